"""Outputs: cut to real rows, intact after later steps, never in memory that belongs to someone else."""

from __future__ import annotations

import dataclasses
import functools
import gc
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from graphplat import (
    CaptureError,
    ForwardBatch,
    InputSpec,
    Phase,
    PhaseConfig,
    Reason,
    TensorSpec,
    capture_cuda_graphs,
    platform_for,
)
from graphplat.output_layout import OutputLayout
from graphplat.outputs import GraphSharedOutput

F32, I64 = torch.float32, torch.int64


class Named(NamedTuple):
    y: Any
    z: Any


@dataclasses.dataclass
class Result:
    y: Any
    parts: Any
    nothing: Any = None
    label: str = "same"


def structured(batch: Any) -> Any:
    x = batch.inputs["x"]
    return Result(
        x * 2, {"a": [x + 1, (x[:, 0],)], "named": Named(x.t() * 3, x.sum(dim=1, dtype=torch.float64))}
    )


def same(got: Any, wanted: Any) -> bool:
    """Equal leaves in equal structures."""
    from graphplat import tree

    mine, theirs = dict(tree.walk(got)), dict(tree.walk(wanted))
    return mine.keys() == theirs.keys() and all(
        torch.equal(mine[path], leaf) if isinstance(leaf, torch.Tensor) else mine[path] == leaf
        for path, leaf in theirs.items()
    )


# Which axis counts rows


def test_the_row_axis_is_the_one_that_follows_the_batch() -> None:
    """A feature axis that happens to have a batch's size is told apart by the other run."""
    runs = [((3, 6), {"a": torch.zeros(3, 3), "t": torch.zeros(2, 6), "k": torch.zeros(3)}) for _ in range(1)]
    runs += [((2, 4), {"a": torch.zeros(2, 3), "t": torch.zeros(2, 4), "k": torch.zeros(3)})]
    assert OutputLayout.infer(runs).axes == {"a": (0, "requests"), "t": (1, "tokens")}


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda n: torch.zeros(n + 1), "has shapes"),
        (lambda n: torch.zeros(n * 8), "has shapes"),
        (lambda n: torch.zeros(n, n), "has shapes"),
        (lambda n: torch.zeros((1,) * n), "has shapes"),
        (lambda n: {"y": torch.zeros(n), "count": n}, "output count depends on the batch size"),
        (lambda n: {"y": None if n > 2 else torch.zeros(n)}, "output y depends"),
        (lambda n: [torch.zeros(n)] * n, "depend on the batch size"),
        (lambda n: {f"k{n}": torch.zeros(n)}, "depend on the batch size"),
        (lambda n: torch.zeros(4, dtype=F32 if n > 2 else I64), "float32, then a tensor of shape"),
        (lambda n: {0: torch.zeros(n), "0": torch.ones(n)}, "two outputs have the path '0'"),
        (lambda n: {"a.b": torch.zeros(n), "a": {"b": torch.ones(n)}}, r"two outputs have the path 'a\.b'"),
    ],
)
def test_outputs_that_a_replay_would_falsify_are_refused(
    runtime: Any, decode: Any, rows: Any, make: Any, says: str
) -> None:
    """
    A graph repeats the bucket's host values and axes, not the batch's. Rather than return them,
    the capture fails, and under on_failure="eager" every step is right.
    """

    def forward(batch: Any) -> Any:
        return make(batch.num_requests)

    with pytest.raises(CaptureError, match=says):
        capture_cuda_graphs(model_runner=runtime(forward))
    config = PhaseConfig(buckets=(4, 8), on_failure="eager")
    runner = capture_cuda_graphs(model_runner=runtime(forward, decode=config)).decode_runner
    for n in (1, 3, 8):
        assert same(runner.execute(decode(n, x=rows(n))), make(n))
    assert runner.stats.eager == {Reason.CAPTURE_FAILED: 3}


def test_an_array_is_refused_as_an_object_that_no_graph_can_give(runtime: Any) -> None:
    """Arrays of two sizes cannot be compared at all, and those of one compare in parts."""
    numpy = pytest.importorskip("numpy")
    for make in (lambda n: numpy.zeros((n, 2)), lambda n: numpy.zeros(3)):
        toy = runtime(lambda batch, make=make: {"y": make(batch.num_requests)})
        with pytest.raises(CaptureError, match=r"output y is another ndarray at each run.*Return tensors"):
            capture_cuda_graphs(model_runner=toy)


