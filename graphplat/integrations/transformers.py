"""Run a causal language model of ``transformers`` through captured graphs.

:class:`CausalLMRunner` is the :class:`~graphplat.ModelRunner` of a Llama-like
model: its cache lies in fixed slots (:mod:`graphplat.integrations.slot_cache`) and
its attention is registered with transformers' own ``AttentionInterface``.
:mod:`graphplat.integrations.generation` schedules requests on top of it.

Works with transformers 5.17 and later.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch

from graphplat.batch import ForwardBatch, Phase
from graphplat.breaks import running
from graphplat.config import GraphConfig, PhaseConfig
from graphplat.errors import ConfigError, InputError
from graphplat.inputs import InputSpec, TensorSpec, UpTo
from graphplat.integrations.norms import find_fused_norms, replace_modules
from graphplat.integrations.slot_model import ATTENTION, SlotModel
from graphplat.integrations.slot_steps import (
    DecodeStep,
    Kernel,
    LiveStep,
    PackedBatch,
    PackedStep,
    Span,
    Step,
)
from graphplat.model_runner import ModelRunner

__all__ = ["ATTENTION", "CONTINUED", "SCATTERED", "CausalLMRunner", "PackedBatch"]

Returns = Literal["logits", "tokens"]

SCATTERED = "scattered"
"""The variant of decode batches whose row *i* is not in slot *i*: right, but copies the cache."""

CONTINUED = "continued"
"""The variant of prefill batches that need earlier tokens no graph was captured to see."""


class CausalLMRunner(ModelRunner):
    """A causal model of transformers with *max_requests* requests of up to *max_len* tokens.

    Inputs, all ``int64``. Decode: ``input_ids``, ``positions`` (where the token goes, so
    how many came before) and ``slots``, one of each a request. Prefill: the same
    three for each token of packed prompts, and ``last_tokens``, the row of each
    request's last token; ``history`` is ``slot * max_len + position`` of every earlier
    token that the batch looks at. :meth:`decode_batch` and :meth:`prefill_batch` build them.

    The forward gives float logits ``(requests, vocabulary)`` of each request's next
    token, or with ``returns="tokens"`` its greedy choice ``(requests,)``.

    Decode reads the cache in place: row *i* of a batch must be in slot *i*; a batch of
    the variant :data:`SCATTERED` may have its requests in any slot and copies rows.

    *max_history* is how many earlier tokens a ``full`` prefill graph may look at (chunked
    prefill). Zero leaves those graphs out; a batch with earlier tokens then has the
    variant :data:`CONTINUED` and runs eagerly. ``breakable`` graphs need no such bound.

    Sets the attention of *model* to :data:`ATTENTION`, which acts like ``sdpa`` whenever
    the model is called by others. Raises :class:`ConfigError` for a model whose cache
    is not plain full attention on one device.

    *kernel* is how decode attends. By default it is the fused kernel, or two products under the ``compiled``
    backend: the compiler can fuse what lies around those, and nothing into the other.

    *fused_norms* puts ``torch.nn.RMSNorm`` on the same weights in the place of *model*'s own norms, for
    everyone who calls it; hooks on those are lost. That is one kernel for some eight of Llama's, and
    results differ by rounding. Raises :class:`ConfigError`, with *model* left as it was, if a norm computes
    something else, as one that scales by ``1 + weight`` does.
    """

    def __init__(
        self,
        model: Any,
        *,
        max_requests: int = 8,
        max_len: int = 2048,
        graph_config: GraphConfig | None = None,
        returns: Returns = "logits",
        max_history: int = 0,
        kernel: Kernel | None = None,
        fused_norms: bool = False,
    ) -> None:
        self.graph_config = graph_config or GraphConfig(
            decode=PhaseConfig(max_size=max_requests), prefill=PhaseConfig(backend="disabled")
        )
        ladder = self.graph_config.decode.ladder(Phase.DECODE)
        if ladder and ladder[-1] > max_requests:
            raise ConfigError(
                f"decode bucket {ladder[-1]} exceeds the cache's {max_requests} slots",
                field="decode.buckets",
                hint="Raise max_requests, or set decode.max_size",
            )
        for name, value, known in (("returns", returns, Returns), ("kernel", kernel or "sdpa", Kernel)):
            if value not in get_args(known):
                raise ConfigError(f"{name}={value!r} is none of {get_args(known)}", field=name)
        self._slot_model = SlotModel(model)
        norms = find_fused_norms(model) if fused_norms else {}
        self.model: torch.nn.Module = model
        self.device = torch.device(model.device)
        self.returns = returns
        self._prefill_backend = self.graph_config.prefill.backend
        self.max_history = max_history if self._is_masked else 0
        compiled = self.graph_config.decode.backend == "compiled"
        self.kernel: Kernel = kernel or ("matmul" if compiled else "sdpa")
        self.store = self._slot_model.make_store(max_requests, max_len)
        # Last: whatever was refused above left the model as it was.
        self._slot_model.select_attention()
        replace_modules(model, norms)

    @property
    def _is_masked(self) -> bool:
        """Whether prefill graphs hold their attention, so that it must be right for any packing."""
        return self._prefill_backend in ("full", "compiled")

    @property
    def max_requests(self) -> int:
        """Requests that the cache holds."""
        return self.store.slots

    @property
    def max_len(self) -> int:
        """Tokens of one request that the cache holds."""
        return self.store.max_len

    def input_spec(self, phase: Phase) -> InputSpec:
        """Padded rows are token 0 at position 0 of the dummy slot."""
        rows = "requests" if phase is Phase.DECODE else "tokens"
        fields: dict[str, TensorSpec] = {
            "input_ids": TensorSpec((rows,)),
            "positions": TensorSpec((rows,)),
            "slots": TensorSpec((rows,), fill=self.store.dummy),
        }
        if phase is Phase.PREFILL:
            fields["last_tokens"] = TensorSpec(("requests",))
            if self.max_history:
                fill = self.store.dummy * self.max_len
                fields["history"] = TensorSpec((UpTo(self.max_history),), fill=fill, optional=True)
        return InputSpec(**fields)

    @torch.no_grad()
    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Logits or tokens of each request's next token; writes the new tokens' keys and values."""
        logits = self._decode(batch) if batch.phase is Phase.DECODE else self._prefill(batch)
        return logits.argmax(-1) if self.returns == "tokens" else logits

    def extra_tensors(self) -> Mapping[str, torch.Tensor]:
        """The cache."""
        return self.store.tensors()

    def decode_batch(
        self, tokens: Sequence[int], positions: Sequence[int], slots: Sequence[int] | None = None
    ) -> ForwardBatch:
        """One new token a request; without *slots*, request *i* is in slot *i*."""
        count = len(tokens)
        slots = range(count) if slots is None else slots
        self.store.check(slots, positions)
        in_place = list(slots) == list(range(count))
        rows = self._upload(tokens, positions, slots)
        return ForwardBatch(
            phase=Phase.DECODE,
            num_requests=count,
            num_tokens=count,
            inputs=dict(zip(("input_ids", "positions", "slots"), rows, strict=True)),
            variant=None if in_place else SCATTERED,
        )

    def prefill_batch(
        self, prompts: Sequence[Sequence[int]], slots: Sequence[int], starts: Sequence[int] | None = None
    ) -> PackedBatch:
        """Packed *prompts*, one slot each; *starts* counts the tokens that the cache already holds."""
        starts = [0] * len(prompts) if starts is None else starts
        spans, offset = [], 0
        for prompt, slot, start in zip(prompts, slots, starts, strict=True):
            if not prompt:
                raise InputError("a prompt needs at least one token", field="input_ids")
            if start + len(prompt) > self.max_len:
                raise InputError(
                    f"{start + len(prompt)} tokens, at most {self.max_len} fit", field="positions"
                )
            spans.append(Span(slot, offset, start, len(prompt)))
            offset += len(prompt)
        self.store.check([span.slot for span in spans], starts)
        ids, positions, owners = self._upload(
            [token for prompt in prompts for token in prompt],
            [span.start + index for span in spans for index in range(span.length)],
            [span.slot for span in spans for _ in range(span.length)],
        )
        (last_tokens,) = self._upload([span.offset + span.length - 1 for span in spans])
        inputs = {"input_ids": ids, "positions": positions, "slots": owners, "last_tokens": last_tokens}
        return PackedBatch(
            phase=Phase.PREFILL,
            num_requests=len(prompts),
            num_tokens=offset,
            inputs=inputs | self._history(spans),
            spans=tuple(spans),
            variant=CONTINUED if self._is_masked and any(starts) and not self.max_history else None,
        )

    def _history(self, spans: Sequence[Span]) -> dict[str, torch.Tensor]:
        places = [span.slot * self.max_len + index for span in spans for index in range(span.start)]
        if not places or not self.max_history:
            return {}
        (history,) = self._upload(places)
        return {"history": history}

    def _decode(self, batch: ForwardBatch) -> torch.Tensor:
        ids, positions, slots = (batch.inputs[name] for name in ("input_ids", "positions", "slots"))
        gather = batch.variant == SCATTERED
        step = DecodeStep.build(self.store, slots, positions, gather=gather, kernel=self.kernel)
        return self._slot_model.logits(ids[:, None], positions[:, None], step)[:, 0]

    def _prefill(self, batch: ForwardBatch) -> torch.Tensor:
        ids, positions, last = (batch.inputs[name] for name in ("input_ids", "positions", "last_tokens"))
        step = self._prefill_step(batch)
        # During capture no one else says which batch it is.
        with running(batch) if isinstance(step, LiveStep) else contextlib.nullcontext():
            return self._slot_model.logits(ids[None], positions[None], step, logits_to_keep=last)[0]

    def _prefill_step(self, batch: ForwardBatch) -> Step:
        slots, positions = batch.inputs["slots"], batch.inputs["positions"]
        if self._prefill_backend == "breakable":
            return LiveStep(self.store, self.store.rows(slots, positions).flatten(), slots, positions)
        if isinstance(batch, PackedBatch):
            return batch.ragged(self.store, self.store.rows(slots, positions).flatten())
        if batch.variant == CONTINUED:
            raise InputError(
                "earlier tokens, but no word on which",
                phase="prefill",
                field="history",
                hint="Set max_history to capture such batches",
            )
        history = None
        if "history" in batch.inputs:
            places = batch.inputs["history"]
            history = places // self.max_len, places % self.max_len
        return PackedStep.build(self.store, slots, positions, history)

    def _upload(self, *columns: Sequence[int]) -> tuple[torch.Tensor, ...]:
        # One copy to the device for all columns.
        rows = torch.tensor([list(column) for column in columns], dtype=torch.int64)
        return rows.to(self.device).unbind(0)
