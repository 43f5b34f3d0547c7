"""The decode runner: which graph, why none, and that a step gives what the forward gives."""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import gc
import threading
import weakref
from typing import Any

import msgspec
import pytest
import torch

from graphplat import (
    CaptureError,
    Decision,
    ForwardBatch,
    GraphConfig,
    HostSpec,
    InputSpec,
    ModelRunner,
    Phase,
    PhaseConfig,
    Reason,
    TensorSpec,
    UpTo,
    capture_cuda_graphs,
)
from graphplat.errors import HostReadError, InputError, PlatformError, ReplayError

F32, I64 = torch.float32, torch.int64


def double(batch: ForwardBatch) -> Any:
    return batch.inputs["x"] * 2


def test_a_whole_runtime_in_a_few_lines(device: torch.device) -> None:
    """The toy runtime of the documentation: three rows replay the bucket of four."""

    class Toy(ModelRunner):
        def __init__(self, device: torch.device) -> None:
            self.device = torch.device(device)
            self.model = torch.nn.Linear(8, 8, device=device)
            self.graph_config = GraphConfig(decode=PhaseConfig(backend="full", buckets=(1, 2, 4, 8)))

        def input_spec(self, phase: Phase) -> InputSpec:
            return InputSpec(x=TensorSpec(("requests", 8), dtype=torch.float32))

        def forward(self, batch: ForwardBatch) -> Any:
            return self.model(batch.inputs["x"])

    toy = Toy(device)
    capture = capture_cuda_graphs(model_runner=toy)
    x = torch.randn(3, 8)
    batch = ForwardBatch(phase=Phase.DECODE, num_requests=3, num_tokens=3, inputs={"x": x})
    runner = capture.decode.runner
    assert runner is not None
    assert runner.can_run_graph(batch)
    torch.testing.assert_close(runner.execute(batch), toy.model(x.to(device)))
    assert runner.stats.replays == collections.Counter({4: 1})


def test_every_size_gives_the_eager_result(runtime: Any, decode: Any, rows: Any) -> None:
    """
    From an empty batch to one beyond the largest bucket, in any order, with the reason for each eager step.
    """
    toy = runtime(double)
    runner = capture_cuda_graphs(model_runner=toy).decode_runner
    for n in (*range(10), 3, 8, 1, 9, 2, 0):
        x = rows(n)
        assert torch.equal(runner.execute(decode(n, x=x)), x * 2)
    assert runner.buckets == (1, 2, 4, 8)
    assert runner.stats.eager == {Reason.OVER_MAX_BUCKET: 2, Reason.EMPTY_BATCH: 2}
    assert runner.stats.replays == {1: 2, 2: 2, 4: 3, 8: 5}
    assert runner.stats.replayed == 12
    assert runner.stats.ran_eagerly == 4
    sizes = collections.Counter((*range(10), 3, 8, 1, 9, 2, 0))
    assert runner.stats.sizes == sizes, "every step counts, replayed or not"


def test_explain_says_what_execute_then_does(runtime: Any, decode: Any, rows: Any) -> None:
    """The decision of explain equals the one that execute notes in the stats, and changes nothing itself."""
    toy = runtime(double, decode=PhaseConfig(buckets=(2, 4), variants=("a",)))
    runner = capture_cuda_graphs(model_runner=toy).decode_runner
    for n, variant in ((1, None), (3, "a"), (5, None), (2, "b"), (0, None)):
        batch = decode(n, x=rows(n), variant=variant)
        decision = runner.explain(batch)
        steps = sum(runner.stats.sizes.values())
        assert runner.can_run_graph(batch) is decision.is_graph
        assert sum(runner.stats.sizes.values()) == steps
        runner.execute(batch)
        assert runner.stats.last == decision


def test_eager_forward_sees_the_batch_itself(runtime: Any, decode: Any, rows: Any) -> None:
    """An eager step hands the caller's batch to the forward, unpadded."""
    seen = []
    toy = runtime(lambda b: (seen.append(b), b.inputs["x"] * 2)[1], decode=PhaseConfig(buckets=(2,)))
    runner = capture_cuda_graphs(model_runner=toy).decode_runner
    batch = decode(3, x=rows(3))
    runner.execute(batch)
    assert seen[-1] is batch


# Capturing


def test_capture_goes_from_the_largest_bucket_to_the_smallest(runtime: Any) -> None:
    """
    Guards against NVIDIA/TensorRT-LLM#3116, lightseekorg/tokenspeed#1065, vllm-project/vllm#5074 and #9724:
    whatever order the user gave, so that smaller graphs fit into the memory of larger ones.
    """
    toy = runtime(double, decode=PhaseConfig(buckets=(4, 16, 1, 8), variants=("v",)))
    report = capture_cuda_graphs(model_runner=toy).report
    assert [shape.key.size for shape in report.shapes] == [16, 16, 8, 8, 4, 4, 1, 1]


def test_shared_memory_costs_little_more_than_the_largest_bucket(runtime: Any, device: torch.device) -> None:
    """Reserved memory of many buckets stays near that of the largest one alone."""

    def forward(batch: Any) -> Any:
        y = batch.inputs["x"].repeat(1, 4000)
        return ((y + 1) * (y + 2)).sum(dim=1)

    def reserved(*buckets: int) -> int:
        toy = runtime(forward, decode=PhaseConfig(buckets=buckets))
        runner = capture_cuda_graphs(model_runner=toy).decode_runner
        pool = runner.context.pool
        if device.type == "cpu":
            return pool.bytes
        torch.cuda.synchronize()
        segments = torch.cuda.memory_snapshot(pool)
        return sum(segment["total_size"] for segment in segments)

    assert reserved(*range(1, 65)) <= 1.3 * reserved(64)


