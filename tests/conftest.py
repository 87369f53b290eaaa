"""What all tests share."""

import gc
import os
import signal
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
import structlog
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from tests.cluster.processes import Process

# Several torch processes share few cores; each with a pool of threads of its own would mostly wait for the others.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Routers that tests start serve no HTTP unless a test asks for it: several cannot share the default port.
os.environ["TRUNKLINE_HTTP_PORT"] = "-1"
# The same holds for the metrics of workers.
os.environ["TRUNKLINE_METRICS_PORT"] = "-1"
# Triton kernels run on the CPU; whether they compile for a GPU, tests ask a process of its own.
os.environ["TRITON_INTERPRET"] = "1"

# A shell starts what runs in its background with SIGINT ignored, and processes that tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in every run, however busy the machine is.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")

# Where `rich` is installed, a traceback shows the local variables of each frame: with large ones that takes seconds.
structlog.configure(
    processors=[
        *structlog.get_config()["processors"][:-1],
        structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback),
    ]
)

SHARING = ("tests/clients", "tests/cluster", "tests/page")  # folders whose files share clusters of servers
PRINTED_LINES = 30  # of each process, shown when a test fails

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real models, traces and texts beside the repository."""
    path = Path(os.environ.get("TRUNKLINE_SHARED", REPOSITORY.parent / "shared"))
    if not path.is_dir():
        pytest.skip(f"{path} is absent: it holds the real models, traces and texts that this test reads")
    return path


class FolderScheduling(LoadFileScheduling):  # type: ignore[misc]  # xdist has no types
    """Runs the files of a folder that shares clusters in one process: each process would start them again."""

    def _split_scope(self, nodeid: str) -> str:
        folder, _, _ = nodeid.split("::")[0].rpartition("/")
        return folder if folder in SHARING else str(super()._split_scope(nodeid))


@pytest.hookimpl(optionalhook=True)  # absent with `-p no:xdist`
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> FolderScheduling:
    return FolderScheduling(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collecting makes a million objects, which stay. Repeated garbage collections of them would take seconds."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Excludes modules and tests, which stay, from garbage collection. A full collection of them took 0.3 s and stopped
    the event loops of tests for that long. No test may call gc.unfreeze(), which would undo this for those after it."""
    gc.collect()
    gc.freeze()
    _lighten_interpreter()


def _lighten_interpreter() -> None:
    """Importing Triton takes a second: only if a test uses it."""
    if "triton" in sys.modules:
        from tests.interpreter import lighten

        lighten()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A client sees INTERNAL and a request id; why, the servers' logs say."""
    report = yield
    if report.failed:
        for process in Process.known:
            report.sections.append((f"printed by {process.name}", "\n".join(process.lines[-PRINTED_LINES:])))
    return report
