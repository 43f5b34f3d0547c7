"""Section ``decode`` and the steps of section ``prefill``: every way to run one step, side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import attrs

from graphplat.backends.numerics import tolerance
from graphplat.batch import ForwardBatch
from graphplat.bench.baselines import bare_graph, compiled_forward, compiler, graphed_callables, static_copy
from graphplat.bench.measure import FRESH, Clock, Say, Schedule, Timing, Watch, Way, brief, worst_difference
from graphplat.bench.records import BenchReport, Skip, StepRow
from graphplat.bench.subject import Subject, hold
from graphplat.capture import CudaGraphsCapture
from graphplat.runners import BaseRunner

GRAPHPLAT = {
    "full": {"backend": "full"},
    "breakable": {"backend": "breakable"},
    "compiled": {"backend": "compiled"},
    "compiled, each size": {"backend": "compiled", "compile": "each"},
}
"""Ways through graphplat and their settings."""

COMPILED = ("torch.compile", "compiled, bare graph", "torch.compile reduce-overhead")
"""Ways of the compiler without graphplat."""

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
    reserve: float = 0.0
    """Seconds that later sections need: no compiler is started that would take them."""
    say: Say = lambda text: None
    watch: Watch = nullcontext
    _held: ExitStack = attrs.field(factory=ExitStack, init=False)
    """Destroys the graphs that graphplat captured."""
    _bare: ExitStack = attrs.field(factory=ExitStack, init=False)
    """Destroys the graphs captured by hand for one size."""

    @property
    def clock(self) -> Clock:
        """The subject's clock."""
        return self.subject.clock

    def run(self, sizes: Sequence[int], rows: list[StepRow]) -> None:
        """Add a row for every way and size. No graph is left, whatever goes wrong."""
        made = self.subject.decode_batches if self.section == "decode" else self.subject.prefill_batches
        with self._held:
            captures = dict(self._captures(sizes))
            try:
                for size in sorted(sizes, reverse=True):
                    batches = made(size, FRESH)
                    with self._bare:
                        rows += self._measured(list(self._ways(size, batches, captures)), size, batches)
            finally:
                rows.sort(key=lambda row: row.bucket)

    def skip(self, what: str, why: str, *, failed: bool = False) -> None:
        """Say what is not measured."""
        skip = Skip(section=self.section, what=what, why=why, failed=failed)
        if skip not in self.report.skipped:
            self.report.skipped.append(skip)

    def _skip_all(self, names: Sequence[str], why: str) -> None:
        for name in names:
            self.skip(name, why)

    # Ways

    def _captures(self, sizes: Sequence[int]) -> Iterator[tuple[str, CudaGraphsCapture]]:
        """The graphs of every backend that the platform and the time left allow."""
        capabilities = self.clock.platform.capabilities
        needs = {"full": True, "breakable": capabilities.breakable, "compiled": capabilities.compiled}
        for way, chosen in GRAPHPLAT.items():
            name, backend = f"graphplat {way}", chosen["backend"]
            why = ""
            if not (needs[backend] and capabilities.graph_capture):
                why = f"{self.clock.platform.name} does not declare it"
            elif backend == "compiled":
                why = self._why_no_compiler(each="compile" in chosen)
            if why:
                self.skip(name, why)
                continue
            phase: dict[str, Any] = {**chosen, "buckets": list(sizes), "outputs": "view"}
            other: dict[str, Any] = {"backend": "disabled"}
            settings = {"decode": phase, "prefill": other}
            if self.section == "prefill":
                settings = {"decode": other, "prefill": phase | {"max_requests": self.subject.slots}}
            compiles = backend == "compiled"
            if compiles:
                self.say(f"{self.section}: compiling {name}")
            try:
                with self.watch() if compiles else nullcontext():
                    capture = hold(self._held, self.subject.capture(**settings))
            except Exception as error:  # noqa: BLE001 - reported; the other ways still run
                self.skip(name, brief(error), failed=True)
            else:
                yield way, capture

    def _why_no_compiler(self, *, each: bool) -> str:
        """Why the compiled backend is left out; empty if it is not."""
        if self.section != "decode":
            return "it is measured in section decode"
        if not self.compiler:
            return _NOT_ASKED
        if each and not self.each:
            return "kernels for each size alone were not asked for"
        return self._late(2 * self.compile_seconds)

    def _ways(
        self, size: int, batches: Sequence[ForwardBatch], captures: dict[str, CudaGraphsCapture]
    ) -> Iterator[Way]:
        runtime = self.subject.under(prefill={"backend": "full", "max_requests": self.subject.slots})
        exact = self.section == "decode"
        yield Way("eager", lambda index: runtime.forward(batches[index]))
        static = static_copy(batches[0])
        yield from self._by_hand("bare graph", runtime.forward, static, batches, exact=exact)
        for backend, capture in captures.items():
            yield self._graphplat(backend, capture, size, batches)
        if self.section != "decode":
            self._skip_all((*COMPILED, "make_graphed_callables"), "it is measured in section decode")
            return
        yield from self._compiled(runtime, static, batches)
        yield from self._tried(
            "make_graphed_callables", lambda: graphed_callables(self.clock, runtime, batches)
        )

    def _compiled(self, runtime: Any, static: ForwardBatch, batches: Sequence[ForwardBatch]) -> Iterator[Way]:
        whole, bare, recorded = COMPILED
        capabilities = self.clock.platform.capabilities
        if not capabilities.compiled:
            return self._skip_all(COMPILED, f"{self.clock.platform.name} does not declare it")
        if not self.compiler:
            return self._skip_all(COMPILED, _NOT_ASKED)
        if late := self._late(self.compile_seconds):
            return self._skip_all(COMPILED, late)
        self.say(f"{self.section}: compiling {whole} of {batches[0].num_requests}")
        forward = compiled_forward(runtime)
        ways = list(self._tried(whole, lambda: compiler(self.clock, forward, batches)))
        if not ways:
            return self._skip_all((bare, recorded), "the forward does not compile")
        self.compile_seconds = max(ways[0].warmup_seconds or 0.0, 1.0)
        yield from ways
        if capabilities.executes_in_capture:
            self.skip(bare, "operators are recorded here, and kernels are none")
            self.skip(recorded, "it changes nothing where there are no device graphs")
            return None
        yield from self._by_hand(bare, forward, static, batches, exact=False)
        if late := self._late(self.compile_seconds):
            return self.skip(recorded, late)
        self.say(f"{self.section}: compiling {recorded} of {batches[0].num_requests}")
        again = compiled_forward(runtime, "reduce-overhead")
        yield from self._tried(recorded, lambda: compiler(self.clock, again, batches, "reduce-overhead"))

    def _by_hand(
        self,
        name: str,
        forward: Callable[[ForwardBatch], Any],
        static: ForwardBatch,
        batches: Sequence[ForwardBatch],
        *,
        exact: bool,
    ) -> Iterator[Way]:
        return self._tried(
            name, lambda: bare_graph(self.clock, self._bare, forward, static, batches, name=name, exact=exact)
        )

    def _graphplat(
        self, backend: str, capture: CudaGraphsCapture, size: int, batches: Sequence[ForwardBatch]
    ) -> Way:
        runner: BaseRunner = capture.decode_runner if self.section == "decode" else capture.prefill_runner
        shape = next((shape for shape in capture.report.shapes if shape.key.size == size), None)
        way = Way(
            f"graphplat {backend}",
            lambda index: runner.execute(batches[index]),
            exact=self._runs_eager_kernels(GRAPHPLAT[backend]["backend"]),
        )
        if shape is None:
            return attrs.evolve(way, note="no graph of this size")
        return attrs.evolve(
            way,
            warmup_seconds=shape.warmup_seconds,
            capture_seconds=shape.seconds,
            capture_bytes=shape.bytes,
            note=shape.note,
        )

    def _runs_eager_kernels(self, backend: str) -> bool:
        """Whether graphs of *backend* run the very kernels of the eager forward.

        The compiler's are others. So is the attention of a whole graph of a prefill: it masks all pairs
        of packed tokens, where eager and breakable steps attend at live lengths.
        """
        if backend == "compiled":
            return False
        return self.section == "decode" or backend == "breakable"

    def _tried(self, name: str, make: Callable[[], Way]) -> Iterator[Way]:
        """The way that *make* gives, or a note of why there is none: it is not there, or it went wrong."""
        try:
            made = make()
        except NotImplementedError as error:
            self.skip(name, str(error) or "it is not implemented here")
        except Exception as error:  # noqa: BLE001 - reported; the other ways still run
            self.skip(name, brief(error), failed=True)
        else:
            yield made

    def _late(self, needed: float) -> str:
        """Why a compiler that needs so many seconds is not started; empty if it may be."""
        left = max(0.0, self.clock.left())
        if left - self.reserve >= needed:
            return ""
        kept = f", of which {self.reserve:.0f} s are kept for later sections" if self.reserve else ""
        return f"about {needed:.0f} s needed, {left:.0f} s left{kept}"

    # Measuring

    def _measured(self, ways: Sequence[Way], size: int, batches: Sequence[ForwardBatch]) -> Iterator[StepRow]:
        """Compare, and time what is right."""
        expected = [ways[0].step(index).clone() for index in range(len(batches))]
        allowed = tolerance([{"output": expected[0]}], self.clock.device)
        once, differences = {}, {}
        for way in ways:
            try:
                differences[way.name] = worst_difference(way, expected)
            except Exception as error:  # noqa: BLE001 - reported; the other ways still run
                self.skip(f"{way.name} at {size}", brief(error), failed=True)
                continue
            limit = 0.0 if way.exact else allowed
            if differences[way.name] > limit:
                bound = "the same kernels must be equal" if way.exact else f"{limit:.2g} is allowed"
                why = f"differs from eager by {differences[way.name]:.2g}, {bound}"
                self.skip(f"{way.name} at {size}", why, failed=True)
            else:
                once[way.name] = self.clock.seconds(partial(way.step, 0))
        left = self.clock.left()
        schedule = Schedule.within(once, min(self.budget, left / (2 * max(1, len(once)))))
        if left < schedule.seconds:
            self.skip(
                f"steps of {size}", f"about {schedule.seconds:.2g} s needed, {max(0.0, left):.2g} s left"
            )
            return
        timings = self.clock.steps([way for way in ways if way.name in once], schedule)
        for way in (way for way in ways if way.name in differences):
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
