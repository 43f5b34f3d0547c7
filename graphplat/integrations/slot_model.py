"""A model of transformers on the slot cache: its attention, its cache layers, its checks."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, Cache
from transformers.cache_utils import CacheLayerMixin

from graphplat.errors import ConfigError
from graphplat.integrations.slot_cache import SlotStore
from graphplat.integrations.slot_steps import Step

ATTENTION = "graphplat_slots"
"""The name under which the attention is registered with transformers."""

_HOST_READING_ROPE = ("dynamic", "longrope")


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


class SlotModel:
    """Calls a causal model of transformers with a step in the place of its own cache.

    Raises :class:`ConfigError` for a model that slots cannot serve. *model* is unchanged
    until :meth:`select_attention`, which comes before the first step.
    """

    def __init__(self, model: Any) -> None:
        _check_model(model)
        self.model = model
        self._cache_argument = _cache_argument(model)

    def select_attention(self) -> None:
        """Register the attention :data:`ATTENTION` and let the model use it."""
        AttentionInterface.register(ATTENTION, _attention)
        AttentionMaskInterface.register(ATTENTION, AttentionMaskInterface()["sdpa"])
        self.model.set_attn_implementation(ATTENTION)

    def logits(self, ids: torch.Tensor, positions: torch.Tensor, step: Step, **extra: Any) -> torch.Tensor:
        """Logits of *ids* at *positions*, ``(batch, tokens)`` each; *extra* goes to the model."""
        layers = [_SlotLayer(step, index) for index in range(step.store.data.shape[0])]
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

    def make_store(self, slots: int, max_len: int) -> SlotStore:
        """A cache for this model."""
        config = self.model.config
        return SlotStore(
            layers=config.num_hidden_layers,
            slots=slots,
            kv_heads=config.num_key_value_heads,
            max_len=max_len,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            dtype=self.model.dtype,
            device=torch.device(self.model.device),
        )


def _check_model(model: Any) -> None:
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