def test_the_graph_limit_of_a_setting_thins_the_ladder(runtime: Any, decode: Any, rows: Any) -> None:
    """
    Guards against vllm-project/vllm-ascend#1168, #9596, #9564 and #8585: with room for fewer graphs than
    buckets the ladder is thinned evenly, keeps both ends, and the report says so; other sizes use the next
    larger one.
    """
    toy = runtime(double, decode=PhaseConfig(buckets=tuple(range(1, 31)), max_graphs=5))
    capture = capture_cuda_graphs(model_runner=toy)
    runner = capture.decode_runner
    assert len(runner.buckets) == 5
    assert {1, 30} <= set(runner.buckets)
    assert [skip.reason for skip in capture.report.skipped if skip.phase is Phase.DECODE] == [
        Reason.GRAPH_LIMIT
    ]
    for n in (1, 2, 17, 30):
        x = rows(n)
        assert torch.equal(runner.execute(decode(n, x=x)), x * 2)
    assert runner.stats.ran_eagerly == 0


@pytest.mark.parametrize(("limit", "held"), [(1, {None}), (2, {None, "a"}), (3, {None, "a", "b"})])
def test_fewer_graphs_than_families_go_to_the_unnamed_one_first(
    runtime: Any, decode: Any, rows: Any, limit: int, held: set[Any]
) -> None:
    """
    Few graphs for three families hold the largest bucket, of the unnamed variant before the named ones;
    every other step says why it ran eagerly, and none raises.
    """
    toy = runtime(double, decode=PhaseConfig(buckets=(2, 4), variants=("a", "b"), max_graphs=limit))
    capture = capture_cuda_graphs(model_runner=toy)
    runner = capture.decode_runner
    assert runner.buckets == (4,)
    assert Reason.GRAPH_LIMIT in {skip.reason for skip in capture.report.skipped}
    for variant in (None, "a", "b"):
        batch = decode(2, x=rows(2), variant=variant)
        assert runner.explain(batch).reason is (None if variant in held else Reason.GRAPH_LIMIT)
        assert torch.equal(runner.execute(batch), double(batch))
    assert runner.stats.replays == {4: limit}


def test_an_unnamed_batch_comes_before_variants_with_other_inputs(
    runtime: Any, decode: Any, rows: Any
) -> None:
    """Of the combinations of variant and optional inputs, those without a variant are captured first."""
    spec = InputSpec(
        x=TensorSpec(("requests", 3), dtype=F32), bias=TensorSpec(("requests", 3), dtype=F32, optional=True)
    )

    def forward(batch: Any) -> Any:
        bias = batch.inputs.get("bias")
        return batch.inputs["x"] * 2 if bias is None else batch.inputs["x"] * 2 + bias

    config = PhaseConfig(buckets=(4,), variants=("a",), max_graphs=2)
    runner = capture_cuda_graphs(model_runner=runtime(forward, spec, decode=config)).decode_runner
    for inputs in ({"x": rows(3)}, {"x": rows(3), "bias": rows(3)}):
        assert runner.can_run_graph(decode(3, **inputs))
        assert not runner.can_run_graph(decode(3, variant="a", **inputs))


@pytest.mark.parametrize(
    ("path", "change"),
    [
        ("x", lambda inputs: inputs.update(x=inputs["x"].clone())),
        ("x", lambda inputs: inputs.update(x=inputs["x"].to_sparse())),
        ("meta[1]", lambda inputs: inputs["meta"].__setitem__(1, torch.ones_like(inputs["meta"][1]))),
        ("meta[0]", lambda inputs: inputs.pop("meta")),
        ("mode", lambda inputs: inputs.update(mode=3)),
    ],
)
def test_a_preparation_that_replaces_an_input_is_refused(
    runtime: Any, decode: Any, rows: Any, path: str, change: Any
) -> None:
    """A graph would go on reading the other tensor or number, and steps would never reach it."""
    spec = InputSpec(
        x=TensorSpec(("requests", 3), dtype=F32),
        meta=[TensorSpec(("requests",)), TensorSpec(("requests",))],
        mode=HostSpec(values=(2,)),
    )

    def inputs(count: int) -> dict[str, Any]:
        whole = rows(count, width=1, dtype=I64)[:, 0]
        return {"x": rows(count), "meta": [whole, whole], "mode": 2}

    def forward(batch: ForwardBatch) -> Any:
        return batch.inputs["x"].to_dense() * 2 if batch.inputs["x"].is_sparse else batch.inputs["x"] * 2

    def start(prepare: Any, on_failure: str) -> Any:
        toy = runtime(forward, spec, decode=PhaseConfig(buckets=(2,), on_failure=on_failure))
        toy.prepare_capture_batch = lambda batch: prepare(batch.inputs)
        return capture_cuda_graphs(model_runner=toy).decode_runner

    with pytest.raises(CaptureError, match=r"in the place of an input.*in place") as caught:
        start(change, "raise")
    assert caught.value.field == path
    assert caught.value.bucket == 2
    batch = decode(2, **inputs(2))
    runner = start(change, "eager")
    assert torch.equal(runner.execute(batch), batch.inputs["x"] * 2)
    assert runner.stats.eager == {Reason.CAPTURE_FAILED: 1}
    runner = start(lambda inputs: inputs.update(x=inputs["x"].fill_(5).view(-1, 3)), "raise")
    assert torch.equal(runner.execute(batch), batch.inputs["x"] * 2)
    assert runner.stats.replayed == 1


@dataclasses.dataclass(frozen=True)
class Scale:
    """A host constant with a part."""

    by: float


