"""The benchmark: its structure, its checks, and what it says of what it leaves out. No times are judged."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graphplat import capture
from graphplat.batch import Phase
from graphplat.bench import decode, host, measure, retained, subject
from graphplat.bench.decode import COMPILED, Steps
from graphplat.bench.fields import FiveFields
from graphplat.bench.floor import Floor
from graphplat.bench.hand import Hand
from graphplat.bench.measure import Clock, Effort, Schedule, Way
from graphplat.bench.plot import padding_by_size
from graphplat.bench.records import BenchReport, Skip, Spread
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
    for way in (*COMPILED, "graphplat compiled", "graphplat compiled, each size"):
        assert "as asked" in why["decode", way]
        assert "section decode" in why["prefill", way]
    assert "no such function" in why["decode", "make_graphed_callables"]


def test_nothing_is_skipped_without_a_reason() -> None:
    """A report cannot hold a skip that does not say why."""
    with pytest.raises(ValueError, match="no reason"):
        Skip(section="decode", what="something", why="")


def test_prefill_sizes_beyond_the_cache_are_named() -> None:
    """They are left out, with what the cache holds; with no other size the section does nothing more."""
    report = bench(sections=("prefill",), prefill_buckets=(64, 128))
    why = {skip.what: skip.why for skip in report.skipped}
    assert {what: "holds 32 tokens" in why[what] for what in ("steps of 64", "steps of 128")} == {
        "steps of 64": True,
        "steps of 128": True,
    }
    assert not report.prefill
    assert not report.failed


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
    assert [row.way for row in report.host][6:] == [
        "by hand: five copies",
        "by hand: one grouped copy",
        "by hand: packed host batch",
    ]
    assert report.host[0].over_replay_us == 0
    assert [row.buckets for row in report.scaling] == [1, 8, 64, 512]
    ladders = {row.way: row.buckets for row in report.capture}
    assert ladders["graphplat full"] == ladders["by hand, one pool, largest warmed up"] == 3
    assert ladders["by hand, the largest alone"] == ladders["graphplat full, the largest prefill alone"] == 1
    assert ladders["graphplat full, prefill too"] > 3
    assert not report.failed


def test_generation_compares_tokens() -> None:
    """Each way answers the same four prompts, and says how many tokens agree with the dynamic cache's."""
    pytest.importorskip("transformers")
    report = bench(sections=("hf",))
    ways = {row.way: row for row in report.generate}
    names = list(ways)
    assert names[0] == "generate(), dynamic cache"
    place = names.index("graphplat full")
    assert names[place : place + 2] == ["graphplat full", "graphplat full, fused norms"]
    assert all((row.same_tokens, row.tokens) == (16, 16) for row in report.generate)


def test_the_way_with_fused_norms_leaves_the_others_theirs(monkeypatch) -> None:
    """It runs on a copy of the model that shares the weights, so no other way gets its norms."""
    transformers = pytest.importorskip("transformers")
    from graphplat.integrations import transformers as integration

    models = []

    class Noting(integration.CausalLMRunner):
        def __init__(self, model: Any, **settings: Any) -> None:
            super().__init__(model, **settings)
            models.append((settings["fused_norms"], model))

    monkeypatch.setattr(integration, "CausalLMRunner", Noting)
    bench(sections=("hf",))
    (plain,) = [model for fused, model in models if not fused]
    (fused,) = [model for fused, model in models if fused]
    assert isinstance(plain.model.norm, transformers.models.llama.modeling_llama.LlamaRMSNorm)
    assert isinstance(fused.model.norm, torch.nn.RMSNorm)
    assert all(a is b for a, b in zip(plain.parameters(), fused.parameters(), strict=True))


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


@pytest.mark.parametrize("exact", [True, False])
def test_a_row_that_is_off_by_an_eighth_is_timed_only_where_kernels_differ(exact: bool) -> None:
    """In bfloat16 that is within what other kernels may differ by; the same kernels must be equal."""
    report = bench(sections=())
    right = torch.ones(4, 3, dtype=torch.bfloat16)
    wrong = right.clone()
    wrong[2] *= 1.125
    ways = [Way("eager", lambda index: right), Way("off", lambda index: wrong, exact=exact)]
    section = Steps(SimpleNamespace(clock=clock()), report, "decode", 0.01)  # type: ignore[arg-type]
    rows = {row.way: row for row in section._measured(ways, 4, [SimpleNamespace(num_tokens=4)])}  # type: ignore[list-item]
    assert rows["off"].difference == 0.125
    assert (rows["off"].step_us is None) is exact
    assert [(skip.what, skip.failed) for skip in report.skipped] == [("off at 4", True)] * exact
    assert report.failed is exact


