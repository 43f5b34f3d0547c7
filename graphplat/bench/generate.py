"""Section ``hf``: transformers' ``generate`` and graphplat, from the same prompts."""

from __future__ import annotations

import copy
import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import attrs
import torch

from graphplat.bench.measure import Clock, Say, Watch, brief
from graphplat.bench.records import BenchReport, GenerateRow, Skip, Spread
from graphplat.bench.subject import hold
from graphplat.config import GraphConfig
from graphplat.errors import ConfigError

PROMPT, NEW = 32, 128
_REPEATS = 3
_COMPILE_SECONDS = 60.0
TUNED = {"coordinate_descent_tuning": True}
"""Has the compiler write the products of one row itself, fused with what lies around them, and try several
shapes of each kernel: torch/_inductor/decomposition.py and config.py."""

Generate = Callable[[list[int]], list[int]]
"""New tokens after a prompt."""


@attrs.define(eq=False)
class GenerateWay:
    """One way to generate."""

    name: str
    make: Callable[[], Generate]
    exact: bool = False
    """Runs the model's own kernels: in float32 its tokens have to be equal."""
    compiles: bool = False
    """Needs the compiler."""
    run: Generate = attrs.field(init=False)
    warmup_seconds: float = attrs.field(default=0.0, init=False)
    seconds: list[float] = attrs.field(factory=list, init=False)
    tokens: list[list[int]] = attrs.field(factory=list, init=False)
    """Of each prompt, the one before timing first."""