@pytest.mark.parametrize(
    ("captured", "equal"),
    [
        (0.0, -0.0),
        ((2,), (2.0,)),
        ((1, (True,)), (1, (1,))),
        (((0.0,),), ((-0.0,),)),
        (Scale(2), Scale(2.0)),
        (Scale(0.0), Scale(-0.0)),
        (frozenset({2}), frozenset({2.0})),
        (0j, complex(0.0, -0.0)),
    ],
)
def test_an_equal_host_constant_that_is_another_runs_eagerly(
    runtime: Any, decode: Any, rows: Any, captured: Any, equal: Any
) -> None:
    """Python calls them equal; a forward can tell them apart, by type or by the sign of a zero."""
    assert captured == equal
    spec = InputSpec(x=TensorSpec(("requests", 3), dtype=F32), k=HostSpec(values=(captured,)))
    seen: list[Any] = []
    toy = runtime(lambda batch: (seen.append(batch.inputs["k"]), batch.inputs["x"] * 2)[1], spec)
    runner = capture_cuda_graphs(model_runner=toy).decode_runner
    seen.clear()
    runner.execute(decode(2, x=rows(2), k=copy.deepcopy(captured)))
    assert runner.stats.replayed == 1
    runner.execute(decode(2, x=rows(2), k=equal))
    assert runner.stats.eager == {Reason.HOST_VALUE: 1}
    assert [repr(value) for value in seen] == [repr(equal)]


def autocasting(device: torch.device, *, enabled: bool) -> Any:
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=enabled)


@pytest.mark.parametrize("capture", ["startup", "lazy"])
@pytest.mark.parametrize("captured", [False, True])
def test_a_graph_answers_under_the_autocast_it_was_captured_under(
    runtime: Any, decode: Any, rows: Any, device: torch.device, captured: bool, capture: str
) -> None:
    """A step under another one runs eagerly and says so, also where the same size has just replayed."""
    model = torch.nn.Linear(3, 3, device=device)
    config = PhaseConfig(buckets=(2, 4), capture=capture)
    toy = runtime(lambda batch: model(batch.inputs["x"]), model=model, decode=config)
    with autocasting(device, enabled=captured):
        runner = capture_cuda_graphs(model_runner=toy).decode_runner
    for enabled in (captured, captured, not captured, captured, not captured):
        batch = decode(2, x=rows(2))
        with autocasting(device, enabled=enabled), torch.no_grad():
            found, wanted = runner.execute(batch), model(batch.inputs["x"])
            assert runner.can_run_graph(batch) == runner.stats.last.is_graph == (enabled == captured)
        assert found.dtype == wanted.dtype == (torch.bfloat16 if enabled else F32)
        assert torch.equal(found, wanted)
    assert runner.stats.eager == {Reason.HOST_VALUE: 2}
    assert "under autocast" in runner.stats.last.detail


@pytest.mark.parametrize("capture", ["startup", "lazy"])
def test_no_graph_reads_a_weight_that_autocast_cast_for_its_caller(
    runtime: Any, decode: Any, rows: Any, device: torch.device, capture: str
) -> None:
    """Autocast keeps cast weights until its block ends; a graph casts anew, and so follows updates."""
    model = torch.nn.Linear(3, 3, device=device)
    config = PhaseConfig(buckets=(2,), capture=capture)
    toy = runtime(lambda batch: model(batch.inputs["x"]), model=model, decode=config)
    with autocasting(device, enabled=True):
        runner = capture_cuda_graphs(model_runner=toy).decode_runner
        runner.execute(decode(2, x=rows(2)))
        assert torch.is_autocast_cache_enabled()
    for _ in range(2):
        batch = decode(2, x=rows(2))
        with torch.no_grad():
            model.weight.add_(3)
        with autocasting(device, enabled=True), torch.no_grad():
            assert torch.equal(runner.execute(batch), model(batch.inputs["x"]))
    assert runner.stats.replayed == 3


def test_buffers_are_those_of_the_graph_that_execute_replays(runtime: Any, decode: Any, rows: Any) -> None:
    """
    Where a bucket was left out the next larger one lends its inputs, by variant and host constants too; what
    no graph holds is an error that names the captured sizes.
    """
    config = PhaseConfig(buckets=(1, 2, 4, 8), variants=("a",), max_graphs=8)
    spec = InputSpec(x=TensorSpec(("requests", 3), dtype=F32), scale=HostSpec(values=(2, 5)))
    toy = runtime(lambda b: b.inputs["x"] * b.inputs["scale"], spec, decode=config)
    runner = capture_cuda_graphs(model_runner=toy).decode_runner
    assert runner.buckets == (1, 8)
    for variant, scale in ((None, 2), ("a", 5), (None, 5)):
        lent = runner.buffers(3, variant=variant, host={"scale": scale})
        x = rows(3)
        lent["x"].copy_(x)
        batch = decode(3, variant=variant, scale=scale, **lent)
        key = runner.explain(batch).key
        assert key is not None
        assert key.size == 8
        assert lent["x"].data_ptr() == runner.entries[key].inputs.views()["x"].data_ptr()
        assert torch.equal(runner.execute(batch), x * scale)
    assert runner.buffers(3)["x"].shape == (3, 3)
    for size, asked in ((9, {}), (3, {"variant": "b"}), (3, {"present": ["x"]}), (3, {"host": {"scale": 3}})):
        with pytest.raises(ReplayError, match=r"Captured: \[1, 8\]"):
            runner.buffers(size, **asked)
    with pytest.raises(InputError, match=r"no host constants \['scales'\]"):
        runner.buffers(3, host={"scales": 2})


