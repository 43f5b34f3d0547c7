"""The work behind ``graphplat demo``: load, capture, generate, compare."""

from __future__ import annotations

import collections
import itertools
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import attrs
import msgspec
import torch
from rich.console import Console

from graphplat import CaptureReport, CudaGraphsCapture, GraphConfig, Phase, PhaseConfig, capture_cuda_graphs
from graphplat.cli import render
from graphplat.errors import ConfigError
from graphplat.integrations.generation import Completion, Engine
from graphplat.integrations.text import TextStream
from graphplat.integrations.transformers import CausalLMRunner
from graphplat.integrations.weights import LoadedModel, load_model, random_model
from graphplat.registry import resolve
from graphplat.runners import BaseRunner


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt and what the graphs made of it."""

    prompt: str
    text: str
    prompt_tokens: int
    tokens: tuple[int, ...]
    finish_reason: str
    differs: dict[str, int]
    """Way of running to the first new token that differs from ``generate``."""


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """How fast one way of running was."""

    mode: str
    prefill_tokens_per_second: float | None
    """``None`` where prefill is not timed apart."""
    decode_tokens_per_second: float
    seconds: float


class Steps(msgspec.Struct, frozen=True, kw_only=True):
    """How the steps of one phase ran."""

    replayed: dict[int, int]
    """Steps by the size of the graph."""
    eager: dict[str, int]
    """Steps by reason."""

    def describe(self) -> str:
        """In one line."""
        text = f"{sum(self.replayed.values())} steps replayed"
        if self.replayed:
            text += f" ({', '.join(f'{count} of size {size}' for size, count in self.replayed.items())})"
        text += f", {sum(self.eager.values())} ran eagerly"
        if self.eager:
            text += f" ({', '.join(f'{reason}: {count}' for reason, count in self.eager.items())})"
        return text


class DemoReport(msgspec.Struct, frozen=True, kw_only=True):
    """All that the demo found."""

    platform: str
    because: str
    device: str
    model: str
    dtype: str
    answers: tuple[Answer, ...]
    tokens: int
    identical: bool
    """Eager and graph tokens are those of ``generate``."""
    capture: CaptureReport
    speeds: tuple[Speed, ...]
    steps: dict[str, Steps]
    """By phase, of the run through graphs."""


@attrs.define(eq=False, kw_only=True)
class Demo:
    """One run of the demo. Prints as it goes; a quiet console keeps it silent.

    Where the console is no terminal, a line on stderr names each part that can take a while.
    """

    device: str
    model: Path | None
    prompts: Sequence[str]
    max_new_tokens: int
    batch: int
    prefill: Literal["full", "breakable", "disabled"]
    decode: Literal["full", "breakable", "compiled", "disabled"]
    dtype: str
    random: bool
    console: Console

    def run(self) -> DemoReport:
        """Load, capture, generate, compare.

        Raises :class:`PlatformError` for a device that cannot be used and
        :class:`ConfigError` without weights.
        """
        resolution = resolve(self.device)
        device = torch.device(self.device)
        self._say(f"Platform {resolution.platform.name} for {device}: {resolution.because}.")
        loaded = self._load(device)
        self._say(f"Model: {loaded.source}, {self.dtype}.")
        ids = [loaded.tokenizer.encode(prompt) for prompt in self.prompts]
        expected, reference_speed = self._reference(loaded, ids)
        runner = self._runner(loaded, ids)
        self._status("capturing graphs")
        with render.capture_bar(self.console):
            capture = capture_cuda_graphs(model_runner=runner)
        limit = max(self._prefill_buckets(ids))
        eager, eager_speed, _ = self._generate(
            "eager", Engine(runner, capture.eager_runner, capture.eager_runner, limit), ids
        )
        watch = _StepWatch(capture)
        engine = Engine.from_capture(runner, capture, max_prefill_tokens=limit)
        found, speed, texts = self._generate("graphs", engine, ids, loaded)
        compared = zip(self.prompts, texts, found, eager, expected, strict=True)
        answers = tuple(itertools.starmap(_answer, compared))
        return DemoReport(
            platform=resolution.platform.name,
            because=resolution.because,
            device=str(device),
            model=loaded.source,
            dtype=self.dtype,
            answers=answers,
            tokens=sum(len(answer.tokens) for answer in answers),
            identical=not any(answer.differs for answer in answers),
            capture=capture.report,
            speeds=(reference_speed, eager_speed, speed),
            steps=watch.steps(engine),
        )

    def _load(self, device: torch.device) -> LoadedModel:
        self._status("loading the model")
        dtype: torch.dtype = getattr(torch, self.dtype)
        if self.random:
            if self.model is not None:
                raise ConfigError("random weights and a model's path were both asked for", field="model")
            return random_model(device=device, dtype=dtype)
        return load_model(self.model, device=device, dtype=dtype)

    def _reference(
        self, loaded: LoadedModel, ids: Sequence[Sequence[int]]
    ) -> tuple[list[tuple[int, ...]], Speed]:
        """What the model's own ``generate`` says of each prompt alone, before anything is changed."""
        self._status("generating with generate(), one prompt at a time")
        found = []
        started = time.perf_counter()
        for prompt in ids:
            tensor = torch.tensor([list(prompt)], device=loaded.model.device)
            output = loaded.model.generate(
                tensor,
                attention_mask=torch.ones_like(tensor),
                do_sample=False,
                max_new_tokens=self.max_new_tokens,
            )
            found.append(tuple(output[0, len(prompt) :].tolist()))
        seconds = time.perf_counter() - started
        new = sum(len(tokens) for tokens in found)
        speed = Speed(
            mode="generate(), one by one",
            prefill_tokens_per_second=None,
            decode_tokens_per_second=new / seconds,
            seconds=seconds,
        )
        return found, speed

    def _runner(self, loaded: LoadedModel, ids: Sequence[Sequence[int]]) -> CausalLMRunner:
        buckets = self._prefill_buckets(ids)
        return CausalLMRunner(
            loaded.model,
            max_requests=self.batch,
            max_len=max(map(len, ids)) + self.max_new_tokens,
            returns="tokens",
            graph_config=GraphConfig(
                decode=PhaseConfig(backend=self.decode, max_size=self.batch),
                prefill=PhaseConfig(backend=self.prefill, buckets=buckets, max_requests=self.batch),
            ),
        )

    def _prefill_buckets(self, ids: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """Powers of two from one that holds the shortest prompt to one that holds any two."""
        shortest = min(map(len, ids))
        largest = max(map(len, ids)) * min(2, self.batch)
        sizes = [1]
        while sizes[-1] < largest:
            sizes.append(sizes[-1] * 2)
        return tuple(size for size in sizes if size >= shortest)

    def _generate(
        self,
        mode: str,
        engine: Engine,
        ids: Sequence[Sequence[int]],
        loaded: LoadedModel | None = None,
    ) -> tuple[list[Completion], Speed, list[str]]:
        self._status(f"generating: {mode}")
        streams = [TextStream(loaded.tokenizer.decode) for _ in ids] if loaded else []
        texts = [""] * len(ids)

        def show(index: int, piece: str) -> None:
            texts[index] += piece
            if len(ids) == 1:
                self.console.print(piece, end="", markup=False, highlight=False, soft_wrap=True)

        def on_token(index: int, token: int) -> None:
            show(index, streams[index].push(token))

        if loaded and len(ids) == 1:
            self._say(f"\n> {self.prompts[0]}")
        started = time.perf_counter()
        found = engine.generate(ids, self.max_new_tokens, on_token=on_token if loaded else None)
        seconds = time.perf_counter() - started
        for index, stream in enumerate(streams):
            show(index, stream.finish())
        if loaded and len(ids) == 1:
            self._say("\n")
        speed = Speed(
            mode=mode,
            prefill_tokens_per_second=engine.prefill_timing.tokens_per_second,
            decode_tokens_per_second=engine.decode_timing.tokens_per_second,
            seconds=seconds,
        )
        return found, speed, texts

    def _status(self, doing: str) -> None:
        if not self.console.quiet and not self.console.is_terminal:
            print(f"graphplat: {doing}", file=sys.stderr, flush=True)

    def _say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


class _StepWatch:
    """Counts the steps of both phases from its making on."""

    def __init__(self, capture: CudaGraphsCapture) -> None:
        self._capture = capture
        self._runners = {Phase.PREFILL: capture.prefill_runner, Phase.DECODE: capture.decode_runner}
        self._before = {phase: _counts(runner) for phase, runner in self._runners.items()}

    def steps(self, engine: Engine) -> dict[str, Steps]:
        """By phase; *engine* ran since."""
        timings = {Phase.PREFILL: engine.prefill_timing, Phase.DECODE: engine.decode_timing}
        found = {}
        for phase, runner in self._runners.items():
            if runner is self._capture.eager_runner:
                # It counts both phases together, and knows only that it is eager.
                skipped = [skip for skip in self._capture.report.skipped if skip.phase is phase]
                reason = str(skipped[0].reason) if skipped else "eager"
                found[str(phase)] = Steps(replayed={}, eager={reason: timings[phase].steps})
                continue
            replays, eager = (
                now - old for now, old in zip(_counts(runner), self._before[phase], strict=True)
            )
            found[str(phase)] = Steps(
                replayed=dict(replays), eager={str(reason): count for reason, count in eager.items()}
            )
        return found


def _counts(runner: BaseRunner) -> tuple[collections.Counter[Any], collections.Counter[Any]]:
    return collections.Counter(runner.stats.replays), collections.Counter(runner.stats.eager)


def _answer(prompt: str, text: str, found: Completion, eager: Completion, wanted: tuple[int, ...]) -> Answer:
    return Answer(
        prompt=prompt,
        text=text,
        prompt_tokens=len(found.prompt),
        tokens=found.tokens,
        finish_reason=found.finish_reason,
        differs=_differences(wanted, eager=eager.tokens, graphs=found.tokens),
    )


def _differences(wanted: tuple[int, ...], **ways: tuple[int, ...]) -> dict[str, int]:
    """The first place where each way departs from *wanted*."""
    found = {}
    for way, tokens in ways.items():
        if tokens != wanted:
            pairs = zip(wanted, tokens, strict=False)
            shorter = min(len(wanted), len(tokens))
            found[way] = next((place for place, (a, b) in enumerate(pairs) if a != b), shorter)
    return found
