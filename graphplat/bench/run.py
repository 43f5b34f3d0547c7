"""Runs the sections of the benchmark, one after another, within a time limit."""

from __future__ import annotations

import time
import traceback
from collections.abc import Sequence
from contextlib import nullcontext

import attrs
import torch

from graphplat.batch import Phase
from graphplat.bench import host
from graphplat.bench.capturing import Ladder, default_sizes
from graphplat.bench.decode import Steps
from graphplat.bench.generate import PROMPT, Generation
from graphplat.bench.measure import Clock, Say, Watch
from graphplat.bench.models import Source
from graphplat.bench.records import BenchReport, Skip
from graphplat.bench.subject import Subject
from graphplat.buckets import default_ladder
from graphplat.errors import ConfigError
from graphplat.registry import resolve

SECTIONS = ("host", "scaling", "capture", "decode", "prefill", "hf")
"""In the order they run: a run cut short still has the times of decode steps."""

_WITH_CACHE = ("capture", "decode", "prefill")
"""Sections that run the model on a cache of its own."""

_RESERVE = 0.1
"""The part of the time limit that is kept for each later section when a compiler is started."""


@attrs.define(eq=False)
class Measured:
    """What sections measure, and where they write."""

    clock: Clock
    source: Source
    dtype: torch.dtype
    report: BenchReport
    slots: int
    max_len: int
    _subject: Subject | None = attrs.field(default=None, init=False)

    @property
    def subject(self) -> Subject:
        """The model with its cache, loaded when it is first asked for."""
        if self._subject is None:
            self._subject = Subject.load(
                self.source, self.clock, dtype=self.dtype, slots=self.slots, max_len=self.max_len
            )
        return self._subject

    def skip(self, section: str, what: str, why: str, *, failed: bool = False) -> None:
        """Say what is not measured."""
        self.report.skipped.append(Skip(section=section, what=what, why=why, failed=failed))


