"""A key-value cache in fixed slots.

Every request owns one slot of a single preallocated tensor, so that all
addresses are fixed and a step can be captured. Nothing here advances when a
step runs: where a step writes, and how far each request may look, are inputs of
the step. Running a step twice leaves the cache as running it once.

One slot more than asked for is reserved: padded rows write there.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

import torch

from graphplat.errors import ConfigError, InputError

_ALIGNMENT = 8
"""Fused attention kernels want mask rows of a multiple of eight elements."""


class SlotStore:
    """Keys and values of *slots* requests (and one dummy) of up to *max_len* tokens.

    ``data`` has the shape ``(layers, 2, slots + 1, kv_heads, max_len, head_dim)``. It
    starts as zeros, since masked garbage times zero may still be NaN. *max_len* is
    rounded up to a multiple of eight.
    """

    def __init__(
        self,
        *,
        layers: int,
        slots: int,
        kv_heads: int,
        max_len: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        for name, size in (("slots", slots), ("max_len", max_len)):
            if size < 1:
                raise ConfigError(f"a cache needs at least one of them, found {size}", field=name)
        self.slots = slots
        self.in_use = threading.Lock()
        """Held by whoever schedules requests on these slots."""
        self.max_len = -(-max_len // _ALIGNMENT) * _ALIGNMENT
        shape = (layers, 2, slots + 1, kv_heads, self.max_len, head_dim)
        self.data = torch.zeros(shape, dtype=dtype, device=device)
        # Made once, and all that a step uses: a compiler writes to its very inputs in place, but copies
        # a whole cache to write to a view that it made itself.
        self._rows = tuple(tuple(half.flatten(0, 2) for half in layer) for layer in self.data)
        # Made once: a step then reads them instead of launching two more kernels.
        self.columns = torch.arange(self.max_len).to(device)
        self.heads = torch.arange(kv_heads).to(device)

    @property
    def dummy(self) -> int:
        """The slot that padded rows write to."""
        return self.slots

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        return self.data.nbytes

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor whose address a captured step reads."""
        return {"cache.data": self.data, "cache.columns": self.columns, "cache.heads": self.heads}

    def check(self, slots: Sequence[int], positions: Iterable[int]) -> None:
        """Raise :class:`InputError` unless requests in *slots* may write at *positions*."""
        if wrong := [slot for slot in slots if not 0 <= slot < self.slots]:
            raise InputError(f"no slots {wrong}; there are {self.slots}", field="slots")
        if len(set(slots)) < len(slots):
            raise InputError(f"two requests in one slot: {list(slots)}", field="slots")
        if wrong := [position for position in positions if not 0 <= position < self.max_len]:
            raise InputError(f"no positions {wrong}; a slot holds {self.max_len} tokens", field="positions")

    def rows(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Where tokens lie in a layer seen as rows of ``head_dim``: ``(tokens, kv_heads)``."""
        by_head = slots.unsqueeze(-1) * self.heads.shape[0] + self.heads
        return by_head * self.max_len + positions.unsqueeze(-1)

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, each ``(slots + 1, kv_heads, max_len, head_dim)``."""
        shape = (self.slots + 1, self.heads.shape[0], self.max_len, -1)
        keys, values = self._rows[index]
        return keys.view(shape), values.view(shape)

    def flat(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The same memory as rows of ``head_dim``, as :meth:`rows` counts them."""
        keys, values = self._rows[index]
        return keys, values

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first *length* tokens of one slot to another, all layers at once."""
        for slot in (source, target):
            if not 0 <= slot < self.slots:
                raise InputError(f"slot {slot} is not one of {self.slots}", field="slots")
        self.data[:, :, target, :, :length].copy_(self.data[:, :, source, :, :length])
