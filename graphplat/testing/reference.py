"""A reference runtime: a Llama-like decoder with a slot cache that prefills packed prompts and decodes.

It runs on any torch device and serves tests, conformance and benchmarks. Under the ``full``
backend its prefill attention is one masked product, captured with the rest. Under ``breakable`` it is
an eager part at the live lengths of the batch being run.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch.nn import functional

from graphplat.batch import ForwardBatch, Phase
from graphplat.breaks import eager_on_graph, live_batch
from graphplat.config import GraphConfig
from graphplat.errors import ConfigError, InputError
from graphplat.inputs import InputSpec, TensorSpec, UpTo
from graphplat.model_runner import ModelRunner
from graphplat.testing.reference_cache import (
    Kernel,
    PackedBatch,
    Scratch,
    SlotCache,
    Span,
    additive,
    attend_decode,
    attend_packed,
    attend_spans,
)
from graphplat.testing.reference_layers import SHAPES, ReferenceDecoder, ReferenceShape

__all__ = ["CONTINUED", "SCATTERED", "SHAPES", "PackedBatch", "ReferenceRunner", "ReferenceShape", "Span"]

SCATTERED = "scattered"
"""The variant of decode batches whose row *i* is not in slot *i*: right, but copies the cache."""

CONTINUED = "continued"
"""The variant of prefill batches with earlier tokens that no captured attention was made to see."""


class ReferenceRunner(ModelRunner):
    """A decoder of *shape* (or a name in :data:`SHAPES`), *slots* requests of up to *max_len* tokens.

    Inputs, all ``int64``. Decode: ``input_ids``, ``positions`` and ``slots``, one of each a request.
    Prefill: the same three for each token of packed prompts; ``cu_seqlens`` ``(requests + 1,)``
    and ``seq_lens`` ``(requests,)``, a request's new tokens with those it had before. With
    *max_history*, a captured prefill may look at so many earlier tokens of all requests together,
    whose places ``slot * max_len + position`` are the optional input ``history``; without it
    such a batch runs eagerly. An eager attention needs none. :meth:`decode_batch` and
    :meth:`prefill_batch` build batches.

    The forward gives logits ``(requests, vocab)`` of each request's last token, in *dtype*.

    *ranks* above zero makes it data-parallel: for capture each batch gets the tensor
    ``global_num_tokens_gpu`` of so many token counts, and the forward scales its logits by
    their mean over its own count: by 1, as long as that tensor holds what was put there.

    Raises :class:`ConfigError` for sizes that cannot be.
    """

    def __init__(
        self,
        shape: ReferenceShape | str = "tiny",
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        slots: int = 8,
        max_len: int = 64,
        max_history: int = 0,
        ranks: int = 0,
        kernel: Kernel = "sdpa",
        graph_config: GraphConfig | None = None,
    ) -> None:
        if isinstance(shape, str):
            if shape not in SHAPES:
                raise ConfigError(f"no shape {shape!r}", hint=f"Use one of {sorted(SHAPES)}")
            shape = SHAPES[shape]
        for name, size in (("slots", slots), ("max_len", max_len)):
            if size < 1:
                raise ConfigError(f"at least one is needed, found {size}", field=name)
        self.shape = shape
        self.device = torch.device(device)
        self.dtype = dtype
        self.max_history = max_history
        self.ranks = ranks
        self.kernel: Kernel = kernel
        self.graph_config = graph_config or GraphConfig()
        self.cache = SlotCache(shape, slots=slots, max_len=max_len, device=self.device, dtype=dtype)
        self.decoder = ReferenceDecoder(
            shape, max_len=self.cache.max_len, device=self.device, dtype=dtype, seed=seed
        )
        self.model: torch.nn.Module = self.decoder
        self._scratch = self._make_scratch()

    def configured(self, graph_config: GraphConfig) -> Self:
        """The same weights and cache under other settings."""
        clone = copy.copy(self)
        clone.graph_config = graph_config
        clone._scratch = clone._make_scratch()
        return clone

    # The contract

    def input_spec(self, phase: Phase) -> InputSpec:
        """Padded rows are token 0 at position 0 of the dummy slot; unused requests are empty."""
        rows = "requests" if phase is Phase.DECODE else "tokens"
        fields: dict[str, TensorSpec] = {
            "input_ids": TensorSpec((rows,)),
            "positions": TensorSpec((rows,)),
            "slots": TensorSpec((rows,), fill=self.cache.dummy),
        }
        if phase is Phase.PREFILL:
            fields["cu_seqlens"] = TensorSpec(("requests+1",), fill="last")
            fields["seq_lens"] = TensorSpec(("requests",))
            if self.max_history and not self.breaks(phase):
                fill = self.cache.dummy * self.cache.max_len
                fields["history"] = TensorSpec((UpTo(self.max_history),), fill=fill, optional=True)
        return InputSpec(**fields)

    @torch.no_grad()
    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Logits of each request's next token; writes the new tokens' keys and values."""
        inputs = batch.inputs
        hidden = functional.embedding(inputs["input_ids"], self.decoder.embedding)
        rope = self.decoder.rope.index_select(0, inputs["positions"])
        rows = self.cache.rows(inputs["slots"], inputs["positions"])
        attention = self._decode(batch) if batch.phase is Phase.DECODE else self._prefill(batch)
        qkv_out = self._scratch_rows(batch, hidden.shape[0])[0]
        for index, layer in enumerate(self.decoder.stack):
            qkv = layer.project(hidden, rope, qkv_out)
            self.cache.write(index, rows, qkv[:, self.shape.heads :])
            layer.finish(hidden, attention(index, qkv))
        if batch.phase is Phase.PREFILL:
            # Empty requests repeat the last row; a dummy batch is empty altogether.
            hidden = hidden.index_select(0, (inputs["cu_seqlens"][1:] - 1).clamp_(min=0))
        logits = self.decoder.logits(hidden)
        counts = batch.global_num_tokens_gpu
        return (
            logits if counts is None else logits * (counts.float().mean() / batch.num_tokens).to(self.dtype)
        )

    def prepare_capture_batch(self, batch: ForwardBatch) -> None:
        """Data-parallel: install the token counts of all ranks, which the graph goes on reading."""
        if self.ranks:
            batch.global_num_tokens_gpu = torch.full((self.ranks,), batch.num_tokens).to(self.device)

    def extra_tensors(self) -> Mapping[str, torch.Tensor]:
        """The cache, its index tables, and the memory that segments share with eager parts."""
        cache = self.cache
        found = {"cache.data": cache.data, "cache.columns": cache.columns, "cache.places": cache.places}
        return found if self._scratch is None else found | {"scratch": self._scratch.data}

    def decode_batch(
        self, tokens: Sequence[int], positions: Sequence[int], slots: Sequence[int] | None = None
    ) -> ForwardBatch:
        """One new token a request at its position; without *slots*, request *i* is in slot *i*."""
        count = len(tokens)
        compact = slots is None or list(slots) == list(range(count))
        columns = self._upload(tokens, positions, range(count) if slots is None else slots)
        return ForwardBatch(
            phase=Phase.DECODE,
            num_requests=count,
            num_tokens=count,
            inputs=dict(zip(("input_ids", "positions", "slots"), columns, strict=True)),
            variant=None if compact else SCATTERED,
        )

    def prefill_batch(
        self,
        prompts: Sequence[Sequence[int]],
        slots: Sequence[int] | None = None,
        starts: Sequence[int] | None = None,
    ) -> PackedBatch:
        """Packed *prompts*; *starts* counts each one's tokens that the cache already holds.

        Raises :class:`InputError` for an empty prompt or one that the cache cannot hold.
        """
        slots = range(len(prompts)) if slots is None else slots
        starts = [0] * len(prompts) if starts is None else starts
        spans: list[Span] = []
        ends = [0]
        for prompt, slot, start in zip(prompts, slots, starts, strict=True):
            if not prompt or start + len(prompt) > self.cache.max_len:
                raise InputError(
                    f"1 to {self.cache.max_len - start} tokens fit, found {len(prompt)}", field="input_ids"
                )
            spans.append(Span(slot, ends[-1], start, len(prompt)))
            ends.append(ends[-1] + len(prompt))
        ids, positions, owners = self._upload(
            [token for prompt in prompts for token in prompt],
            [span.start + index for span in spans for index in range(span.length)],
            [span.slot for span in spans for _ in range(span.length)],
        )
        inputs = {"input_ids": ids, "positions": positions, "slots": owners}
        (inputs["cu_seqlens"],) = self._upload(ends)
        (inputs["seq_lens"],) = self._upload([span.start + span.length for span in spans])
        places = [span.slot * self.cache.max_len + index for span in spans for index in range(span.start)]
        captured = bool(places) and not self.breaks(Phase.PREFILL)
        if captured and self.max_history:
            (inputs["history"],) = self._upload(places)
        return PackedBatch(
            phase=Phase.PREFILL,
            num_requests=len(prompts),
            num_tokens=ends[-1],
            inputs=inputs,
            spans=tuple(spans),
            variant=CONTINUED if captured and not self.max_history else None,
        )

    def dense(self, prompt: Sequence[int]) -> torch.Tensor:
        """Logits ``(tokens, vocab)`` of a whole prompt, eagerly and without the cache."""
        return self.decoder.dense(self._upload(prompt)[0])

    def _upload(self, *columns: Sequence[int]) -> tuple[torch.Tensor, ...]:
        # One copy to the device for all columns.
        return torch.tensor([list(column) for column in columns]).to(self.device).unbind(0)

    # Attention

    def breaks(self, phase: Phase) -> bool:
        """Whether attention of *phase* is an eager part, as the settings say."""
        return self.graph_config.phase(phase).backend == "breakable"

    def _decode(self, batch: ForwardBatch) -> Any:
        inputs, heads = batch.inputs, self.shape.heads
        mask = additive(self.cache.columns <= inputs["positions"][:, None], self.dtype)[:, None, None]
        slots = inputs["slots"] if batch.variant == SCATTERED else None

        def attend(layer: int, qkv: torch.Tensor) -> torch.Tensor:
            return attend_decode(
                qkv[:, :heads], self.cache, layer, mask=mask, slots=slots, kernel=self.kernel
            )

        if not self.breaks(batch.phase):
            return attend
        out = self._scratch_rows(batch, mask.shape[0])[1]
        return lambda layer, qkv: _decode_eagerly(attend, layer, qkv, out)

    def _prefill(self, batch: ForwardBatch) -> Any:
        if self.breaks(batch.phase) or isinstance(batch, PackedBatch):
            out = self._scratch_rows(batch, batch.inputs["input_ids"].shape[0])[1]
            if self.breaks(batch.phase):
                return lambda layer, qkv: _prefill_eagerly(self, layer, qkv, out)
            # Run eagerly, so no mask over all pairs of tokens is needed.
            return lambda layer, qkv: self.attend_live(batch, layer, qkv, out)
        slots, positions = batch.inputs["slots"], batch.inputs["positions"]
        key_slots, key_positions, history = slots, positions, None
        if "history" in batch.inputs:
            places, length = batch.inputs["history"], self.cache.max_len
            old_slots, old_positions = places // length, places % length
            history = self.cache.rows(old_slots, old_positions)
            key_slots = torch.cat((old_slots, slots))
            key_positions = torch.cat((old_positions, positions))
        visible = (slots[:, None] == key_slots) & (positions[:, None] >= key_positions)
        mask = additive(visible, self.dtype)
        heads = self.shape.heads
        return lambda layer, qkv: attend_packed(
            qkv, self.cache, layer, mask=mask, history=history, heads=heads
        )

    def attend_live(
        self, batch: ForwardBatch, layer: int, qkv: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor:
        """Prefill attention at *batch*'s own lengths, into *out*; for eager use.

        A batch that is no :class:`PackedBatch` has its lengths read from the device.
        """
        packed = PackedBatch.of(batch)
        cache, heads = self.cache, self.shape.heads
        attend_spans(qkv, out, cache, layer, spans=packed.spans, masks=packed.masks(cache), heads=heads)
        return out

    def _make_scratch(self) -> Scratch | None:
        sizes = [self.graph_config.phase(phase).ladder(phase)[-1] for phase in Phase if self.breaks(phase)]
        return Scratch(self.shape, max(sizes), device=self.device, dtype=self.dtype) if sizes else None

    def _scratch_rows(self, batch: ForwardBatch, rows: int) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Where projections (``None``: anywhere) and attention outputs of *rows* go."""
        if self._scratch is not None and self.breaks(batch.phase) and rows <= self._scratch.rows:
            return self._scratch.cut(rows)
        width = self.shape.heads * self.shape.head_dim
        return None, torch.empty(rows, width, dtype=self.dtype, device=self.device)


@eager_on_graph(rows="tokens")
def _prefill_eagerly(
    runtime: ReferenceRunner, layer: int, qkv: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    return runtime.attend_live(live_batch(), layer, qkv, out)


@eager_on_graph(rows="requests")
def _decode_eagerly(attend: Any, layer: int, qkv: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return out.copy_(attend(layer, qkv))
