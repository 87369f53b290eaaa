"""Makes a worker's engine die of a certain prompt, as a bug in a kernel would: for fleets that are to be harmed.

Python imports a module of this name at its start, wherever it lies on PYTHONPATH.
"""

import os
import signal
import sys
from typing import Any

POISON = [1999, 1998, 1997, 1996]  # tokens that no other prompt of a harmed fleet begins with

if "trunkline_worker.engine_process" in sys.orig_argv:
    from trunkline_worker.step_thread import InlineExecutor

    sick: set[int] = set()
    launch = InlineExecutor.launch

    def launch_or_die(self: InlineExecutor, plan: Any) -> None:
        sick.difference_update(plan.ended)
        sick.update(start.sequence_id for start in plan.starts if start.token_ids[: len(POISON)] == POISON)
        if any(step.sequence_id in sick and step.samples for step in plan.steps):
            os.kill(os.getpid(), signal.SIGSEGV)
        launch(self, plan)

    InlineExecutor.launch = launch_or_die  # type: ignore[method-assign]