def test_buffers_that_no_graph_has_say_why(runtime: Any) -> None:
    """The reason is that of a step of the same kind; a size that no batch can have is an InputError."""
    spec = InputSpec(
        x=TensorSpec(("requests", 3), dtype=F32), mode=HostSpec(values=(1,)), y=TensorSpec(("requests",))
    )
    config = PhaseConfig(buckets=(2,), variants=("a",))
    runner = capture_cuda_graphs(
        model_runner=runtime(lambda b: b.inputs["x"] * 2, spec, decode=config)
    ).decode_runner
    asked: list[tuple[int, dict[str, Any], str]] = [
        (100, {}, "over_max_bucket, 100 is over 2"),
        (2, {"variant": "q"}, "unknown_variant, 'q'"),
        (2, {"present": ["y"]}, r"optional_inputs, no graphs with \['y'\] present"),
        (2, {"host": {"mode": 2}}, "host_value, mode=2 was not captured"),
        (1, {"requests": 3}, "3 requests are too many"),
    ]
    for size, kind, says in asked:
        with pytest.raises(ReplayError, match=f"size {size}: {says}"):
            runner.buffers(size, **kind)
    for size in (0, -1, "3", 2.0, True, None):
        with pytest.raises(InputError, match="expected a count of 1 or more") as caught:
            runner.buffers(size)  # type: ignore[arg-type]
        assert caught.value.field == "size"
    with pytest.raises(InputError, match="expected a count of 1 or more"):
        runner.buffers(2, requests=0)
    runner.release()
    with pytest.raises(ReplayError, match=r"size 2: released, call recapture\(\)"):
        runner.buffers(2)


def test_a_backend_can_be_driven_by_hand(runtime: Any, rows: Any) -> None:
    """Inside a replay session a captured shape replays from what its static inputs hold."""
    runner = capture_cuda_graphs(model_runner=runtime(double)).decode_runner
    key = next(key for key in runner.entries if key.size == 4)
    x = rows(4)
    with runner.backend.replay_session():
        runner.buffers(4)["x"].copy_(x)
        output = runner.backend.replay(key)
    assert torch.equal(output.head(4, 4), x * 2)


@pytest.mark.filterwarnings("ignore:too little memory")
def test_a_budget_keeps_what_fits_and_reports_the_rest(runtime: Any, decode: Any, rows: Any) -> None:
    """
    Guards against vllm-project/vllm#57475, #57595 and #53013: a graph that exceeds the budget is dropped;
    smaller ones are still tried; the report lists both.
    """
    plain = capture_cuda_graphs(model_runner=runtime(double)).report
    sizes = {shape.key.size: shape.bytes for shape in plain.shapes}
    if not sizes[8] or not sizes[1]:
        pytest.skip("these graphs are too small to be counted on this device")
    config = PhaseConfig(buckets=(1, 2, 4, 8), memory_budget_gb=(sizes[8] - 1) / 2**30)
    capture = capture_cuda_graphs(model_runner=runtime(double, decode=config))
    runner = capture.decode_runner
    assert 8 not in runner.buckets
    assert runner.buckets
    dropped = {skip.key.size for skip in capture.report.skipped if skip.reason is Reason.MEMORY_BUDGET}
    assert dropped == {1, 2, 4, 8} - set(runner.buckets)
    batch = decode(8, x=rows(8))
    assert torch.equal(runner.execute(batch), double(batch))
    assert runner.stats.eager == {Reason.MEMORY_BUDGET: 1}


def test_the_first_lazy_step_is_computed_and_not_only_recorded(runtime: Any, decode: Any, rows: Any) -> None:
    """Guards against isaac-sim/IsaacLab#4829: the call that captures returns this batch's result."""
    toy = runtime(double, decode=PhaseConfig(buckets=(1, 2, 4, 8), capture="lazy"))
    runner = capture_cuda_graphs(model_runner=toy).decode_runner
    assert runner.buckets == ()
    for n in (1, 3, 2, 8, 1, 5):
        x = rows(n)
        assert torch.equal(runner.execute(decode(n, x=x)), x * 2)
    assert runner.buckets == (1, 2, 4, 8)
    assert runner.stats.replayed == 6


def test_lazy_captures_keep_the_most_recent_graphs(runtime: Any, decode: Any, rows: Any) -> None:
    """
    Guards against deepspeedai/DeepSpeed#2572 and #2896: shapes come and go, results are those of eager, at
    most the limit of graphs live, and the one used least recently goes first.
    """
    toy = runtime(double, decode=PhaseConfig(buckets=tuple(range(1, 9)), capture="lazy", max_graphs=3))
    runner = capture_cuda_graphs(model_runner=toy).decode_runner
    for n in (1, 2, 3, 1, 1, 4):  # 2 is the least recent when 4 comes
        x = rows(n)
        assert torch.equal(runner.execute(decode(n, x=x)), x * 2)
    assert runner.buckets == (1, 3, 4)
    for n in torch.randint(1, 9, (100,), generator=torch.Generator().manual_seed(3)).tolist():
        x = rows(n)
        assert torch.equal(runner.execute(decode(n, x=x)), x * 2)
        assert len(runner.buckets) <= 3
        assert runner.context.live_graphs <= 3
    one = runtime(double, decode=PhaseConfig(buckets=(1, 2, 4), capture="lazy", max_graphs=1))
    runner = capture_cuda_graphs(model_runner=one).decode_runner
    for n in (1, 2, 4, 1, 3):
        x = rows(n)
        assert torch.equal(runner.execute(decode(n, x=x)), x * 2)
        assert runner.context.live_graphs == 1


