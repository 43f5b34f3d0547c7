"""``graphplat bench``: steps, captures and memory against baselines, side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from graphplat.cli.files import check_file, write_json
from graphplat.errors import ConfigError

if TYPE_CHECKING:
    from graphplat.bench.records import BenchReport
    from graphplat.bench.run import Bench

Precision = Literal["float32", "bfloat16", "float16"]

_FILE_WIDTH = 160
"""Columns where no terminal says otherwise."""

_INTERRUPTED = 130
"""The status of a command that the user stopped."""

_Model = Annotated[
    str, typer.Option(help="A shape (135M, 8B, tiny) with random weights, or a Hugging Face folder.")
]
_Device = Annotated[str, typer.Option(help="Torch device to measure: TYPE or TYPE:INDEX.")]
_Dtype = Annotated[Precision | None, typer.Option(help="By default float32 on cpu, else bfloat16.")]
_Sections = Annotated[
    str | None,
    typer.Option(
        help="Of host, scaling, capture, decode, prefill, hf, separated by commas; all by default. "
        "They run in this order."
    ),
]
_Buckets = Annotated[str, typer.Option(help="Decode sizes, separated by commas.")]
_PrefillBuckets = Annotated[str, typer.Option(help="Prefill sizes in tokens, separated by commas.")]
_MaxLen = Annotated[int, typer.Option(min=16, help="Tokens that the cache holds for a request.")]
_TimeLimit = Annotated[
    float,
    typer.Option(
        min=1,
        help="Seconds; what does not fit is skipped. The compiler leaves a tenth for each later section.",
    ),
]
_Budget = Annotated[float, typer.Option(min=0.001, help="Seconds of measuring for each way and size.")]
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

    All ways run in one process on one device, in turn, with fresh inputs. Before a way
    is timed its results are compared: steps with eager ones, section hf with the
    dynamic cache. Says what it skipped and why. Fails if a result is wrong, or if a way
    that is there goes wrong. The JSON has the quartiles beside each median.
    """
    from graphplat.bench.run import SECTIONS, Bench

    wanted = SECTIONS if sections is None else [name.strip() for name in sections.split(",")]
    _check_files(wanted, output, plot)
    bench = Bench(
        device=device,
        model=model,
        dtype=dtype,
        sections=wanted,
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


def _check_files(sections: Sequence[str], output: Path | None, plot: Path | None) -> None:
    """Raise :class:`ConfigError` for what could not be written once all is measured."""
    if output is not None:
        check_file(output, "output")
    if plot is not None:
        from graphplat.bench.plot import check_plot

        check_plot(sections, plot)
        check_file(plot, "plot")


def _run(bench: Bench, *, json: bool, output: Path | None, plot: Path | None) -> None:
    """Run, and give the report wherever it is wanted."""
    from rich.console import Console

    from graphplat.cli import render
    from graphplat.cli.bench_tables import show

    console, notes = Console(quiet=json), Console(stderr=True, quiet=json)
    if not console.is_terminal:
        console = Console(quiet=json, width=_FILE_WIDTH)
    bench.say = lambda text: notes.print(text, markup=False, highlight=False, soft_wrap=True)
    bench.watch = lambda: render.capture_bar(notes, transient=True)
    report = bench.run()
    if json:
        render.print_json(report)
    show(report, console)
    _save(report, output, plot)
    if report.interrupted:
        raise typer.Exit(_INTERRUPTED)
    if report.failed:
        raise typer.Exit(1)


def _save(report: BenchReport, output: Path | None, plot: Path | None) -> None:
    """Write what is wanted; one that cannot be written does not keep the other from it."""
    from graphplat.bench.plot import plot as draw

    wanted: list[tuple[Path, Callable[[BenchReport, Path], None]]] = []
    if output is not None:
        wanted.append((output, write_json))
    if plot is not None and (report.decode or report.prefill or not report.interrupted):
        wanted.append((plot, draw))
    errors = []
    for path, write in wanted:
        try:
            write(report, path)
        except ConfigError as error:
            errors.append(error)
    if errors:
        raise ConfigError("; ".join(map(str, errors))) from errors[0]


def sizes_of(text: str, field: str) -> tuple[int, ...]:
    """Sizes in a list with commas. Raises :class:`ConfigError`."""
    try:
        sizes = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError as error:
        raise ConfigError(f"{text!r} is no list of sizes", field=field) from error
    if sizes[0] < 1:
        raise ConfigError(f"{sizes[0]} is no size", field=field)
    return sizes
