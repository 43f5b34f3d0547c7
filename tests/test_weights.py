"""Weights that move after capture: found before replay, never stale results."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphplat import (
    CaptureError,
    InputSpec,
    Phase,
    PhaseConfig,
    Reason,
    TensorSpec,
    capture_cuda_graphs,
    platform_for,
)
from graphplat.batch import ForwardBatch
from graphplat.errors import WeightsMovedError


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(3, 3, bias=False)
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("none", None)
        with torch.no_grad():
            self.inner.weight.copy_(torch.eye(3) * 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale


class Engine:
    """A runtime over Net, with one tensor that is neither parameter nor buffer."""

    def __init__(self, runtime: Any, device: torch.device, **settings: Any) -> None:
        self.net = Net().to(device)
        self.extra = torch.ones(3, device=device)
        self.toy = runtime(
            self.forward,
            model=self.net,
            extra_tensors=lambda: {"extra": self.extra},
            decode=PhaseConfig(buckets=(4, 8), **settings),
        )
        self.runner = capture_cuda_graphs(model_runner=self.toy).decode_runner

    def forward(self, batch: Any) -> torch.Tensor:
        if batch.inputs["x"].shape[0] == 8 and getattr(self, "fails", False):
            raise RuntimeError("cannot be captured now")
        return self.toy.model(batch.inputs["x"]) + self.extra


def rebind_parameter(engine: Engine) -> None:
    engine.net.inner.weight = torch.nn.Parameter(engine.net.inner.weight.detach() * 3)


def swap_data(engine: Engine) -> None:
    engine.net.inner.weight.data = engine.net.inner.weight.data * 3


def replace_buffer(engine: Engine) -> None:
    engine.net.scale = engine.net.scale * 3


def replace_extra(engine: Engine) -> None:
    engine.extra = engine.extra * 3


def replace_submodule(engine: Engine) -> None:
    fresh = torch.nn.Linear(3, 3, bias=False, device=engine.toy.device)
    engine.net.inner = fresh


def add_parameter(engine: Engine) -> None:
    engine.net.inner.bias = None
    del engine.net.inner.bias
    engine.net.inner.bias = torch.nn.Parameter(torch.ones(3, device=engine.toy.device))


def fill_an_empty_buffer(engine: Engine) -> None:
    engine.net.none = torch.ones(3, device=engine.toy.device)


def replace_model(engine: Engine) -> None:
    fresh = Net().to(engine.toy.device)
    rebind = fresh.inner.weight.detach() * 3
    fresh.inner.weight = torch.nn.Parameter(rebind)
    engine.net = engine.toy.model = fresh


MOVES = [
    rebind_parameter,
    swap_data,
    replace_buffer,
    replace_extra,
    replace_submodule,
    add_parameter,
    fill_an_empty_buffer,
    replace_model,
]
Move = Callable[[Engine], None]


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("policy", ["recapture", "eager", "raise"])
def test_whatever_moved_is_found_before_a_replay(
    runtime: Any, decode: Any, rows: Any, device: torch.device, move: Move, policy: Any
) -> None:
    """
    Guards against vllm-project/vllm-ascend#7473, #13902 and vllm-project/vllm#48941, #48312: after a move no
    step returns results of the old weights; the policy says what it does instead.
    """
    engine = Engine(runtime, device, weights=policy)
    for n in (3, 8):
        engine.runner.execute(decode(n, x=rows(n)))
    move(engine)
    for n in (3, 8, 3):
        batch = decode(n, x=rows(n))
        if policy == "raise":
            assert engine.runner.explain(batch).reason is Reason.WEIGHTS_MOVED
            assert not engine.runner.can_run_graph(batch)
            with pytest.raises(WeightsMovedError) as caught:
                engine.runner.execute(batch)
            assert caught.value.field
            continue
        torch.testing.assert_close(engine.runner.execute(batch), engine.forward(batch))
    stats = engine.runner.stats
    if policy == "recapture":
        assert stats.recaptures == 1
        assert stats.ran_eagerly == 0
    elif policy == "eager":
        assert stats.eager == {Reason.WEIGHTS_MOVED: 3}
        assert engine.runner.explain(decode(3, x=rows(3))).reason is Reason.WEIGHTS_MOVED
    engine.runner.recapture()
    batch = decode(3, x=rows(3))
    torch.testing.assert_close(engine.runner.execute(batch), engine.forward(batch))
    assert engine.runner.stats.replays[4] >= 2


def test_an_update_in_place_shows_at_once(runtime: Any, decode: Any, rows: Any, device: torch.device) -> None:
    """New values in old memory need no new capture."""
    engine = Engine(runtime, device)
    for factor in (1, 5, 7):
        with torch.no_grad():
            engine.net.inner.weight.copy_(torch.eye(3) * factor)
            engine.net.scale.fill_(factor)
            engine.extra.fill_(factor)
        x = rows(3)
        torch.testing.assert_close(engine.runner.execute(decode(3, x=x)), x * factor * factor + factor)
    assert engine.runner.stats.recaptures == 0
    assert engine.runner.stats.ran_eagerly == 0


def test_an_update_that_fails_half_way_is_found_too(
    runtime: Any, decode: Any, rows: Any, device: torch.device
) -> None:
    """Guards against unslothai/unsloth#10537: what was moved before the failure counts."""
    engine = Engine(runtime, device)
    try:
        for step in (3, 0):
            1 / step
            rebind_parameter(engine)
    except ZeroDivisionError:
        moved = engine.net.inner.weight
    assert torch.equal(moved.diag(), torch.full((3,), 6.0, device=device))
    batch = decode(3, x=rows(3))
    torch.testing.assert_close(engine.runner.execute(batch), engine.forward(batch))