def test_every_bucket_is_warmed_up_with_the_tensors_it_is_captured_with(
    runtime: Any, decode: Any, rows: Any
) -> None:
    """
    Guards against pytorch/pytorch#185074, #131782 and vllm-project/vllm#42241: what compiles, with a host
    read, at each new shape has compiled before any capture.
    """
    compiled: set[tuple[int, ...]] = set()

    def forward(batch: Any) -> Any:
        x = batch.inputs["x"]
        if tuple(x.shape) not in compiled:
            float(x.sum())
            compiled.add(tuple(x.shape))
        return x * 2

    runner = capture_cuda_graphs(model_runner=runtime(forward)).decode_runner
    assert runner.buckets == (1, 2, 4, 8)
    batch = decode(3, x=rows(3))
    assert torch.equal(runner.execute(batch), batch.inputs["x"] * 2)


def test_a_tensor_made_on_first_use_does_not_live_in_a_graph(runtime: Any, decode: Any, rows: Any) -> None:
    """
    Guards against huggingface/transformers#30775 and sgl-project/sglang-omni#579: a table cached by the
    first call stays right for eager steps of other shapes after replays.
    """
    cached: dict[str, torch.Tensor] = {}

    def forward(batch: Any) -> Any:
        x = batch.inputs["x"]
        if "table" not in cached:
            cached["table"] = torch.arange(3, device=x.device) * 1.0
        return (x + cached["table"]) * 2

    runner = capture_cuda_graphs(model_runner=runtime(forward)).decode_runner
    for n in (8, 3, 3, 20, 5, 20):
        x = rows(n)
        assert torch.equal(runner.execute(decode(n, x=x)), (x + torch.arange(3, device=x.device)) * 2)


def test_warm_up_and_capture_run_on_one_stream_and_the_callers_stays_current(
    runtime: Any, device: torch.device
) -> None:
    """
    Guards against vllm-project/vllm#53818: a workspace kept per stream, made in the warm-up, is found in
    the capture.
    """
    if device.type == "cpu":
        pytest.skip("a CPU has no streams")
    spaces: dict[int, torch.Tensor] = {}

    def forward(batch: Any) -> Any:
        stream = torch.cuda.current_stream().cuda_stream
        if torch.cuda.is_current_stream_capturing():
            return batch.inputs["x"] * spaces[stream]
        spaces.setdefault(stream, torch.full((3,), 2.0, device=device))
        return batch.inputs["x"] * spaces[stream]

    before = torch.cuda.current_stream()
    runner = capture_cuda_graphs(model_runner=runtime(forward)).decode_runner
    assert torch.cuda.current_stream() == before
    assert runner.buckets == (1, 2, 4, 8)


def test_capture_only_tensors_live_as_long_as_their_graph_and_nothing_else_is_kept(
    runtime: Any, decode: Any, rows: Any
) -> None:
    """
    Guards against pytorch/pytorch#170646, #174649 and microsoft/onnxruntime#32121: what prepare_capture_batch
    installed is owned; the batch is not retained; without such tensors nothing is.
    """
    batches: list[weakref.ref[Any]] = []

    def prepare(batch: ForwardBatch) -> None:
        batches.append(weakref.ref(batch))
        n = batch.num_requests
        batch.global_num_tokens_gpu = torch.full((4,), 5, device=batch.inputs["x"].device)
        batch.capture_only["extra"] = torch.full((n, 3), 7.0, device=batch.inputs["x"].device)

    def forward(batch: Any) -> Any:
        if batch.global_num_tokens_gpu is None:
            return batch.inputs["x"] * 5 + 7
        return batch.inputs["x"] * batch.global_num_tokens_gpu[0] + batch.capture_only["extra"]

    toy = runtime(forward, prepare_capture_batch=prepare)
    capture = capture_cuda_graphs(model_runner=toy)
    assert batches
    gc.collect()
    assert all(ref() is None for ref in batches)
    assert [shape.retained_bytes for shape in capture.report.shapes] == [32 + n * 12 for n in (8, 4, 2, 1)]
    poison = [torch.full((n, 3), -1.0, device=toy.device) for n in (8, 4, 2, 1, 8, 4)]
    for n in (8, 3, 1, 9):
        x = rows(n)
        assert torch.equal(capture.decode_runner.execute(decode(n, x=x)), x * 5 + 7)
    del poison
    plain = capture_cuda_graphs(model_runner=runtime(double)).report
    assert {shape.retained_bytes for shape in plain.shapes} == {0}


def test_a_callers_batch_is_not_retained(runtime: Any, decode: Any, rows: Any) -> None:
    """No runner keeps a batch it has run alive, replayed or eager."""
    runner = capture_cuda_graphs(model_runner=runtime(double)).decode_runner
    for n in (3, 3, 9):
        batch = decode(n, x=rows(n))
        ref = weakref.ref(batch)
        runner.execute(batch)
        del batch
        assert ref() is None


