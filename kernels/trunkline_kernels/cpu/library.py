"""The C kernels as a library, compiled for this machine at first use and cached.

The system's C compiler (CC, else cc) writes it to a cache folder (TRUNKLINE_CACHE_DIR, else ~/.cache/trunkline), under
a name derived from source, flags, compiler, CPU and torch version. TRUNKLINE_MARCH chooses the compiler's -march, such
as x86-64-v3, for results that are the same on different CPUs; without it, the kernels use all that this CPU has.

Code that another user could have put there is never loaded: if other users can write to the folder, or this process
cannot, it uses a temporary folder of its own. If the kernels cannot be compiled, it issues a warning, and the PyTorch
references are used.
"""

import ctypes
import hashlib
import os
import subprocess
import tempfile
import warnings
from functools import cache
from pathlib import Path

import torch

FOLDER = Path(__file__).parent
PRODUCTS = "linear.c"  # all that the builds for quantised weights have
SOURCES = ("kernels.c", "experts.c", "text_attention.c", PRODUCTS)
HEADERS = ("element.h", "exponential.h", "linear.h", "ranges.h", "vectors.h")
# No -ffast-math, because NaN and infinity must be preserved. Pragmas allow reordering of certain sums.
FLAGS = (
    "-O3",
    "-std=gnu11",
    "-shared",
    "-fPIC",
    "-fopenmp",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
)
# GCC's alone: else it fuses multiplications with additions or not by how many sums a loop has, and tiles would differ.
GCC_FLAGS = ("--param=avoid-fma-max-bits=0",)
COMPILE_TIMEOUT_S = 120
DEFINES: dict[torch.dtype, tuple[str, ...]] = {torch.float32: (), torch.bfloat16: ("-DBF16",)}

MARCH = "TRUNKLINE_MARCH"
# Instruction sets of x86-64 that compilers use for these kernels.
INSTRUCTIONS = ("SSE4_2", "AVX", "AVX2", "FMA", "BMI2", "F16C", "AVX512F", "AVX512BW", "AVX512DQ", "AVX512VL",
                "AVX512VNNI", "AVX512BF16", "AVX512FP16")  # fmt: skip

P, I32, I64, F32 = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
SIGNATURES: dict[str, tuple[type, ...]] = {
    "attention": (P, P, P, P, P, P, P, I64, I64, I32, I32, I32, I32, I64, F32),
    "add_rms_norm": (P, P, P, P, I64, I64, I32, F32),
    "rotate_and_write": (P, P, P, P, P, P, P, P, P, P, P, I64, I64, I32, I32, I32, I32, I32, F32),
    "silu_and_mul": (P, P, I64, I32),
    "text_attention": (P, P, P, P, P, P, I32, I64),
    "greedy": (P, P, I64, I64),
    "greedy_allowed": (P, P, P, P, I64, I64, I64),
    "exclude": (P, P, P, I64, I64, I64),
    "route": (P, P, P, I64, I32, I32, I32, F32),
    "multiply_experts": (P, P, P, P, P, P, P, P, P, P, I64, I64, I32),
    "add_gated": (P, P, P, I64, I32),
    "run_layers": (P, P, I64, P, P, P, P, P, I64),
}
PRODUCT_SIGNATURES: dict[str, tuple[type, ...]] = {
    "pack": (P, P, I64, I64),
    "multiply": (P, P, P, P, I64),
    "multiply_grouped": (P, P, P, P, P, P),
}


def library(dtype: torch.dtype, *, bits: int = 0) -> ctypes.CDLL | None:
    """Returns the kernels for elements of this dtype, or None if there are none on this machine. Raises ValueError if
    TRUNKLINE_MARCH names a build that cannot be compiled, or that this CPU cannot run.

    bits: of quantised weights, 4 or 8; then the library has products only
    """
    march = os.environ.get(MARCH)
    if dtype not in DEFINES or not march:
        return built(dtype, "native", bits=bits)
    try:
        missing = instructions(march) - instructions("native")
    except (OSError, subprocess.SubprocessError) as error:
        raise ValueError(f"{MARCH}={march}: the compiler refuses it: {_end_of(error)}") from None
    if missing:
        raise ValueError(f"{MARCH}={march}: this CPU lacks {', '.join(sorted(missing))}")
    return built(dtype, march, bits=bits)


def instructions(march: str) -> frozenset[str]:
    """Returns which of INSTRUCTIONS the compiler uses for a -march. Raises SubprocessError if it does not know it."""
    command = [_compiler(), f"-march={march}", "-dM", "-E", "-x", "c", os.devnull]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=COMPILE_TIMEOUT_S).stdout
    macros = {line.split()[1] for line in printed.splitlines() if line.startswith("#define ")}
    return frozenset(name for name in INSTRUCTIONS if f"__{name}__" in macros)


