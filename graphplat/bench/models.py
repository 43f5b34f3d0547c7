"""Which model is measured: a shape with random weights, or one of transformers in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import torch

from graphplat.errors import ConfigError
from graphplat.testing.reference import SHAPES

_LONGEST = 8192
"""Positions of a model of transformers with random weights."""


@attrs.frozen
class Source:
    """A model by name. Nothing is loaded until it is asked for."""

    name: str
    path: Path | None
    """A Hugging Face folder or a GGUF file; ``None`` for a shape."""

    @classmethod
    def of(cls, model: str) -> Source:
        """Raises :class:`ConfigError` for what is neither a shape nor there."""
        if model in SHAPES:
            return cls(model, None)
        path = Path(model)
        if not path.exists():
            raise ConfigError(
                f"{model!r} is neither a shape nor a folder",
                field="model",
                hint=f"Use one of {sorted(SHAPES)}",
            )
        return cls(model, path)

    @property
    def longest(self) -> int | None:
        """Tokens of a request that the model knows positions for; ``None`` where nothing bounds them."""
        if self.path is None:
            return None
        from graphplat.integrations.weights import load_config

        found: int | None = getattr(load_config(self.path).get_text_config(), "max_position_embeddings", None)
        return found

    def causal_lm(self, *, device: torch.device, dtype: torch.dtype) -> Any:
        """A model of transformers: that of the path, or one of this shape with random weights.

        Without a tokenizer, since tokens are drawn at random. Raises :class:`ConfigError` for what
        transformers cannot load.
        """
        from graphplat.integrations.weights import load_causal_lm, random_model

        if self.path is None:
            return random_model(device=device, dtype=dtype, shape=self._sizes()).model
        return load_causal_lm(self.path, device=device, dtype=dtype)

    def _sizes(self) -> dict[str, Any]:
        shape = SHAPES[self.name]
        return {
            "vocab_size": shape.vocab,
            "hidden_size": shape.hidden,
            "intermediate_size": shape.intermediate,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "max_position_embeddings": _LONGEST,
            "tie_word_embeddings": shape.tied,
            "initializer_range": 0.05,
        }