def test_a_failed_recapture_never_leaves_stale_graphs(
    runtime: Any, decode: Any, rows: Any, device: torch.device
) -> None:
    """The step that finds the move raises what the capture raised; every later one is right."""
    engine = Engine(runtime, device)
    engine.runner.execute(decode(3, x=rows(3)))
    rebind_parameter(engine)
    engine.fails = True
    with pytest.raises(CaptureError, match="cannot be captured now"):
        engine.runner.execute(decode(3, x=rows(3)))
    engine.fails = False
    for n in (3, 8):
        batch = decode(n, x=rows(n))
        torch.testing.assert_close(engine.runner.execute(batch), engine.forward(batch))
    assert engine.runner.stats.eager == {Reason.CAPTURE_FAILED: 2}
    engine.runner.recapture()
    batch = decode(8, x=rows(8))
    torch.testing.assert_close(engine.runner.execute(batch), engine.forward(batch))
    assert engine.runner.stats.last is not None
    assert engine.runner.stats.last.is_graph


def test_each_phase_finds_a_move_for_itself(
    runtime: Any, decode: Any, rows: Any, device: torch.device
) -> None:
    """
    Recapturing one phase by hand does not hide the move from the other, nor does it bring a released one
    back.
    """
    net = Net().to(device)
    spec = InputSpec(x=TensorSpec(("tokens", 3), dtype=torch.float32))
    toy = runtime(
        lambda b: net(b.inputs["x"]),
        spec,
        model=net,
        decode=PhaseConfig(buckets=(4,)),
        prefill=PhaseConfig(buckets=(8,)),
    )
    capture = capture_cuda_graphs(model_runner=toy)
    net.inner.weight = torch.nn.Parameter(torch.eye(3, device=device) * 9)
    capture.prefill_runner.recapture()
    x = rows(3)
    torch.testing.assert_close(capture.decode_runner.execute(decode(3, x=x)), x * 9)
    capture.prefill_runner.release()
    net.inner.weight = torch.nn.Parameter(torch.eye(3, device=device) * 4)
    torch.testing.assert_close(capture.decode_runner.execute(decode(3, x=x)), x * 4)
    batch = ForwardBatch(phase=Phase.PREFILL, num_requests=1, num_tokens=3, inputs={"x": x})
    assert capture.prefill_runner.explain(batch).reason is Reason.RELEASED
    torch.testing.assert_close(capture.prefill_runner.execute(batch), x * 4)


def test_the_check_can_be_switched_off(runtime: Any, decode: Any, rows: Any, device: torch.device) -> None:
    """With weights="off" the graph goes on reading the memory it was captured with, which the user keeps."""
    engine = Engine(runtime, device, weights="off")
    kept = engine.net.inner.weight
    rebind_parameter(engine)
    x = rows(3)
    torch.testing.assert_close(engine.runner.execute(decode(3, x=x)), x * 2 + 1)
    with torch.no_grad():
        kept.fill_(0)
    torch.testing.assert_close(engine.runner.execute(decode(3, x=x)), torch.ones_like(x))


