"""Charts of a benchmark. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path

from graphplat.batch import Phase
from graphplat.bench.records import BenchReport
from graphplat.buckets import default_ladder
from graphplat.errors import ConfigError
from graphplat.planner import describe


def padding_by_size(phase: Phase, maximum: int) -> list[tuple[int, float]]:
    """The part of rows that is padding, for each real size, on the default ladder up to *maximum*."""
    ladder = default_ladder(phase, maximum)
    return [(size, describe(ladder, {size: 1}, {1: 0.0}).padding_waste) for size in range(1, maximum + 1)]


def plot(report: BenchReport, path: Path) -> None:
    """Write latency and memory by bucket, and padding by size, to *path*; its suffix names the format.

    Raises :class:`ConfigError` where matplotlib is missing or does not know the format.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            f"matplotlib is missing: {error}", field="plot", hint='Install "graphplat[plot]"'
        ) from error
    figure = Figure(figsize=(15, 4.5), layout="constrained")
    latency, memory, waste = figure.subplots(1, 3)
    for way in dict.fromkeys(row.way for row in report.decode):
        rows = [row for row in report.decode if row.way == way]
        timed = [(row.bucket, row.step_us.median) for row in rows if row.step_us is not None]
        latency.plot(*zip(*timed, strict=True), marker="o", label=way)
        held = [(row.bucket, row.capture_bytes / 2**20) for row in rows if row.capture_bytes is not None]
        if held:
            memory.plot(*zip(*held, strict=True), marker="o", label=way)
    largest = max((row.bucket for row in report.decode), default=128)
    waste.plot(*zip(*padding_by_size(Phase.DECODE, largest), strict=True), drawstyle="steps-mid")
    for axes, title, unit in (
        (latency, "Decode step", "µs"),
        (memory, "Memory added by a capture", "MiB"),
        (waste, "Padding on the default ladder", "part of all rows"),
    ):
        axes.set(title=title, xlabel="requests", ylabel=unit)
    latency.set_yscale("log")
    latency.legend(fontsize="small")
    figure.suptitle(f"{report.model}, {report.dtype}, {report.device_name}")
    try:
        figure.savefig(path)
    except (ValueError, OSError) as error:
        raise ConfigError(f"{path} cannot be written: {error}", field="plot") from error