class Opaque:
    """Holds what no structure that is known here does."""

    def __init__(self, y: Any) -> None:
        self.y = y


@pytest.mark.parametrize("where", ["", "deep"])
def test_an_object_that_cannot_be_looked_into_is_refused_where_it_is_made_anew(
    runtime: Any, decode: Any, rows: Any, where: str
) -> None:
    """
    A replay would return the object of the capture, its tensors uncut, step after step. The error says what
    to return instead; under on_failure="eager" each step gets an object of its own.
    """

    def forward(batch: Any) -> Any:
        found = Opaque(batch.inputs["x"] * 2)
        return {"deep": found} if where else found

    with pytest.raises(CaptureError, match=r"another Opaque at each run.*dataclasses") as caught:
        capture_cuda_graphs(model_runner=runtime(forward))
    assert isinstance(caught.value.__cause__, CaptureError)
    assert caught.value.__cause__.field == (where or None)
    config = PhaseConfig(buckets=(4,), on_failure="eager")
    runner = capture_cuda_graphs(model_runner=runtime(forward, decode=config)).decode_runner
    kept = [(x, runner.execute(decode(3, x=x))) for x in (rows(3), rows(3))]
    for x, found in kept:
        assert torch.equal((found["deep"] if where else found).y, x * 2)


def test_one_object_at_every_run_and_equal_values_are_returned_as_they_are(
    runtime: Any, decode: Any, rows: Any
) -> None:
    """An enum member, a dtype, a device, an object of the runtime's own: what eager gives, graphs give."""
    config = Opaque(None)

    def forward(batch: Any) -> Any:
        x = batch.inputs["x"]
        about = {"config": config, "phase": Phase.DECODE, "dtype": x.dtype, "device": x.device}
        return {"y": x * 2, "columns": range(x.shape[1]), "nan": float("nan"), **about}

    runner = capture_cuda_graphs(model_runner=runtime(forward)).decode_runner
    x = rows(3)
    found = runner.execute(decode(3, x=x))
    assert runner.stats.replayed == 1
    assert torch.equal(found["y"], x * 2)
    assert found["config"] is config
    assert (found["phase"], found["dtype"], found["device"]) == (Phase.DECODE, x.dtype, x.device)
    assert found["columns"] == range(3)


def test_equal_constants_that_are_new_at_each_run_are_captured(runtime: Any, decode: Any, rows: Any) -> None:
    """What compares by value is one value, however often it is made; NaN is the same NaN."""
    make = lambda: {"set": frozenset({"a"}), "path": Path("x"), "cut": slice(0, 3), "nan": float("nan")}
    runner = capture_cuda_graphs(
        model_runner=runtime(
            lambda batch: {"y": batch.inputs["x"] * 2, **make()}, decode=PhaseConfig(buckets=(4,))
        )
    ).decode_runner
    x = rows(3)
    found = runner.execute(decode(3, x=x))
    assert torch.equal(found.pop("y"), x * 2)
    assert repr(found) == repr(make())
    assert runner.stats.replayed == 1


def test_an_object_in_the_outputs_is_let_go_of_by_a_release(runtime: Any) -> None:
    """A cache that the forward returns beside its tensors lives no longer than its runtime wants."""

    class Cache:
        pass

    state = {"cache": Cache()}
    runner = capture_cuda_graphs(
        model_runner=runtime(
            lambda batch: {"y": batch.inputs["x"] * 2, "cache": state["cache"]},
            decode=PhaseConfig(buckets=(4,)),
        )
    ).decode_runner
    gone = weakref.ref(state["cache"])
    runner.release()
    state.clear()
    gc.collect()
    assert gone() is None


def test_a_runtime_may_return_something_else_by_the_next_capture(
    runtime: Any, decode: Any, rows: Any
) -> None:
    """What outputs are is found anew with each recapture: other structure, host values, dtypes and rows."""
    state: dict[str, Any] = {"make": lambda x: {"y": x * 2, "mode": 1}}
    runner = capture_cuda_graphs(
        model_runner=runtime(lambda batch: state["make"](batch.inputs["x"]), decode=PhaseConfig(buckets=(4,)))
    ).decode_runner
    for make in (state["make"], lambda x: {"y": x.t().double(), "z": [x[:, 0]], "mode": 2}):
        state["make"] = make
        runner.recapture()
        x = rows(3)
        assert same(runner.execute(decode(3, x=x)), make(x))
    assert runner.stats.replayed == 2


# Cutting and keeping