@pytest.mark.parametrize("lazy", [False, True], ids=["recapture", "first use"])
def test_a_batch_in_the_runners_own_buffers_survives_a_capture(
    runtime: Any, decode: Any, rows: Any, lazy: bool
) -> None:
    """A step that captures first does not lose what the runtime wrote into the static buffers."""
    linear = torch.nn.Linear(3, 3).to(rows(1).device)
    config = PhaseConfig(buckets=(4,), capture="lazy", variants=("a",)) if lazy else PhaseConfig(buckets=(4,))
    model = runtime(lambda batch: linear(batch.inputs["x"]), decode=config, model=linear)
    runner = capture_cuda_graphs(model_runner=model).decode_runner
    runner.execute(decode(3, x=rows(3)))
    buffers = runner.buffers(3)
    x = rows(3)
    if not lazy:
        linear.weight = torch.nn.Parameter(linear.weight.detach() * 2)
    buffers["x"].copy_(x)
    result = runner.execute(decode(3, variant="a" if lazy else None, **buffers))
    with torch.no_grad():
        torch.testing.assert_close(result, linear(x))
    assert runner.stats.replayed == 2


@pytest.mark.parametrize(("others", "steps"), [(0, 1), (80, 11)], ids=["few", "many"])
def test_other_strides_at_the_old_address_are_found(
    runtime: Any, decode: Any, rows: Any, others: int, steps: int
) -> None:
    """
    vllm-ascend#7473: a weight transposed in place keeps its address, and is noticed all the same;
    at once or, where there are many tensors, when its turn comes: eight of them are looked at in each step.
    """
    linear = torch.nn.Linear(3, 3, bias=False).to(rows(1).device)
    model = torch.nn.ModuleList([linear, *(torch.nn.Linear(1, 1, bias=False) for _ in range(others))])
    toy = runtime(lambda batch: linear(batch.inputs["x"]), decode=PhaseConfig(buckets=(4,)), model=model)
    runner = capture_cuda_graphs(model_runner=toy).decode_runner
    x = rows(4)
    runner.execute(decode(4, x=x))
    linear.weight.data = linear.weight.data.t()
    for _ in range(steps):
        result = runner.execute(decode(4, x=x))
    with torch.no_grad():
        torch.testing.assert_close(result, linear(x))
    assert runner.stats.recaptures == 1


def test_a_conjugate_at_the_old_address_is_found(runtime: Any, decode: Any, rows: Any) -> None:
    """It shares memory, sizes and strides with what it replaces; only a bit of the tensor differs."""
    device = rows(1).device
    module = torch.nn.ParameterList([torch.full((3,), 1 + 2j, device=device)]).requires_grad_(False)
    toy = runtime(
        lambda batch: torch.view_as_real(batch.inputs["x"] * module[0]),
        decode=PhaseConfig(buckets=(4,)),
        model=module,
    )
    runner = capture_cuda_graphs(model_runner=toy).decode_runner
    x = rows(4)
    runner.execute(decode(4, x=x))
    module[0].data = module[0].data.conj()
    assert torch.equal(runner.execute(decode(4, x=x)), torch.view_as_real(x * module[0]))
    assert runner.stats.recaptures == 1


def test_what_is_added_to_a_module_that_held_nothing_is_found(runtime: Any, decode: Any, rows: Any) -> None:
    """A buffer registered on a module without any, as adapters do, is seen at the next step."""
    module = torch.nn.Module().to(rows(1).device)
    model = runtime(
        lambda batch: batch.inputs["x"] * getattr(module, "scale", 1),
        decode=PhaseConfig(buckets=(4,)),
        model=module,
    )
    runner = capture_cuda_graphs(model_runner=model).decode_runner
    x = rows(4)
    assert torch.equal(runner.execute(decode(4, x=x)), x)
    module.register_buffer("scale", torch.full((1,), 5.0, device=x.device))
    assert torch.equal(runner.execute(decode(4, x=x)), x * 5)


