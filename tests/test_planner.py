"""The bucket planner: exact, within its limits, and honest about what to expect."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphplat import plan_buckets
from graphplat.errors import ConfigError
from graphplat.planner import BucketLimit, describe, interpolated

typer = pytest.importorskip("typer")
from typer.testing import CliRunner  # noqa: E402

from graphplat.cli.main import app  # noqa: E402

SIZES = st.integers(1, 12)


@st.composite
def problems(draw: st.DrawFn) -> tuple[dict[int, int], dict[int, float], dict[int, int], BucketLimit]:
    """Any histogram, any times (a larger bucket may be faster), any bytes, any limits."""
    histogram = draw(st.dictionaries(SIZES, st.integers(0, 50), max_size=8))
    times = draw(st.dictionaries(SIZES, st.integers(0, 30).map(float), min_size=1, max_size=8))
    memory = {size: draw(st.integers(0, 20)) for size in times}
    limit = BucketLimit(
        graphs=draw(st.none() | st.integers(1, 5)), bytes=draw(st.none() | st.integers(0, 60))
    )
    return histogram, times, memory, limit


def ladders(
    histogram: dict[int, int], times: dict[int, float], memory: dict[int, int], limit: BucketLimit
) -> Iterator[tuple[int, ...]]:
    """Every ladder within the limits that holds what the largest candidate could hold."""
    held = [size for size, count in histogram.items() if count and size <= max(times)]
    for count in range(len(times) + 1):
        for ladder in itertools.combinations(sorted(times), count):
            within = limit.graphs is None or count <= limit.graphs
            within &= limit.bytes is None or sum(memory[size] for size in ladder) <= limit.bytes
            if within and all(ladder and size <= ladder[-1] for size in held):
                yield ladder


def total(ladder: tuple[int, ...], histogram: dict[int, int], times: dict[int, float]) -> float:
    return sum(
        count * times[min(bucket for bucket in ladder if bucket >= size)]
        for size, count in histogram.items()
        if ladder and size <= ladder[-1]
    )


@given(problems())
def test_no_other_ladder_is_better(problem) -> None:
    """The plan has the least expected time of all ladders within the limits, or there is none."""
    histogram, times, memory, limit = problem
    allowed = list(ladders(*problem))
    if not allowed:
        with pytest.raises(ConfigError, match="no ladder"):
            plan_buckets(histogram, times, memory, limit)
        return
    plan = plan_buckets(histogram, times, memory, limit)
    assert plan.buckets in allowed
    best = min(total(ladder, histogram, times) for ladder in allowed)
    assert total(plan.buckets, histogram, times) == pytest.approx(best)
    assert plan.expected_time * plan.steps == pytest.approx(best)


@given(problems())
def test_no_equal_ladder_is_smaller(problem) -> None:
    """Among ladders of the least time none has fewer graphs."""
    histogram, times, _, limit = problem
    allowed = list(ladders(*problem))
    if not allowed:
        return
    plan = plan_buckets(histogram, times, problem[2], limit)
    best = total(plan.buckets, histogram, times)
    equal = [ladder for ladder in allowed if total(ladder, histogram, times) == pytest.approx(best)]
    assert len(plan.buckets) == min(map(len, equal))


@given(problems())
def test_every_step_is_accounted_for(problem) -> None:
    """Steps that the ladder holds and steps that run eagerly add up to those observed."""
    histogram, times, _, _ = problem
    plan = plan_buckets(histogram, times, None, len(times))
    assert plan.steps + plan.uncovered == sum(histogram.values())
    assert plan.uncovered == sum(count for size, count in histogram.items() if size > max(times))


def test_one_bucket_is_the_largest_needed() -> None:
    """With a limit of one the bucket holds every observed size and is no larger than that."""
    plan = plan_buckets({1: 10, 3: 5, 6: 1}, {1: 1.0, 4: 2.0, 8: 3.0, 16: 9.0}, None, 1)
    assert plan.buckets == (8,)
    assert plan.expected_time == 3.0


def test_padding_is_a_part_of_the_rows_computed() -> None:
    """Three rows in a bucket of four: a quarter is padding."""
    assert plan_buckets({3: 7}, {4: 1.0}, None, 4).padding_waste == pytest.approx(0.25)


def test_memory_buys_what_saves_most() -> None:
    """Of two small buckets, only one of which fits beside the largest, the more useful one stays."""
    times = {1: 1.0, 4: 2.0, 8: 8.0}
    memory = {1: 10, 4: 10, 8: 100}
    plan = plan_buckets({1: 1, 4: 50, 8: 1}, times, memory, BucketLimit(bytes=110))
    assert plan.buckets == (4, 8)
    assert plan.bytes == 110


def test_large_ladders_are_planned_at_once() -> None:
    """256 candidates and a limit of 16 need no patience."""
    times = {size: 100.0 + size for size in range(1, 257)}
    plan = plan_buckets({size: 1 + size % 7 for size in range(1, 257)}, times, None, 16)
    assert len(plan.buckets) == 16
    assert plan.buckets[-1] == 256


def test_times_between_known_sizes_are_interpolated() -> None:
    """On the line between neighbours, and flat beyond the ends."""
    assert interpolated({2: 10.0, 4: 20.0}, 3) == 15.0
    assert interpolated({2: 10.0, 4: 20.0}, 1) == 10.0
    assert interpolated({2: 10.0, 4: 20.0}, 9) == 20.0


def test_nothing_observed_needs_no_bucket() -> None:
    """An empty histogram plans nothing."""
    assert plan_buckets({}, {4: 1.0}, None, 4) == describe((), {}, {4: 1.0})


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (({1: 1}, {}, None, 1), "no candidate"),
        (({0: 1}, {1: 1.0}, None, 1), "size 0"),
        (({1: -1}, {1: 1.0}, None, 1), "-1 for size 1"),
        (({1: 1}, {1: float("nan")}, None, 1), "nan"),
        (({1: 1}, {1: 1.0}, None, 0), "limit of 0"),
        (({1: 1}, {1: 1.0}, None, BucketLimit(bytes=1)), "needs the bytes"),
        (({1: 1}, {1: 1.0, 2: 1.0}, {1: 1}, BucketLimit(bytes=1)), r"sizes \[2\]"),
    ],
)
def test_what_cannot_be_is_refused(arguments, word: str) -> None:
    """Bad numbers are named, not planned with."""
    with pytest.raises(ConfigError, match=word):
        plan_buckets(*arguments)


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    (tmp_path / "sizes.json").write_text(json.dumps({"3": 90, "17": 10}))
    costs = {str(size): {"time": 1.0 + size, "bytes": size * 2**20} for size in (1, 3, 4, 17, 24, 32)}
    (tmp_path / "times.json").write_text(json.dumps(costs))
    return str(tmp_path / "sizes.json"), str(tmp_path / "times.json")


def test_command_prints_ladder_and_saving(files) -> None:
    """People see the ladder, its padding and what it saves over the default one."""
    result = CliRunner().invoke(app, ["plan", *files, "--limit", "2"])
    assert result.exit_code == 0, result.output
    assert "Capture: 3, 17" in result.output
    assert "Saving over the default ladder: 83.6%" in result.output


def test_command_prints_one_json_document(files) -> None:
    """With --json the whole report is one document."""
    result = CliRunner().invoke(app, ["plan", *files, "--memory-mib", "17", "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.output)
    assert report["plan"]["buckets"] == [17]
    assert report["default"]["buckets"] == [1, 2, 4, 8, 16, 24, 32]


def test_command_reads_the_benchmark(files, tmp_path: Path) -> None:
    """Steps measured by ``graphplat bench`` serve as times."""
    rows = [
        {"way": way, "bucket": size, "step_us": {"median": time, "low": 0, "high": 0}}
        for way, size, time in (("graphplat full", 4, 5.0), ("graphplat full", 32, 9.0), ("eager", 4, 1.0))
    ]
    rows.append({"way": "graphplat full", "bucket": 64, "step_us": None})
    (tmp_path / "bench.json").write_text(json.dumps({"decode": rows}))
    result = CliRunner().invoke(app, ["plan", files[0], str(tmp_path / "bench.json"), "--json"])
    assert json.loads(result.output)["plan"]["buckets"] == [4, 32]


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_command_says_what_a_benchmark_lacks(files, tmp_path: Path, phase: str) -> None:
    """
    Without timed steps of the phase, the file, the section and the command that measures it are named. The
    command writes to another file, so that the times of the other phase stay.
    """
    other = {"decode": "prefill", "prefill": "decode"}[phase]
    row = {"way": "graphplat full", "bucket": 32, "step_us": {"median": 9.0, "low": 0, "high": 0}}
    untimed = {"way": "graphplat full", "bucket": 32, "step_us": None}
    path = tmp_path / "bench.json"
    path.write_text(
        json.dumps({"model": "tiny", "device": "cpu", "dtype": "float32", other: [row], phase: [untimed]})
    )
    result = CliRunner().invoke(app, ["plan", files[0], str(path), "--phase", phase])
    assert isinstance(result.exception, ConfigError)
    message = str(result.exception)
    assert f"{path} has no timed steps" in message
    assert f"its section {phase} is missing" in message
    output = tmp_path / f"bench-{phase}.json"
    assert f"graphplat bench --sections {phase} --output {output} --model tiny --device cpu" in message
    result = CliRunner().invoke(app, ["plan", files[0], str(path), "--phase", other, "--json"])
    assert json.loads(result.output)["plan"]["buckets"] == [32]


def test_command_names_a_bad_file(files, tmp_path: Path) -> None:
    """A file that holds something else is an error that names it."""
    bad = tmp_path / "bad.json"
    bad.write_text('{"x": []}')
    result = CliRunner().invoke(app, ["plan", files[0], str(bad)])
    assert isinstance(result.exception, ConfigError)
    assert "bad.json" in str(result.exception)


def test_the_default_ladder_is_thinned_to_the_limit(files) -> None:
    """A plan of two buckets is compared with two, which is what a limit of graphs would leave of it."""
    result = CliRunner().invoke(app, ["plan", *files, "--limit", "2", "--json"])
    report = json.loads(result.output)
    assert report["default"]["buckets"] == [1, 32]
    assert report["saving"] > 0


@given(problems())
def test_no_plan_is_worse_than_the_default_ladder(problem) -> None:
    """Where all sizes of the thinned default ladder are candidates, the plan never loses to it."""
    from graphplat.batch import Phase
    from graphplat.cli.plan import make_report

    histogram, _, _, limit = problem
    times = {size: float(size) for size in range(1, 13)}
    report = make_report(histogram, times, None, BucketLimit(graphs=limit.graphs), Phase.DECODE)
    assert report.saving >= -1e-9


def test_a_limit_of_memory_needs_bytes(files, tmp_path: Path) -> None:
    """Times without bytes, a benchmark's too, are refused with the form that has them."""
    rows = [{"way": "graphplat full", "bucket": 32, "step_us": {"median": 9.0}, "capture_bytes": 5}]
    for name, document in (("bench", {"decode": rows}), ("times", {"32": 9.0})):
        path = tmp_path / f"{name}-only.json"
        path.write_text(json.dumps(document))
        result = CliRunner().invoke(app, ["plan", files[0], str(path), "--memory-mib", "1"])
        assert isinstance(result.exception, ConfigError)
        assert '{"4": {"time": 2.2, "bytes": 100}}' in str(result.exception)
        assert "memory_mib" in str(result.exception)