@pytest.mark.parametrize("capture", ["startup", "lazy"])
def test_a_live_number_that_was_captured_as_another_runs_eagerly(
    runtime: Any, decode: Any, rows: Any, capture: Any
) -> None:
    """
    The number that prepare_capture_batch left is frozen in the graph: a batch that brings another one runs
    eagerly, counted, also at a size replayed before; ``None`` means as captured.
    """

    def prepare(batch: ForwardBatch) -> None:
        batch.global_dp_buffer_len = 2 * batch.num_requests

    def forward(batch: Any) -> Any:
        return batch.inputs["x"] * batch.global_dp_buffer_len

    config = PhaseConfig(buckets=(4, 8), capture=capture)
    toy = runtime(forward, prepare_capture_batch=prepare, decode=config)
    runner = capture_cuda_graphs(model_runner=toy).decode_runner
    for n, length, captured in (
        (3, 16, 8),
        (3, None, 8),
        (4, 8, 8),
        (3, 8, 8),
        (3, 16, 8),
        (3, 8.0, 8),
        (8, 8, 16),
    ):
        x = rows(n)
        batch = decode(n, x=x)
        batch.global_dp_buffer_len = length
        assert torch.equal(runner.execute(batch), x * (length or captured))
        decision = runner.stats.last
        assert decision == runner.explain(batch)
        if length in (None, captured) and type(length) is not float:
            assert decision is not None
            assert decision.is_graph
        else:
            detail = f"global_dp_buffer_len={length} was captured as {captured}"
            assert decision == Decision(reason=Reason.HOST_VALUE, detail=detail)
    assert runner.stats.eager == {Reason.HOST_VALUE: 4}
    assert runner.stats.replays == {4: 3}
    runner.recapture()
    assert torch.equal(runner.execute(batch), x * 8)


def test_a_live_number_where_none_was_captured_runs_eagerly(runtime: Any, decode: Any, rows: Any) -> None:
    """A forward that was captured without it took the other way; larger batches are eager anyhow."""
    toy = runtime(lambda b: b.inputs["x"] * (b.global_dp_buffer_len or 1))
    runner = capture_cuda_graphs(model_runner=toy).decode_runner
    for n in (3, 9, 3):
        for length in (None, 5):
            x = rows(n)
            batch = decode(n, x=x)
            batch.global_dp_buffer_len = length
            assert torch.equal(runner.execute(batch), x * (length or 1))
    assert runner.stats.eager == {Reason.HOST_VALUE: 2, Reason.OVER_MAX_BUCKET: 2}


@pytest.mark.parametrize("field", ["global_num_tokens_gpu", "capture_only.counts"])
@pytest.mark.parametrize("capture", ["startup", "lazy"])
def test_a_live_tensor_that_the_graph_does_not_read_is_an_error(
    runtime: Any, decode: Any, rows: Any, field: str, capture: Any
) -> None:
    """
    The captured tensor itself, or a view of the whole of it, may come with a batch, and what is written
    there shows. Another tensor would be ignored: an InputError names the field and changes nothing.
    """

    def put(batch: ForwardBatch, tensor: Any) -> Any:
        if field == "global_num_tokens_gpu":
            batch.global_num_tokens_gpu = tensor
        else:
            batch.capture_only["counts"] = tensor
        return batch

    def forward(batch: Any) -> Any:
        counts = batch.capture_only.get("counts", batch.global_num_tokens_gpu)
        return batch.inputs["x"] * counts[0]

    config = PhaseConfig(buckets=(4, 8), capture=capture)
    toy = runtime(forward, prepare_capture_batch=lambda batch: put(batch, counts), decode=config)
    counts = torch.tensor([5, 6], device=toy.device)
    runner = capture_cuda_graphs(model_runner=toy).decode_runner
    others = (counts.clone(), counts[:1], counts.view(torch.float64), counts.new_tensor([5]).expand(2))
    for n in (3, 3, 8):
        for other in others:
            bad = put(decode(n, x=rows(n)), other)
            with pytest.raises(InputError, match="in place") as caught:
                runner.execute(bad)
            assert caught.value.field == field
            with pytest.raises(InputError, match="in place"):
                runner.explain(bad)
        x = rows(n)
        for live in (counts, counts.view(2)):
            counts.fill_(n)
            assert torch.equal(runner.execute(put(decode(n, x=x), live)), x * n)
    x = rows(9)
    assert torch.equal(runner.execute(put(decode(9, x=x), others[0])), x * 5)
    assert runner.stats.eager == {Reason.OVER_MAX_BUCKET: 1}
    unknown = put(decode(3, x=rows(3)), counts)
    unknown.capture_only["more"] = counts
    with pytest.raises(InputError, match="Install it in prepare_capture_batch"):
        runner.execute(unknown)


def test_a_refused_host_read_names_its_line_once(runtime: Any) -> None:
    """One place in the message, that of the runtime's own code; what was swallowed is placed too."""

    def forward(batch: Any) -> Any:
        return batch.inputs["x"] * batch.inputs["x"].sum().item()

    def swallowing(batch: Any) -> Any:
        with contextlib.suppress(HostReadError):
            return forward(batch)
        return batch.inputs["x"]

    for function in (forward, swallowing):
        with pytest.raises(CaptureError) as caught:
            capture_cuda_graphs(model_runner=runtime(function))
        assert str(caught.value).count(f"{__file__}:{forward.__code__.co_firstlineno + 1}") == 1


# Keys


@pytest.mark.parametrize("variants", [("a", "b"), ("b", "a")])
def test_variants_of_one_bucket_share_no_state(
    runtime: Any, decode: Any, rows: Any, variants: tuple[str, str]
) -> None:
    """
    Guards against sgl-project/sglang#23727, #23873 and #22809: whatever order variants are captured and
    replayed in, each replays its own graph; an unknown one runs eagerly.
    """
    scale = {None: 1, "a": 2, "b": 3, "c": 4}

    def forward(batch: Any) -> Any:
        return batch.inputs["x"] * scale[batch.variant]

    config = PhaseConfig(buckets=(4, 8), variants=variants)
    runner = capture_cuda_graphs(model_runner=runtime(forward, decode=config)).decode_runner
    for n, variant in ((4, "a"), (4, "b"), (4, "a"), (3, None), (8, "b"), (3, "b"), (2, "c"), (3, "a")):
        batch = decode(n, x=rows(n), variant=variant)
        assert torch.equal(runner.execute(batch), forward(batch))
        key = runner.explain(batch).key
        assert key is None if variant == "c" else key is not None and key.variant == variant
    assert runner.stats.eager == {Reason.UNKNOWN_VARIANT: 1}