@attrs.define(eq=False, kw_only=True)
class Bench:
    """One benchmark to run.

    *buckets* are the decode sizes that steps are timed at; *prefill_buckets* likewise count tokens.
    *budget* is the seconds of measuring for each way and size. What does not fit into *time_limit* seconds
    is skipped; a compiler is started only if a tenth of them stays for each later section.
    """

    device: str = "cpu"
    model: str = "135M"
    dtype: str | None = None
    """By default float32 on a CPU, else bfloat16."""
    sections: Sequence[str] = SECTIONS
    buckets: Sequence[int] = (1, 8, 64)
    prefill_buckets: Sequence[int] = (128, 512)
    max_len: int = 2048
    time_limit: float = 540.0
    budget: float = 2.0
    new_tokens: int = 128
    compiler: bool = True
    """Measure what needs the compiler, which takes minutes for a large model."""
    each: bool = False
    """Also measure kernels compiled for each size alone."""
    say: Say = lambda text: None
    watch: Watch = nullcontext

    def run(self) -> BenchReport:
        """Measure. Raises :class:`ConfigError` or :class:`PlatformError` before anything is measured.

        A section that goes wrong is reported as a failure, and the others still run. A keyboard interrupt
        ends the run: what was measured is reported, and the rest as skipped.
        """
        started = time.perf_counter()
        source = self._checked()
        resolution = resolve(self.device)  # its error is better than torch's about a device it does not know
        device = torch.device(self.device)
        dtype = self.dtype or ("float32" if device.type == "cpu" else "bfloat16")
        clock = Clock(resolution.platform, device, started + self.time_limit)
        report = BenchReport(
            platform=resolution.platform.name,
            device=str(device),
            device_name=_device_name(device),
            torch=str(torch.__version__),
            threads=torch.get_num_threads(),
            model=self.model,
            dtype=dtype,
        )
        measured = Measured(clock, source, getattr(torch, dtype), report, self._slots(device), self.max_len)
        with torch.inference_mode():
            self._run_sections(measured)
        report.seconds = time.perf_counter() - started
        return report

    def _checked(self) -> Source:
        """The model, once the settings fit it and each other."""
        unknown = sorted(set(self.sections) - set(SECTIONS))
        if unknown:
            raise ConfigError(f"no sections {unknown}", field="sections", hint=f"Use {', '.join(SECTIONS)}")
        source = Source.of(self.model)
        needed = {}
        if set(self.sections) & set(_WITH_CACHE):
            needed["max_len"] = self.max_len
        if "hf" in self.sections:
            needed["new_tokens"] = PROMPT + self.new_tokens
        longest = source.longest if needed else None
        for field, length in needed.items():
            if longest is not None and length > longest:
                raise ConfigError(
                    f"{length} tokens of a request, but {self.model} knows only {longest} positions",
                    field=field,
                    hint=f"Lower it by {length - longest}, or more",
                )
        return source

    @property
    def _prefill_sizes(self) -> list[int]:
        """Those that the cache can hold."""
        return [size for size in self.prefill_buckets if size <= self.max_len]

    def _slots(self, device: torch.device) -> int:
        if device.type == "cpu":  # where bytes are dear and steps are slow
            return max(self.buckets)
        return max(*self.buckets, 128 if "capture" in self.sections else 1)

    def _run_sections(self, measured: Measured) -> None:
        waiting = [section for section in SECTIONS if section in self.sections]
        what = "all of it"
        try:
            if set(waiting) & set(_WITH_CACHE):
                _ = measured.subject  # one that cannot be loaded ends the run before anything is measured
            while waiting:
                what = "the rest of it"
                self._run_section(waiting[0], measured)
                what = "all of it"
                del waiting[0]
        except KeyboardInterrupt:
            measured.report.interrupted = True
            for section in waiting:
                measured.skip(section, what, "interrupted")
                what = "all of it"

    def _run_section(self, section: str, measured: Measured) -> None:
        if measured.clock.left() <= 0:
            measured.skip(section, "all of it", "no time left")
            return
        self.say(f"{section}: {max(0.0, measured.clock.left()):.0f} s left")
        try:
            getattr(self, f"_{section}")(measured)
        except Exception as error:  # noqa: BLE001 - reported, and the other sections still run
            self.say(traceback.format_exc())
            measured.skip(section, "the rest of it", f"{type(error).__name__}: {error}", failed=True)

    def _host(self, measured: Measured) -> None:
        host.host_times(measured.clock, measured.report)

    def _scaling(self, measured: Measured) -> None:
        host.scaling(measured.clock, measured.report)

    def _capture(self, measured: Measured) -> None:
        subject = measured.subject
        Ladder(subject, measured.report, default_sizes(subject.slots), self._prefill_sizes).run()

    def _decode(self, measured: Measured) -> None:
        steps = Steps(
            measured.subject, measured.report, "decode", self.budget, self.compiler, self.each, say=self.say
        )
        steps.reserve, steps.watch = self._reserve("decode"), self.watch
        steps.run(self.buckets, measured.report.decode)

    def _reserve(self, section: str) -> float:
        """Seconds kept for the sections after *section*."""
        later = [name for name in SECTIONS[SECTIONS.index(section) + 1 :] if name in self.sections]
        return _RESERVE * self.time_limit * len(later)

    def _prefill(self, measured: Measured) -> None:
        from graphplat.bench.retained import retained

        subject, report = measured.subject, measured.report
        host.breaks(subject.clock, report)
        if not subject.is_reference:
            measured.skip("prefill", "steps and memory", "a folder's prefill is measured in the section hf")
            return
        sizes = self._prefill_sizes
        for size in sorted(set(self.prefill_buckets) - set(sizes)):
            why = f"the cache holds {self.max_len} tokens of a request"
            measured.skip("prefill", f"steps of {size}", why)
        if not sizes:
            return
        Steps(subject, report, "prefill", self.budget).run(sizes, report.prefill)
        retained(subject, report, default_ladder(Phase.PREFILL, max(sizes)))

    def _hf(self, measured: Measured) -> None:
        try:
            model = measured.source.causal_lm(device=measured.clock.device, dtype=measured.dtype)
        except ImportError as error:
            measured.skip("hf", "all of it", str(error))
            return
        Generation(
            measured.clock, model, measured.report, self.new_tokens, self.compiler, self.say, self.watch
        ).run()


def _device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return f"{torch.get_num_threads()} threads"
    named = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(named(device)) if named is not None else device.type
