"""The benchmark: its structure, its checks, and what it says of what it leaves out. No times are judged."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
import torch

from graphplat.batch import Phase
from graphplat.bench.decode import Steps
from graphplat.bench.fields import FiveFields
from graphplat.bench.measure import Clock, Effort, Way
from graphplat.bench.plot import padding_by_size
from graphplat.bench.records import BenchReport, Spread
from graphplat.bench.run import SECTIONS, Bench
from graphplat.errors import ConfigError
from graphplat.registry import platform_for

pytest.importorskip("typer")
from typer.testing import CliRunner

from graphplat.cli.bench import sizes_of
from graphplat.cli.main import app


def bench(**settings: Any) -> BenchReport:
    """A run on the tiny shape, without the compiler."""
    usual: dict[str, Any] = {
        "model": "tiny",
        "buckets": (1, 3),
        "prefill_buckets": (8, 16),
        "max_len": 32,
        "budget": 0.01,
        "new_tokens": 4,
        "compiler": False,
    }
    torch.set_num_threads(1)
    return Bench(**usual | settings).run()


@pytest.fixture(scope="module")
def steps() -> BenchReport:
    """Decode and prefill, measured once."""
    return bench(sections=("decode", "prefill"))


def test_every_way_is_timed_at_every_size(steps: BenchReport) -> None:
    """Eager, the bare graph, and graphplat's backends stand side by side, with medians and spread."""
    ways = {"eager", "bare graph", "graphplat full", "graphplat breakable"}
    assert {(row.bucket, row.way) for row in steps.decode} == {(size, way) for size in (1, 3) for way in ways}
    assert {(row.bucket, row.way) for row in steps.prefill} == {
        (size, way) for size in (8, 16) for way in ways
    }
    for row in steps.decode + steps.prefill:
        assert row.step_us is not None
        assert 0 < row.step_us.low <= row.step_us.median <= row.step_us.high
        assert row.step_us.samples >= 3
        assert row.tokens_per_second is not None
    assert not steps.failed


def test_replays_of_the_eager_kernels_are_equal(steps: BenchReport) -> None:
    """Decode graphs differ from eager by nothing at all."""
    assert {row.difference for row in steps.decode} == {0.0}


def test_graphs_tell_what_they_cost(steps: BenchReport) -> None:
    """Seconds and bytes of a capture stand with every graph."""
    for row in steps.decode:
        if row.way != "eager":
            assert row.capture_seconds is not None
            assert row.capture_bytes is not None


def test_what_is_left_out_is_named(steps: BenchReport) -> None:
    """The compiler's ways, which were not asked for, and a function that the device does not have."""
    why = {(skip.section, skip.what): skip.why for skip in steps.skipped}
    assert "as asked" in why["decode", "torch.compile"]
    assert "as asked" in why["decode", "graphplat compiled"]
    assert "no such function" in why["decode", "make_graphed_callables"]


def test_prefill_retains_capture_only_tensors_alone(steps: BenchReport) -> None:
    """Nothing without them; with them eight counts of eight bytes for each bucket; a whole batch is more."""
    whole, only, none = (row.retained_bytes for row in steps.retained)
    buckets = steps.retained[0].buckets
    assert none == 0
    assert only == buckets * 8 * 8
    assert whole > only


def test_host_scaling_and_capture_have_a_row_for_each_way() -> None:
    """Host time over a bare replay, costs by number of buckets, and a ladder captured in each way."""
    report = bench(sections=("host", "capture", "scaling"))
    assert [row.way for row in report.host][:2] == ["bare replay", "runner's own buffers"]
    assert len(report.host) == 6
    assert report.host[0].over_replay_us == 0
    assert [row.buckets for row in report.scaling] == [1, 8, 64, 512]
    assert {row.buckets for row in report.capture} == {1, 3}
    assert not report.failed


def test_generation_compares_tokens() -> None:
    """Each way generates as many tokens, and says how many agree with the dynamic cache's."""
    pytest.importorskip("transformers")
    report = bench(sections=("hf",))
    ways = {row.way: row for row in report.generate}
    assert {"generate(), dynamic cache", "graphplat full"} <= ways.keys()
    assert all((row.same_tokens, row.tokens) == (4, 4) for row in report.generate)


def test_a_wrong_result_is_reported_and_not_timed() -> None:
    """A way that computes something else fails the run and gets no times."""
    report = bench(sections=())
    clock = Clock(platform_for("cpu"), torch.device("cpu"))
    right = torch.ones(2, 3)
    ways = [Way("eager", lambda index: right), Way("liar", lambda index: right * 1.5)]

    class Subject:
        pass

    subject = Subject()
    subject.clock = clock  # type: ignore[attr-defined]
    section = Steps(subject, report, "decode", 0.01)  # type: ignore[arg-type]
    batch = next(iter([type("Batch", (), {"num_tokens": 2})()]))
    rows = {row.way: row for row in section._measured(ways, 2, [batch])}
    assert rows["eager"].step_us is not None
    assert rows["liar"].step_us is None
    assert rows["liar"].difference == 0.5
    assert report.failed
    assert report.skipped[-1].what == "liar at 2"


def test_a_section_that_breaks_leaves_the_others(monkeypatch) -> None:
    """The failure is in the report, and what comes after it is measured."""
    monkeypatch.setattr(FiveFields, "forward", lambda self, batch: 1 / 0)
    report = bench(sections=("host", "capture"))
    assert report.capture
    (failure,) = [skip for skip in report.skipped if skip.failed]
    assert failure.section == "host"
    assert "ZeroDivisionError" in failure.why


