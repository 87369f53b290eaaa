"""The file that collects what the stages of a day have measured. It is complete after every row."""

import json
import os
from pathlib import Path
from typing import Any

from trunkline_bench.gpu.stage_process import Ending, Row


class ResultsFile:
    """What stages of earlier calls found stays; a stage that runs again replaces its own rows."""

    def __init__(self, path: Path, command: str) -> None:
        self.path = path
        self._content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"stages": {}}
        self._content["command"] = command

    def begin(self, stage: str) -> None:
        """Forgets what an earlier run of this stage found."""
        self._content["stages"][stage] = {"ended": "was running when this was written", "rows": []}
        self._write()

    def add(self, stage: str, row: Row) -> None:
        self._content["stages"][stage]["rows"].append(row)
        self._write()

    def end(self, stage: str, ending: Ending) -> None:
        """Says how the stage ended, and on what it ran."""
        entry = self._content["stages"][stage]
        entry["ended"] = ending.error or "done"
        entry["seconds"] = round(ending.seconds, 1)
        if ending.kernel:
            entry["kernel"] = ending.kernel
        self._content |= ending.facts
        self._write()

    def note(self, stage: str, **facts: object) -> None:
        """Adds facts to a stage, such as what a second run of it has shown."""
        self._content["stages"].setdefault(stage, {"rows": []}).update(facts)
        self._write()

    def _write(self) -> None:
        whole = self.path.with_suffix(".part")
        whole.write_text(json.dumps(self._content, indent=1) + "\n")
        os.replace(whole, self.path)
