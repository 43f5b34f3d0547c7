"""What ``graphplat bench`` shows to people."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from graphplat.cli import render

if TYPE_CHECKING:
    from rich.console import Console

    from graphplat.bench.records import BenchReport, Spread, StepRow


def show(report: BenchReport, console: Console) -> None:
    """Print *report* for people."""

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    say(
        f"{report.model}, {report.dtype}, on {report.device} ({report.device_name}), platform "
        f"{report.platform}, torch {report.torch}, {report.seconds:.0f} s. "
        "Medians ± half the range between quartiles."
    )
    for title, columns, rows in _tables(report):
        listed = list(rows)
        if listed:
            console.print(render.table(title, columns, listed))
    for row in (*report.decode, *report.prefill):
        if row.note:
            say(f"{row.way} at {row.bucket}: {row.note}")
    for skip in report.skipped:
        say(f"{'FAILED' if skip.failed else 'skipped'}: {skip.section}, {skip.what}: {skip.why}")


Rows = Iterable[tuple[object, ...]]


def _tables(report: BenchReport) -> Iterable[tuple[str, tuple[str, ...], Rows]]:
    yield "Decode steps, µs", _STEP_COLUMNS, _steps(report.decode)
    yield "Prefill steps, µs", _STEP_COLUMNS, _steps(report.prefill)
    yield (
        "Host time of a step of five fields, µs",
        ("way", "host", "over bare replay"),
        ((row.way, _spread(row.host_us), f"{row.over_replay_us:.1f}") for row in report.host),
    )
    yield (
        "Host time of breaks, µs",
        ("breaks", "host", "each"),
        ((row.breaks, _spread(row.host_us), _number(row.per_break_us)) for row in report.breaks),
    )
    yield from _cost_tables(report)
    yield (
        "Generation, one prompt at a time",
        ("way", "tokens/s", "warm-up s", "equal tokens"),
        (
            (
                row.way,
                _spread(row.tokens_per_second),
                f"{row.warmup_seconds:.2f}",
                f"{row.same_tokens}/{row.tokens}",
            )
            for row in report.generate
        ),
    )


def _cost_tables(report: BenchReport) -> Iterable[tuple[str, tuple[str, ...], Rows]]:
    yield (
        "Capture of a ladder, warm-up included",
        ("way", "buckets", "seconds", "memory"),
        ((row.way, row.buckets, _spread(row.seconds, 3), render.size(row.bytes)) for row in report.capture),
    )
    yield (
        "Kept by prefill graphs",
        ("way", "buckets", "retained", "graphs"),
        (
            (row.way, row.buckets, render.size(row.retained_bytes), render.size(row.graph_bytes))
            for row in report.retained
        ),
    )
    yield (
        "By number of buckets",
        ("buckets", "capture s", "capture µs each", "host µs of a step", "memory"),
        (
            (
                row.buckets,
                f"{row.capture_seconds:.3f}",
                f"{row.capture_us_per_bucket:.0f}",
                _spread(row.host_us),
                render.size(row.bytes),
            )
            for row in report.scaling
        ),
    )


_STEP_COLUMNS = (
    "size",
    "way",
    "step",
    "host",
    "back to back",
    "tokens/s",
    "warm-up s",
    "capture s",
    "memory",
    "difference",
)


def _steps(rows: Iterable[StepRow]) -> Rows:
    for row in rows:
        yield (
            row.bucket,
            row.way,
            _spread(row.step_us),
            _spread(row.host_us),
            _spread(row.throughput_us),
            _number(row.tokens_per_second),
            _number(row.warmup_seconds, 3),
            _number(row.capture_seconds, 3),
            "-" if row.capture_bytes is None else render.size(row.capture_bytes),
            "equal" if row.difference == 0 else f"{row.difference:.1e}",
        )


def _spread(spread: Spread | None, digits: int = 1) -> str:
    if spread is None:
        return "-"
    return f"{spread.median:.{digits}f} ±{(spread.high - spread.low) / 2:.{digits}f}"


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