@attrs.define(eq=False)
class Generation:
    """Generates from the same prompts in several ways."""

    clock: Clock
    model: Any
    report: BenchReport
    new: int = NEW
    compiler: bool = True
    say: Say = lambda text: None
    watch: Watch = nullcontext
    _held: ExitStack = attrs.field(factory=ExitStack, init=False)

    def run(self) -> None:
        """Add a row for every way. No graph is left, whatever goes wrong."""
        self.model.generation_config.eos_token_id = None  # random weights must not stop early
        self.model.generation_config.pad_token_id = 0
        draw = random.Random(1)  # noqa: S311 - reproducible prompts
        vocabulary = self.model.config.get_text_config().vocab_size
        prompts = [[draw.randrange(1, vocabulary) for _ in range(PROMPT)] for _ in range(1 + _REPEATS)]
        with self._held:
            ways = self._compared(self._prepared(prompts[0]))
            self._measure(ways, prompts[1:])

    # Before timing

    def _prepared(self, prompt: list[int]) -> Iterator[GenerateWay]:
        """Every way that can run, having generated once."""
        for way in self._ways():
            if why := self._why_not(way):
                self._skip(way.name, why)
                continue
            if way.compiles:
                self.say(f"hf: compiling {way.name}")
            started = time.perf_counter()
            try:
                with self.watch() if way.compiles else nullcontext():
                    way.run = way.make()
                    way.tokens.append(way.run(prompt))
                    self.clock.sync()
            except NotImplementedError as error:
                self._skip(way.name, str(error))
                continue
            except Exception as error:  # noqa: BLE001 - one way that goes wrong must not end the others
                self._skip(way.name, brief(error), failed=True)
                continue
            way.warmup_seconds = time.perf_counter() - started
            yield way

    def _why_not(self, way: GenerateWay) -> str:
        """Why *way* is left out; empty if it is not."""
        if not way.compiles:
            return ""
        if not self.compiler:
            return "the compiler is left out, as asked"
        left = max(0.0, self.clock.left())
        return f"about {_COMPILE_SECONDS:.0f} s needed, {left:.0f} s left" if left < _COMPILE_SECONDS else ""

    def _compared(self, ways: Iterator[GenerateWay]) -> list[GenerateWay]:
        """The *ways* whose first tokens may be as they are; the others fail the run."""
        found: list[GenerateWay] = []
        for way in ways:
            if not found or self._is_right(way, found[0], 0):
                found.append(way)
        return found

    def _is_right(self, way: GenerateWay, first: GenerateWay, prompt: int) -> bool:
        """Whether *way* may differ from *first* as it does; says so if not."""
        same, found = _common(first.tokens[prompt], way.tokens[prompt]), len(way.tokens[prompt])
        if same == found or not way.exact or self.model.dtype != torch.float32:
            return True
        where = f"differs from {first.name} at new token {same} of prompt {prompt}"
        self._skip(way.name, f"{where}, on the same kernels in float32", failed=True)
        return False

    # Timing

    def _measure(self, ways: Sequence[GenerateWay], prompts: Sequence[list[int]]) -> None:
        for turn, prompt in enumerate(prompts):
            for way in ways:
                if turn and self.clock.left() <= 0:
                    continue
                self.clock.sync()
                started = time.perf_counter()
                way.tokens.append(way.run(prompt))
                self.clock.sync()
                way.seconds.append(time.perf_counter() - started)
        for way in ways:
            if all(self._is_right(way, ways[0], prompt) for prompt in range(1, len(way.tokens))):
                self.report.generate.append(self._row(way, ways[0]))

    def _row(self, way: GenerateWay, first: GenerateWay) -> GenerateRow:
        pairs = zip(first.tokens, way.tokens, strict=False)
        return GenerateRow(
            way=way.name,
            tokens_per_second=Spread.of([self.new / each for each in way.seconds]),
            warmup_seconds=max(0.0, way.warmup_seconds - Spread.of(way.seconds).median),
            same_tokens=sum(_common(wanted, found) for wanted, found in pairs),
            tokens=sum(map(len, way.tokens)),
        )

    # Ways

    def _ways(self) -> Iterator[GenerateWay]:
        yield GenerateWay("generate(), dynamic cache", self._transformers, exact=True)
        static = partial(self._transformers, cache_implementation="static")
        if compiles_static_cache(self.model):
            name = "generate(), static cache, its default compile"
            yield GenerateWay(name, static, compiles=True)
        else:
            yield GenerateWay("generate(), static cache", static, exact=True)
        yield GenerateWay("graphplat full", partial(self._engine, "full"), exact=True)
        fused = partial(self._engine, "full", fused_norms=True)
        yield GenerateWay("graphplat full, fused norms", fused)
        for name, options in (("graphplat compiled", {}), ("graphplat compiled, tuned", TUNED)):
            if self.clock.platform.capabilities.compiled:
                compiled = partial(self._engine, "compiled", compile_options=options)
                yield GenerateWay(name, compiled, compiles=True)
            else:
                self._skip(name, f"{self.clock.platform.name} does not declare it")

    def _transformers(self, **settings: Any) -> Generate:
        def run(prompt: list[int]) -> list[int]:
            ids = torch.tensor([prompt], device=self.clock.device)
            output = self.model.generate(
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

    def _engine(self, backend: str, *, fused_norms: bool = False, **decode: Any) -> Generate:
        from graphplat.capture import capture_cuda_graphs
        from graphplat.integrations.generation import Engine

        config = GraphConfig.from_dict(
            {
                "decode": {"backend": backend, "buckets": [1], "outputs": "view"} | decode,
                "prefill": {"backend": "full", "buckets": [PROMPT], "outputs": "view"},
            }
        )
        runner = self._runner(config, fused_norms=fused_norms)
        capture = hold(self._held, capture_cuda_graphs(model_runner=runner))
        engine = Engine.from_capture(runner, capture, stop_tokens=frozenset())
        return lambda prompt: list(engine.generate([prompt], self.new)[0].tokens)

    def _runner(self, config: GraphConfig, *, fused_norms: bool) -> Any:
        """Raises :class:`NotImplementedError` for norms that cannot be fused."""
        from graphplat.integrations.transformers import CausalLMRunner

        model = _with_same_weights(self.model)  # others keep their own attention and norms
        try:
            return CausalLMRunner(
                model,
                max_requests=1,
                max_len=PROMPT + self.new,
                returns="tokens",
                graph_config=config,
                fused_norms=fused_norms,
            )
        except ConfigError as error:
            if not fused_norms:
                raise
            raise NotImplementedError(error.what) from error

    def _skip(self, what: str, why: str, *, failed: bool = False) -> None:
        self.report.skipped.append(Skip(section="hf", what=what, why=why, failed=failed))


def compiles_static_cache(model: Any) -> bool:
    """Whether ``generate()`` of *model* compiles the forward for a static cache, as on some devices."""
    from transformers import StaticCache

    # There is no public question, and a list of devices of ours would not be that of the installed release.
    decide = getattr(model, "_valid_auto_compile_criteria", None)
    if decide is None:
        return True
    cache = StaticCache(config=model.config, max_cache_len=1)
    # The name of the cache among the model's arguments differs between releases.
    return bool(decide({"cache": cache, "past_key_values": cache}, model.generation_config))


def _with_same_weights(model: torch.nn.Module) -> Any:
    """A copy of *model* whose modules may be replaced; it shares every parameter and buffer."""
    shared = itertools.chain(model.parameters(), model.buffers())
    return copy.deepcopy(model, {id(tensor): tensor for tensor in shared})


def _common(wanted: list[int], found: list[int]) -> int:
    """Tokens equal from the start."""
    pairs = zip(wanted, found, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(wanted), len(found)))
