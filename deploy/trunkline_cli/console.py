"""What `trunkline serve` prints: every log line of its processes, or on a terminal one line for each milestone."""

import contextlib
import json
import os
import sys
import time
from collections.abc import Sequence

from trunkline_cli.child import print_log_line, script
from trunkline_cli.log_files import LogFiles, log_folder
from trunkline_cli.plan import ClusterPlan
from trunkline_runtime.log_writer import LogWriter

PRINTED_NOTHING, NO_ERROR = "it printed nothing", "no error in its log"
MOST_CHARACTERS = 400  # of an error on the terminal; its log has it in full
# Fields that every log line has. The terminal names the process itself.
COMMON_FIELDS = frozenset({"event", "level", "service", "worker", "router", "timestamp", "trace_id", "span_id"})


class LogConsole:
    """Relays the log lines of all processes to standard error, each with the name of its process."""

    def log_line(self, name: str, line: str) -> None:
        print_log_line(name, line)

    def loading(self, plan: ClusterPlan) -> None:
        """The logs show it."""

    def worker_ready(self, name: str, address: str) -> None:
        say(f"{name} is ready on {address}")

    def all_ready(self, plan: ClusterPlan, *, needs_credentials: bool = False) -> None:
        say(f"router is ready on {plan.router_address}")
        print(f"\nServing {plan.name} with {plan.workers} workers. Try:\n")
        print(f"    {example_command(plan, needs_credentials=needs_credentials)}\n", flush=True)
        if plan.http_url:
            print(f"OpenAI API: {plan.http_url}\n", flush=True)

    def stopping(self) -> None:
        """The logs show it."""

    def cause(self, last_lines: Sequence[str]) -> str:
        """Why a process ended, from the last lines that it printed."""
        return last_lines[-1] if last_lines else PRINTED_NOTHING

    def where_to_look(self, name: str) -> str:
        """Added to a message about a process that ended. Empty: its log has been printed already."""
        return ""


class QuietConsole:
    """Prints one plain line for each milestone and each process that ends; the logs go to files."""

    def __init__(self) -> None:
        self._logs: LogFiles | None = None
        self._loading_s = 0.0

    def log_line(self, name: str, line: str) -> None:
        if self._logs is not None:
            self._logs.write(name, line)

    def loading(self, plan: ClusterPlan) -> None:
        """Starts new log files and keeps those of the last run on this address. Raises LaunchError if it cannot."""
        self._loading_s = time.monotonic()
        self._logs = LogFiles(log_folder(f"{plan.host}-{plan.port}"))
        say(f"loading {plan.name} with {_workers(plan)}; logs: {self._logs.folder}")

    def worker_ready(self, name: str, address: str) -> None:
        """One line for all workers follows."""

    def all_ready(self, plan: ClusterPlan, *, needs_credentials: bool = False) -> None:
        took_s = time.monotonic() - self._loading_s
        say(f"serving {plan.name} on {plan.router_address}; {_workers(plan)} ready after {took_s:.1f} s")
        if plan.http_url:
            say(f"OpenAI API on {plan.http_url}")
        say(f"try: {example_command(plan, needs_credentials=needs_credentials)}")

    def stopping(self) -> None:
        with contextlib.suppress(OSError):
            print(file=sys.stderr)  # ends the line in which the terminal shows ^C
        say("stopping")

    def cause(self, last_lines: Sequence[str]) -> str:
        """Why a process ended, from the last lines that it printed."""
        return last_error(last_lines)

    def where_to_look(self, name: str) -> str:
        """Added to a message about a process that ended."""
        return "" if self._logs is None else f"; log: {self._logs.path(name)}"


Console = LogConsole | QuietConsole


def console(*, is_verbose: bool) -> Console:
    """Quiet if both standard output and standard error are terminals, unless `is_verbose`."""
    is_terminal = sys.stdout.isatty() and sys.stderr.isatty()
    return QuietConsole() if is_terminal and not is_verbose else LogConsole()


def print_without_waiting() -> None:
    """From now on, this process waits for no terminal and no pipe that it prints to. What is too much is dropped."""

    def tell_dropped(num_lines: int) -> None:
        say(f"{num_lines} lines could not be printed and were dropped")

    output = LogWriter(1, tell_dropped)
    # If both lead to the same place, lines keep their order only in one queue.
    errors = output if os.path.sameopenfile(1, 2) else LogWriter(2, tell_dropped)
    for printer in {output, errors}:
        printer.start()
    sys.stdout, sys.stderr = output.text(), errors.text()


def say(text: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may be gone: its processes must be stopped all the same
        print(f"trunkline: {text}", file=sys.stderr, flush=True)


def example_command(plan: ClusterPlan, *, needs_credentials: bool) -> str:
    """A command line that sends the cluster a request; with credentials, the user fills in the file that has them."""
    server = "" if (plan.host, plan.port) == ("127.0.0.1", 50051) else f" --server {plan.router_address}"
    found = script("trunkline")
    command = min(os.path.relpath(found), found, key=len) if os.sep in found else found
    key = " --api-key-file FILE" if needs_credentials else ""
    return f'{command} generate "Once upon a time" --stream{server}{key}'


def last_error(lines: Sequence[str]) -> str:
    """The last line that reports an error, as a person reads it: a JSON log line of that level, or a plain line (the
    end of a traceback, a refusal to start)."""
    for line in reversed(lines):
        fields = _fields(line)
        if fields is None and line.strip():
            return _one_line(line)
        if fields is not None and fields.get("level") in ("error", "critical"):
            return _one_line(_readable(fields))
    return NO_ERROR if lines else PRINTED_NOTHING


def _fields(line: str) -> dict[str, object] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _readable(fields: dict[str, object]) -> str:
    """An event and its fields; of an exception, the last line."""
    shown = {name: str(value).strip() for name, value in fields.items() if name not in COMMON_FIELDS}
    details = ", ".join(f"{name} {value.splitlines()[-1]}" for name, value in shown.items() if value)
    return f"{fields.get('event', '')}: {details}" if details else str(fields.get("event", ""))


def _one_line(text: str) -> str:
    """Without control characters, such as those for colours, and of at most MOST_CHARACTERS."""
    shown = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return shown if len(shown) <= MOST_CHARACTERS else shown[:MOST_CHARACTERS] + "…"


def _workers(plan: ClusterPlan) -> str:
    return f"{plan.workers} worker" + ("s" if plan.workers > 1 else "")
