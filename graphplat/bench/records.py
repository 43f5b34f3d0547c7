"""What the benchmark reports. Times are in microseconds unless a name says seconds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """A median and the quartiles around it."""

    median: float
    low: float
    high: float
    samples: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of one or more *values*."""
        if len(values) == 1:
            return cls(median=values[0], low=values[0], high=values[0], samples=1)
        low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median=middle, low=low, high=high, samples=len(values))


class StepRow(msgspec.Struct, frozen=True, kw_only=True):
    """One way of running steps of one size."""

    way: str
    bucket: int
    step_us: Spread | None = None
    """Wall time from the call until a synchronize that follows it returns: the device is done."""
    host_us: Spread | None = None
    """Until the call returns."""
    throughput_us: Spread | None = None
    """Of steps launched back to back: the longer of device and host time."""
    tokens_per_second: float | None = None
    """At the median throughput."""
    warmup_seconds: float | None = None
    """Before the first step at full speed, compilation included."""
    capture_seconds: float | None = None
    capture_bytes: int | None = None
    difference: float | None = None
    """Largest difference from eager, as a part of the largest result; 0: equal."""
    note: str = ""


class CaptureRow(msgspec.Struct, frozen=True, kw_only=True):
    """One way of capturing a ladder."""

    way: str
    buckets: int
    seconds: Spread
    """Warm-up included."""
    bytes: int | None = None
    """``None`` where the platform cannot say."""
    note: str = ""


class HostRow(msgspec.Struct, frozen=True, kw_only=True):
    """Host time of one way to launch a step of five input fields."""

    way: str
    host_us: Spread
    over_replay_us: float
    """Beyond the bare replay of the same graph."""


class BreakRow(msgspec.Struct, frozen=True, kw_only=True):
    """Host time of a graph with breaks around functions that do nothing."""

    breaks: int
    host_us: Spread
    per_break_us: float | None = None


class RetainedRow(msgspec.Struct, frozen=True, kw_only=True):
    """What prefill graphs keep alive beside themselves."""

    way: str
    buckets: int
    retained_bytes: int
    graph_bytes: int | None
    """``None`` where the platform cannot say."""


class ScalingRow(msgspec.Struct, frozen=True, kw_only=True):
    """Costs by the number of captured buckets."""

    buckets: int
    capture_seconds: float
    capture_us_per_bucket: float
    host_us: Spread
    bytes: int | None
    """``None`` where the platform cannot say."""


class GenerateRow(msgspec.Struct, frozen=True, kw_only=True):
    """One way of generating from one prompt at a time."""

    way: str
    tokens_per_second: Spread
    warmup_seconds: float
    same_tokens: int
    """New tokens equal to those of the first way, of each prompt up to the first that differs."""
    tokens: int
    """Of all prompts."""


class Skip(msgspec.Struct, frozen=True, kw_only=True):
    """Something that was not measured."""

    section: str
    what: str
    why: str
    failed: bool = False
    """It was tried and went wrong."""

    def __post_init__(self) -> None:
        if not self.why:
            raise ValueError(f"no reason why {self.what!r} was not measured")


class BenchReport(msgspec.Struct, kw_only=True):
    """One run."""

    platform: str
    device: str
    device_name: str
    torch: str
    threads: int
    model: str
    dtype: str
    seconds: float = 0.0
    interrupted: bool = False
    """Stopped by the user: what was not measured by then is skipped."""
    decode: list[StepRow] = []
    prefill: list[StepRow] = []
    breaks: list[BreakRow] = []
    retained: list[RetainedRow] = []
    capture: list[CaptureRow] = []
    host: list[HostRow] = []
    scaling: list[ScalingRow] = []
    generate: list[GenerateRow] = []
    skipped: list[Skip] = []

    @property
    def failed(self) -> bool:
        """Whether anything went wrong, a wrong result included."""
        return any(skip.failed for skip in self.skipped)
