"""The slot cache of the reference decoder, and the attentions that read it.

All but :func:`attend_spans` read no tensor on the host and can be captured. One scatter writes keys
and values.
"""

from __future__ import annotations

import itertools
from typing import Literal, NamedTuple

import attrs
import torch
from torch.nn import functional

from graphplat.batch import ForwardBatch
from graphplat.errors import InputError
from graphplat.testing.reference_layers import ReferenceShape

Kernel = Literal["sdpa", "matmul"]
"""How decode attends: the fused kernel, or two batched products, which spread a long
cache over the device even when few requests run."""

_ALIGNMENT = 8
"""Fused attention kernels want mask rows of a multiple of eight elements."""


class SlotCache:
    """Keys and values of *slots* requests, and of one dummy that padded rows write to.

    ``data`` is ``(layers, 2, slots + 1, kv_heads, max_len, head_dim)``, zeros at first, since
    masked garbage times zero may be NaN. *max_len* is rounded up to a multiple of eight.
    """

    def __init__(
        self, shape: ReferenceShape, *, slots: int, max_len: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.slots = slots
        self.kv_heads = shape.kv_heads
        self.max_len = -(-max_len // _ALIGNMENT) * _ALIGNMENT
        size = (shape.layers, 2, slots + 1, shape.kv_heads, self.max_len, shape.head_dim)
        self.data = torch.zeros(size, dtype=dtype, device=device)
        # Made once, and all that a step uses: a compiler writes to its very inputs in place, but copies
        # a whole cache to write to a view that it made itself.
        self.flat = tuple(layer.view(-1, shape.head_dim) for layer in self.data)
        # Made once, so that a step reads them instead of launching kernels.
        self.columns = torch.arange(self.max_len).to(device)
        halves = torch.arange(2)[:, None] * (slots + 1) * shape.kv_heads + torch.arange(shape.kv_heads)
        self.places = (halves.flatten() * self.max_len).to(device)

    @property
    def dummy(self) -> int:
        """The slot of padded rows."""
        return self.slots

    def rows(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Where tokens' keys and values lie in a layer seen as rows: ``(tokens, 2 * kv_heads)``."""
        first = slots * (self.kv_heads * self.max_len) + positions
        return first[:, None] + self.places

    def write(self, layer: int, rows: torch.Tensor, pairs: torch.Tensor) -> None:
        """Put keys and values, ``(tokens, 2 * kv_heads, head_dim)``, at *rows* of *layer*."""
        self.flat[layer].index_put_((rows,), pairs)

    def keys_and_values(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Each ``(slots + 1, kv_heads, max_len, head_dim)``."""
        halves = self.flat[layer].view(2, self.slots + 1, self.kv_heads, self.max_len, -1)
        return halves[0], halves[1]


class Scratch:
    """Memory for *rows* tokens that all layers and buckets share with eager parts.

    Segments and eager parts run one after another, so one piece serves every break: none copies
    its arguments and none keeps memory of its own.
    """

    def __init__(self, shape: ReferenceShape, rows: int, *, device: torch.device, dtype: torch.dtype) -> None:
        self.rows = rows
        self._widths = (shape.qkv_heads * shape.head_dim, shape.heads * shape.head_dim)
        self.data = torch.zeros(rows * sum(self._widths), dtype=dtype, device=device)

    def cut(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """For projections ``(rows, qkv_heads * head_dim)``, and outputs ``(rows, heads * head_dim)``."""
        wide, narrow = self._widths
        split, end = rows * wide, rows * (wide + narrow)
        return self.data[:split].view(rows, wide), self.data[split:end].view(rows, narrow)


class Span(NamedTuple):
    """One request's tokens in a packed batch."""

    slot: int
    offset: int
    """Row of its first token."""
    start: int
    """Tokens that the cache already holds."""
    length: int
    """New tokens."""


@attrs.define(eq=False)
class PackedBatch(ForwardBatch):
    """A prefill batch that also says on the host where each request's tokens lie."""

    spans: tuple[Span, ...] = ()
    _masks: tuple[torch.Tensor | None, ...] | None = None

    def masks(self, cache: SlotCache) -> tuple[torch.Tensor | None, ...]:
        """The mask of each span that continues a prompt, made once for all layers."""
        if self._masks is None:
            self._masks = tuple(_continued(cache, span) for span in self.spans)
        return self._masks

    @classmethod
    def of(cls, batch: ForwardBatch) -> PackedBatch:
        """*batch* itself, or a copy with its spans read from its tensors on the host."""
        if isinstance(batch, cls):
            return batch
        ends, totals = batch.inputs["cu_seqlens"].tolist(), batch.inputs["seq_lens"].tolist()
        slots = batch.inputs["slots"].tolist()
        spans = [
            Span(slots[first], first, total - (last - first), last - first)
            for (first, last), total in zip(itertools.pairwise(ends), totals, strict=True)
            if last > first
        ]
        return cls(
            phase=batch.phase,
            num_requests=batch.num_requests,
            num_tokens=batch.num_tokens,
            inputs=batch.inputs,
            spans=tuple(spans),
        )


def additive(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask to add to scores: zero where *visible*, else minus infinity."""
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(visible.logical_not(), float("-inf"))


def attend_decode(
    query: torch.Tensor,
    cache: SlotCache,
    layer: int,
    *,
    mask: torch.Tensor,
    slots: torch.Tensor | None,
    kernel: Kernel,
) -> torch.Tensor:
    """One new token a request over whole cache rows, ``(requests, heads * head_dim)``.

    *query* is ``(requests, heads, head_dim)``, *mask* ``(requests, 1, 1, max_len)``. Without *slots*
    row *i* reads slot *i* where it lies; with them the rows are copied together first.
    """
    count, _, dim = query.shape
    if slots is None and count > cache.slots + 1:
        raise InputError(f"{count} rows, but {cache.slots} slots", field="slots")
    keys, values = (
        memory[:count] if slots is None else memory.index_select(0, slots)
        for memory in cache.keys_and_values(layer)
    )
    # Heads that share keys become query rows: no copy of the cache for each of them.
    grouped = query.reshape(count, cache.kv_heads, -1, dim)
    if kernel == "sdpa":
        found = functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)
    else:
        scores = torch.matmul(grouped * dim**-0.5, keys.transpose(2, 3)) + mask
        found = torch.matmul(scores.softmax(-1, dtype=torch.float32).to(values.dtype), values)
    return found.reshape(count, -1)


def attend_packed(
    qkv: torch.Tensor,
    cache: SlotCache,
    layer: int,
    *,
    mask: torch.Tensor,
    history: torch.Tensor | None,
    heads: int,
) -> torch.Tensor:
    """Packed prompts under one mask, ``(tokens, heads * head_dim)``: right for every packing of its size.

    *mask* is ``(tokens, history + tokens)``; *history* the cache rows of earlier tokens,
    ``(history, 2 * kv_heads)``.
    """
    pairs = qkv[:, heads:]
    if history is not None:
        pairs = torch.cat((cache.flat[layer][history], pairs))
    key, value = pairs.transpose(0, 1).chunk(2)
    return _grouped(qkv[:, :heads], key, value, mask).flatten(1)


def attend_spans(
    qkv: torch.Tensor,
    out: torch.Tensor,
    cache: SlotCache,
    layer: int,
    *,
    spans: tuple[Span, ...],
    masks: tuple[torch.Tensor | None, ...],
    heads: int,
) -> None:
    """Packed prompts one by one at their real lengths, into *out*: no work for padding.

    *masks* has one ``(length, start + length)`` for each span with earlier tokens, else ``None``.
    """
    keys, values = cache.keys_and_values(layer)
    for (slot, offset, start, length), mask in zip(spans, masks, strict=True):
        new = qkv[offset : offset + length]
        if start:
            key, value = (memory[slot, :, : start + length] for memory in (keys, values))
        else:
            key, value = new[:, heads:].transpose(0, 1).chunk(2)
        found = _grouped(new[:, :heads], key, value, mask)
        out[offset : offset + length].copy_(found.flatten(1))


def _grouped(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """``(tokens, heads, dim)`` over ``(kv_heads, length, dim)``; causal without a mask.

    Key-value heads play the batch and the heads that share them the heads, with a
    stride of zero, so that no key is copied.
    """
    grouped = torch.unflatten(query.transpose(0, 1), 0, (key.shape[0], -1))
    shape = (key.shape[0], grouped.shape[1], *key.shape[1:])
    found = functional.scaled_dot_product_attention(
        grouped,
        key.unsqueeze(1).expand(shape),
        value.unsqueeze(1).expand(shape),
        attn_mask=mask,
        is_causal=mask is None,
    )
    return found.flatten(0, 1).transpose(0, 1)


def _continued(cache: SlotCache, span: Span) -> torch.Tensor | None:
    """The causal mask of tokens that have others before them; none for a whole prompt."""
    if span.start == 0:
        return None
    held = cache.columns[: span.start + span.length]
    return additive(held <= held[span.start :, None], cache.data.dtype)
