"""Section ``decode`` and the steps of section ``prefill``: every way to run one step, side by side."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch

from graphplat.backends.kernels import own_code
from graphplat.backends.numerics import tolerance
from graphplat.batch import ForwardBatch
from graphplat.bench.hand import Hand
from graphplat.bench.measure import FRESH, Clock, Effort, Timing, Way, worst_difference
from graphplat.bench.records import BenchReport, Skip, StepRow
from graphplat.bench.subject import Subject, function_of
from graphplat.capture import CudaGraphsCapture
from graphplat.errors import GraphplatError
from graphplat.runners import BaseRunner

GRAPHPLAT = {
    "full": {"backend": "full"},
    "breakable": {"backend": "breakable"},
    "compiled": {"backend": "compiled"},
    "compiled, each size": {"backend": "compiled", "compile": "each"},
}
"""Ways through graphplat and their settings."""

_NOT_ASKED = "the compiler is left out, as asked"


@attrs.define(eq=False)
class Steps:
    """Measures the steps of one section."""

    subject: Subject
    report: BenchReport
    section: str
    budget: float
    """Seconds of measuring for each way and size."""
    compiler: bool = True
    """Measure what needs the compiler."""
    each: bool = False
    """Measure kernels compiled for each size alone, too."""
    compile_seconds: float = 30.0
    """What the compiler is expected to need for one size; learnt from the first."""

    @property
    def clock(self) -> Clock:
        """The subject's clock."""
        return self.subject.clock

    def run(self, sizes: Sequence[int], rows: list[StepRow]) -> None:
        """Add a row for every way and size."""
        captures = dict(self._captures(sizes))
        for size in sorted(sizes, reverse=True):
            made = self.subject.decode_batches if self.section == "decode" else self.subject.prefill_batches
            batches = made(size, FRESH)
            ways = list(self._ways(size, batches, captures))
            rows += self._measured(ways, size, batches)
        rows.sort(key=lambda row: row.bucket)
        for capture in captures.values():
            capture.prefill_runner.release()
            capture.decode_runner.release()

    def skip(self, what: str, why: str, *, failed: bool = False) -> None:
        """Say what is not measured."""
        skip = Skip(section=self.section, what=what, why=why, failed=failed)
        if skip not in self.report.skipped:
            self.report.skipped.append(skip)

    # Ways

    def _captures(self, sizes: Sequence[int]) -> Iterator[tuple[str, CudaGraphsCapture]]:
        """The graphs of every backend that the platform and the time left allow."""
        capabilities = self.clock.platform.capabilities
        needs = {"full": True, "breakable": capabilities.breakable, "compiled": capabilities.compiled}
        for way, chosen in GRAPHPLAT.items():
            name, backend = f"graphplat {way}", chosen["backend"]
            if backend == "compiled" and (
                self.section != "decode" or ("compile" in chosen and not self.each)
            ):
                continue
            if backend == "compiled" and not self.compiler:
                self.skip(name, _NOT_ASKED)
                continue
            if not (needs[backend] and capabilities.graph_capture):
                self.skip(name, f"{self.clock.platform.name} does not declare it")
                continue
            if backend == "compiled" and self._is_late(name, 2 * self.compile_seconds):
                continue
            phase: dict[str, Any] = {**chosen, "buckets": list(sizes), "outputs": "view"}
            other: dict[str, Any] = {"backend": "disabled"}
            settings = {"decode": phase, "prefill": other}
            if self.section == "prefill":
                settings = {"decode": other, "prefill": phase | {"max_requests": self.subject.slots}}
            try:
                yield way, self.subject.capture(**settings)
            except GraphplatError as error:
                self.skip(name, str(error), failed=True)

    def _ways(
        self, size: int, batches: Sequence[ForwardBatch], captures: dict[str, CudaGraphsCapture]
    ) -> Iterator[Way]:
        runtime = self.subject.under(prefill={"backend": "full", "max_requests": self.subject.slots})
        yield Way("eager", lambda index: runtime.forward(batches[index]))
        static = self._static(batches[0])
        yield from self._tried(
            "bare graph", lambda: self._bare(lambda: runtime.forward(static), static, batches)
        )
        for backend, capture in captures.items():
            yield self._graphplat(backend, capture, size, batches)
        if self.section == "decode":
            yield from self._compiled(runtime, static, batches)
            yield from self._tried("make_graphed_callables", lambda: self._callables(runtime, batches))

    def _compiled(self, runtime: Any, static: ForwardBatch, batches: Sequence[ForwardBatch]) -> Iterator[Way]:
        if not self.clock.platform.capabilities.compiled:
            self.skip("torch.compile", f"{self.clock.platform.name} does not declare it")
            return
        if not self.compiler:
            self.skip("torch.compile", _NOT_ASKED)
            return
        if self._is_late("torch.compile", self.compile_seconds):
            return
        way, compiled = self._compile(runtime, batches, None)
        yield way
        if self.clock.platform.capabilities.executes_in_capture:
            self.skip("compiled, captured by hand", "operators are recorded here, and kernels are none")
            self.skip("torch.compile reduce-overhead", "it changes nothing where there are no device graphs")
            return
        yield from self._tried(
            "compiled, bare graph",
            lambda: self._bare(lambda: compiled(static), static, batches, "compiled, bare graph"),
        )
        if not self._is_late("torch.compile reduce-overhead", self.compile_seconds):
            yield self._compile(runtime, batches, "reduce-overhead")[0]

    def _compile(
        self, runtime: Any, batches: Sequence[ForwardBatch], mode: str | None
    ) -> tuple[Way, Callable[[ForwardBatch], torch.Tensor]]:
        def forward(batch: ForwardBatch) -> torch.Tensor:
            found: torch.Tensor = runtime.forward(batch)
            return found

        compiled = torch.compile(own_code(forward), fullgraph=True, dynamic=False, mode=mode)
        mark: Callable[[], None] | None = torch.compiler.cudagraph_mark_step_begin if mode else None

        def step(index: int) -> torch.Tensor:
            if mark is not None:
                mark()
            found: torch.Tensor = compiled(batches[index])
            return found

        started = time.perf_counter()
        for index in range(3):  # reduce-overhead records at the second run and replays from the third
            step(index)
        self.clock.sync()
        seconds = time.perf_counter() - started
        self.compile_seconds = max(seconds, 1.0)
        name = f"torch.compile {mode}" if mode else "torch.compile"
        return Way(name, step, exact=False, warmup_seconds=seconds), compiled

    def _bare(
        self,
        function: Callable[[], torch.Tensor],
        static: ForwardBatch,
        batches: Sequence[ForwardBatch],
        name: str = "bare graph",
    ) -> Way:
        hand = Hand(self.clock)
        with hand.session():
            made = hand.capture(function, warmups=2)
        targets = list(static.inputs.values())

        def load(index: int) -> None:
            for target, source in zip(targets, batches[index].inputs.values(), strict=True):
                target.copy_(source)

        def replay(index: int, _hand: Hand = hand) -> torch.Tensor:  # which owns pool and stream
            del index
            made.graph.replay()
            found: torch.Tensor = made.output
            return found

        return Way(
            name,
            replay,
            load=load,
            exact=name == "bare graph",
            warmup_seconds=made.warmup_seconds,
            capture_seconds=made.capture_seconds,
            capture_bytes=made.bytes,
        )

    def _callables(self, runtime: Any, batches: Sequence[ForwardBatch]) -> Way:
        module = torch.get_device_module(self.clock.device)
        make = getattr(module, "make_graphed_callables", None)
        if make is None:
            raise NotImplementedError(f"torch.{self.clock.device.type} has no such function")
        sample = tuple(tensor.clone() for tensor in batches[0].inputs.values())
        started = time.perf_counter()
        graphed = make(function_of(runtime, batches[0]), sample)
        self.clock.sync()
        seconds = time.perf_counter() - started
        return Way(
            "make_graphed_callables",
            lambda index: graphed(*batches[index].inputs.values()),
            capture_seconds=seconds,
            note="warm-up within its capture",
        )

    def _graphplat(
        self, backend: str, capture: CudaGraphsCapture, size: int, batches: Sequence[ForwardBatch]
    ) -> Way:
        runner: BaseRunner = capture.decode_runner if self.section == "decode" else capture.prefill_runner
        shape = next((shape for shape in capture.report.shapes if shape.key.size == size), None)
        name = f"graphplat {backend}"
        if shape is None:
            return Way(name, lambda index: runner.execute(batches[index]), note="no graph of this size")
        return Way(
            name,
            lambda index: runner.execute(batches[index]),
            exact=not backend.startswith("compiled"),
            warmup_seconds=shape.warmup_seconds,
            capture_seconds=shape.seconds,
            capture_bytes=shape.bytes,
            note=shape.note,
        )

    def _tried(self, name: str, make: Callable[[], Way]) -> Iterator[Way]:
        """The way that *make* gives, or a note of why there is none."""
        try:
            yield make()
        except NotImplementedError as error:
            self.skip(name, str(error))
        except Exception as error:  # noqa: BLE001 - a baseline that cannot run must not end the benchmark
            self.skip(name, f"{type(error).__name__}: {error}".splitlines()[0])

    def _static(self, batch: ForwardBatch) -> ForwardBatch:
        """A batch of memory of its own, padded nowhere."""
        return ForwardBatch(
            phase=batch.phase,
            num_requests=batch.num_requests,
            num_tokens=batch.num_tokens,
            inputs={name: tensor.clone() for name, tensor in batch.inputs.items()},
        )

    def _is_late(self, what: str, needed: float) -> bool:
        if self.clock.left() >= needed:
            return False
        self.skip(what, f"about {needed:.0f} s needed, {max(0.0, self.clock.left()):.0f} s left")
        return True

    # Measuring

    def _measured(self, ways: Sequence[Way], size: int, batches: Sequence[ForwardBatch]) -> Iterator[StepRow]:
        """Compare, and time what is right."""
        expected = [ways[0].step(index).clone() for index in range(len(batches))]
        allowed = tolerance([{"output": expected[0]}], self.clock.device)
        right, differences = [], {}
        for way in ways:
            differences[way.name] = worst_difference(way, expected)
            if differences[way.name] > allowed:
                why = f"differs from eager by {differences[way.name]:.2g}, {allowed:.2g} is allowed"
                self.skip(f"{way.name} at {size}", why, failed=True)
            else:
                right.append(way)
        once = self.clock.seconds(lambda: ways[0].step(0))
        if self.clock.left() <= 0:
            self.skip(f"steps of {size}", "no time left")
            return
        budget = min(self.budget, self.clock.left() / max(1, 2 * len(right)))
        timings = self.clock.steps(right, Effort.within(once, budget))
        for way in ways:
            yield _row(way, size, batches[0], differences[way.name], timings.get(way.name))


def _row(way: Way, size: int, batch: ForwardBatch, difference: float, timing: Timing | None) -> StepRow:
    return StepRow(
        way=way.name,
        bucket=size,
        step_us=None if timing is None else timing.step,
        host_us=None if timing is None else timing.host,
        throughput_us=None if timing is None else timing.throughput,
        tokens_per_second=None if timing is None else batch.num_tokens / timing.throughput.median * 1e6,
        warmup_seconds=way.warmup_seconds,
        capture_seconds=way.capture_seconds,
        capture_bytes=way.capture_bytes,
        difference=difference,
        note=way.note,
    )
