"""Weights and keys: a moved tensor is found before a replay, and one key tells everything apart."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from graphplat import CaptureError, InputSpec, Reason, WeightsMovedError


class Model(nn.Module):
    """A parameter, a buffer, a nested parameter, and a plain tensor that nobody registered."""

    def __init__(self, device):
        super().__init__()
        self.inner = nn.Linear(3, 3, bias=False, device=device)
        self.weight = nn.Parameter(torch.full((3,), 2.0, device=device))
        self.register_buffer("shift", torch.full((3,), 1.0, device=device))
        self.plain = torch.full((3,), 5.0, device=device)
        with torch.no_grad():
            self.inner.weight.copy_(torch.eye(3, device=device))

    def forward(self, x, cut):
        return cut(self.inner(x) * self.weight) + self.shift + self.plain


def other(tensor):
    """Other values in other memory."""
    return tensor.detach().clone() + 1


def rebind(name):
    def move(model):
        setattr(model, name, nn.Parameter(other(getattr(model, name))))

    return move


MOVES = {
    "parameter": rebind("weight"),
    "data": lambda model: setattr(model.weight, "data", other(model.weight)),
    "nested parameter": lambda model: setattr(model.inner, "weight", nn.Parameter(other(model.inner.weight))),
    "submodule": lambda model: setattr(
        model, "inner", nn.Linear(3, 3, bias=False, device=model.weight.device)
    ),
    "buffer": lambda model: setattr(model, "shift", other(model.shift)),
    "plain tensor": lambda model: setattr(model, "plain", other(model.plain)),
    "repacked": lambda model: setattr(model.inner.weight, "data", other(model.inner.weight).t().contiguous()),
    "load with assign": lambda model: model.load_state_dict(
        {name: other(tensor) for name, tensor in model.state_dict().items()}, assign=True
    ),
}


@pytest.fixture
def start(rig):
    """A runner of a fresh model under a policy; the model too."""

    def make(policy, **settings):
        model = Model(rig.device)
        runtime = rig.runtime(
            lambda batch: runtime.model(batch.inputs["x"], rig.cut), weights=policy, model=model, **settings
        )
        runtime.extra_tensors = lambda: {"plain": runtime.model.plain}
        return rig.runner(runtime), model

    return make


@pytest.mark.parametrize("policy", ["recapture", "eager", "raise"])
@pytest.mark.parametrize("move", MOVES)
def test_a_moved_tensor_is_found_before_a_replay(rig, rows, start, move, policy):
    """
    Guards against vllm-project/vllm-ascend#7473, #13902 and vllm-project/vllm#48941, #48312: whatever was
    rebound, repacked or replaced, no step gives results of the old memory: it captures anew, runs eagerly
    or raises, as the settings say, and says which.
    """
    runner, model = start(policy)
    x = rows(3)
    before = runner.execute(rig.batch(3, x=x))
    MOVES[move](model)
    wanted = rig.eagerly(runner, rig.batch(3, x=x))
    assert not torch.equal(before, wanted)
    if policy == "raise":
        for _ in range(2):
            with pytest.raises(WeightsMovedError):
                runner.execute(rig.batch(3, x=x))
        runner.recapture()
    assert torch.equal(runner.execute(rig.batch(3, x=x)), wanted)
    y = rows(8)
    assert torch.equal(runner.execute(rig.batch(8, x=y)), rig.eagerly(runner, rig.batch(8, x=y)))
    assert runner.stats.recaptures == (policy == "recapture")
    assert runner.stats.eager == ({Reason.WEIGHTS_MOVED: 2} if policy == "eager" else {})


def test_an_update_in_place_shows_at_once(rig, rows, start):
    """
    Guards against vllm-project/vllm-ascend#7473: new values copied into old memory are read by the next
    replay, of every bucket, with no new capture.
    """
    runner, model = start("raise")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers(), model.plain):
            tensor.copy_(tensor + 2)
    for n in (1, 3, 8):
        x = rows(n)
        assert torch.equal(runner.execute(rig.batch(n, x=x)), rig.eagerly(runner, rig.batch(n, x=x)))
    assert runner.stats.replayed == 3


def test_an_update_that_fails_half_way_is_found(rig, rows, start):
    """
    Guards against unslothai/unsloth#10537: what was moved before an update failed counts, and so does the
    failed capture that follows: later steps are right, and no stale graph comes back.
    """
    runner, model = start("recapture")

    def update():
        rebind("weight")(model)
        raise OSError("the connection broke")

    with pytest.raises(OSError, match="connection"):
        update()
    x = rows(3)
    wanted = rig.eagerly(runner, rig.batch(3, x=x))
    assert torch.equal(runner.execute(rig.batch(3, x=x)), wanted)
    rebind("weight")(model)
    broken = {"on": True}
    forward = runner.model_runner.function

    def failing(batch):
        if broken["on"] and rig.platform.is_capturing():
            raise ZeroDivisionError
        return forward(batch)

    runner.model_runner.function = failing
    with pytest.raises(CaptureError):
        runner.execute(rig.batch(3, x=x))
    wanted = rig.eagerly(runner, rig.batch(3, x=x))
    assert torch.equal(runner.execute(rig.batch(3, x=x)), wanted)
    broken["on"] = False
    runner.recapture()
    assert torch.equal(runner.execute(rig.batch(3, x=x)), wanted)
    assert runner.stats.last.is_graph


class Scaled(torch.Tensor):
    """A weight that wraps others, as quantized ones do: codes and their scale."""

    @staticmethod
    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype, device=codes.device)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self):
        return ["codes", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner, meta, size, stride):
        return Scaled(inner["codes"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        assert func is torch.ops.aten.detach.default
        return cls(args[0].codes, args[0].scale)


@pytest.mark.parametrize("part", ["codes", "scale"])
def test_a_weight_that_wraps_others_is_watched_inside(rig, rows, part):
    """
    Guards against vllm-project/vllm#48941 and vllm-project/vllm-ascend#7473 for quantized weights: a tensor
    inside a wrapping one is found when it moves, though the wrapper stays the same object.
    """
    model = nn.Module()
    weight = Scaled(torch.full((3,), 2.0, device=rig.device), torch.full((1,), 3.0, device=rig.device))
    model.weight = nn.Parameter(weight, requires_grad=False)

    def forward(batch):
        return rig.cut(batch.inputs["x"] * (model.weight.codes * model.weight.scale))

    runtime = rig.runtime(forward, model=model, weights="raise")
    runner = rig.runner(runtime)
    x = rows(3)
    assert torch.equal(runner.execute(rig.batch(3, x=x)), x * 6)
    setattr(model.weight, part, torch.full_like(getattr(model.weight, part), 5.0))
    with pytest.raises(WeightsMovedError) as caught:
        runner.execute(rig.batch(3, x=x))
    assert caught.value.field == "weight"
    runner.recapture()
    assert torch.equal(runner.execute(rig.batch(3, x=x)), x * (15 if part == "codes" else 10))


def test_beside_a_weight_that_wraps_others_a_plain_one_is_watched_whole(rig, rows):
    """
    Guards against vllm-project/vllm-ascend#7473 for partly quantized models: a plain weight that is
    transposed at its old address is found, whatever kinds of weight lie beside it.
    """
    model = nn.Module()
    codes, scale = torch.full((3,), 2.0, device=rig.device), torch.full((1,), 3.0, device=rig.device)
    model.wrapped = nn.Parameter(Scaled(codes, scale), requires_grad=False)
    model.plain = nn.Parameter(torch.arange(9.0).view(3, 3).to(rig.device), requires_grad=False)

    def forward(batch):
        return rig.cut(batch.inputs["x"] * (model.wrapped.codes * model.wrapped.scale)) @ model.plain

    runner = rig.start(forward, model=model, weights="raise")
    x = rows(3)
    assert torch.equal(runner.execute(rig.batch(3, x=x)), x * 6 @ model.plain)
    model.plain.data = model.plain.data.t()
    for _ in range(2):
        with pytest.raises(WeightsMovedError) as caught:
            runner.execute(rig.batch(3, x=x))
        assert caught.value.field == "plain"
    runner.recapture()
    assert torch.equal(runner.execute(rig.batch(3, x=x)), x * 6 @ model.plain)
    assert runner.stats.last.is_graph


def test_another_type_at_the_old_address_is_found(rig, rows):
    """Guards against vllm-project/vllm-ascend#7473: old bytes read as another type are another tensor."""
    model = nn.Module()
    model.register_buffer("table", torch.full((3,), 2.0, device=rig.device))
    runner = rig.start(
        lambda batch: rig.cut(batch.inputs["x"] * 2) + model.table.float(), model=model, weights="recapture"
    )
    x = rows(3)
    assert torch.equal(runner.execute(rig.batch(3, x=x)), x * 2 + 2)
    model.table.data = model.table.data.view(torch.int32)
    assert torch.equal(runner.execute(rig.batch(3, x=x)), x * 2 + float(0x40000000))
    assert runner.stats.recaptures == 1


