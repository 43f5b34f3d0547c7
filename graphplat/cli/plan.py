"""``graphplat plan``: which sizes to capture, from the batches that were seen."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import typer

from graphplat.batch import Phase
from graphplat.buckets import default_ladder, thin
from graphplat.errors import ConfigError
from graphplat.planner import BucketLimit, BucketPlan, describe, plan_buckets


class PlanReport(msgspec.Struct, frozen=True, kw_only=True):
    """A planned ladder beside the default one."""

    phase: Phase
    limit: BucketLimit
    plan: BucketPlan
    default: BucketPlan
    """The default ladder up to the largest candidate, thinned to the limit of graphs as it would be when
    captured; times between known sizes are interpolated."""
    saving: float
    """The part of the default ladder's expected time that the plan spares."""


def command(
    *,
    histogram: Annotated[
        Path, typer.Argument(help='Steps by size as JSON, {"3": 120}: what runner.stats.sizes counts.')
    ],
    times: Annotated[
        Path,
        typer.Argument(help='Time by bucket as JSON, {"4": 2.2} or {"4": {"time": 2.2, "bytes": 100}}.'),
    ],
    limit: Annotated[int | None, typer.Option(min=1, help="Most buckets.")] = None,
    memory_mib: Annotated[
        float | None,
        typer.Option(min=0, help="Most memory of all buckets; needs the bytes of each one alone."),
    ] = None,
    phase: Annotated[
        Literal["decode", "prefill"],
        typer.Option(help="Whose default ladder, and whose steps of a benchmark."),
    ] = "decode",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Plan which sizes to capture from observed batches.

    Prints the ladder of least expected time within the limits, its padding, and
    what it saves over the default ladder with as many buckets at most. The JSON of
    "graphplat bench" also serves as times, without bytes. Only sizes that have a time
    can get a bucket; without limits every one of them may.
    """
    from graphplat.cli import render

    step_times, memory = read_times(times, Phase(phase))
    if memory_mib is not None and memory is None:
        raise ConfigError(
            f"{times} does not say how many bytes each bucket takes alone",
            field="memory_mib",
            hint='Give each bucket as {"4": {"time": 2.2, "bytes": 100}}. In the JSON of "graphplat bench" '
            "graphs share a pool, so that the bytes of one depend on the others",
        )
    bound = BucketLimit(graphs=limit, bytes=None if memory_mib is None else int(memory_mib * 2**20))
    report = make_report(read_histogram(histogram), step_times, memory, bound, Phase(phase))
    if json:
        render.print_json(report)
    else:
        show(report)


def make_report(
    histogram: dict[int, int],
    step_times: dict[int, float],
    memory: dict[int, int] | None,
    limit: BucketLimit,
    phase: Phase,
) -> PlanReport:
    """Plan, and compare with the default ladder. Raises :class:`ConfigError`."""
    plan = plan_buckets(histogram, step_times, memory, limit)
    ladder = default_ladder(phase, max(step_times))
    if limit.graphs is not None:
        ladder = thin(ladder, limit.graphs)
    default = describe(ladder, histogram, step_times, memory)
    saving = 1 - plan.expected_time / default.expected_time if default.expected_time else 0.0
    return PlanReport(phase=phase, limit=limit, plan=plan, default=default, saving=saving)


def show(report: PlanReport) -> None:
    """Print *report* for people."""
    from rich.console import Console

    from graphplat.cli import render

    rows = [
        (name, len(plan.buckets), f"{plan.expected_time:.4g}", f"{plan.padding_waste:.1%}", plan.uncovered)
        for name, plan in (("planned", report.plan), ("default", report.default))
    ]
    console = Console()
    columns = ("ladder", "buckets", "expected time", "padding", "eager steps")
    console.print(render.table(f"Buckets for {report.phase}", columns, rows))
    ladder = ", ".join(map(str, report.plan.buckets)) or "none: no observed size fits a candidate"
    over = f"Saving over the default ladder: {report.saving:.1%}"
    if report.limit.bytes is not None:
        over += ", which is not held to the limit of memory"
    for line in (f"Capture: {ladder}", over):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


class _Cost(msgspec.Struct):
    time: float
    bytes: int | None = None


def read_histogram(path: Path) -> dict[int, int]:
    """Steps by size. Raises :class:`ConfigError`."""
    found: dict[int, int] = _decode(path, dict[int, int])
    return found


def read_times(path: Path, phase: Phase) -> tuple[dict[int, float], dict[int, int] | None]:
    """Times and, if every size has them, bytes by bucket.

    Of a benchmark's JSON the steps of *phase* are read. Raises :class:`ConfigError`.
    """
    document = _decode(path, dict[str, Any])
    if any(isinstance(document.get(section), list) for section in Phase):
        document = _from_bench(document, path, phase)
    try:
        costs = msgspec.convert(
            {size: cost if isinstance(cost, dict) else {"time": cost} for size, cost in document.items()},
            dict[int, _Cost],
            strict=False,
        )
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}", field="times") from error
    times = {size: cost.time for size, cost in costs.items()}
    known = {size: cost.bytes for size, cost in costs.items() if cost.bytes is not None}
    return times, known if known.keys() == times.keys() else None


def _from_bench(document: dict[str, Any], path: Path, phase: Phase) -> dict[str, Any]:
    """Times of the ``full`` backend in a benchmark's JSON."""
    try:
        times = {
            str(row["bucket"]): row["step_us"]["median"]
            for row in document.get(phase) or ()
            if row["way"] == "graphplat full" and row["step_us"] is not None
        }
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no result of graphplat bench: {error!r}", field="times") from error
    if not times:
        # Not the file that was read, which may hold the other section's times.
        output = path.with_name(f"{path.stem}-{phase}.json")
        command = ["graphplat", "bench", "--sections", phase, "--output", str(output)]
        for name in ("model", "device", "dtype"):
            if name in document:
                command += [f"--{name}", str(document[name])]
        raise ConfigError(
            f"{path} has no timed steps of graphplat full: its section {phase} is missing or was skipped",
            field="times",
            phase=phase,
            hint=f"Run: {shlex.join(command)}",
        )
    return times


def _decode(path: Path, kind: Any) -> Any:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind, strict=False)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: {error}") from error
