"""Tensors of the simulated device: wrappers with its device string, over memory of its pools."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .memory import Block
from .runtime import active

Dispatch = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def _dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from .dispatch import dispatch

    return dispatch(func, args, kwargs)


class SimTensor(torch.Tensor):
    """A tensor on the simulated device.

    ``backing`` is a CPU tensor with the same geometry over the same bytes as every other view of ``block``.
    """

    backing: torch.Tensor
    block: Block
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, backing: torch.Tensor, block: Block, device: torch.device) -> SimTensor:
        """A tensor of *backing*'s geometry over *block*."""
        self: SimTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            backing.size(),
            strides=backing.stride(),
            storage_offset=backing.storage_offset(),
            dtype=backing.dtype,
            device=device,
        )
        self.backing = backing
        self.block = block
        return self

    def __init__(self, *_args: Any) -> None:
        super().__init__()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Hand every operator to the device."""
        return _dispatch(func, args, kwargs or {})

    def rebind(self, other: SimTensor) -> None:
        """Become *other*: same geometry, same memory, under this object's identity."""
        _SET_DATA(self, other)
        self.backing, self.block = other.backing, other.block

    @property
    def data(self) -> torch.Tensor:
        """As ``torch.Tensor.data``; assigning moves the memory along with the geometry."""
        return _GET_DATA(self)

    @data.setter
    def data(self, new: torch.Tensor) -> None:
        if not isinstance(new, SimTensor):
            raise TypeError(
                "incompatible tensor type: .data of a simulated device's tensor takes a tensor of that device"
            )
        self.rebind(new)

    def data_ptr(self) -> int:
        """The address in simulated device memory."""
        return self.backing.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """The memory under this tensor and all its views; its bytes live on the CPU."""
        return self.block.bytes.untyped_storage()

    def tolist(self) -> Any:
        """The values as Python numbers; a host read."""
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """As on a real device: refused unless *force*."""
        if not force:
            raise TypeError(
                f"can't convert {self.device} device type tensor to numpy. "
                "Use Tensor.cpu() to copy the tensor to host memory first."
            )
        return self.detach().cpu().numpy()

    def record_stream(self, stream: Any) -> None:
        """Keep the memory until *stream* has finished what it was given so far."""
        self.block.users[stream.state] = stream.state.submitted

    def __deepcopy__(self, memo: dict[int, Any]) -> SimTensor:
        if id(self) in memo:
            known: SimTensor = memo[id(self)]
            return known
        with torch.no_grad():
            copy: Any = self.detach().clone()
        copy.requires_grad_(self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            copy = torch.nn.Parameter(copy, self.requires_grad)
        memo[id(self)] = copy
        result: SimTensor = copy
        return result

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """The values too, unless reading them would spoil a capture."""
        if active().stream(self.device.index).capture is not None:
            return f"tensor(<{tuple(self.shape)} in capture>, dtype={self.dtype}, device='{self.device}')"
        return repr(self.detach().cpu())[:-1] + f", device='{self.device}')"

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 else object.__format__(repr(self), spec)

    def __reduce_ex__(self, proto: Any) -> Any:
        """Pickle the values; they come back on the device of the same name."""
        return _rebuild, (self.detach().cpu(), str(self.device), self.requires_grad)


def _rebuild(values: torch.Tensor, device: str, requires_grad: bool) -> torch.Tensor:
    return values.to(device).requires_grad_(requires_grad)


# The class above hides these accessors of torch.Tensor; the descriptor is the only way to the original.
_DATA: Any = torch.Tensor.__dict__.get("data") or torch._C.TensorBase.__dict__["data"]


def _SET_DATA(tensor: torch.Tensor, new: torch.Tensor) -> None:  # noqa: N802
    _DATA.__set__(tensor, new)


def _GET_DATA(tensor: torch.Tensor) -> torch.Tensor:  # noqa: N802
    result: torch.Tensor = _DATA.__get__(tensor)
    return result


def allocate(size: Any, stride: Any, dtype: torch.dtype, index: int) -> SimTensor:
    """A new tensor on device *index*, its memory as it was left: never zeroed."""
    runtime = active()
    stream = runtime.stream(index)
    room = _extent(size, stride) * dtype.itemsize
    with runtime.lock:
        block = runtime.pool_for(stream).allocate(room, stream.id)
    with torch.inference_mode(False):
        backing = torch.empty(0, dtype=dtype).set_(block.bytes.untyped_storage(), 0, size, stride)
    return SimTensor(backing, block, runtime.devices[index].torch_device)


def _extent(size: Any, stride: Any) -> int:
    if any(n == 0 for n in size):
        return 0
    return 1 + sum(int(n - 1) * int(step) for n, step in zip(size, stride, strict=True))


def view_of(base: SimTensor, backing: torch.Tensor) -> SimTensor:
    """A tensor over the same memory as *base*.

    A view of a tensor made outside inference mode is itself no inference tensor, also when made inside.
    """
    with torch.inference_mode(base.is_inference()):
        return SimTensor(backing, base.block, base.device)
