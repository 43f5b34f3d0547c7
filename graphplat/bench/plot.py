"""Charts of a benchmark. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from graphplat.batch import Phase
from graphplat.bench.records import BenchReport, StepRow
from graphplat.buckets import default_ladder
from graphplat.errors import ConfigError
from graphplat.planner import describe

_UNITS = {Phase.DECODE: "requests", Phase.PREFILL: "tokens"}


def padding_by_size(phase: Phase, maximum: int) -> list[tuple[int, float]]:
    """The part of rows that is padding, for each real size, on the default ladder up to *maximum*."""
    ladder = default_ladder(phase, maximum)
    return [(size, describe(ladder, {size: 1}, {1: 0.0}).padding_waste) for size in range(1, maximum + 1)]


def check_plot(sections: Sequence[str], path: Path) -> None:
    """Raise :class:`ConfigError` if charts of these *sections* cannot be written to *path*.

    For no section has steps, matplotlib is missing or does not know the format, or there is no such folder.
    """
    if not set(sections) & set(Phase):
        raise ConfigError(
            "nothing to plot", field="plot", hint="Charts are of the sections decode and prefill: add one"
        )
    _figure_class()
    from matplotlib.backend_bases import FigureCanvasBase

    formats = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix.removeprefix(".").lower() not in formats:
        raise ConfigError(
            f"{path} has no suffix of a known format", field="plot", hint=f"Use one of {', '.join(formats)}"
        )


def plot(report: BenchReport, path: Path) -> None:
    """Write latency and memory by bucket, and padding by size, to *path*; its suffix names the format.

    A line of panels for each phase that has steps. Raises :class:`ConfigError` where none has, matplotlib is
    missing or does not know the format, or *path* cannot be written.
    """
    phases = {Phase.DECODE: report.decode, Phase.PREFILL: report.prefill}
    phases = {phase: rows for phase, rows in phases.items() if rows}
    if not phases:
        raise ConfigError("nothing to plot: no steps were measured", field="plot")
    figure = _figure_class()(figsize=(15, 4.5 * len(phases)), layout="constrained")
    ways = dict.fromkeys(row.way for rows in phases.values() for row in rows)
    colours = {way: f"C{index}" for index, way in enumerate(ways)}
    panels = figure.subplots(len(phases), 3, squeeze=False)
    for (phase, rows), line in zip(phases.items(), panels, strict=True):
        _draw(phase, rows, line, colours)
    figure.suptitle(f"{report.model}, {report.dtype}, {report.device_name}")
    try:
        figure.savefig(path)
    except (ValueError, OSError) as error:
        raise ConfigError(f"{path} cannot be written: {error}", field="plot") from error


def _figure_class() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            f"matplotlib is missing: {error}", field="plot", hint='Install "graphplat[plot]"'
        ) from error
    return Figure


def _draw(phase: Phase, rows: Sequence[StepRow], panels: Any, colours: Mapping[str, str]) -> None:
    """One line of panels; a way has the same colour in each."""
    latency, memory, waste = panels
    for way in dict.fromkeys(row.way for row in rows):
        own = [row for row in rows if row.way == way]
        timed = [(row.bucket, row.step_us.median) for row in own if row.step_us is not None]
        held = [(row.bucket, row.capture_bytes / 2**20) for row in own if row.capture_bytes is not None]
        for axes, points in ((latency, timed), (memory, held)):
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", label=way, color=colours[way])
    largest = max(row.bucket for row in rows)
    waste.plot(*zip(*padding_by_size(phase, largest), strict=True), drawstyle="steps-mid")
    for axes, title, unit in (
        (latency, f"{phase} step".capitalize(), "µs"),
        (memory, "Memory added by a capture", "MiB"),
        (waste, "Padding on the default ladder", "part of all rows"),
    ):
        axes.set(title=title, xlabel=_UNITS[phase], ylabel=unit)
    if latency.lines:
        latency.set_yscale("log")
        latency.legend(fontsize="small")
