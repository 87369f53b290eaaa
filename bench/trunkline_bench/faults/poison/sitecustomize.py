"""Makes a worker's engine die of a certain prompt, as a bug in a kernel would: for fleets that are to be harmed.

Python imports a module of this name at its start, wherever it lies on PYTHONPATH.
"""

import os
import signal
import sys
import time
from typing import Any

# It dies in the step that would give such a request this many tokens after it came to the worker.
DEADLY_STEP = int(os.environ.get("TRUNKLINE_DEADLY_STEP", "1"))
HANGS = bool(os.environ.get("TRUNKLINE_DEADLY_HANG"))  # then it does not end
POISON = [1999, 1998, 1997, 1996]  # tokens that no other prompt of a harmed fleet begins with

if "trunkline_worker.engine.engine_process" in sys.orig_argv:
    from trunkline_worker.execution.step_thread import InlineExecutor

    sick: dict[int, int] = {}  # steps survived, by sequence
    launch = InlineExecutor.launch

    def launch_or_die(self: InlineExecutor, plan: Any) -> None:
        for ended in plan.ended:
            sick.pop(ended, None)
        sick.update((start.sequence_id, 0) for start in plan.starts if start.token_ids[: len(POISON)] == POISON)
        for step in plan.steps:
            if step.sequence_id in sick and step.samples:
                sick[step.sequence_id] += 1
                if sick[step.sequence_id] == DEADLY_STEP:
                    if HANGS:
                        time.sleep(3600)
                    os.kill(os.getpid(), signal.SIGSEGV)
        launch(self, plan)

    InlineExecutor.launch = launch_or_die  # type: ignore[method-assign]
