"""The file with the rows of a day's stages. It is rewritten after every row."""

import json
import os
from pathlib import Path
from typing import Any

from trunkline_bench.gpu.stage_process import Ending, Row


class ResultsFile:
    """Rows by stage, as JSON. Rows of earlier calls are kept; a stage that runs again replaces its own."""

    def __init__(self, path: Path, command: str) -> None:
        self.path = path
        self._content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"stages": {}}
        self._content["command"] = command

    def begin(self, stage: str) -> None:
        """Drops the rows of an earlier run of this stage."""
        self._content["stages"][stage] = {"ended": "was running when this was written", "rows": []}
        self._write()

    def add(self, stage: str, row: Row) -> None:
        self._content["stages"][stage]["rows"].append(row)
        self._write()

    def end(self, stage: str, ending: Ending) -> None:
        """Records how the stage ended, and the device and versions that it ran on."""
        entry = self._content["stages"][stage]
        entry["ended"] = ending.error or "done"
        entry["seconds"] = round(ending.seconds, 1)
        if ending.kernel:
            entry["kernel"] = ending.kernel
        self._content |= ending.facts
        self._write()

    def note(self, stage: str, **facts: object) -> None:
        """Adds facts to a stage, such as the result of a second run."""
        self._content["stages"].setdefault(stage, {"rows": []}).update(facts)
        self._write()

    def _write(self) -> None:
        whole = self.path.with_suffix(".part")
        whole.write_text(json.dumps(self._content, indent=1) + "\n")
        os.replace(whole, self.path)
