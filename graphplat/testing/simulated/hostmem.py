"""Pinned host memory, known by its storage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing import reductions

from .memory import POISON
from .runtime import active


def pin(tensor: torch.Tensor, device: object = None) -> torch.Tensor:
    """``aten::_pin_memory``: a pinned copy. A driver call that a capture elsewhere may forbid."""
    active().unsafe_call("pinned memory allocation")
    with torch.inference_mode(False):
        copy = tensor.detach().clone()
    _register(copy)
    return copy


def pin_result(tensor: torch.Tensor) -> None:
    """Count *tensor* as pinned, its contents unwritten: the target of an asynchronous download."""
    raw = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    even = raw.numel() // 2 * 2
    raw[:even].view(torch.int16).fill_(POISON)
    _register(tensor)


def is_pinned(tensor: torch.Tensor, device: object = None) -> bool:
    """``aten::is_pinned``."""
    ref = active().pinned.get(tensor.untyped_storage().data_ptr())
    return ref is not None and not ref.expired()


def _register(tensor: torch.Tensor) -> None:
    runtime, storage = active(), tensor.untyped_storage()
    with runtime.lock:
        for address in [a for a, ref in runtime.pinned.items() if ref.expired()]:
            del runtime.pinned[address]
        runtime.pinned[storage.data_ptr()] = _weak(storage)


def _weak(storage: torch.UntypedStorage) -> Any:
    return reductions.StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def host_read_of(tensor: torch.Tensor) -> Callable[[], torch.Tensor | None]:
    """What a captured upload reads at each replay: the memory of *tensor*, or ``None`` once it was freed.

    A graph keeps the address and not the owner, so this must not keep the owner either.
    """
    reference = _weak(tensor.untyped_storage())
    size, stride, offset, dtype = tensor.size(), tensor.stride(), tensor.storage_offset(), tensor.dtype

    def read() -> torch.Tensor | None:
        if reference.expired():
            return None
        storage: Any = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
        if storage is None:
            return None
        return torch.empty(0, dtype=dtype).set_(storage, offset, size, stride)

    return read
