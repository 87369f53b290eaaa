"""Which GPU the engine computes on."""

from typing import NamedTuple

import torch


class OwnGpu(NamedTuple):
    """Its names; empty on a CPU."""

    name: str = ""  # as torch reports it
    uuid: str = ""  # of the GPU, or of the part of a divided one (MIG), without a prefix


def own_gpu(device: torch.device) -> OwnGpu:
    """The names of a device. NVML counts devices in another order than CUDA, so only the UUID says which one it is."""
    if device.type != "cuda":
        return OwnGpu()
    return OwnGpu(torch.cuda.get_device_name(device), str(torch.cuda.get_device_properties(device).uuid))
