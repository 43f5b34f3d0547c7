"""Causal models of transformers on a slot cache: the same tokens as ``model.generate``."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

import transformers

from graphplat.batch import ForwardBatch, Phase
from graphplat.config import GraphConfig, PhaseConfig
from graphplat.errors import ConfigError, InputError
from graphplat.integrations.transformers import SCATTERED, CausalLMRunner

SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    # Wide weights keep the best two logits apart, so that ties cannot flip a token.
    "initializer_range": 0.5,
}
FAMILIES = {
    "llama": (transformers.LlamaConfig, {"tie_word_embeddings": True}),
    "qwen2": (transformers.Qwen2Config, {"tie_word_embeddings": False}),
    "qwen3": (transformers.Qwen3Config, {"tie_word_embeddings": True, "head_dim": 16}),
}
PROMPTS = [[5, 9, 33], [7], [11, 12, 13, 14, 15, 16, 17, 18, 19], [90, 2, 41, 8, 8]]


def make_model(family: str = "llama", **changes: Any) -> Any:
    config_class, extra = FAMILIES[family]
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return transformers.AutoModelForCausalLM.from_config(config_class(**(SMALL | extra | changes))).eval()


def reference(model: Any, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    found = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, min_new_tokens=None
    )
    return found[0, len(prompt) :].tolist()


def pad(runner: CausalLMRunner, batch: ForwardBatch, requests: int, tokens: int) -> ForwardBatch:
    """What a graph of this size sees: every row beyond the real ones holds the declared fill."""
    inputs = {}
    for name, spec in runner.input_spec(batch.phase).tensors.items():
        if name not in batch.inputs:
            continue
        inputs[name] = torch.full(spec.shape(requests, tokens), spec.fill, dtype=spec.dtype)
        real = batch.inputs[name]
        inputs[name][: len(real)] = real
    return ForwardBatch(
        phase=batch.phase, num_requests=requests, num_tokens=tokens, inputs=inputs, variant=batch.variant
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("padded", [False, True], ids=["exact", "padded"])
@pytest.mark.parametrize("kernel", ["sdpa", "matmul"])
def test_steps_choose_the_tokens_that_generate_chooses(family, padded, kernel):
    """
    Packed prefill and batched decode of unequal lengths give each request the
    tokens that it gets alone, padded to a larger size or not.
    """
    model = make_model(family)
    expected = [reference(model, prompt, 6) for prompt in PROMPTS]
    runner = CausalLMRunner(model, max_requests=6, max_len=64, kernel=kernel)
    batch: ForwardBatch = runner.prefill_batch(PROMPTS, range(4))
    if padded:
        batch = pad(runner, batch, 6, 32)
    tokens = [runner.forward(batch)[:4].argmax(-1).tolist()]
    for step in range(5):
        batch = runner.decode_batch(tokens[-1], [len(prompt) + step for prompt in PROMPTS])
        if padded:
            batch = pad(runner, batch, 6, 6)
        tokens.append(runner.forward(batch)[:4].argmax(-1).tolist())
    assert [list(column) for column in zip(*tokens, strict=True)] == expected
