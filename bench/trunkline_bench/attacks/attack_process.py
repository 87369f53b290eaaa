"""An attack in a process of its own, which reports when it begins, and its outcomes when it ends."""

import asyncio
import contextlib
import json
import subprocess
import sys

from trunkline_bench.attacks.vectors.attacker import BEGINS
from trunkline_bench.faults.fleet import FleetError


class AttackProcess:
    """`address`: host:port, or the URL of a Redis. The attack ends after at most `seconds`."""

    def __init__(self, attack: str, address: str, seconds: float) -> None:
        self._command = ("-m", "trunkline_bench.attacks.vectors.attacker", attack, address, f"--seconds={seconds:g}")
        self._process: asyncio.subprocess.Process | None = None

    async def begins(self) -> None:
        """Starts the process, and returns when its attack begins. Raises FleetError if it ends before that."""
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            *self._command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # with a scheduling priority of its own
        )
        assert self._process.stderr is not None
        said = []
        async for line in self._process.stderr:
            said.append(line.decode(errors="replace").strip())
            if said[-1] == BEGINS:
                return
        raise FleetError(f"the attacker ended before it began: {' '.join(said)}")

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def end(self) -> dict[str, int]:
        """Ends the attack early if it still runs. Returns how often each outcome occurred.

        Raises FleetError if the process failed."""
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        printed, said = await self._process.communicate()
        if self._process.returncode:
            raise FleetError(f"the attacker ended with {self._process.returncode}: {said.decode(errors='replace')}")
        outcomes: dict[str, int] = json.loads(printed)
        return outcomes

    async def stop(self) -> None:
        """Kills the process if it still runs."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