def test_ways_that_run_the_eager_kernels_have_to_be_equal(monkeypatch) -> None:
    """All in decode; in prefill breakable graphs, as whole ones attend by a mask over packed tokens."""
    monkeypatch.setattr(decode, "worst_difference", lambda way, expected: 0.125 * (way.name != "eager"))
    report = bench(sections=("decode", "prefill"), dtype="bfloat16", buckets=(2,), prefill_buckets=(8,))
    failed = {(skip.section, skip.what) for skip in report.skipped if skip.failed}
    assert failed == {
        ("decode", "bare graph at 2"),
        ("decode", "graphplat full at 2"),
        ("decode", "graphplat breakable at 2"),
        ("prefill", "graphplat breakable at 8"),
    }
    timed = {row.way for row in report.prefill if row.step_us is not None}
    assert timed == {"eager", "bare graph", "graphplat full"}


@pytest.fixture
def made(monkeypatch) -> SimpleNamespace:
    """Whatever the benchmark captures from now on, through graphplat and by hand."""
    noted = SimpleNamespace(captures=[], hands=[])
    honest, by_hand = capture.capture_cuda_graphs, Hand.capture

    def capturing(**settings: Any) -> Any:
        noted.captures.append(honest(**settings))
        return noted.captures[-1]

    def capturing_by_hand(self: Hand, *arguments: Any, **settings: Any) -> Any:
        noted.hands.append(self)
        return by_hand(self, *arguments, **settings)

    for module in (capture, host, retained, subject):
        monkeypatch.setattr(module, "capture_cuda_graphs", capturing)
    monkeypatch.setattr(Hand, "capture", capturing_by_hand)
    return noted


BREAKS = [
    ("host", "measure.Clock.host", True),
    ("scaling", "measure.Clock.seconds", False),
    ("scaling", "measure.Clock.host", False),
    ("capture", "measure.Clock.seconds", True),
    ("capture", "capturing.CaptureRow", True),
    ("decode", "measure.Clock.seconds", True),
    ("decode", "measure.Clock.steps", True),
    ("prefill", "measure.Clock.host", False),
    ("prefill", "measure.Clock.steps", True),
    ("prefill", "retained.RetainedRow", True),
    ("hf", "generate.Generation._measure", False),
]


@pytest.mark.parametrize(("section", "where", "by_hand"), BREAKS)
def test_a_section_that_breaks_leaves_no_graph(
    monkeypatch, made, section: str, where: str, by_hand: bool
) -> None:
    """What it had captured is destroyed, through graphplat or by hand, so that its memory is free again."""
    if section == "hf":
        pytest.importorskip("transformers")

    def breaking(*arguments: Any, **settings: Any) -> None:
        for argument in arguments:
            if callable(argument):
                argument()
        raise RuntimeError("broken")

    monkeypatch.setattr(f"graphplat.bench.{where}", breaking)
    report = bench(sections=(section,))
    assert [(skip.section, skip.why) for skip in report.skipped if skip.failed] == [
        (section, "RuntimeError: broken")
    ]
    assert made.captures
    assert bool(made.hands) is by_hand
    assert [capture.eager_runner.context.live_graphs for capture in made.captures] == [0] * len(made.captures)
    assert not [hand for hand in made.hands if hand.graphs]


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
    with pytest.raises(ConfigError, match="decode, prefill, hf"):
        bench(sections=("decode", "prefil"))
    with pytest.raises(ConfigError, match="neither a shape nor a folder"):
        bench(model="no-such-model")


def test_the_compiler_is_skipped_when_time_is_short(monkeypatch) -> None:
    """What it would need, what is left, and what is kept for later sections are named."""
    for later in ("prefill", "hf"):
        monkeypatch.setattr(Bench, f"_{later}", lambda self, measured: None)
    report = bench(sections=("decode", "prefill", "hf"), compiler=True, time_limit=35.0)
    why = {skip.what: skip.why for skip in report.skipped}
    for way in COMPILED:
        assert why[way].startswith("about 30 s needed, ")
        assert why[way].endswith(" s left, of which 7 s are kept for later sections")
    assert why["graphplat compiled"].startswith("about 60 s needed, ")


