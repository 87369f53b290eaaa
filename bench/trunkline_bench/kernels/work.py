"""The bytes and FLOP of one launch, and the time that it should take: waves of programs, each limited by memory or
arithmetic, and never faster than one program alone.
"""

from dataclasses import dataclass, replace

from trunkline_bench.kernels.device import Device

# Tiles of library products (rows, columns), with their speed relative to the best one: a smaller tile reads its
# operands more often from shared memory.
PRODUCT_TILES = {
    (128, 256): 1.0, (256, 128): 1.0, (256, 192): 1.0, (128, 192): 0.97, (128, 128): 0.92, (64, 256): 0.9,
    (128, 64): 0.75, (64, 128): 0.75, (64, 64): 0.6,
}  # fmt: skip
PRODUCT_SPLITS = (1, 2, 3, 4, 6, 8)  # parts of the inner dimension that different programs compute


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one launch."""

    name: str
    programs: int  # with work
    slots: int  # programs that run at once
    bytes: float  # read and written
    flops: float = 0.0
    flops_per_s: float = 0.0  # rate of the arithmetic; unused if there are no flops
    least_s: float = 0.0  # time of one program alone
    tail_s: float = 0.0  # after the last loads, while memory is idle
    idle_programs: int = 0  # programs without work
    bytes_share: float = 1.0  # share of the device's bytes per second
    early: bool = False  # its programs start before the previous launch ends
    is_fp8: bool = False  # its operations are products of 8-bit floats

    @property
    def waves(self) -> float:
        return self.programs / self.slots

    def seconds(self, device: Device) -> float:
        """Time of the launch alone: full waves, then the last partial wave, then programs without work."""
        full, rest = divmod(self.programs, self.slots)
        total = full * self._wave_s(self.slots, device) if full else 0.0
        if rest:
            total += self._wave_s(rest, device)
        if self.idle_programs:
            total += -(-self.idle_programs // self.slots) * device.exit_s
        return total + self.tail_s + (device.fill_s if self.programs else 0.0)

    def gap_s(self, device: Device) -> float:
        """Time from the end of the previous launch."""
        return device.dependent_s if self.early else device.node_s

    def roofline_s(self, device: Device) -> float:
        """The least time that the device's data sheet allows."""
        peak_flops = device.peak_fp8_flops if self.is_fp8 else device.peak_flops
        return max(self.bytes / device.peak_bytes_per_s, self.flops / peak_flops)

    def _wave_s(self, running: int, device: Device) -> float:
        share = running / self.programs
        arithmetic_s = share * self.flops / self.flops_per_s if self.flops else 0.0
        return max(self.least_s, share * self.bytes / (device.bytes_per_s * self.bytes_share), arithmetic_s)


def product(name: str, rows: int, columns: int, inner: int, itemsize: int, out_itemsize: int, device: Device) -> Work:
    """A matrix product as a library computes it, with the fastest tile and split."""
    moved = itemsize * (rows * inner + columns * inner) + out_itemsize * rows * columns
    flops = 2.0 * rows * columns * inner
    is_fp8 = itemsize == 1
    peak, share = (device.peak_fp8_flops, device.fp8_share) if is_fp8 else (device.peak_flops, device.product_share)
    base = Work(name, 1, device.multiprocessors, moved, is_fp8=is_fp8)
    found: list[Work] = []
    for (tile_rows, tile_columns), nearness in PRODUCT_TILES.items():
        tiles = -(-rows // tile_rows) * -(-columns // tile_columns)
        # Only products with few tiles are split: others have enough programs for all multiprocessors.
        for split in PRODUCT_SPLITS if tiles < device.multiprocessors else (1,):
            of_multiprocessor = peak / device.multiprocessors * share * nearness
            tile_s = 2.0 * tile_rows * tile_columns * inner / split / of_multiprocessor
            # Parts are written and read again in float32.
            parts = 0 if split == 1 else 8.0 * split * rows * columns
            found.append(
                replace(
                    base, programs=tiles * split, bytes=moved + parts, flops=flops, flops_per_s=peak,
                    least_s=tile_s,
                )
            )  # fmt: skip
    return min(found, key=lambda work: work.seconds(device))