@pytest.mark.parametrize("outputs", ["copy", "view"])
def test_every_field_is_cut_to_the_real_rows(runtime: Any, decode: Any, rows: Any, outputs: Any) -> None:
    """
    Guards against sgl-project/sglang#7843 and #13881: sizes from one to the largest give exactly the eager
    result, in any structure and along any axis; what is None stays None.
    """
    config = PhaseConfig(buckets=(1, 4, 8), outputs=outputs)
    runner = capture_cuda_graphs(model_runner=runtime(structured, decode=config)).decode_runner
    for n in (*range(1, 9), 3, 1, 8):
        batch = decode(n, x=rows(n))
        got = runner.execute(batch)
        assert same(got, structured(batch))
        assert got.nothing is None
        assert type(got.parts["named"]) is Named
    assert runner.stats.ran_eagerly == 0


@pytest.mark.parametrize("sizes", [(3, 3, 3), (3, 8, 2, 4), (8, 1, 8)])
def test_a_result_survives_later_steps(runtime: Any, decode: Any, rows: Any, sizes: tuple[int, ...]) -> None:
    """
    Guards against sgl-project/sglang#23037 and pytorch/pytorch#104435, #144386, #170604: results, their
    aliases and every field are intact after replays of the same and of other buckets.
    """
    runner = capture_cuda_graphs(model_runner=runtime(structured)).decode_runner
    kept = []
    for n in sizes:
        batch = decode(n, x=rows(n))
        got = runner.execute(batch)
        kept.append((got, got.y.detach(), got.y[0], structured(batch)))
    for got, alias, row, wanted in kept:
        assert same(got, wanted)
        assert torch.equal(alias, wanted.y)
        assert torch.equal(row, wanted.y[0])


def test_a_view_is_valid_until_the_next_step_and_costs_no_memory(
    runtime: Any, decode: Any, rows: Any
) -> None:
    """The zero-copy way hands out the shared buffer itself, the same one for all buckets."""
    config = PhaseConfig(buckets=(4, 8), outputs="view")
    runner = capture_cuda_graphs(
        model_runner=runtime(lambda b: b.inputs["x"] * 2, decode=config)
    ).decode_runner
    first = runner.execute(decode(8, x=rows(8)))
    addresses = {first.data_ptr()}
    for n in (8, 3, 5):
        x = rows(n)
        got = runner.execute(decode(n, x=x))
        assert torch.equal(got, x * 2)
        addresses.add(got.data_ptr())
    assert len(addresses) == 1


def test_a_caller_may_change_the_structure_it_got(runtime: Any, decode: Any, rows: Any) -> None:
    """Emptying a returned dict, or setting a field, does not reach later results, in view mode either."""
    config = PhaseConfig(buckets=(4,), outputs="view")
    runner = capture_cuda_graphs(model_runner=runtime(structured, decode=config)).decode_runner
    for _ in range(3):
        batch = decode(3, x=rows(3))
        got = runner.execute(batch)
        assert same(got, structured(batch))
        got.y = None
        got.parts["a"].clear()
        got.parts.clear()


def test_padded_rows_that_are_not_finite_stay_inside(runtime: Any, decode: Any, rows: Any) -> None:
    """
    Guards against flashinfer-ai/flashinfer#2883, flagos-ai/vllm-plugin-FL#368 and NVIDIA/TensorRT-LLM#5058:
    NaN in padded rows never reaches the caller, in any field.
    """
    spec = InputSpec(x=TensorSpec(("requests", 3), dtype=F32, fill=0))

    def forward(batch: Any) -> Any:
        x = batch.inputs["x"]
        return {"y": x / x, "rows": (x / x).sum(dim=1)}

    config = PhaseConfig(buckets=(8,))
    runner = capture_cuda_graphs(model_runner=runtime(forward, spec, decode=config)).decode_runner
    got = runner.execute(decode(3, x=rows(3)))
    assert got["y"].shape == (3, 3)
    assert got["y"].isfinite().all()
    assert got["rows"].tolist() == [3, 3, 3]


def test_outputs_without_rows_are_returned_whole(runtime: Any, decode: Any, rows: Any) -> None:
    """A total over a constant input, a scalar tensor, a Python value: as eager returns them."""
    spec = InputSpec(x=TensorSpec(("requests", 3), dtype=F32), scale=TensorSpec((3,), dtype=F32))

    def forward(batch: Any) -> Any:
        scale = batch.inputs["scale"]
        return {"y": batch.inputs["x"] * scale, "twice": scale * 2, "sum": scale.sum(), "name": "n", "k": 3}

    runner = capture_cuda_graphs(model_runner=runtime(forward, spec)).decode_runner
    kept = []
    for n in (3, 8, 3, 1):
        batch = decode(n, x=rows(n), scale=rows(1)[0])
        kept.append((runner.execute(batch), forward(batch)))
    assert all(same(got, wanted) for got, wanted in kept)