def test_time_is_kept_for_later_sections_that_were_asked_for() -> None:
    """A tenth of the limit for each, and none for sections that run before or were not asked for."""
    assert Bench(time_limit=100.0)._reserve("decode") == pytest.approx(20.0)
    assert Bench(time_limit=100.0, sections=("decode", "hf"))._reserve("decode") == pytest.approx(10.0)
    assert Bench(time_limit=100.0, sections=("host", "decode"))._reserve("decode") == 0


def test_decode_steps_come_before_what_may_be_cut_short() -> None:
    """In whatever order sections were asked for, decode runs before prefill."""
    said: list[str] = []
    bench(sections=("prefill", "host", "decode"), say=said.append)
    assert [line.partition(":")[0] for line in said] == ["host", "decode", "prefill"]


class Ticking:
    """Ways on a clock of their own: each step takes the seconds that it is said to take.

    A step after one of another way takes *cold* seconds more.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cold: float = 0.0) -> None:
        self.now = 0.0
        self.cold = cold
        self.ran: list[tuple[str, int]] = []
        self.spent: dict[str, float] = {}
        monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def way(self, name: str, seconds: float) -> Way:
        def step(index: int) -> None:
            cold = self.cold if self.ran and self.ran[-1][0] != name else 0.0
            self.now += seconds + cold
            self.spent[name] = self.spent.get(name, 0.0) + seconds
            self.ran.append((name, index))

        return Way(name, step)


STEPS = {"eager": 10e-3, "graph": 2e-3, "tiny": 2e-5}


def clock() -> Clock:
    return Clock(platform_for("cpu"), torch.device("cpu"))


@pytest.mark.parametrize("budget", [0.1, 0.5, 3.0])
def test_each_way_gets_the_steps_that_its_own_time_affords(monkeypatch, budget: float) -> None:
    """No way runs longer than the budget, and the slowest one does not take steps from the others."""
    ticking = Ticking(monkeypatch)
    schedule = Schedule.within(STEPS, budget)
    clock().steps([ticking.way(name, seconds) for name, seconds in STEPS.items()], schedule)
    assert all(spent <= budget + 1e-9 for spent in ticking.spent.values())
    assert sum(ticking.spent.values()) == pytest.approx(schedule.seconds)
    eager, graph, tiny = (schedule.efforts[name] for name in STEPS)
    assert eager.block < graph.block <= tiny.block
    assert tiny == Effort(10, 50)


@pytest.mark.parametrize("milliseconds", [0.01, 0.3, 2.0, 4.0, 4.9])
def test_quick_steps_run_in_long_blocks(milliseconds: float) -> None:
    """Twenty steps at least, so that the launch of the first one hardly counts."""
    schedule = Schedule.within({"eager": 10e-3, "graph": milliseconds / 1e3}, 0.5)
    assert 20 <= schedule.efforts["graph"].block <= 50
    assert schedule.efforts["graph"].steps >= 3


def test_slow_steps_are_measured_at_least_a_little() -> None:
    """Three rounds of one step alone and two in a row, whatever that takes."""
    schedule = Schedule.within({"slow": 10.0}, 1.0)
    assert schedule == Schedule(3, {"slow": Effort(1, 2)}, 90.0)


def test_the_first_step_of_a_turn_is_not_recorded(monkeypatch) -> None:
    """Where a way runs three or more steps a round, the one that finds cold caches does not count."""
    ticking = Ticking(monkeypatch, cold=1.0)
    ways = [ticking.way(name, 0.5) for name in ("warm", "cold")]
    schedule = Schedule(4, {"warm": Effort(3, 2), "cold": Effort(2, 2)}, 0.0)
    found = clock().steps(ways, schedule)
    assert found["warm"].step == found["warm"].host == Spread(median=5e5, low=5e5, high=5e5, samples=8)
    assert found["warm"].throughput == Spread(median=5e5, low=5e5, high=5e5, samples=4)
    assert found["cold"].step.samples == 8
    assert found["cold"].step.high > 5e5


def test_steps_that_do_not_fit_are_skipped() -> None:
    """Where even the fewest steps would take longer than what is left, nothing is timed, and why is said."""
    report = bench(sections=())
    now = measure.time.perf_counter()
    subject = SimpleNamespace(clock=Clock(platform_for("cpu"), torch.device("cpu"), now + 0.15))

    def step(index: int) -> torch.Tensor:
        measure.time.sleep(0.03 if index == 0 else 0.0)
        return torch.ones(2, 3)

    section = Steps(subject, report, "decode", 0.01)  # type: ignore[arg-type]
    assert list(section._measured([Way("eager", step)], 2, [SimpleNamespace(num_tokens=2)])) == []  # type: ignore[list-item]
    assert report.skipped[-1].what == "steps of 2"
    assert report.skipped[-1].why.startswith("about ")


def test_a_spread_is_a_median_between_quartiles() -> None:
    """Of one value, that value."""
    assert Spread.of([3.0]) == Spread(median=3.0, low=3.0, high=3.0, samples=1)
    assert Spread.of([1.0, 2.0, 3.0, 4.0, 5.0]) == Spread(median=3.0, low=2.0, high=4.0, samples=5)


def test_ways_take_turns_and_fresh_inputs(monkeypatch) -> None:
    """Each way begins a round in its turn, and no step gets the inputs of the one before it."""
    ticking = Ticking(monkeypatch)
    ways = [ticking.way(name, 1.0) for name in ("a", "b", "c")]
    clock().steps(ways, Schedule(3, dict.fromkeys("abc", Effort(3, 4)), 0.0))
    order = [name for name, _ in itertools.groupby(name for name, _ in ticking.ran)]
    assert "".join(order) == "abcbcacab"
    assert len(ticking.ran) == 3 * 3 * (3 + 4)
    assert all(one != two for (_, one), (_, two) in itertools.pairwise(ticking.ran))


def test_host_times_take_turns(monkeypatch) -> None:
    """Blocks of short steps begin with another way each time, too, after five steps that do not count."""
    ticking = Ticking(monkeypatch, cold=1.0)
    found = clock().host([ticking.way(name, 1.0) for name in ("a", "b", "c")], blocks=3, size=2)
    blocks = [(name, len(list(group))) for name, group in itertools.groupby(name for name, _ in ticking.ran)]
    assert blocks == [(name, 5 + 2) for name in "abcbcacab"]
    assert {spread.median for spread in found.values()} == {1e6}


def test_steps_by_hand_are_compared_too(monkeypatch) -> None:
    """A floor that computes something else fails the section."""
    monkeypatch.setattr(Floor, "_grouped", lambda self, batches: lambda index: self.output)
    report = bench(sections=("host",))
    assert not report.host
    assert "by hand: one grouped copy: results differ" in report.skipped[-1].why


PINNED = """
import msgspec, torch
from graphplat.bench.fields import FiveFields, column_batch
from graphplat.bench.floor import Floor
from graphplat.bench.measure import Clock
from graphplat.config import GraphConfig
from graphplat.registry import platform_for
from graphplat.testing.simulated import install_simulated