@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")])
def test_variants_of_one_bucket_share_nothing(rig, rows, order):
    """
    Guards against sgl-project/sglang#23727, #23873 and #22809: variants of one size have graphs, buffers,
    outputs and plugin metadata of their own, in whatever order they are captured and replayed; the plugin
    is given the key; one that was not captured runs eagerly.
    """
    scale = {None: 1.0, "a": 2.0, "b": 3.0, "c": 4.0}
    metadata = {}

    def forward(batch):
        factor = torch.full((1,), scale[batch.variant], device=rig.device)
        return {"y": rig.cut(batch.inputs["x"] * factor), "half": batch.inputs["x"][:, :1] / 2}

    runtime = rig.runtime(forward, buckets=(4,), variants=order)
    runner = rig.runner(runtime)
    for key, graphs in runner.device_graphs().items():
        metadata.setdefault(key, []).extend(graphs)
    assert {key.variant for key in metadata} == {None, "a", "b"}
    owned = [id(graph) for graphs in metadata.values() for graph in graphs]
    assert len(set(owned)) == len(owned)
    kept = []
    for variant in ("a", "b", "a", None, "c", "b", "a"):
        x = rows(3)
        found = runner.execute(rig.batch(3, x=x, variant=variant))
        kept.append((found, x * scale[variant], x[:, :1] / 2))
        if variant != "c":
            assert runner.stats.last.key.variant == variant
    for found, y, half in kept:
        assert torch.equal(found["y"], y)
        assert torch.equal(found["half"], half)
    assert runner.stats.eager == {Reason.UNKNOWN_VARIANT: 1}


def test_the_key_tells_apart_whatever_graphs_depend_on(rig, rows):
    """
    Guards against sgl-project/sglang#23727 as a kind: variant, presence of an optional input and size each
    give another key, equal ones the same; none answers for another.
    """
    spec = InputSpec(x=rig.tensor(3), bias=rig.tensor(3, optional=True))

    def forward(batch):
        y = rig.cut(batch.inputs["x"] * (2 if batch.variant else 1))
        return y + batch.inputs["bias"] if "bias" in batch.inputs else y

    runner = rig.start(forward, spec, buckets=(2, 4), variants=("twice",))
    assert len(runner.entries) == len(set(runner.entries)) == 8
    for n in (2, 3):
        for variant in (None, "twice"):
            for biased in (True, False, True):
                x, bias = rows(n), rows(n)
                inputs = {"x": x, "bias": bias} if biased else {"x": x}
                found = runner.execute(rig.batch(n, variant=variant, **inputs))
                assert torch.equal(found, x * (2 if variant else 1) + (bias if biased else 0))
    assert runner.stats.ran_eagerly == 0