def test_several_tokens_per_request(runtime: Any, decode: Any, rows: Any) -> None:
    """
    Guards against vllm-project/vllm-ascend#3909, #3910 and vllm-project/vllm#23679: buckets count requests,
    so any number of tokens per request fits; fields per request and per token are padded and cut by their
    own counts.
    """
    spec = InputSpec(
        x=TensorSpec(("tokens", 3), dtype=F32),
        lengths=TensorSpec(("requests",), fill=1),
        starts=TensorSpec(("requests+1",), fill="last"),
    )

    def forward(batch: Any) -> Any:
        x = batch.inputs["x"]
        per_request = x.view(-1, 3, 3).sum(dim=1) / batch.inputs["lengths"][:, None]
        return {
            "tokens": x * 2,
            "requests": per_request,
            "starts": per_request + batch.inputs["starts"][:-1, None],
        }

    toy = runtime(forward, spec, tokens_per_request=3, decode=PhaseConfig(buckets=(4, 8, 14)))
    runner = capture_cuda_graphs(model_runner=toy).decode_runner
    for n in (2, 14, 3, 8, 1):
        lengths = rows(n, width=1, dtype=I64)[:, 0]
        starts = torch.arange(n + 1, device=lengths.device) * 3
        batch = decode(n, per=3, x=rows(3 * n), lengths=lengths, starts=starts)
        got, wanted = runner.execute(batch), forward(batch)
        assert got["tokens"].shape == (3 * n, 3)
        assert got["requests"].shape == (n, 3)
        assert all(torch.equal(got[name], wanted[name]) for name in wanted)
        key = runner.explain(batch).key
        assert key is not None
        assert key.tokens == 3 * key.size
    assert runner.stats.ran_eagerly == 0


def test_a_host_maximum_is_captured_at_its_worst_and_never_exceeded(
    runtime: Any, decode: Any, rows: Any
) -> None:
    """
    Guards against facebookresearch/xformers#968, vllm-project/vllm#51119 and sgl-project/sglang#28371: a
    replay whose host value exceeds the captured one is no replay; there is never a truncated sum.
    """
    spec = InputSpec(table=TensorSpec(("requests", UpTo(9))), longest=HostSpec(maximum=4))

    def forward(batch: Any) -> Any:
        return batch.inputs["table"][:, : batch.inputs["longest"]].sum(dim=1)

    runner = capture_cuda_graphs(model_runner=runtime(forward, spec)).decode_runner
    for longest in (4, 2, 9, 4):
        table = rows(3, width=longest, dtype=I64)
        batch = decode(3, table=table, longest=longest)
        assert torch.equal(runner.execute(batch), table.sum(dim=1))
        assert runner.can_run_graph(batch) is (longest <= 4)
    assert runner.stats.eager == {Reason.HOST_VALUE: 1}


def test_an_updated_host_value_runs_eagerly_where_graphs_cannot_be_rewritten(
    runtime: Any, decode: Any, rows: Any
) -> None:
    """
    Neither CPU nor CUDA graphs are rewritten after capture: no graph is recorded in vain, and the report
    says why.
    """
    spec = InputSpec(x=TensorSpec(("requests", 3), dtype=F32), lengths=HostSpec(update=True))

    def forward(batch: Any) -> Any:
        return batch.inputs["x"] * sum(batch.inputs["lengths"])

    capture = capture_cuda_graphs(model_runner=runtime(forward, spec))
    runner = capture.decode_runner
    assert capture.report.shapes == ()
    assert Reason.HOST_VALUE in {skip.reason for skip in capture.report.skipped}
    assert capture.decode.runner is None
    batch = decode(3, x=rows(3), lengths=[1, 2, 3])
    assert torch.equal(runner.execute(batch), batch.inputs["x"] * 6)
    assert runner.stats.eager == {Reason.HOST_VALUE: 1}
    with pytest.raises(ReplayError, match="no graph holds 3: this runner has none"):
        runner.buffers(3)
    demanding = runtime(forward, spec)
    demanding.graph_config = msgspec.structs.replace(demanding.graph_config, on_unsupported="raise")
    with pytest.raises(PlatformError, match="cannot rewrite lengths in a graph"):
        capture_cuda_graphs(model_runner=demanding)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # from loading the compiler
@pytest.mark.parametrize("backend", ["full", "breakable", "compiled"])
def test_the_default_device_of_torch_is_of_no_matter(
    runtime: Any, decode: Any, rows: Any, backend: Any
) -> None:
    """Set-up, captures and steps name the device of what they make."""
    toy = runtime(lambda batch: batch.inputs["x"] * 2, decode=PhaseConfig(backend=backend, buckets=(2, 4)))
    x = rows(3)
    with torch.device("meta"):
        runner = capture_cuda_graphs(model_runner=toy).decode_runner
        result = runner.execute(decode(3, x=x))
    assert torch.equal(result, x * 2)
    assert runner.stats.replayed == 1