def test_replaced_weights_are_not_kept_alive(
    runtime: Any, decode: Any, rows: Any, device: torch.device
) -> None:
    """
    The step after a replacement lets go of what was replaced; a released runner holds no part of the model,
    so that a runtime without room for two may replace all of it.
    """
    engine = Engine(runtime, device)
    weight = weakref.ref(engine.net.inner.weight)
    rebind_parameter(engine)
    engine.runner.execute(decode(3, x=rows(3)))
    gc.collect()
    assert weight() is None
    inner, weight = weakref.ref(engine.net.inner), weakref.ref(engine.net.inner.weight)
    engine.runner.release()
    replace_submodule(engine)
    gc.collect()
    assert (inner(), weight()) == (None, None)


def test_a_view_that_replaces_its_weight_in_place_is_found_at_once(
    runtime: Any, decode: Any, rows: Any
) -> None:
    """vllm-ascend#7473: a new parameter at the old address, but transposed, is another one, also of many."""
    linear = torch.nn.Linear(3, 3, bias=False).to(rows(1).device)
    model = torch.nn.ModuleList([linear, *(torch.nn.Linear(1, 1, bias=False) for _ in range(80))])
    toy = runtime(lambda batch: linear(batch.inputs["x"]), decode=PhaseConfig(buckets=(4,)), model=model)
    runner = capture_cuda_graphs(model_runner=toy).decode_runner
    x = rows(4)
    runner.execute(decode(4, x=x))
    linear.weight = torch.nn.Parameter(linear.weight.data.t())
    with torch.no_grad():
        torch.testing.assert_close(runner.execute(decode(4, x=x)), linear(x))
    assert runner.stats.recaptures == 1


@pytest.mark.parametrize("policy", ["eager", "raise", "off"])
def test_weights_that_moved_are_let_go_under_every_policy(
    runtime: Any, decode: Any, rows: Any, device: torch.device, policy: Any
) -> None:
    """
    A runtime without room for two models can replace one: the runner does not hold the old one once a step
    has found it moved, nor ever where nobody looks.
    """
    engine = Engine(runtime, device, weights=policy)
    batch = decode(3, x=rows(3))
    engine.runner.execute(batch)
    weight, scale = weakref.ref(engine.net.inner.weight), weakref.ref(engine.net.scale)
    rebind_parameter(engine)
    replace_buffer(engine)
    if policy == "raise":
        with pytest.raises(WeightsMovedError) as caught:
            engine.runner.execute(batch)
        first = caught.value.field
        del caught
    elif policy == "eager":
        engine.runner.execute(batch)
        assert engine.runner.stats.last is not None
        first = engine.runner.stats.last.detail
    gc.collect()
    assert (weight(), scale()) == (None, None)
    if policy != "off":
        assert first in ("inner.weight", "scale")
        assert engine.runner.explain(batch).reason is Reason.WEIGHTS_MOVED
    engine.runner.recapture()
    torch.testing.assert_close(engine.runner.execute(batch), engine.forward(batch))


def test_a_runner_without_graphs_holds_no_weight(
    runtime: Any, decode: Any, rows: Any, device: torch.device
) -> None:
    """Where every capture failed, steps run eagerly and nothing of the model is kept alive."""
    linear = torch.nn.Linear(3, 3, bias=False).to(device)
    model = torch.nn.ModuleList([linear])
    platform = platform_for(device)

    def forward(batch: Any) -> torch.Tensor:
        if platform.is_capturing():
            raise RuntimeError("cannot be captured")
        return model[0](batch.inputs["x"])

    config = PhaseConfig(buckets=(4, 8), on_failure="eager")
    runner = capture_cuda_graphs(model_runner=runtime(forward, decode=config, model=model)).decode_runner
    assert runner.buckets == ()
    batch = decode(3, x=rows(3))
    runner.execute(batch)
    weight = weakref.ref(linear.weight)
    linear.weight = torch.nn.Parameter(torch.eye(3, device=device) * 5)
    gc.collect()
    assert weight() is None
    torch.testing.assert_close(runner.execute(batch), batch.inputs["x"] * 5)
    assert runner.stats.recaptures == 0


