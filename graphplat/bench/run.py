"""Runs the sections of the benchmark, one after another, within a time limit."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence

import attrs
import torch

from graphplat.batch import Phase
from graphplat.bench import host
from graphplat.bench.capturing import Ladder, default_sizes
from graphplat.bench.decode import Steps
from graphplat.bench.measure import Clock
from graphplat.bench.records import BenchReport, Skip
from graphplat.bench.subject import Subject
from graphplat.buckets import default_ladder
from graphplat.errors import ConfigError
from graphplat.registry import resolve

SECTIONS = ("host", "scaling", "capture", "decode", "prefill", "hf")
"""In the order they run: a run cut short still has the times of decode steps."""

_RESERVE = 0.1
"""The part of the time limit that is kept for each later section when a compiler is started."""

Say = Callable[[str], None]


@attrs.define(eq=False, kw_only=True)
class Bench:
    """One benchmark to run.

    *buckets* are the decode sizes that steps are timed at; *prefill_buckets* likewise count tokens.
    *budget* is the seconds of measuring for each way and size. What does not fit into *time_limit* seconds
    is skipped; a compiler is started only if a tenth of them stays for each later section.
    """

    device: str = "cpu"
    model: str = "135M"
    dtype: str = "float32"
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

    def run(self) -> BenchReport:
        """Measure. Raises :class:`ConfigError` or :class:`PlatformError` before anything is measured.

        A section that goes wrong is reported as a failure, and the others still run.
        """
        started = time.perf_counter()
        unknown = sorted(set(self.sections) - set(SECTIONS))
        if unknown:
            raise ConfigError(f"no sections {unknown}", field="sections", hint=f"Use {', '.join(SECTIONS)}")
        device = torch.device(self.device)
        resolution = resolve(device.type)
        clock = Clock(resolution.platform, device, started + self.time_limit)
        report = BenchReport(
            platform=resolution.platform.name,
            device=str(device),
            device_name=_device_name(device),
            torch=str(torch.__version__),
            threads=torch.get_num_threads(),
            model=self.model,
            dtype=self.dtype,
        )
        with torch.inference_mode():
            subject = self._subject(clock)
            for section in SECTIONS:
                if section in self.sections:
                    self._run_section(section, subject, report)
        report.seconds = time.perf_counter() - started
        return report

    @property
    def _prefill_sizes(self) -> list[int]:
        """Those that the cache can hold."""
        return [size for size in self.prefill_buckets if size <= self.max_len]

    def _subject(self, clock: Clock) -> Subject:
        slots = max((*self.buckets, *((128,) if "capture" in self.sections else ())))
        if clock.device.type == "cpu":  # where bytes are dear and steps are slow
            slots = max(self.buckets)
        return Subject.load(
            self.model, clock, dtype=getattr(torch, self.dtype), slots=slots, max_len=self.max_len
        )

    def _run_section(self, section: str, subject: Subject, report: BenchReport) -> None:
        if subject.clock.left() <= 0:
            report.skipped.append(Skip(section=section, what="all of it", why="no time left"))
            return
        self.say(f"{section}: {max(0.0, subject.clock.left()):.0f} s left")
        try:
            getattr(self, f"_{section}")(subject, report)
        except Exception as error:  # noqa: BLE001 - reported, and the other sections still run
            self.say(traceback.format_exc())
            why = f"{type(error).__name__}: {error}"
            report.skipped.append(Skip(section=section, what="the rest of it", why=why, failed=True))

    def _host(self, subject: Subject, report: BenchReport) -> None:
        host.host_times(subject.clock, report)

    def _scaling(self, subject: Subject, report: BenchReport) -> None:
        host.scaling(subject.clock, report)

    def _capture(self, subject: Subject, report: BenchReport) -> None:
        Ladder(subject, report, default_sizes(subject.slots), self._prefill_sizes).run()

    def _decode(self, subject: Subject, report: BenchReport) -> None:
        steps = Steps(subject, report, "decode", self.budget, self.compiler, self.each)
        steps.reserve = self._reserve("decode")
        steps.run(self.buckets, report.decode)

    def _reserve(self, section: str) -> float:
        """Seconds kept for the sections after *section*."""
        later = [name for name in SECTIONS[SECTIONS.index(section) + 1 :] if name in self.sections]
        return _RESERVE * self.time_limit * len(later)

    def _prefill(self, subject: Subject, report: BenchReport) -> None:
        from graphplat.bench.retained import retained

        host.breaks(subject.clock, report)
        if not subject.is_reference:
            why = "a folder's prefill is measured in the section hf"
            report.skipped.append(Skip(section="prefill", what="steps and memory", why=why))
            return
        sizes = self._prefill_sizes
        for size in sorted(set(self.prefill_buckets) - set(sizes)):
            why = f"the cache holds {self.max_len} tokens of a request"
            report.skipped.append(Skip(section="prefill", what=f"steps of {size}", why=why))
        if not sizes:
            return
        Steps(subject, report, "prefill", self.budget).run(sizes, report.prefill)
        retained(subject, report, default_ladder(Phase.PREFILL, max(sizes)))

    def _hf(self, subject: Subject, report: BenchReport) -> None:
        try:
            from graphplat.bench.generate import Generation
        except ImportError as error:
            report.skipped.append(Skip(section="hf", what="all of it", why=str(error)))
            return
        Generation(subject, report, getattr(torch, self.dtype), self.new_tokens, self.compiler).run()


def _device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return f"{torch.get_num_threads()} threads"
    named = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(named(device)) if named is not None else device.type
