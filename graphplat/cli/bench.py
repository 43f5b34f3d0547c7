"""``graphplat bench``: steps, captures and memory against baselines, side by side."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from graphplat.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from graphplat.bench.records import BenchReport, Spread, StepRow
    from graphplat.bench.run import Bench

Precision = Literal["float32", "bfloat16", "float16"]

_FILE_WIDTH = 160
"""Columns where no terminal says otherwise."""


_Model = Annotated[
    str, typer.Option(help="A shape (135M, 8B, tiny) with random weights, or a Hugging Face folder.")
]
_Device = Annotated[str, typer.Option(help="Torch device to measure.")]
_Dtype = Annotated[Precision | None, typer.Option(help="By default float32 on cpu, else bfloat16.")]
_Sections = Annotated[
    str | None,
    typer.Option(
        help="Of host, scaling, capture, decode, prefill, hf, which run in this order; all by default."
    ),
]
_Buckets = Annotated[str, typer.Option(help="Decode sizes.")]
_PrefillBuckets = Annotated[str, typer.Option(help="Prefill sizes, in tokens.")]
_MaxLen = Annotated[int, typer.Option(min=16, help="Tokens that the cache holds for a request.")]
_TimeLimit = Annotated[
    float,
    typer.Option(
        help="Seconds; what does not fit is skipped. The compiler leaves a tenth for each later section."
    ),
]
_Budget = Annotated[float, typer.Option(help="Seconds of measuring for each way and size.")]
_NewTokens = Annotated[int, typer.Option(min=1, help="Tokens to generate in section hf.")]
_Compiler = Annotated[bool, typer.Option(help="Measure what needs the compiler: minutes for 135M.")]
_Each = Annotated[bool, typer.Option("--each", help="Also measure kernels for each size alone.")]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
_Output = Annotated[Path | None, typer.Option(help="Write the JSON document here too.")]
_Plot = Annotated[Path | None, typer.Option(help="Write charts here; needs matplotlib.")]


def command(
    *,
    model: _Model = "135M",
    device: _Device = "cpu",
    dtype: _Dtype = None,
    sections: _Sections = None,
    buckets: _Buckets = "1,8,64",
    prefill_buckets: _PrefillBuckets = "128,512",
    max_len: _MaxLen = 2048,
    time_limit: _TimeLimit = 540.0,
    budget: _Budget = 2.0,
    new_tokens: _NewTokens = 128,
    compiler: _Compiler = True,
    each: _Each = False,
    json: _Json = False,
    output: _Output = None,
    plot: _Plot = None,
) -> None:
    """Measure steps, captures and memory against baselines.

    All ways run in one process on one device, in turn, with fresh inputs; results are
    compared with eager before anything is timed. Says what it skipped and why. Fails if
    a result is wrong. The JSON has the quartiles beside each median.
    """
    from graphplat.bench.run import SECTIONS, Bench

    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("matplotlib is not installed", field="plot", hint='Install "graphplat[plot]"')
    bench = Bench(
        device=device,
        model=model,
        dtype=dtype or ("float32" if device == "cpu" else "bfloat16"),
        sections=SECTIONS if sections is None else [name.strip() for name in sections.split(",")],
        buckets=sizes_of(buckets, "buckets"),
        prefill_buckets=sizes_of(prefill_buckets, "prefill_buckets"),
        max_len=max_len,
        time_limit=time_limit,
        budget=budget,
        new_tokens=new_tokens,
        compiler=compiler,
        each=each,
    )
    _run(bench, json=json, output=output, plot=plot)


def _run(bench: Bench, *, json: bool, output: Path | None, plot: Path | None) -> None:
    """Run, and give the report wherever it is wanted."""
    from rich.console import Console

    from graphplat.cli import render

    console, notes = Console(quiet=json), Console(stderr=True, quiet=json)
    if not console.is_terminal:
        console = Console(quiet=json, width=_FILE_WIDTH)
    bench.say = lambda text: notes.print(text, markup=False, highlight=False, soft_wrap=True)
    report = bench.run()
    if json:
        render.print_json(report)
    show(report, console)
    if output is not None:
        _write(report, output)
    if plot is not None:
        from graphplat.bench.plot import plot as draw

        draw(report, plot)
    if report.failed:
        raise typer.Exit(1)


def sizes_of(text: str, field: str) -> tuple[int, ...]:
    """Sizes in a list with commas. Raises :class:`ConfigError`."""
    try:
        sizes = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError as error:
        raise ConfigError(f"{text!r} is no list of sizes", field=field) from error
    if sizes[0] < 1:
        raise ConfigError(f"{sizes[0]} is no size", field=field)
    return sizes


def show(report: BenchReport, console: Console) -> None:
    """Print *report* for people."""
    from graphplat.cli import render

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
        "Generation, one prompt",
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
    from graphplat.cli import render

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
    from graphplat.cli import render

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


def _write(report: Any, path: Path) -> None:
    import msgspec

    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2))
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}", field="output") from error
