"""A key-value cache in fixed slots, and the attention that reads it.

Every request owns one slot of a single preallocated tensor, so that all
addresses are fixed and a step can be captured. Nothing here advances when a
step runs: where a step writes, and how far each request may look, are inputs of
the step. Running a step twice leaves the cache as running it once.

One slot more than asked for is reserved: padded rows write there.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import attrs
import torch
from torch.nn.functional import scaled_dot_product_attention

from graphplat.errors import ConfigError, InputError

Kernel = Literal["sdpa", "matmul"]
"""How decode attends: the fused kernel, or two batched products, which spread a long
cache over the device even when few requests run."""

_ALIGNMENT = 8
"""Fused attention kernels want mask rows of a multiple of eight elements."""


class Span(NamedTuple):
    """The tokens of one request in a packed batch, for attention at live lengths."""

    slot: int
    offset: int
    """Its first token's row in the batch."""
    start: int
    """Tokens that the cache already holds."""
    length: int
    """New tokens."""


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
        self.max_len = -(-max_len // _ALIGNMENT) * _ALIGNMENT
        shape = (layers, 2, slots + 1, kv_heads, self.max_len, head_dim)
        self.data = torch.zeros(shape, dtype=dtype, device=device)
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

    def rows(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Where tokens lie in a layer seen as rows of ``head_dim``: ``(tokens, kv_heads)``."""
        by_head = slots.unsqueeze(-1) * self.heads.shape[0] + self.heads
        return by_head * self.max_len + positions.unsqueeze(-1)

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, each ``(slots + 1, kv_heads, max_len, head_dim)``."""
        return self.data[index, 0], self.data[index, 1]

    def flat(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The same memory as rows of ``head_dim``, as :meth:`rows` counts them."""
        keys, values = self.data[index].flatten(1, 3)
        return keys, values

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first *length* tokens of one slot to another, all layers at once."""
        for slot in (source, target):
            if not 0 <= slot < self.slots:
                raise InputError(f"slot {slot} is not one of {self.slots}", field="slots")
        self.data[:, :, target, :, :length].copy_(self.data[:, :, source, :, :length])


class Step:
    """What the attention of one forward needs beside queries, keys and values."""

    store: SlotStore
    write_rows: torch.Tensor
    """Flat cache rows of the new tokens, ``(tokens * kv_heads,)``."""

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Put new keys and values, ``(batch, kv_heads, tokens, head_dim)``, into their slots."""
        for memory, new in zip(self.store.flat(layer), (key, value), strict=True):
            memory.index_copy_(0, self.write_rows, new.transpose(1, 2).reshape(-1, new.shape[-1]))

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Attention of *query*, ``(batch, heads, tokens, head_dim)``, after :meth:`write`.

        *key* and *value* are the new ones. Returns ``(batch, tokens, heads, head_dim)``.
        """
        raise NotImplementedError


@attrs.frozen(eq=False)
class DecodeStep(Step):
    """One new token a request, over whole cache rows.

    Without ``slots`` the batch's row *i* reads slot *i*, which needs no copy of
    the cache; with them, rows are gathered first.
    """

    store: SlotStore
    write_rows: torch.Tensor
    mask: torch.Tensor
    """Additive, ``(requests, 1, 1, max_len)``."""
    slots: torch.Tensor | None
    kernel: Kernel

    @classmethod
    def build(
        cls,
        store: SlotStore,
        slots: torch.Tensor,
        positions: torch.Tensor,
        *,
        gather: bool,
        kernel: Kernel,
    ) -> DecodeStep:
        """From *slots* and *positions*, ``(requests,)`` each, on the device alone."""
        if not gather and slots.shape[0] > store.slots + 1:
            raise InputError(f"{slots.shape[0]} rows, but {store.slots} slots", field="slots")
        return cls(
            store=store,
            write_rows=store.rows(slots, positions).flatten(),
            mask=_additive(store.columns <= positions[:, None], store)[:, None, None],
            slots=slots if gather else None,
            kernel=kernel,
        )

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """See :meth:`Step.attend`."""
        del key, value  # the cache holds them, with all earlier ones
        count, heads, _, dim = query.shape
        keys, values = (self._read(memory, count) for memory in self.store.layer(layer))
        # Heads that share keys become query rows: no copy of the cache for each of them.
        grouped = query.reshape(count, keys.shape[1], -1, dim)
        if self.kernel == "sdpa":
            found = scaled_dot_product_attention(grouped, keys, values, attn_mask=self.mask, scale=scale)
        else:
            found = _two_products(grouped, keys, values, self.mask, scale)
        return found.reshape(count, 1, heads, dim)

    def _read(self, memory: torch.Tensor, count: int) -> torch.Tensor:
        return memory[:count] if self.slots is None else memory.index_select(0, self.slots)


@attrs.frozen(eq=False)
class PackedStep(Step):
    """Packed prompts under one mask: right for every packing, so fit for a graph.

    Tokens of one request carry one slot, by which the mask tells requests apart;
    padded tokens carry the dummy slot and see each other alone. Earlier tokens,
    if any, are gathered from the cache through ``history_rows``.
    """

    store: SlotStore
    write_rows: torch.Tensor
    mask: torch.Tensor
    """Additive, ``(tokens, history + tokens)``."""
    history_rows: torch.Tensor | None
    """``(kv_heads, history)``."""

    @classmethod
    def build(
        cls,
        store: SlotStore,
        slots: torch.Tensor,
        positions: torch.Tensor,
        history: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> PackedStep:
        """From *slots* and *positions*, ``(tokens,)`` each, and those of earlier tokens."""
        key_slots, key_positions, history_rows = slots, positions, None
        if history is not None:
            history_rows = store.rows(*history).t()
            key_slots = torch.cat((history[0], slots))
            key_positions = torch.cat((history[1], positions))
        visible = (slots[:, None] == key_slots) & (positions[:, None] >= key_positions)
        return cls(
            store=store,
            write_rows=store.rows(slots, positions).flatten(),
            mask=_additive(visible, store),
            history_rows=history_rows,
        )

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """See :meth:`Step.attend`."""
        keys, values = key[0], value[0]
        if self.history_rows is not None:
            old = [memory[self.history_rows] for memory in self.store.flat(layer)]
            keys, values = torch.cat((old[0], keys), 1), torch.cat((old[1], values), 1)
        return _grouped(query, keys, values, scale, mask=self.mask)


@attrs.frozen(eq=False)
class RaggedStep(Step):
    """Packed prompts one by one, at their live lengths. Reads lengths on the host: eager only.

    Rows that no span covers come out as zeros.
    """

    store: SlotStore
    write_rows: torch.Tensor
    spans: tuple[Span, ...]
    masks: tuple[torch.Tensor | None, ...]
    """One for each span with earlier tokens, ``(length, start + length)``."""

    @classmethod
    def build(
        cls, store: SlotStore, slots: torch.Tensor, positions: torch.Tensor, spans: tuple[Span, ...]
    ) -> RaggedStep:
        """From *slots* and *positions*, ``(tokens,)`` each, and the live *spans*."""
        return cls(
            store=store,
            write_rows=store.rows(slots, positions).flatten(),
            spans=spans,
            masks=tuple(_continued(store, span) for span in spans),
        )

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """See :meth:`Step.attend`."""
        _, heads, tokens, dim = query.shape
        found = query.new_zeros(1, tokens, heads, dim)
        keys, values = self.store.layer(layer)
        for (slot, offset, start, length), mask in zip(self.spans, self.masks, strict=True):
            new = slice(offset, offset + length)
            if start:
                used_keys, used_values = (memory[slot, :, : start + length] for memory in (keys, values))
            else:
                used_keys, used_values = key[0, :, new], value[0, :, new]
            found[:, new] = _grouped(query[:, :, new], used_keys, used_values, scale, mask=mask)
        return found


def _continued(store: SlotStore, span: Span) -> torch.Tensor | None:
    """The causal mask of tokens that have *span.start* others before them."""
    if span.start == 0:
        return None
    held = store.columns[: span.start + span.length]
    return _additive(held <= held[span.start :, None], store)


def _additive(visible: torch.Tensor, store: SlotStore) -> torch.Tensor:
    mask = torch.zeros(visible.shape, dtype=store.data.dtype, device=visible.device)
    return mask.masked_fill_(visible.logical_not(), float("-inf"))


def _grouped(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    *,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of ``(1, heads, tokens, dim)`` over ``(kv_heads, length, dim)``; causal without a mask.

    Key-value heads play the batch and the heads that share them the heads, with a
    stride of zero, so that no key is copied. Returns ``(1, tokens, heads, dim)``.
    """
    grouped = query[0].view(keys.shape[0], -1, *query.shape[2:])
    shape = (keys.shape[0], grouped.shape[1], keys.shape[1], keys.shape[2])
    found = scaled_dot_product_attention(
        grouped,
        keys.unsqueeze(1).expand(shape),
        values.unsqueeze(1).expand(shape),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
    )
    return found.flatten(0, 1).transpose(0, 1).unsqueeze(0)


def _two_products(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    scores = torch.matmul(query * scale, keys.transpose(2, 3)) + mask
    weights = scores.softmax(-1, dtype=torch.float32).to(values.dtype)
    return torch.matmul(weights, values)
