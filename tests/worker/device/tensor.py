"""A tensor on a device that is not there: it has a shape, a type and a storage, and no memory."""

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from tests.worker.device.faults import HostSync, LaunchFault

CUDA = torch.device("cuda", 0)
META = torch.device("meta")


class DeviceTensor(torch.Tensor):
    """Wraps a tensor of torch's meta device, which computes shapes and strides, and whose storage stands for memory.

    What torch's own bindings ask the driver for, before any operation begins, is done here.
    """

    meta: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls: type["DeviceTensor"], meta: Tensor) -> "DeviceTensor":
        tensor: DeviceTensor = torch.Tensor._make_wrapper_subclass(
            cls, meta.shape, strides=meta.stride(), storage_offset=meta.storage_offset(), dtype=meta.dtype, device=CUDA
        )
        tensor.meta = meta
        return tensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        raise LaunchFault(f"{func} of a tensor of the device, and no device is running")

    def __getitem__(self, key: Any) -> Tensor:
        tensor: Tensor = self
        dim = 0
        for index in key if isinstance(key, tuple) else (key,):
            if index is ...:
                dim += tensor.dim() - (len(key) - 1) + key.count(None)
            elif index is None:
                tensor = tensor.unsqueeze(dim)
                dim += 1
            elif isinstance(index, slice):
                start, end, step = index.indices(tensor.shape[dim])
                tensor = torch.ops.aten.slice.Tensor(tensor, dim, start, max(start, end), step)
                dim += 1
            elif type(index) is int:
                tensor = torch.ops.aten.select.int(tensor, dim, index)
            elif isinstance(index, Tensor):
                tensor = torch.ops.aten.index.Tensor(tensor, [*[None] * dim, index])
                dim += 1
            else:
                raise HostSync(
                    f"a tensor of the device is indexed with a {type(index).__name__}, which is copied to it"
                )
        return tensor

    def __setitem__(self, key: Any, value: Any) -> None:
        part = self[key]
        if isinstance(value, Tensor):
            part.copy_(value)
        else:
            part.fill_(value)

    def copy_(self, source: Tensor, non_blocking: bool = False) -> Tensor:
        copied: Tensor = torch.ops.aten.copy_.default(self, source, non_blocking)
        return copied

    def contiguous(self, *_: Any) -> Tensor:
        return (
            self if self.is_contiguous() else torch.ops.aten.clone.default(self, memory_format=torch.contiguous_format)
        )

    def record_stream(self, stream: Any) -> None:
        stream.told_of(self)

    def _read(self, *_: Any, **__: Any) -> NoReturn:
        raise HostSync("the host reads a tensor of the device")

    # Each of these waits for the device.
    tolist = item = numpy = nonzero = cpu = _read
    __bool__ = __int__ = __float__ = __index__ = __array__ = _read

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype})"


def storage_of(tensor: Tensor) -> torch.UntypedStorage:
    """Of a tensor of the device."""
    assert isinstance(tensor, DeviceTensor)
    return tensor.meta.untyped_storage()


def metas(values: Sequence[Any]) -> list[Any]:
    """An operator's arguments, for the meta device; lists of tensors too."""
    return [_meta(value) for value in values]


def _meta(value: Any) -> Any:
    if isinstance(value, DeviceTensor):
        return value.meta
    if isinstance(value, torch.device):
        return META if value.type == "cuda" else value
    return [_meta(part) for part in value] if isinstance(value, list | tuple) else value
