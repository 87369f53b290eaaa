"""What one launch moves and computes, and how long that should take: waves of programs, limited by memory or
arithmetic, but never faster than one program alone.
"""

from dataclasses import dataclass, replace

from trunkline_bench.kernels.device import Device

# Tiles of products that libraries have (rows, columns), and how near each comes to the best of them: a smaller tile
# reads its operands more often from shared memory.
PRODUCT_TILES = {
    (128, 256): 1.0, (256, 128): 1.0, (256, 192): 1.0, (128, 192): 0.97, (128, 128): 0.92, (64, 256): 0.9,
    (128, 64): 0.75, (64, 128): 0.75, (64, 64): 0.6,
}  # fmt: skip
PRODUCT_SPLITS = (1, 2, 3, 4, 6, 8)  # parts of the inner dimension that different programs compute


@dataclass(frozen=True, slots=True)
class Work:
    """One launch."""

    name: str
    programs: int  # that have something to do
    slots: int  # programs that run at once
    bytes: float  # read and written
    flops: float = 0.0
    flops_per_s: float = 0.0  # that the arithmetic reaches; not read without flops
    least_s: float = 0.0  # of one program alone
    tail_s: float = 0.0  # after the last loads, while memory is idle
    idle_programs: int = 0  # that find nothing to do
    bytes_share: float = 1.0  # of the device's bytes per second that are reached
    early: bool = False  # its programs are there before the launch before it ends

    @property
    def waves(self) -> float:
        return self.programs / self.slots

    def seconds(self, device: Device) -> float:
        """Of the launch alone: full waves, then what is left over, then the programs without work."""
        full, rest = divmod(self.programs, self.slots)
        total = full * self._wave_s(self.slots, device) if full else 0.0
        if rest:
            total += self._wave_s(rest, device)
        if self.idle_programs:
            total += -(-self.idle_programs // self.slots) * device.exit_s
        return total + self.tail_s + (device.fill_s if self.programs else 0.0)

    def gap_s(self, device: Device) -> float:
        """From the end of the launch before."""
        return device.dependent_s if self.early else device.node_s

    def roofline_s(self, device: Device) -> float:
        """The least that the device's data sheet allows."""
        return max(self.bytes / device.peak_bytes_per_s, self.flops / device.peak_flops)

    def _wave_s(self, running: int, device: Device) -> float:
        share = running / self.programs
        arithmetic_s = share * self.flops / self.flops_per_s if self.flops else 0.0
        return max(self.least_s, share * self.bytes / (device.bytes_per_s * self.bytes_share), arithmetic_s)


def product(name: str, rows: int, columns: int, inner: int, itemsize: int, out_itemsize: int, device: Device) -> Work:
    """A matrix product as a library computes it: with the tile and the split that take least."""
    moved = itemsize * (rows * inner + columns * inner) + out_itemsize * rows * columns
    flops = 2.0 * rows * columns * inner
    base = Work(name, 1, device.multiprocessors, moved)
    found: list[Work] = []
    for (tile_rows, tile_columns), nearness in PRODUCT_TILES.items():
        tiles = -(-rows // tile_rows) * -(-columns // tile_columns)
        # Only a product with few tiles is split: otherwise there are enough programs for all multiprocessors.
        for split in PRODUCT_SPLITS if tiles < device.multiprocessors else (1,):
            of_multiprocessor = device.peak_flops / device.multiprocessors * device.product_share * nearness
            tile_s = 2.0 * tile_rows * tile_columns * inner / split / of_multiprocessor
            # Parts are written and read again in float32.
            parts = 0 if split == 1 else 8.0 * split * rows * columns
            found.append(
                replace(
                    base, programs=tiles * split, bytes=moved + parts, flops=flops, flops_per_s=device.peak_flops,
                    least_s=tile_s,
                )
            )  # fmt: skip
    return min(found, key=lambda work: work.seconds(device))
