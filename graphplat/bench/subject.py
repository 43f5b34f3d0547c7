"""What is measured: a model, its batches, and its graphs under one setting or another."""

from __future__ import annotations

import copy
import random
import types
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Literal, cast

import attrs
import torch

from graphplat.batch import ForwardBatch
from graphplat.bench.models import Source
from graphplat.capture import CudaGraphsCapture, capture_cuda_graphs
from graphplat.config import GraphConfig
from graphplat.testing.reference import SHAPES, ReferenceRunner

if TYPE_CHECKING:
    from graphplat.bench.measure import Clock

_KERNEL: Literal["matmul"] = "matmul"
"""How decode attends. A fused attention is one kernel to the compiler, which then has little left to fuse."""


@attrs.define(eq=False)
class Subject:
    """A runtime whose cache is full of numbers, and the clock of its device."""

    name: str
    runtime: Any
    """A :class:`ReferenceRunner` or a runner of transformers: both make batches alike."""
    clock: Clock
    vocab: int
    max_len: int
    slots: int
    is_reference: bool = True
    """Prefill can be set up in every way."""

    @classmethod
    def load(cls, source: Source, clock: Clock, *, dtype: torch.dtype, slots: int, max_len: int) -> Subject:
        """The model of *source*. Raises :class:`ConfigError` for one that cannot be loaded or captured."""
        device = clock.device
        if source.path is None:
            runtime: Any = ReferenceRunner(
                source.name, device=device, dtype=dtype, slots=slots, max_len=max_len, kernel=_KERNEL
            )
            cache, vocab = runtime.cache.data, SHAPES[source.name].vocab
            used = runtime.cache.flat
        else:
            from graphplat.integrations.transformers import CausalLMRunner

            model = source.causal_lm(device=device, dtype=dtype)
            config = GraphConfig.from_dict({"decode": {"max_size": slots}})
            runtime = CausalLMRunner(
                model, max_requests=slots, max_len=max_len, graph_config=config, kernel=_KERNEL
            )
            cache, vocab = runtime.store.data, model.config.get_text_config().vocab_size
            used = tuple(half for layer in range(cache.shape[0]) for half in runtime.store.flat(layer))
        cache.normal_()
        for tensor in used:  # otherwise the compiler's own graphs refuse a forward that writes to it
            torch._dynamo.mark_static_address(tensor)
        return cls(source.name, runtime, clock, vocab, max_len, slots, source.path is None)

    def under(self, **settings: Any) -> Any:
        """The same weights and cache under other settings, given as for ``GraphConfig.from_dict``."""
        config = GraphConfig.from_dict(settings)
        if self.is_reference:
            return self.runtime.configured(config)
        clone = copy.copy(self.runtime)
        clone.graph_config = config
        return clone

    def capture(self, **settings: Any) -> CudaGraphsCapture:
        """Graphs under *settings*."""
        return capture_cuda_graphs(model_runner=self.under(**settings))

    def decode_batches(self, size: int, count: int) -> list[ForwardBatch]:
        """*count* batches of other tokens each, none of them zero.

        Each request keeps its position, so that a step reads the same cache whatever ran before.
        """
        draw = random.Random(size)  # noqa: S311 - reproducible inputs, no secrets
        positions = [draw.randrange(self.max_len // 4, self.max_len - 1) for _ in range(size)]
        tokens = [[draw.randrange(1, self.vocab) for _ in range(size)] for _ in range(count)]
        return [self.runtime.decode_batch(row, positions) for row in tokens]

    def prefill_batches(self, tokens: int, count: int) -> list[ForwardBatch]:
        """*count* batches of packed prompts of unequal lengths, *tokens* together."""
        draw = random.Random(tokens)  # noqa: S311
        batches = []
        for _ in range(count):
            lengths = _lengths(draw, tokens, self.slots)
            prompts = [[draw.randrange(1, self.vocab) for _ in range(length)] for length in lengths]
            batches.append(self.runtime.prefill_batch(prompts))
        return batches


def hold(held: ExitStack, capture: CudaGraphsCapture) -> CudaGraphsCapture:
    """*capture*, whose graphs are destroyed when *held* closes."""
    held.callback(capture.prefill_runner.release)
    held.callback(capture.decode_runner.release)
    return capture


def _lengths(draw: random.Random, tokens: int, slots: int) -> list[int]:
    """One long prompt and up to three shorter ones: always as many for the same *tokens*."""
    count = min(4, slots, tokens)
    first = tokens if count == 1 else max(1, min(tokens * 5 // 8, tokens - count + 1))
    cuts = sorted(draw.sample(range(first + 1, tokens), count - 2)) if count > 2 else []
    ends = [first, *cuts, tokens] if count > 1 else [tokens]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def function_of(runtime: Any, example: ForwardBatch) -> types.FunctionType:
    """The forward as a function of the tensors of *example*, in the order of its inputs."""
    names, sizes = list(example.inputs), (example.num_requests, example.num_tokens)

    def forward(*tensors: torch.Tensor) -> torch.Tensor:
        batch = ForwardBatch(
            phase=example.phase,
            num_requests=sizes[0],
            num_tokens=sizes[1],
            inputs=dict(zip(names, tensors, strict=True)),
        )
        found: torch.Tensor = runtime.forward(batch)
        return found

    return cast(types.FunctionType, forward)
