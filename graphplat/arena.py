"""The memory of all static inputs, and the order of the steps that use it."""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, Any, cast

import attrs
import torch

from graphplat import tree

if TYPE_CHECKING:
    from graphplat.buffers import BoundInputs
    from graphplat.platform import Platform

_ALIGN = 64
"""Bytes; keeps every field fit for vectorised loads."""


def packed_bytes(shapes: list[tuple[tuple[int, ...], torch.dtype]]) -> int:
    """Bytes of a layout that holds tensors of *shapes*, padding included."""
    return sum(field_bytes(shape, dtype) for shape, dtype in shapes)


def field_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes that one tensor takes in a layout, padding included."""
    return -(-dtype.itemsize * math.prod(shape) // _ALIGN) * _ALIGN


def carve(raw: torch.Tensor, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The tensor of *shape* at byte *offset* of *raw*; a normal one in inference mode, too."""
    size = dtype.itemsize * math.prod(shape)
    with torch.inference_mode(False):
        return raw[offset : offset + size].view(dtype).view(shape)


@attrs.define(eq=False)
class StaticArena:
    """Device bytes that the static inputs of all runners of one model runner share.

    ``lock`` serializes steps: two threads never mix their batches. A step on
    another stream than the last one waits for it, since both use these bytes.
    """

    platform: Platform
    device: torch.device
    lock: threading.RLock = attrs.field(factory=threading.RLock)
    owner: BoundInputs | None = None
    """The layout that wrote last; any other finds foreign bytes in its padded rows."""
    start: int = 0
    """Address of the first byte held."""
    stop: int = 0
    pins: bool = True
    """Whether host batches may be staged; false once pinning memory failed."""
    _bytes: torch.Tensor | None = None
    _outgrown: list[torch.Tensor] = attrs.field(factory=list)
    """Smaller bytes that layouts made before still use."""
    _last_stream: Any = None
    _stream_key: Any = None

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return 0 if self._bytes is None else self._bytes.numel()

    @property
    def writes(self) -> int:
        """Counts operators that wrote here; the counter is torch's own, of every tensor."""
        return 0 if self._bytes is None else self._bytes._version

    @property
    def stream(self) -> Any:
        """The stream of the latest step, which :meth:`enter_stream` made sure of."""
        return self._last_stream

    def reserve(self, nbytes: int) -> None:
        """Hold at least *nbytes*. Layouts already handed out keep their old memory."""
        if nbytes > self.nbytes:
            if self._bytes is not None:
                self._outgrown.append(self._bytes)
            # Static buffers are written both inside and outside inference mode.
            with torch.inference_mode(False):
                self._bytes = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
            self.device = self._bytes.device  # with its index, which "current device" lacks
            self.start = self._bytes.data_ptr()
            self.stop = self.start + nbytes
            self.owner = None

    def carve(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The tensor of *shape* at byte *offset*."""
        if self._bytes is None:
            self.reserve(_ALIGN)
        return carve(cast(torch.Tensor, self._bytes), offset, shape, dtype)

    def enter_stream(self) -> None:
        """Order this step after the last one if that ran on another stream."""
        key = self.platform.stream_key(self.device)
        if key == self._stream_key:
            return
        stream = self.platform.current_stream(self.device)
        if self._last_stream is not None:
            self.platform.wait_stream(stream, self._last_stream)
        self._last_stream, self._stream_key = stream, key

    def contains(self, tensor: torch.Tensor) -> bool:
        """Whether *tensor* lies in this arena."""
        if self._bytes is None or tensor.device != self._bytes.device:
            return False
        storage = tensor.untyped_storage().data_ptr()
        return any(storage == held.untyped_storage().data_ptr() for held in (self._bytes, *self._outgrown))

    def holds(self, leaf: Any) -> bool:
        """Whether *leaf* is a dense tensor in this arena."""
        return isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and self.contains(leaf)

    def copied_out(self, value: Any) -> Any:
        """Inputs or results with a copy of every tensor that lies in this arena."""
        return tree.map_leaves(lambda _, leaf: leaf.clone() if self.holds(leaf) else leaf, value)
