"""Runs coding assistants against a router and two workers whose model says what a file prescribes: make assistants.

Each reads a file, edits it and runs a test, twice: undisturbed, and with a worker killed in the middle of the call that
edits. The router enforces calls by grammar. `--write DIRECTORY` writes the last request of each without its contents.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx2

from tests.assistants.assistants import ASSISTANTS, FILES, MENDED, TASK, Assistant
from tests.assistants.recorder import Exchange, recorded
from tests.assistants.shapes import shape
from tests.clients.edge import CLIENTS_ENVIRONMENT, Edge, running_edge
from tests.playing.families import HERMES
from tests.playing.worker import COMMAND

INSTALLED = CLIENTS_ENVIRONMENT / "assistants"  # make assistants puts the packages there
CONTEXT_LENGTH = 131_072
LIMIT_S = 240.0
LEAST_CACHED = 0.9  # of each prompt, from the second turn on; what is left is the turn that is new
# What the model answers with a call of a tool that there is not.
BREAK, BROKEN = "Call what is no tool.", HERMES.call("erase", {})


@dataclass(frozen=True)
class Run:
    """What has become of a task.  said: by the assistant"""

    is_finished: bool
    duration_s: float
    exchanges: list[Exchange]
    said: str

    @property
    def hits(self) -> float:
        """The least part of a prompt that came from the prefix cache, from the second turn on. Requests without tools,
        such as those for a title, are no turns."""
        turns = [exchange for exchange in self.exchanges if exchange.body and exchange.body.get("tools")]
        return min((turn.hits for turn in turns[1:]), default=0.0)


class Killer:
    """Kills the worker that answers as soon as the answer has begun a call of a tool."""

    def __init__(self, edge: Edge, tool: str) -> None:
        self._edge = edge
        self._call = re.compile(rf'"name":"{tool}"(?!,"description")'.encode())  # responses repeat the tools themselves
        self.has_killed = False

    def on_piece(self, piece: bytes) -> None:
        if not self.has_killed and self._call.search(piece):
            self.has_killed = True
            max(self._edge.cluster.workers, key=lambda worker: worker.load().running).process.popen.kill()


def run(assistant: Assistant, top: Path, *, kills: bool) -> Run:
    """Runs an assistant in a directory of its own."""
    folder, home = top / "work", top / "home"
    folder.mkdir(parents=True)
    for name, text in FILES.items():
        (folder / name).write_text(text)
    answers = {**assistant.answers(folder), BREAK: BROKEN}
    model = HERMES.write(top / "model", answers, context_length=CONTEXT_LENGTH)
    served = (f"--served-model-name={assistant.model}", f"--kv-blocks={CONTEXT_LENGTH // 8}")
    enforcing = ["--enforce-calls"]
    with running_edge(model, *served, command=COMMAND, num_workers=2, router_arguments=enforcing) as edge:
        killer = Killer(edge, assistant.calls(folder)[1][0])
        with recorded(edge.root, killer.on_piece if kills else lambda piece: None) as (root, exchanges):
            for name, text in assistant.files(root).items():
                (home / name).parent.mkdir(parents=True, exist_ok=True)
                (home / name).write_text(text)
            home.mkdir(exist_ok=True)
            usual = {"HOME": str(home), "PATH": os.environ["PATH"], "TERM": "dumb"}
            began_s = time.monotonic()
            try:
                done = subprocess.run(
                    [INSTALLED / "node_modules" / ".bin" / assistant.program, *assistant.arguments, TASK],
                    env={**usual, **assistant.environment(root)},
                    cwd=folder,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    timeout=LIMIT_S,
                )
                code, said = done.returncode, done.stdout
            except subprocess.TimeoutExpired:
                code, said = 1, f"not finished after {LIMIT_S:g} s"
            is_right = (folder / "sums.py").read_text() == MENDED and (folder / "passed").exists()
            return Run(
                is_finished=code == 0 and is_right and killer.has_killed == kills and _enforces(edge),
                duration_s=time.monotonic() - began_s,
                exchanges=exchanges,
                said=said,
            )


def _enforces(edge: Edge) -> bool:
    """Whether a call of what is no tool becomes a call of a tool."""
    tools = [{"type": "function", "function": {"name": "edit"}}]
    asked = {"model": edge.model, "messages": [{"role": "user", "content": BREAK}], "tools": tools, "max_tokens": 64}
    answer = httpx2.post(f"{edge.url}/chat/completions", json=asked, timeout=LIMIT_S)
    return [each["function"]["name"] for each in answer.json()["choices"][0]["message"]["tool_calls"]] == ["edit"]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.assistants")
    parser.add_argument("names", nargs="*", help="the assistants to run; default: all")
    parser.add_argument("--write", type=Path, metavar="DIRECTORY", help="write the shapes of their requests")
    given = parser.parse_args()
    if not (INSTALLED / "node_modules").is_dir():
        print("make assistants needs npm, and was left out")
        return 0
    chosen = [each for each in ASSISTANTS if not given.names or each.name in given.names]
    finished = [0, 0]
    for assistant in chosen:
        for kills in (False, True):
            with TemporaryDirectory() as top:
                done = run(assistant, Path(top), kills=kills)
            is_well = done.is_finished and (kills or done.hits >= LEAST_CACHED)
            finished[kills] += is_well
            how = "with a worker killed" if kills else f"{done.hits:.1%} of a prompt cached at least"
            ended = "finished" if is_well else "failed"
            print(f"{assistant.name}: {ended} in {done.duration_s:.0f} s, {len(done.exchanges)} requests, {how}")
            if not is_well:
                print(
                    done.said[-2000:], [exchange.answer[-500:] for exchange in done.exchanges if exchange.status != 200]
                )
            elif given.write and not kills:
                written = json.dumps(shape(done.exchanges[-1]), indent=1, ensure_ascii=False)
                (given.write / f"{assistant.name}.json").write_text(f"{written}\n")
    print(f"{finished[False]} of {len(chosen)} finished, {finished[True]} with a worker killed in the middle of a call")
    return 0 if finished == [len(chosen)] * 2 else 1


if __name__ == "__main__":
    sys.exit(main())
