"""The prediction's assumptions about a device. Each number names its source.

"Measured" means on an H200 (bench/results/gpu/h200-2026-11-27.md).
"""

from dataclasses import dataclass

from trunkline_worker.step.model_work import DATA_SHEETS

REGISTERS = (
    65_536  # 32-bit registers of a multiprocessor (CUDA C++ programming guide, compute capabilities 8.0 to 10.0)
)
WARP_REGISTERS = 256  # unit in which registers are allocated to warps (same guide)
MOST_THREADS = 2048  # of a multiprocessor (same guide)
MOST_PROGRAMS = 32  # of a multiprocessor (same guide)
PROGRAM_SHARED = 1024  # bytes of shared memory that each program takes in addition to its own (same guide)


@dataclass(frozen=True, slots=True)
class Device:
    """The properties of a device that the prediction uses."""

    name: str
    multiprocessors: int
    shared_memory: int  # bytes of a multiprocessor
    peak_bytes_per_s: float  # data sheet
    bytes_per_s: float  # rate of long copies
    paged_share: float  # share of that rate in reads through a block table
    narrow_paged_bytes_per_s: float  # rate of such reads of 8-bit keys and values
    peak_flops: float  # bfloat16 on tensor cores, dense; data sheet
    product_share: float  # share of the peak in one tile of a library's product
    peak_fp8_flops: float  # 8-bit floats on tensor cores, dense; data sheet
    fp8_share: float  # share of that peak in a library's product, scales of rows and columns
    block_share: float  # share of that peak in one large tile of our product with weights in blocks
    attention_share: float  # share of the peak in prefill attention
    node_s: float  # from the end of a kernel in a graph to the start of the next
    dependent_s: float  # the same if the next kernel's programs have started before the kernel ends
    least_s: float  # time of a kernel whose programs load, compute and store once
    fill_s: float  # until a kernel's loads keep the memory busy, and after its last loads
    attention_tile_s: float  # per tile of keys in decode attention, for one program alone on its multiprocessor
    meet_s: float  # for the last program of a group to signal, see that it is last, and merge the others' results
    exit_s: float  # of a program without work
    step_s: float  # between two steps: the launch of a graph, and kernels that the host launches separately


_SHEET = DATA_SHEETS["NVIDIA H200"]
H200 = Device(
    name="H200 SXM",
    multiprocessors=132,
    shared_memory=228 << 10,
    peak_bytes_per_s=_SHEET.bytes_per_s,
    bytes_per_s=4.28e12,  # 0.89 of the peak, measured
    paged_share=0.97,  # measured, 256 contexts of 1,536
    narrow_paged_bytes_per_s=2.3e12,  # measured, likewise
    peak_flops=_SHEET.flops,
    product_share=0.70,  # measured: 0.79 in one product alone, 0.67 fits the time of steps of 8,192 prompt tokens
    peak_fp8_flops=1979e12,
    fp8_share=0.62,  # measured with rounding: 1,170 to 1,250 TFLOP/s for 8,192 rows, 1,040 for 512
    # Measured with rounding: 760 to 910 TFLOP/s for 8,192 rows. DeepGEMM reports up to 1,470 on an H800
    # (deepseek-ai/DeepGEMM 73).
    block_share=0.44,
    attention_share=0.29,  # measured, 8 prompts of 1,024 tokens; 0.45 for one of 8,192
    node_s=1.25e-6,  # 1 to 1.5 µs are reported for graphs without branches
    dependent_s=0.75e-6,  # a guess: only the launch is saved, since the kernel waits for the end of the one before.
    # With it, llama.cpp's pull request 22522 takes 2.7 instead of 3.0 ms per token of gpt-oss 20B.
    least_s=2.0e-6,  # a program's start, and two dependent memory accesses of 0.6 to 0.8 µs
    fill_s=1.5e-6,  # two accesses to memory
    attention_tile_s=1.2e-6,  # a guess: two products and a softmax, each dependent on the one before, loads in flight
    meet_s=2.4e-6,  # a fence, two atomics and a read, dependent and within the L2 cache, of 0.6 µs each
    exit_s=0.7e-6,  # one access to memory
    step_s=15e-6,  # a guess
)

# The least certain assumptions, with their plausible bounds (worst, best).
RANGES: dict[str, tuple[float, float]] = {
    "bytes_per_s": (4.15e12, 4.4e12),
    "paged_share": (0.94, 0.98),
    "narrow_paged_bytes_per_s": (2.2e12, 2.4e12),
    "product_share": (0.66, 0.79),
    "fp8_share": (0.53, 0.64),
    "block_share": (0.38, 0.47),
    "attention_share": (0.25, 0.45),
    "node_s": (1.5e-6, 0.8e-6),
    "dependent_s": (1.25e-6, 0.4e-6),
    "fill_s": (3.0e-6, 1.0e-6),
    "attention_tile_s": (2.4e-6, 0.8e-6),
    "meet_s": (5.0e-6, 1.5e-6),
    "step_s": (100e-6, 5e-6),
}


def programs_per_multiprocessor(device: Device, *, warps: int, registers: int, shared: int) -> int:
    """How many programs run at once on a multiprocessor.  registers: per thread; shared: bytes per program"""
    of_warp = -(-registers * 32 // WARP_REGISTERS) * WARP_REGISTERS
    limits = (
        REGISTERS // (of_warp * warps),
        device.shared_memory // (shared + PROGRAM_SHARED),
        MOST_THREADS // (32 * warps),
        MOST_PROGRAMS,
    )
    return min(limits)