def test_stages_of_a_pipeline_pass_tensors_on(runtime: Any, decode: Any, rows: Any) -> None:
    """
    Guards against vllm-project/vllm#13353: what a former stage hands over is new tensors at every step, and
    is read anew at every replay.
    """
    first = capture_cuda_graphs(
        model_runner=runtime(lambda b: {"hidden": b.inputs["x"] + 1, "residual": b.inputs["x"] * 2})
    ).decode_runner
    spec = InputSpec(
        stage={
            "hidden": TensorSpec(("requests", 3), dtype=F32),
            "residual": TensorSpec(("requests", 3), dtype=F32),
        }
    )
    second = capture_cuda_graphs(
        model_runner=runtime(lambda b: b.inputs["stage"]["hidden"] * 10 + b.inputs["stage"]["residual"], spec)
    ).decode_runner
    for n in (3, 8, 2, 5, 3):
        x = rows(n)
        passed = first.execute(decode(n, x=x))
        assert torch.equal(second.execute(decode(n, stage=dict(passed))), (x + 1) * 10 + x * 2)
    assert second.stats.replayed == 5


# Release, recapture, threads


def test_released_graphs_run_eagerly_until_recaptured(runtime: Any, decode: Any, rows: Any) -> None:
    """release() gives the memory back and every step says so; recapture() brings the same buckets back."""
    capture = capture_cuda_graphs(model_runner=runtime(double))
    runner = capture.decode_runner
    batch = decode(3, x=rows(3))
    kept = runner.execute(batch)
    for _ in range(3):
        runner.release()
        assert runner.buckets == ()
        assert runner.context.live_graphs == 0
        assert runner.context.shared_output.nbytes == 0
        assert runner.explain(batch).reason is Reason.RELEASED
        assert torch.equal(runner.execute(batch), kept)
        with pytest.raises(ReplayError):
            runner.buffers(3)
        runner.recapture()
        assert runner.buckets == (1, 2, 4, 8)
        assert torch.equal(runner.execute(batch), kept)
    assert runner.stats.eager == {Reason.RELEASED: 3}
    assert len(runner.context.shapes) == 4, "what is noted about graphs goes with them"


def test_two_threads_in_one_runner_never_mix(runtime: Any, device: torch.device, decode: Any) -> None:
    """Steps of several threads are serialized: each gets the result of its own batch, replayed or eager."""

    def forward(batch: Any) -> Any:
        y = batch.inputs["x"]
        for _ in range(20):
            y = y + 1
        return y

    config = PhaseConfig(buckets=(4, 8))
    runner = capture_cuda_graphs(model_runner=runtime(forward, decode=config)).decode_runner
    wrong: list[Any] = []
    start = threading.Barrier(3, timeout=60)

    def work(offset: int) -> None:
        try:
            start.wait()
            for step in range(60):
                n = (offset + step) % 9 + 1
                x = torch.full((n, 3), float(1000 * offset + step), device=device)
                if not torch.equal(runner.execute(decode(n, x=x)), x + 20):
                    wrong.append((offset, step))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(offset,), daemon=True) for offset in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive()
    assert wrong == []
    assert sum(runner.stats.sizes.values()) == 180


def test_two_runners_work_in_two_threads_also_while_one_captures(
    runtime: Any, decode: Any, device: torch.device
) -> None:
    """Runners of different runtimes share nothing: one replays while the other captures lazily."""
    failed: list[BaseException] = []
    start = threading.Barrier(2, timeout=60)

    def work(factor: int) -> None:
        try:
            toy = runtime(
                lambda b: b.inputs["x"] * factor, decode=PhaseConfig(buckets=(1, 2, 4, 8), capture="lazy")
            )
            runner = capture_cuda_graphs(model_runner=toy).decode_runner
            start.wait()
            for step in range(24):
                n = step % 8 + 1
                x = torch.full((n, 3), float(step), device=device)
                assert torch.equal(runner.execute(decode(n, x=x)), x * factor)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(factor,), daemon=True) for factor in (2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive()
    assert failed == []


def test_a_step_that_fails_eagerly_leaves_the_runner_usable(runtime: Any, decode: Any, rows: Any) -> None:
    """An error of the model's own passes through unchanged; the next step is right."""

    def forward(batch: Any) -> Any:
        if batch.num_requests == 9:
            raise ZeroDivisionError("mine")
        return batch.inputs["x"] * 2

    runner = capture_cuda_graphs(model_runner=runtime(forward)).decode_runner
    with pytest.raises(ZeroDivisionError, match="mine"):
        runner.execute(decode(9, x=rows(9)))
    batch = decode(3, x=rows(3))
    assert torch.equal(runner.execute(batch), double(batch))


def test_forward_sees_the_worst_case_in_its_dummy_batches(runtime: Any) -> None:
    """Every batch before serving has the bucket's counts, its variant, the fills and the largest widths."""
    seen: list[ForwardBatch] = []
    spec = InputSpec(x=TensorSpec(("requests", UpTo(5)), fill=3), longest=HostSpec(maximum=9))

    def forward(batch: Any) -> Any:
        seen.append(batch)
        return batch.inputs["x"] * 2

    capture_cuda_graphs(
        model_runner=runtime(forward, spec, decode=PhaseConfig(buckets=(4,), variants=("v",)))
    )
    assert {batch.variant for batch in seen} == {None, "v"}
    for batch in seen:
        assert batch.inputs["x"].shape == (batch.num_requests, 5)
        assert batch.inputs["longest"] == 9
        assert batch.num_tokens == batch.num_requests <= 4


def test_a_capture_that_cannot_be_prepared_is_a_capture_error(runtime: Any) -> None:
    """What prepare_capture_batch raises is chained, and names the bucket."""

    def prepare(batch: ForwardBatch) -> None:
        if batch.num_requests == 2:
            raise OSError("no such thing")

    toy = runtime(double, prepare_capture_batch=prepare, decode=PhaseConfig(buckets=(2, 8)))
    with pytest.raises(CaptureError, match="no such thing") as caught:
        capture_cuda_graphs(model_runner=toy)
    assert isinstance(caught.value.__cause__, OSError)
