"""What one step does with the slot cache: where it writes, and how it attends."""

from __future__ import annotations

from typing import Literal, NamedTuple

import attrs
import torch
from torch.nn.functional import scaled_dot_product_attention

from graphplat.batch import ForwardBatch
from graphplat.breaks import eager_on_graph, live_batch
from graphplat.errors import InputError
from graphplat.integrations.slot_cache import SlotStore

Kernel = Literal["sdpa", "matmul"]
"""How decode attends: the fused kernel, or two batched products, which spread a long
cache over the device even when few requests run."""


class Span(NamedTuple):
    """The tokens of one request in a packed batch, for attention at live lengths."""

    slot: int
    offset: int
    """Its first token's row in the batch."""
    start: int
    """Tokens that the cache already holds."""
    length: int
    """New tokens."""


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


@attrs.define(eq=False)
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


@attrs.define(eq=False)
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


@attrs.define(eq=False)
class RaggedStep(Step):
    """Packed prompts one by one, at their live lengths. Reads lengths on the host: eager only.

    Spans follow each other without a gap.
    """

    store: SlotStore
    write_rows: torch.Tensor
    spans: tuple[Span, ...]
    masks: tuple[torch.Tensor | None, ...]
    """One for each span with earlier tokens, ``(length, start + length)``."""

    @classmethod
    def build(cls, store: SlotStore, write_rows: torch.Tensor, spans: tuple[Span, ...]) -> RaggedStep:
        """For the live *spans*."""
        return cls(
            store=store,
            write_rows=write_rows,
            spans=spans,
            masks=tuple(_continued(store, span) for span in spans),
        )

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """See :meth:`Step.attend`."""
        del key, value  # the cache holds them, with all earlier ones
        keys, values = self.store.layer(layer)
        found = []
        for (slot, offset, start, length), mask in zip(self.spans, self.masks, strict=True):
            new, held = query[:, :, offset : offset + length], start + length
            found.append(_grouped(new, keys[slot, :, :held], values[slot, :, :held], scale, mask=mask))
        return torch.cat(found, dim=1)


@attrs.define(eq=False)
class LiveStep(Step):
    """Packed prompts between captured segments: lengths come from the batch being run.

    Its attention is a break in a breakable graph. A :class:`PackedBatch` is attended to
    at its live lengths; any other, such as the one that a graph is captured with, under
    a mask over all pairs of tokens.
    """

    store: SlotStore
    write_rows: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """See :meth:`Step.attend`."""
        del key, value
        return _attend_live(self, layer, query, scale).unsqueeze(0)


@eager_on_graph(rows="tokens", copy_inputs=("query",))
def _attend_live(step: LiveStep, layer: int, query: torch.Tensor, scale: float) -> torch.Tensor:
    """Attention of ``(1, heads, tokens, head_dim)``; returns ``(real tokens, heads, head_dim)``."""
    batch = live_batch()
    if isinstance(batch, PackedBatch):
        inner: Step = batch.ragged(step.store, step.write_rows)
        return inner.attend(layer, query, query, query, scale)[0]
    inner = PackedStep.build(step.store, step.slots, step.positions, None)
    rows = step.store.rows(step.slots, step.positions).t()
    key, value = (memory[rows].unsqueeze(0) for memory in step.store.flat(layer))
    return inner.attend(layer, query, key, value, scale)[0]


@attrs.define(eq=False)
class PackedBatch(ForwardBatch):
    """A prefill batch that also says on the host where each request lies.

    Outside a fully captured graph, its attention works at live lengths and needs no
    mask over all pairs of tokens.
    """

    spans: tuple[Span, ...] = ()
    _ragged: RaggedStep | None = attrs.field(default=None, init=False)

    def ragged(self, store: SlotStore, write_rows: torch.Tensor) -> RaggedStep:
        """The step that attends at live lengths; its masks are built once for all layers."""
        if self._ragged is None or self._ragged.write_rows is not write_rows:
            self._ragged = RaggedStep.build(store, write_rows, self.spans)
        return self._ragged


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
