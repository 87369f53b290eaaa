"""GPUs as torch describes them. Sizes are those of their data sheets; sm_90 and sm_80 from the CUDA C++ guide's table
of compute capabilities."""

from dataclasses import dataclass
from types import SimpleNamespace

# What a process has on a card before its first tensor: the context, the kernels' code, cuBLAS. An assumption; a context
# alone takes 0.3 to 0.5 GiB.
CONTEXT_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Card:
    """One GPU."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    memory: int  # bytes that programs can have
    shared_memory: int  # bytes that one program may use

    @property
    def properties(self) -> SimpleNamespace:
        """As torch.cuda.get_device_properties() has them."""
        return SimpleNamespace(
            name=self.name, major=self.capability[0], minor=self.capability[1],
            multi_processor_count=self.multiprocessors, total_memory=self.memory,
            shared_memory_per_block=48 << 10, shared_memory_per_block_optin=self.shared_memory,
        )  # fmt: skip


H200 = Card("NVIDIA H200", (9, 0), 132, 139 << 30, 227 << 10)
A100 = Card("NVIDIA A100-SXM4-80GB", (8, 0), 108, 79 << 30, 163 << 10)
RTX_4090 = Card("NVIDIA GeForce RTX 4090", (8, 9), 128, (235 << 30) // 10, 99 << 10)
L4 = Card("NVIDIA L4", (8, 9), 58, 22 << 30, 99 << 10)