sim = install_simulated("musa")
base = type(platform_for("musa"))

class Pinned(base):
    name = "pinned"
    capabilities = msgspec.structs.replace(base.capabilities, pinned_memory=True)

clock = Clock(Pinned(), torch.device("musa:0"))
with torch.inference_mode():
    runtime = FiveFields(clock.device, GraphConfig())
    floor = Floor.capture(clock, runtime, 13, 16)
    host, device = ([column_batch(13, where, seed) for seed in range(8)] for where in ("cpu", clock.device))
    wanted = [runtime.forward(batch).cpu() for batch in device]
    sim.set_deferred(True)
    for way in floor.ways(device, host):
        results = [way.step(index).clone() for index in range(8)]
        assert all(torch.equal(a.cpu(), b) for a, b in zip(results, wanted, strict=True)), way.name
    sim.set_deferred(False)
    floor.release()
print("right")
"""


def test_steps_by_hand_are_right_on_a_device_that_lags() -> None:
    """Pinned bytes are written again only after the device has read them."""
    done = subprocess.run([sys.executable, "-c", PINNED], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "right", done.stderr


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
    document = json.loads(result.stdout)
    assert document == json.loads(target.read_text())
    assert {"median", "low", "high", "samples"} == document["host"][0]["host_us"].keys()


def test_command_says_that_matplotlib_is_missing(monkeypatch, tmp_path) -> None:
    """Before anything is measured, with what to install."""
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(Bench, "run", lambda self: pytest.fail("something was measured"))
    result = CliRunner().invoke(app, ["bench", "--plot", str(tmp_path / "plot.png")])
    assert isinstance(result.exception, ConfigError)
    assert "graphplat[plot]" in str(result.exception)


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