# Whose memory it is


@pytest.mark.parametrize("outputs", ["copy", "view"])
def test_two_outputs_in_one_memory_do_not_mix(runtime: Any, decode: Any, rows: Any, outputs: Any) -> None:
    """A variant that returns one tensor twice does not make another variant's two outputs share memory."""

    def forward(batch: Any) -> Any:
        y = batch.inputs["x"] * 2
        if batch.variant == "both":
            return {"a": y, "b": y + 1}
        return {"a": y, "b": y.view(-1, 3)}

    config = PhaseConfig(buckets=(4, 8), variants=("both",), outputs=outputs)
    runner = capture_cuda_graphs(model_runner=runtime(forward, decode=config)).decode_runner
    for n, variant in ((8, None), (8, "both"), (3, "both"), (3, None), (8, "both")):
        batch = decode(n, x=rows(n), variant=variant)
        assert same(runner.execute(batch), forward(batch))


def test_memory_of_the_runtime_is_never_taken_for_outputs(
    runtime: Any, decode: Any, rows: Any, device: torch.device
) -> None:
    """A forward may return views of its own state; other graphs' outputs never overwrite that state."""
    state = torch.zeros(8, 3, device=device)

    def forward(batch: Any) -> Any:
        if batch.variant == "other":
            return batch.inputs["x"] * -1
        return state[: batch.num_requests].add_(batch.inputs["x"])

    config = PhaseConfig(buckets=(4, 8), variants=("other",))
    runner = capture_cuda_graphs(model_runner=runtime(forward, decode=config)).decode_runner
    state.zero_()
    x = rows(8)
    assert torch.equal(runner.execute(decode(8, x=x)), x)
    runner.execute(decode(8, x=rows(8), variant="other"))
    runner.execute(decode(3, x=rows(3), variant="other"))
    assert torch.equal(state, x)
    assert torch.equal(runner.execute(decode(8, x=x)), x * 2)


def test_an_input_may_be_returned(runtime: Any, decode: Any, rows: Any) -> None:
    """An output that is an input survives, and no graph writes its output into static inputs."""
    spec = InputSpec(x=TensorSpec(("requests", 8), dtype=F32, fill=1))

    def forward(batch: Any) -> Any:
        x = batch.inputs["x"]
        return {"x": x, "y": x * 2} if batch.variant is None else {"x": x * 3, "y": x.prod(dim=0) + x * 0}

    # One field of 64-byte rows: the input is the whole arena.
    config = PhaseConfig(buckets=(2, 8), variants=("v",))
    runner = capture_cuda_graphs(model_runner=runtime(forward, spec, decode=config)).decode_runner
    kept = []
    for n, variant in ((8, None), (1, "v"), (5, None), (5, "v"), (1, None), (3, "v")):
        x = torch.full((n, 8), float(n), device=rows(1).device)
        batch = decode(n, x=x, variant=variant)
        kept.append((runner.execute(batch), forward(batch), x.clone(), x))
    for got, wanted, before, after in kept:
        assert torch.equal(before, after)
        assert torch.equal(got["x"], wanted["x"])


def test_outputs_of_all_graphs_share_one_buffer(runtime: Any) -> None:
    """
    The buffer is as large as the largest output; the sum of all sizes is never held. Where memory
    can be aliased the outputs lie in the graphs' own pool, and there is no buffer.
    """
    config = PhaseConfig(buckets=(1, 2, 4, 8, 16))
    capture = capture_cuda_graphs(model_runner=runtime(lambda b: b.inputs["x"] * 2, decode=config))
    aliases = platform_for(capture.report.device).capabilities.memory_aliases
    assert capture.report.output_buffer_bytes == (0 if aliases else 16 * 3 * 4)


