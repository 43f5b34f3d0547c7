"""Run a causal language model of ``transformers`` through captured graphs.

:class:`CausalLMRunner` is the :class:`~graphplat.ModelRunner` of a Llama-like
model: its cache lies in fixed slots (:mod:`graphplat.integrations.slot_cache`) and
its attention is registered with transformers' own ``AttentionInterface``.
:mod:`graphplat.integrations.generation` schedules requests on top of it.

Works with transformers 5.17 and later.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import attrs
import torch
from transformers import AttentionInterface, AttentionMaskInterface, Cache
from transformers.cache_utils import CacheLayerMixin

from graphplat.batch import ForwardBatch, Phase
from graphplat.config import GraphConfig, PhaseConfig
from graphplat.errors import ConfigError, InputError
from graphplat.inputs import InputSpec, TensorSpec, UpTo
from graphplat.integrations.slot_cache import (
    DecodeStep,
    Kernel,
    PackedStep,
    RaggedStep,
    SlotStore,
    Span,
    Step,
)
from graphplat.model_runner import ModelRunner

ATTENTION = "graphplat_slots"
"""The name under which the attention is registered with transformers."""

SCATTERED = "scattered"
"""The variant of decode batches whose row *i* is not in slot *i*: right, but copies the cache."""

CONTINUED = "continued"
"""The variant of prefill batches that need earlier tokens no graph was captured to see."""

_HOST_READING_ROPE = ("dynamic", "longrope")


@attrs.define(eq=False)
class PackedBatch(ForwardBatch):
    """A prefill batch that also says on the host where each request lies.

    Run eagerly, its attention then works at live lengths and needs no mask over all
    pairs of tokens.
    """

    spans: tuple[Span, ...] = ()


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

    *max_history* is how many earlier tokens a captured ``full`` prefill batch may look
    at (chunked prefill). Zero leaves those graphs out; a batch with earlier
    tokens then has the variant :data:`CONTINUED` and runs eagerly.

    Sets the attention of *model* to :data:`ATTENTION`, which acts like ``sdpa`` whenever
    the model is called by others. Raises :class:`ConfigError` for a model whose cache
    is not plain full attention on one device.
    """

    def __init__(
        self,
        model: Any,
        *,
        max_requests: int = 8,
        max_len: int = 2048,
        graph_config: GraphConfig | None = None,
        returns: Literal["logits", "tokens"] = "logits",
        max_history: int = 0,
        kernel: Kernel = "sdpa",
    ) -> None:
        check_model(model)
        self.model: torch.nn.Module = model
        self.device = torch.device(model.device)
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
        self.returns = returns
        self.max_history = max_history
        self.kernel = kernel
        self.store = _make_store(model, max_requests, max_len)
        self._cache_argument = _cache_argument(model)
        AttentionInterface.register(ATTENTION, _attention)
        AttentionMaskInterface.register(ATTENTION, AttentionMaskInterface()["sdpa"])
        model.set_attn_implementation(ATTENTION)

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
        inputs = batch.inputs
        if batch.phase is Phase.DECODE:
            step: Step = DecodeStep.build(
                self.store,
                inputs["slots"],
                inputs["positions"],
                gather=batch.variant == SCATTERED,
                kernel=self.kernel,
            )
            logits = self._call(inputs["input_ids"][:, None], inputs["positions"][:, None], step)[:, 0]
        else:
            step = self._prefill_step(batch)
            logits = self._call(
                inputs["input_ids"][None],
                inputs["positions"][None],
                step,
                logits_to_keep=inputs["last_tokens"],
            )[0]
        return logits.argmax(-1) if self.returns == "tokens" else logits

    def extra_tensors(self) -> Mapping[str, torch.Tensor]:
        """The cache."""
        return self.store.tensors()

    def decode_batch(
        self, tokens: Sequence[int], positions: Sequence[int], slots: Sequence[int] | None = None
    ) -> ForwardBatch:
        """One new token a request; without *slots*, request *i* is in slot *i*."""
        count = len(tokens)
        in_place = slots is None or list(slots) == list(range(count))
        rows = self._upload(tokens, positions, range(count) if slots is None else slots)
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
            variant=CONTINUED if any(starts) and not self.max_history else None,
        )

    def _history(self, spans: Sequence[Span]) -> dict[str, torch.Tensor]:
        places = [span.slot * self.max_len + index for span in spans for index in range(span.start)]
        if not places or not self.max_history:
            return {}
        (history,) = self._upload(places)
        return {"history": history}

    def _prefill_step(self, batch: ForwardBatch) -> Step:
        slots, positions = batch.inputs["slots"], batch.inputs["positions"]
        if isinstance(batch, PackedBatch):
            return RaggedStep.build(self.store, slots, positions, batch.spans)
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

    def _call(self, ids: torch.Tensor, positions: torch.Tensor, step: Step, **extra: Any) -> torch.Tensor:
        layers = [_SlotLayer(step, index) for index in range(self.store.data.shape[0])]
        outputs = self.model(
            input_ids=ids,
            position_ids=positions,
            # Any 4-D mask keeps transformers from building one; ours comes with the step.
            attention_mask=step.write_rows.view(1, 1, 1, -1),
            use_cache=True,
            slot_step=step,
            **{self._cache_argument: Cache(layers=layers)},
            **extra,
        )
        logits: torch.Tensor = outputs.logits
        return logits

    def _upload(self, *columns: Sequence[int]) -> tuple[torch.Tensor, ...]:
        # One copy to the device for all columns.
        return torch.tensor([list(column) for column in columns]).to(self.device).unbind(0)


