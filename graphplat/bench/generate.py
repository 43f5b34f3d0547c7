"""Section ``hf``: transformers' ``generate`` and graphplat, from one prompt."""

from __future__ import annotations

import copy
import itertools
import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import attrs
import torch

from graphplat.bench.records import BenchReport, GenerateRow, Skip, Spread
from graphplat.bench.subject import Subject, hold
from graphplat.config import GraphConfig
from graphplat.testing.reference import SHAPES

PROMPT, NEW = 32, 128
_REPEATS = 3
_COMPILE_SECONDS = 60.0


@attrs.define(eq=False)
class Generation:
    """Generates the same tokens in several ways."""

    subject: Subject
    report: BenchReport
    dtype: torch.dtype
    new: int = NEW
    compiler: bool = True
    _held: ExitStack = attrs.field(factory=ExitStack, init=False)

    def run(self) -> None:
        """Add a row for every way. No graph is left, whatever goes wrong."""
        with self._held:
            self._measure(*self._prepared())

    def _prepared(self) -> tuple[dict[str, Callable[[], list[int]]], dict[str, float]]:
        """Every way that can run, and the seconds until it first had."""
        model = self._load()
        model.generation_config.eos_token_id = None  # random weights must not stop early
        model.generation_config.pad_token_id = 0
        draw = random.Random(1)  # noqa: S311 - a reproducible prompt
        prompt = [draw.randrange(1, model.config.vocab_size) for _ in range(PROMPT)]
        runs: dict[str, Callable[[], list[int]]] = {}
        warmups: dict[str, float] = {}
        for name, make in self._ways(model, prompt):
            if "compile" in name and not self.compiler:
                self._skip(name, "the compiler is left out, as asked")
                continue
            left = max(0.0, self.subject.clock.left())
            if "compile" in name and left < _COMPILE_SECONDS:
                self._skip(name, f"about {_COMPILE_SECONDS:.0f} s needed, {left:.0f} s left")
                continue
            started = time.perf_counter()
            try:
                runs[name] = make()
                runs[name]()
            except Exception as error:  # noqa: BLE001 - one way that cannot run must not end the others
                runs.pop(name, None)
                self._skip(name, f"{type(error).__name__}: {error}".splitlines()[0], failed=True)
                continue
            self.subject.clock.sync()
            warmups[name] = time.perf_counter() - started
        return runs, warmups

    def _measure(self, runs: dict[str, Callable[[], list[int]]], warmups: dict[str, float]) -> None:
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        tokens: dict[str, list[int]] = {}
        for turn in range(_REPEATS):
            for name, run in runs.items():
                if turn and self.subject.clock.left() <= 0:
                    continue
                self.subject.clock.sync()
                started = time.perf_counter()
                tokens[name] = run()
                self.subject.clock.sync()
                seconds[name].append(time.perf_counter() - started)
        wanted = next(iter(tokens.values()), [])
        for name, times in seconds.items():
            usual = Spread.of(times).median
            self.report.generate.append(
                GenerateRow(
                    way=name,
                    tokens_per_second=Spread.of([self.new / each for each in times]),
                    warmup_seconds=max(0.0, warmups[name] - usual),
                    same_tokens=_common(wanted, tokens[name]),
                    tokens=len(tokens[name]),
                )
            )

    def _ways(
        self, model: Any, prompt: list[int]
    ) -> Iterator[tuple[str, Callable[[], Callable[[], list[int]]]]]:
        ids = torch.tensor([prompt], device=self.subject.clock.device)

        def generate(**settings: Any) -> Callable[[], list[int]]:
            def run() -> list[int]:
                output = model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    do_sample=False,
                    max_new_tokens=self.new,
                    min_new_tokens=self.new,
                    **settings,
                )
                tokens: list[int] = output[0, PROMPT:].tolist()
                return tokens

            return run

        yield "generate(), dynamic cache", generate
        yield "generate(), static cache, its default compile", lambda: generate(cache_implementation="static")
        yield "graphplat full", lambda: self._engine(model, prompt, "full")
        yield (
            "graphplat full, fused norms",
            lambda: self._engine(model, prompt, "full", fused_norms=True),
        )
        platform = self.subject.clock.platform
        if platform.capabilities.compiled:
            yield "graphplat compiled", lambda: self._engine(model, prompt, "compiled")
        else:
            self._skip("graphplat compiled", f"{platform.name} does not declare it")

    def _engine(
        self, model: Any, prompt: list[int], backend: str, *, fused_norms: bool = False
    ) -> Callable[[], list[int]]:
        from graphplat.capture import capture_cuda_graphs
        from graphplat.integrations.generation import Engine
        from graphplat.integrations.transformers import CausalLMRunner

        config = GraphConfig.from_dict(
            {
                "decode": {"backend": backend, "buckets": [1], "outputs": "view"},
                "prefill": {"backend": "full", "buckets": [PROMPT], "outputs": "view"},
            }
        )
        length = PROMPT + self.new
        runner = CausalLMRunner(
            _with_same_weights(model),  # others keep their own attention and norms
            max_requests=1,
            max_len=length,
            returns="tokens",
            graph_config=config,
            fused_norms=fused_norms,
        )
        capture = hold(self._held, capture_cuda_graphs(model_runner=runner))
        engine = Engine.from_capture(runner, capture, stop_tokens=frozenset())
        return lambda: list(engine.generate([prompt], self.new)[0].tokens)

    def _load(self) -> Any:
        from graphplat.integrations.weights import load_model, random_model

        device = self.subject.clock.device
        if self.subject.folder is not None:
            return load_model(self.subject.folder, device=device, dtype=self.dtype).model
        shape = SHAPES[self.subject.name]
        sizes = {
            "vocab_size": shape.vocab,
            "hidden_size": shape.hidden,
            "intermediate_size": shape.intermediate,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": shape.tied,
            "initializer_range": 0.05,
        }
        return random_model(device=device, dtype=self.dtype, shape=sizes).model

    def _skip(self, what: str, why: str, *, failed: bool = False) -> None:
        self.report.skipped.append(Skip(section="hf", what=what, why=why, failed=failed))


def _with_same_weights(model: torch.nn.Module) -> Any:
    """A copy of *model* whose modules may be replaced; it shares every parameter and buffer."""
    shared = itertools.chain(model.parameters(), model.buffers())
    return copy.deepcopy(model, {id(tensor): tensor for tensor in shared})


def _common(wanted: list[int], found: list[int]) -> int:
    """Tokens equal from the start."""
    pairs = zip(wanted, found, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(wanted), len(found)))