def test_a_move_found_stands_until_recapture(
    runtime: Any, decode: Any, rows: Any, device: torch.device
) -> None:
    """
    Under "eager" what a step found is not unfound, also where the old weight comes back: steps run eagerly
    and right until recapture(), and replay from then on.
    """
    engine = Engine(runtime, device, weights="eager")
    batch = decode(3, x=rows(3))
    old = engine.net.inner.weight
    rebind_parameter(engine)
    for weight in (engine.net.inner.weight, old, old):
        engine.net.inner.weight = weight
        torch.testing.assert_close(engine.runner.execute(batch), engine.forward(batch))
        assert engine.runner.stats.last is not None
        assert engine.runner.stats.last.reason is Reason.WEIGHTS_MOVED
        assert engine.runner.explain(batch).detail == "inner.weight"
    engine.runner.recapture()
    for _ in range(2):
        torch.testing.assert_close(engine.runner.execute(batch), engine.forward(batch))
        assert engine.runner.stats.last.is_graph
    assert engine.runner.stats.eager == {Reason.WEIGHTS_MOVED: 3}


@pytest.mark.parametrize("policy", ["recapture", "eager", "raise", "off"])
def test_weights_may_move_before_the_first_graph(
    runtime: Any, decode: Any, rows: Any, device: torch.device, policy: Any
) -> None:
    """
    Where graphs are captured on use, what moved before there was one is no move: the first step captures what
    is there, and later moves are found.
    """
    engine = Engine(runtime, device, weights=policy, capture="lazy")
    rebind_parameter(engine)
    replace_extra(engine)
    batch = decode(3, x=rows(3))
    assert engine.runner.explain(batch).is_graph
    for _ in range(2):
        torch.testing.assert_close(engine.runner.execute(batch), engine.forward(batch))
    assert (engine.runner.stats.replayed, engine.runner.stats.recaptures) == (2, 0)
    assert engine.runner.stats.eager == {}
    if policy == "off":
        return
    rebind_parameter(engine)
    if policy == "raise":
        with pytest.raises(WeightsMovedError):
            engine.runner.execute(batch)
        return
    torch.testing.assert_close(engine.runner.execute(batch), engine.forward(batch))
    assert engine.runner.stats.recaptures == (policy == "recapture")
    assert engine.runner.stats.ran_eagerly == (policy == "eager")


@pytest.mark.parametrize("policy", ["recapture", "eager", "raise", "off"])
def test_capture_without_release_reads_the_new_weights(
    runtime: Any, decode: Any, rows: Any, device: torch.device, policy: Any
) -> None:
    """capture() on a runner that has graphs replaces them: what it bakes in is what is there now."""
    engine = Engine(runtime, device, weights=policy)
    batch = decode(3, x=rows(3))
    for _ in range(2):
        engine.runner.execute(batch)
    kept = engine.net.inner.weight
    rebind_parameter(engine)
    engine.runner.capture()
    for _ in range(2):
        torch.testing.assert_close(engine.runner.execute(batch), engine.forward(batch))
    assert (engine.runner.stats.replayed, engine.runner.stats.recaptures) == (4, 0)
    assert engine.runner.buckets == (4, 8)
    del kept  # it kept the memory that a stale graph would read


@pytest.mark.parametrize("policy", ["recapture", "eager", "raise", "off"])
def test_a_capture_without_release_that_fails_leaves_no_stale_graph(
    runtime: Any, decode: Any, rows: Any, device: torch.device, policy: Any
) -> None:
    """A capture() that raises leaves no graph of the old weights behind: steps run eagerly and are right."""
    engine = Engine(runtime, device, weights=policy)
    for n in (3, 8):
        engine.runner.execute(decode(n, x=rows(n)))
    kept = engine.net.inner.weight
    rebind_parameter(engine)
    engine.fails = True
    with pytest.raises(CaptureError, match="cannot be captured now"):
        engine.runner.capture()
    engine.fails = False
    for n in (3, 8, 3, 8):
        batch = decode(n, x=rows(n))
        torch.testing.assert_close(engine.runner.execute(batch), engine.forward(batch))
        assert engine.runner.stats.last is not None
        assert not engine.runner.stats.last.is_graph
    assert engine.runner.stats.eager == {Reason.CAPTURE_FAILED: 4}
    del kept