@cache
def built(dtype: torch.dtype, march: str, *flags: str, bits: int = 0) -> ctypes.CDLL | None:
    """Returns the kernels compiled for a CPU that GCC's -march names, or None if they cannot be compiled."""
    if dtype not in DEFINES:
        return None
    flags = (*FLAGS, f"-march={march}", *DEFINES[dtype], *flags, f"-DWEIGHT_BITS={bits}")
    sources = (PRODUCTS,) if bits else SOURCES
    signatures = PRODUCT_SIGNATURES if bits else SIGNATURES | PRODUCT_SIGNATURES
    try:
        folder = _private_folder()
        if folder is not None:
            loaded = _load(folder, sources, flags)
        else:
            with tempfile.TemporaryDirectory(prefix="trunkline-") as scratch:
                loaded = _load(Path(scratch), sources, flags)
    except (OSError, subprocess.SubprocessError) as error:
        warnings.warn(f"cannot compile the C kernels, using PyTorch instead: {_end_of(error)}", stacklevel=2)
        return None
    for name, arguments in signatures.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, None
    if not bits:
        loaded.text_attention_room.argtypes, loaded.text_attention_room.restype = (I64, I32), I64
    loaded.packed_bytes.argtypes, loaded.packed_bytes.restype = (I64, I64), I64
    loaded.panel_outputs.argtypes, loaded.panel_outputs.restype = (), I32
    for asks in (loaded.has_bfloat16_products, loaded.has_bfloat16_tiles, loaded.has_wide_vectors):
        asks.argtypes, asks.restype = (), ctypes.c_bool
    return loaded


def _compiler() -> str:
    return os.environ.get("CC", "cc")


def _end_of(error: OSError | subprocess.SubprocessError) -> str:
    """The end of what a compiler says, in one line."""
    said = getattr(error, "stderr", None) or str(error)
    if isinstance(said, bytes):  # of a compiler that ran out of time
        said = said.decode(errors="replace")
    return " ".join(said.split())[-300:]


def end_openmp_threads() -> None:
    """Ends the OpenMP threads that work for the calling thread, before another thread takes over its work. With more
    threads than processors, libgomp's barriers sleep at once instead of spinning: a decode takes 1.4 times as long."""
    for runtime in _share_openmp():
        runtime.omp_pause_resource_all(1)  # omp_pause_soft


def _share_openmp() -> list[ctypes.CDLL]:
    """Makes the library use torch's OpenMP runtime, because two runtimes would compete for the cores. Returns it; empty
    if torch does not bring one."""
    paths = sorted(Path(torch.__file__).with_name("lib").glob("libgomp*"))
    return [ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL) for path in paths]


def _private_folder() -> Path | None:
    """Returns the cache folder, or None if it cannot be written or other users can write to it."""
    try:
        folder = Path(os.environ.get("TRUNKLINE_CACHE_DIR") or Path.home() / ".cache" / "trunkline")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except (OSError, RuntimeError):  # RuntimeError: a user without a home, as in some containers
        return None
    is_ours = found.st_uid == os.geteuid() and not found.st_mode & 0o022
    return folder if is_ours and os.access(folder, os.W_OK) else None


def _load(folder: Path, sources: tuple[str, ...], flags: tuple[str, ...]) -> ctypes.CDLL:
    path = _compiled(folder, sources, flags)
    _share_openmp()
    return ctypes.CDLL(str(path))


def _compiled(folder: Path, sources: tuple[str, ...], flags: tuple[str, ...]) -> Path:
    """Returns the path of the library, and compiles it if it does not exist."""
    compiler = _compiler()
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    flags += () if "clang" in version else GCC_FLAGS
    texts = [(FOLDER / name).read_text() for name in (*sources, *HEADERS)]
    facts = "\0".join((*texts, *flags, version, _cpu_flags(), torch.__version__))
    target = folder / f"kernels-{hashlib.sha256(facts.encode()).hexdigest()[:24]}.so"
    if target.exists():
        return target
    # Compiled under a temporary name: two workers may start at once, and neither may load half a library.
    handle, made = tempfile.mkstemp(suffix=".so", dir=folder)
    os.close(handle)
    try:
        command = [compiler, *flags, *(str(FOLDER / name) for name in sources), "-o", made, "-lm"]
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=COMPILE_TIMEOUT_S)
        os.replace(made, target)
    finally:
        Path(made).unlink(missing_ok=True)
    return target


def _cpu_flags() -> str:
    """Returns the properties of the CPU that -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
