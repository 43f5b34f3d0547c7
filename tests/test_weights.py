"""Weights that move after capture: found before replay, never stale results."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphplat import CaptureError, InputSpec, Phase, PhaseConfig, Reason, TensorSpec, capture_cuda_graphs
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
    """With weights="off" the graph goes on reading the memory it was captured with, by the user's word."""
    engine = Engine(runtime, device, weights="off")
    rebind_parameter(engine)
    x = rows(3)
    torch.testing.assert_close(engine.runner.execute(decode(3, x=x)), x * 2 + 1)


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