def test_shared_memory_grows_for_a_larger_output_and_the_old_one_stays_valid() -> None:
    """A second family with more columns gets memory of its own; what was placed first is not overwritten."""
    shared = GraphSharedOutput()
    never = lambda path, leaf: False
    axes = {"": (0, "requests")}
    small = shared.place(torch.ones(4, 2), axes, never)
    large = shared.place(torch.full((4, 5), 2.0), axes, never)
    third = shared.place(torch.full((2, 5), 3.0), axes, never)
    assert (small == 1).all()
    assert third.data_ptr() == large.data_ptr()
    assert shared.nbytes == large.numel() * 4
    shared.release()
    assert shared.nbytes == 0


def test_prefill_and_decode_results_do_not_mix(runtime: Any, decode: Any, rows: Any) -> None:
    """Both phases share output memory; results of one survive steps of the other."""
    from graphplat import ForwardBatch

    spec = InputSpec(x=TensorSpec(("tokens", 3), dtype=F32))
    toy = runtime(
        lambda b: b.inputs["x"] * 2,
        spec,
        prefill=PhaseConfig(buckets=(8, 16)),
        decode=PhaseConfig(buckets=(4,)),
    )
    capture = capture_cuda_graphs(model_runner=toy)
    kept = []
    for n in (12, 2, 8, 4, 15, 1):
        x = rows(n)
        if n > 4:
            batch = ForwardBatch(phase=Phase.PREFILL, num_requests=2, num_tokens=n, inputs={"x": x})
            kept.append((capture.prefill_runner.execute(batch), x * 2))
        else:
            kept.append((capture.decode_runner.execute(decode(n, x=x)), x * 2))
    assert all(torch.equal(got, wanted) for got, wanted in kept)
    assert capture.prefill_runner.stats.replayed == 3
    assert capture.decode_runner.stats.replayed == 3


@dataclasses.dataclass
class Remembering:
    logits: torch.Tensor

    @functools.cached_property
    def token(self) -> torch.Tensor:
        return self.logits.argmax(-1)


@pytest.mark.parametrize("outputs", ["copy", "view"])
def test_what_an_output_computed_of_its_fields_is_computed_anew(
    runtime: Any, decode: Any, rows: Any, outputs: Any
) -> None:
    """A cached property that the forward has read is no part of the result: it would hold padded rows."""

    def forward(batch: ForwardBatch) -> Remembering:
        made = Remembering(batch.inputs["x"] * 2)
        assert made.token is made.token
        return made

    toy = runtime(forward, decode=PhaseConfig(buckets=(4,), outputs=outputs))
    runner = capture_cuda_graphs(model_runner=toy).decode_runner
    for count in (3, 4, 2):
        x = rows(count)
        result = runner.execute(decode(count, x=x))
        assert torch.equal(result.token, (x * 2).argmax(-1))


def test_a_tensor_beside_the_fields_of_an_output_is_refused(runtime: Any) -> None:
    """No step could renew it, and nobody would see."""

    def forward(batch: ForwardBatch) -> Any:
        made = Remembering(batch.inputs["x"] * 2)
        made.extra = made.logits + 1  # type: ignore[attr-defined]
        return {"out": made}

    with pytest.raises(CaptureError, match=r"output out.extra is a tensor beside the fields of"):
        capture_cuda_graphs(model_runner=runtime(forward))


@pytest.mark.parametrize("outputs", ["copy", "view"])
def test_a_host_value_that_can_be_changed_is_the_callers_own(
    runtime: Any, decode: Any, rows: Any, outputs: Any
) -> None:
    """What a caller does to a set that it got is not seen by the next step."""
    toy = runtime(
        lambda batch: {"y": batch.inputs["x"] * 2, "tags": {1, 2}},
        decode=PhaseConfig(buckets=(4,), outputs=outputs),
    )
    runner = capture_cuda_graphs(model_runner=toy).decode_runner
    for _ in range(3):
        result = runner.execute(decode(3, x=rows(3)))
        assert result["tags"] == {1, 2}
        result["tags"].add(99)


def test_capture_and_steps_may_mix_inference_mode(runtime: Any, decode: Any, rows: Any) -> None:
    """Buckets captured in inference mode and outside it share the output buffer."""
    for first, second in ((torch.inference_mode, torch.no_grad), (torch.no_grad, torch.inference_mode)):
        config = PhaseConfig(buckets=(4, 8), capture="lazy")
        runner = capture_cuda_graphs(
            model_runner=runtime(lambda b: b.inputs["x"] * 2, decode=config)
        ).decode_runner
        for mode, n in ((first, 8), (second, 3), (first, 3), (second, 8)):
            x = rows(n)
            with mode():
                assert torch.equal(runner.execute(decode(n, x=x)), x * 2)