class _SlotLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped here
    """One layer's view of a step; made anew for each forward and holds no state."""

    is_compileable = True
    is_sliding = False

    def __init__(self, step: Step, index: int) -> None:
        super().__init__()
        self.is_initialized = True
        self._step = step
        self._index = index

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the store was allocated with the runner."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new tokens to their slots; the attention reads the rest there."""
        self._step.write(self._index, key_states, value_states)
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The whole row: masks are our own."""
        return self.get_max_length(), 0

    def get_seq_length(self) -> int:
        """Zero: requests differ, and positions are given with every step."""
        return 0

    def get_max_length(self) -> int:
        """Tokens that a slot holds."""
        return self._step.store.max_len

    def get_max_cache_shape(self) -> int:
        """The same, under its older name."""
        return self.get_max_length()


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    slot_step: Step | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as *slot_step* says; without one, as transformers' ``sdpa`` does."""
    if slot_step is None:
        usual = AttentionInterface()["sdpa"]
        found, _ = usual(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
        return found, None
    layer: Any = module.layer_idx
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return slot_step.attend(layer, query, key, value, scale), None


def check_model(model: Any) -> None:
    """Raise :class:`ConfigError` unless *model* is a causal model that slots can serve."""
    name = type(model).__name__
    config = getattr(model, "config", None)
    if config is None or not getattr(model, "_supports_attention_backend", False):
        raise ConfigError(
            f"{name} does not let its attention be chosen", hint="Use a causal model of transformers 5"
        )
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds - {"full_attention"}:
        raise ConfigError(
            f"{name} has layers of type {', '.join(sorted(kinds - {'full_attention'}))}",
            field="layer_types",
            hint="Only full attention has a slot cache",
        )
    if not kinds and getattr(config, "sliding_window", None) is not None:
        raise ConfigError(f"{name} attends within a sliding window", field="sliding_window")
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope in _HOST_READING_ROPE:
        raise ConfigError(f"{name} recomputes {rope!r} rotary frequencies on the host", field="rope_type")
    for field in ("num_key_value_heads", "num_attention_heads", "num_hidden_layers"):
        if not isinstance(getattr(config, field, None), int):
            raise ConfigError(f"{name} has no plain attention heads", field=field)
    devices = {tensor.device for tensor in model.parameters()}
    if len(devices) != 1:
        raise ConfigError(f"{name} lies on {len(devices)} devices", hint="Load it on one")


def _cache_argument(model: Any) -> str:
    parameters = inspect.signature(type(model).forward).parameters
    # Renamed in transformers 5.20; the older name is to go in 5.40.
    for name in ("cache", "past_key_values"):
        if name in parameters:
            return name
    raise ConfigError(f"{type(model).__name__}.forward takes no cache", hint="Use a causal language model")


def _make_store(model: Any, slots: int, max_len: int) -> SlotStore:
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return SlotStore(
        layers=config.num_hidden_layers,
        slots=slots,
        kv_heads=config.num_key_value_heads,
        max_len=max_len,
        head_dim=head_dim,
        dtype=model.dtype,
        device=torch.device(model.device),
    )
