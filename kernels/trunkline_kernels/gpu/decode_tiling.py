"""How decode_attention divides its work into programs and tiles."""

from dataclasses import dataclass

import torch

from trunkline_kernels.gpu.tuned_tilings import TilingKey, tuned

MOST_HEAD_DIM = 256
# Reading two tiles of 64 keys takes a program about as long as starting, and merging eight more pieces takes about as
# long as reading one more tile: smaller pieces would gain nothing.
SHORTEST_PIECE = 128
MOST_PROGRAMS = 3  # per multiprocessor, limited by its registers
OWN_SHARED = 7 << 10  # bytes of shared memory per program for other data than keys and values; compiled ones need 6 KiB
HOPPER_SHARED_MEMORY = 227 << 10  # bytes per program
REGISTERS = 65_536  # of an NVIDIA multiprocessor
MOST_REGISTERS = 255  # of a thread


@dataclass(frozen=True, slots=True)
class DecodeTiling:
    """The tile of keys of decode_attention, and the resources of its programs."""

    keys: int  # that a program computes at once
    warps: int
    stages: int  # of the pipeline of loads
    # Per multiprocessor. If more are launched than run at once, the others start when the first ones end. As all take
    # equally long, most of the device may then wait for a few programs.
    programs: int = 3
    shortest: int = SHORTEST_PIECE  # tokens of a piece, unless its context has fewer

    def options(self, *, narrow: bool) -> dict[str, int]:
        """Returns Triton's options for a launch.

        narrow: keys and values have 8 bits. The options then limit the registers of a thread, because the compiler
        would otherwise spill some to make room for one more program. With 16 bits it finds the number by itself; given
        a limit, it uses all of it, and spills with Triton 3.6.
        """
        options = {"num_warps": self.warps, "num_stages": self.stages}
        if narrow and torch.version.hip is None and self.programs <= MOST_PROGRAMS:
            options["maxnreg"] = min(REGISTERS // (32 * self.warps * self.programs) // 8 * 8, MOST_REGISTERS)
        return options


def decode_tiling_for(
    *,
    head_dim: int,
    group: int,
    shared_memory: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    device: str = "",
) -> DecodeTiling:
    """Returns the tiling measured to be the fastest on this device, else one that keeps enough loads in flight.

    group: query heads of a KV head; shared_memory: bytes per program; device: its name
    Raises ValueError if head_dim is more than MOST_HEAD_DIM, or the table of tilings is damaged.
    """
    if head_dim > MOST_HEAD_DIM:
        raise ValueError(f"head_dim {head_dim} is more than the {MOST_HEAD_DIM} that the attention kernels support")
    key = TilingKey.of(
        "decode_attention", device=device, head_dim=head_dim, group=group, dtype=dtype, kv_dtype=kv_dtype
    )
    if found := tuned(key):
        return DecodeTiling(**found)
    if dtype == torch.float32:
        return DecodeTiling(32, 4, 1, programs=2)
    stages = 3 if shared_memory >= HOPPER_SHARED_MEMORY else 2
    keys = 32 if head_dim > 128 else 64
    padded_dim = 1 << (head_dim - 1).bit_length()
    tiles = 2 * (stages - 1) * keys * padded_dim * kv_dtype.itemsize
    if narrow := kv_dtype != dtype:
        tiles += 2 * keys * padded_dim * dtype.itemsize  # once converted
    fit = shared_memory // (tiles + OWN_SHARED)
    # Converting 8-bit keys needs registers: on an H200 two programs read as fast as three with fewer loads in flight.
    most = 2 if head_dim > 128 or narrow else MOST_PROGRAMS
    return DecodeTiling(keys, 4, stages, max(1, min(fit, most)))
