"""Makes a worker's engine die of a certain prompt, as a kernel bug could.

Python imports a module of this name from PYTHONPATH when it starts.
"""

import os
import signal
import sys
import time
from typing import Any

# The engine dies in the step that would compute this many tokens of such a request on this worker.
DEADLY_STEP = int(os.environ.get("TRUNKLINE_DEADLY_STEP", "1"))
HANGS = bool(os.environ.get("TRUNKLINE_DEADLY_HANG"))  # the engine hangs instead of dying
POISON = [1999, 1998, 1997, 1996]  # no other prompt begins with these tokens

if "trunkline_worker.engine.engine_process" in sys.orig_argv:
    from trunkline_worker.runner.step_thread import ThreadedExecutor

    sick: dict[int, int] = {}  # steps survived, by sequence
    launch = ThreadedExecutor.launch

    def launch_or_die(self: ThreadedExecutor, plan: Any) -> None:
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

    ThreadedExecutor.launch = launch_or_die  # type: ignore[method-assign]
