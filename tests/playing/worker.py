"""A `trunkline-worker` whose model says what a file prescribes: python -m tests.playing.worker, with its flags.

tests.playing.families writes the directories for --model.
"""

import sys
from functools import partial

from trunkline_worker import main as worker
from trunkline_worker.link.engine_link import EngineLink

COMMAND = (sys.executable, "-m", "tests.playing.worker")
ENGINE_COMMAND = (sys.executable, "-m", "tests.playing.engine")

if __name__ == "__main__":
    worker.EngineLink = partial(EngineLink, ENGINE_COMMAND)  # type: ignore[attr-defined, assignment]
    worker.main()