def test_no_time_skips_everything_and_says_so() -> None:
    """With the time limit passed, each section is named."""
    report = bench(time_limit=0.0)
    assert [skip.section for skip in report.skipped] == list(SECTIONS)
    assert not report.failed


def test_unknown_sections_and_models_are_refused() -> None:
    """Nothing runs, and the error lists what there is."""
    with pytest.raises(ConfigError, match="capture, prefill"):
        bench(sections=("decode", "prefil"))
    with pytest.raises(ConfigError, match="neither a shape nor a folder"):
        bench(model="no-such-model")


def test_the_compiler_is_skipped_when_time_is_short() -> None:
    """What it would need, and what is left, are named."""
    report = bench(sections=())
    subject = type("Subject", (), {"clock": Clock(platform_for("cpu"), torch.device("cpu"), deadline=0.0)})()
    section = Steps(subject, report, "decode", 0.01)  # type: ignore[arg-type]
    assert section._is_late("torch.compile", 45.0)
    assert report.skipped[-1].why == "about 45 s needed, 0 s left"


def test_effort_follows_the_time_of_a_step() -> None:
    """Quick steps are repeated often, slow ones at least a little."""
    assert Effort.within(1e-4, 1.0) == Effort(9, 10, 20)
    assert Effort.within(10.0, 1.0) == Effort(3, 1, 2)


def test_a_spread_is_a_median_between_quartiles() -> None:
    """Of one value, that value."""
    assert Spread.of([3.0]) == Spread(median=3.0, low=3.0, high=3.0, samples=1)
    assert Spread.of([1.0, 2.0, 3.0, 4.0, 5.0]) == Spread(median=3.0, low=2.0, high=4.0, samples=5)


def test_ways_take_turns_and_fresh_inputs() -> None:
    """No way gets the same inputs twice in a row, and each begins a round."""
    seen: dict[str, list[int]] = {"a": [], "b": []}
    ways = [Way(name, seen[name].append) for name in seen]
    Clock(platform_for("cpu"), torch.device("cpu")).steps(ways, Effort(2, 3, 4))
    for indices in seen.values():
        assert len(indices) == 2 * (3 + 4)
        assert all(a != b for a, b in itertools.pairwise(indices[:3]))


def test_padding_is_that_of_the_default_ladder() -> None:
    """None at a bucket, the most just above one."""
    waste = dict(padding_by_size(Phase.DECODE, 16))
    assert waste[8] == 0
    assert waste[9] == pytest.approx(1 - 9 / 16)


def test_command_prints_tables() -> None:
    """People get a table for each section, and a line for whatever was skipped."""
    arguments = ["bench", "--model", "tiny", "--sections", "capture,prefill"]
    sizes = ["--buckets", "1,2", "--prefill-buckets", "8", "--max-len", "16", "--budget", "0.01"]
    result = CliRunner().invoke(app, arguments + sizes)
    assert result.exit_code == 0, result.output
    for words in ("Capture of a ladder", "Prefill steps", "Kept by prefill graphs", "skipped: capture"):
        assert words in result.stdout


def test_command_prints_one_json_document(tmp_path) -> None:
    """The same document on the terminal and in the file."""
    target = tmp_path / "bench.json"
    arguments = ["bench", "--model", "tiny", "--sections", "host", "--buckets", "1", "--max-len", "16"]
    result = CliRunner().invoke(app, [*arguments, "--json", "--output", str(target)])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == json.loads(target.read_text())


def test_command_says_that_matplotlib_is_missing(monkeypatch, tmp_path) -> None:
    """Before anything is measured, with what to install."""
    monkeypatch.setattr("importlib.util.find_spec", _without_matplotlib)
    result = CliRunner().invoke(app, ["bench", "--plot", str(tmp_path / "plot.png")])
    assert isinstance(result.exception, ConfigError)
    assert "graphplat[plot]" in str(result.exception)


def test_charts_are_written(steps: BenchReport, tmp_path) -> None:
    """Latency, memory and padding in one file."""
    pytest.importorskip("matplotlib")
    from graphplat.bench.plot import plot

    plot(steps, tmp_path / "bench.svg")
    assert (tmp_path / "bench.svg").stat().st_size > 1000


def test_sizes_are_read_from_a_list() -> None:
    """Sorted and unique; anything else is refused by name."""
    assert sizes_of("8,1,8", "buckets") == (1, 8)
    for bad in ("1,x", "0", ""):
        with pytest.raises(ConfigError, match="buckets"):
            sizes_of(bad, "buckets")


@pytest.mark.cuda
def test_gpu_ways_stand_side_by_side() -> None:
    """On a GPU the functions of its torch module are measured too."""
    report = bench(device="cuda", sections=("host", "capture", "decode"))
    assert "make_graphed_callables" in {row.way for row in report.decode}
    assert "torch graph(), own pools, two warm-ups each" in {row.way for row in report.capture}
    assert not report.failed


def _find_spec() -> Any:
    import importlib.util

    return importlib.util.find_spec


_real_find_spec = _find_spec()


def _without_matplotlib(name: str, *rest: Any) -> Any:
    return None if name == "matplotlib" else _real_find_spec(name, *rest)