def scripted() -> Any:
    """A module of TorchScript's own, which keeps its parameters outside Python."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on some releases it is deprecated
        return torch.jit.script(torch.nn.Linear(3, 3, bias=False))


def script_swaps_data(module: Any) -> None:
    module.weight.data = torch.full_like(module.weight.data, 7.0)


def script_rebinds(module: Any) -> None:
    module.weight = torch.nn.Parameter(torch.full_like(module.weight.data, 7.0))


@pytest.mark.parametrize("move", [script_swaps_data, script_rebinds])
@pytest.mark.parametrize("inside", [True, False], ids=["inside a model", "the model"])
def test_a_parameter_of_a_scripted_module_is_watched(
    runtime: Any, decode: Any, rows: Any, device: torch.device, move: Any, inside: bool
) -> None:
    """A TorchScript module is watched as any other, within a model or as the model."""
    module = scripted().to(device)
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), module) if inside else module
    toy = runtime(
        lambda batch: torch.nn.functional.linear(batch.inputs["x"], module.weight),
        decode=PhaseConfig(buckets=(4,)),
        model=model,
    )
    runner = capture_cuda_graphs(model_runner=toy).decode_runner
    x = rows(3)
    for _ in range(2):
        runner.execute(decode(3, x=x))
    assert runner.stats.recaptures == 0
    move(module)
    wanted = x.sum(1, keepdim=True).expand(3, 3) * 7
    for _ in range(2):
        assert torch.equal(runner.execute(decode(3, x=x)), wanted)
    assert runner.stats.recaptures == 1


class Renaming(torch.nn.Linear):
    """As models written before ``remove_duplicate`` existed."""

    def named_parameters(self, prefix: str = "", recurse: bool = True) -> Any:  # type: ignore[override]
        return super().named_parameters(prefix, recurse)

    def named_buffers(self, prefix: str = "", recurse: bool = True) -> Any:  # type: ignore[override]
        return super().named_buffers(prefix, recurse)


def renaming(device: torch.device) -> torch.nn.Module:
    return Renaming(3, 3, bias=False, device=device)


def cyclic(device: torch.device) -> torch.nn.Module:
    """A module that is its own grandchild."""
    model = torch.nn.Linear(3, 3, bias=False, device=device)
    model.inner = torch.nn.Module()
    model.inner.add_module("owner", model)
    return model


@pytest.mark.parametrize("make", [renaming, cyclic])
def test_unusual_models_are_captured_and_watched(
    runtime: Any, decode: Any, rows: Any, device: torch.device, make: Any
) -> None:
    """Methods overridden with fewer arguments, modules in a cycle: there are graphs, and a move is found."""
    model = make(device)
    toy = runtime(
        lambda batch: torch.nn.functional.linear(batch.inputs["x"], model.weight),
        decode=PhaseConfig(buckets=(4,), weights="raise"),
        model=model,
    )
    runner = capture_cuda_graphs(model_runner=toy).decode_runner
    x = rows(3)
    for _ in range(2):
        with torch.no_grad():
            torch.testing.assert_close(runner.execute(decode(3, x=x)), x @ model.weight.t())
    assert runner.stats.replayed == 2
    model.weight = torch.nn.Parameter(torch.eye(3, device=device) * 5)
    with pytest.raises(WeightsMovedError) as caught:
        runner.execute(decode(3, x=x))
    assert caught.value.field == "weight"
    runner.recapture()
    torch.testing.assert_close(runner.execute(decode(3, x=x)), x * 5)


SPARSE = {
    "coo": torch.Tensor.to_sparse,
    "csr": torch.Tensor.to_sparse_csr,
    "csc": torch.Tensor.to_sparse_csc,
    "bsr": lambda dense: dense.to_sparse_bsr((2, 2)),
}


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state:UserWarning")
@pytest.mark.parametrize("layout", SPARSE)
def test_a_sparse_buffer_is_watched_by_its_parts(
    runtime: Any, decode: Any, rows: Any, device: torch.device, layout: str
) -> None:
    """It has no storage of its own: a model with one is captured, and new parts of it are found."""
    model = torch.nn.Module()
    model.register_buffer("adjacency", SPARSE[layout](torch.eye(4, device=device)))
    toy = runtime(
        lambda batch: batch.inputs["x"] * 2, decode=PhaseConfig(buckets=(4,), weights="raise"), model=model
    )
    runner = capture_cuda_graphs(model_runner=toy).decode_runner
    x = rows(3)
    assert torch.equal(runner.execute(decode(3, x=x)), x * 2)
    model.adjacency = SPARSE[layout](torch.ones(4, 4, device=device))
    with pytest.raises(WeightsMovedError) as caught:
        runner.execute(decode(3, x=x))
    assert caught.value.field == "adjacency"
