"""Aliasing and lifetime: nothing is overwritten, frozen or recycled behind anyone's back."""

from __future__ import annotations

import dataclasses
import gc
import queue
import threading
from typing import Any, NamedTuple

import attrs
import msgspec
import pytest
import torch

from graphplat import (
    CaptureError,
    ForwardBatch,
    HostSpec,
    InputError,
    InputSpec,
    Phase,
    PhaseConfig,
    Reason,
    TensorSpec,
    capture_cuda_graphs,
)

ROWS = {Phase.DECODE: "requests", Phase.PREFILL: "tokens"}


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: Any


@attrs.define
class Defined:
    value: Any


class Structured(msgspec.Struct):
    value: Any


class Named(dict):
    """A dict of its own type."""


def snapshot(value):
    """Every tensor of a nested result, by hand, cloned."""
    if isinstance(value, torch.Tensor):
        return [value.clone()]
    if isinstance(value, dict):
        return [tensor for key in value for tensor in snapshot(value[key])]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in snapshot(item)]
    return snapshot(value.value)


def tensors(value):
    """The same tensors, not cloned."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for key in value for tensor in tensors(value[key])]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors(item)]
    return tensors(value.value)


def structured(rig):
    def forward(batch):
        x = rig.cut(batch.inputs["x"] * 2)
        return {"logits": x + 1, "deep": [Pair(x * 3, Frozen(x - 1))], "whole": x[:1].sum() * 0 + 7}

    return forward


def test_a_kept_result_is_intact_after_later_steps(rig, rows):
    """
    Guards against sgl-project/sglang#23037 and pytorch/pytorch#104435, #144386, #170604: results of step N,
    each field, a detached alias and a row of them, are what they were after steps of the same bucket, of
    every other one and an eager one.
    """
    runner = rig.start(structured(rig))
    kept = []
    for n in (3, 4, 3, 8, 1, 2, 20, 3):
        found = tensors(runner.execute(rig.batch(n, x=rows(n))))
        found += [found[0].detach(), found[0][0], found[1].view(-1)]
        kept.append((found, snapshot(found)))
    for found, before in kept:
        for one, two in zip(found, before, strict=True):
            assert torch.equal(one, two)
    assert runner.stats.replayed == 7


@pytest.mark.parametrize("backend", ["full", "breakable"])
def test_results_of_one_phase_survive_the_other(runtime, device, rows, backend):
    """
    Guards against sgl-project/sglang#23037 across runners: decode and prefill share output memory, and their
    results do not.
    """

    def spec(dim):
        return InputSpec(x=TensorSpec((dim, 3), dtype=torch.float32))

    config = PhaseConfig(backend=backend, buckets=(2, 4, 8))
    toy = runtime(
        lambda batch: batch.inputs["x"] * 2,
        {Phase.DECODE: spec("requests"), Phase.PREFILL: spec("tokens")},
        decode=config,
        prefill=config,
    )
    capture = capture_cuda_graphs(model_runner=toy)
    kept = []
    for n in (2, 8, 4, 3):
        for runner, phase in ((capture.decode_runner, "decode"), (capture.prefill_runner, "prefill")):
            x = rows(n)
            batch = ForwardBatch(phase=phase, num_requests=n, num_tokens=n, inputs={"x": x})
            kept.append((x, runner.execute(batch)))
    for x, found in kept:
        assert torch.equal(found, x * 2)
    capture.decode_runner.release()
    capture.prefill_runner.release()


def test_a_view_says_how_long_it_holds(rig, rows):
    """
    Guards against pytorch/pytorch#144386: zero copy is asked for, never a default; what it returns is right
    until the next step, which the step count tells, and then shows the next one's values.
    """
    runner = rig.start(lambda batch: rig.cut(batch.inputs["x"] * 2) + 1, outputs="view")
    x, y = rows(4), rows(4) + 1000
    first, taken = runner.execute(rig.batch(4, x=x)), runner.stats.steps
    assert torch.equal(first, x * 2 + 1)
    assert runner.stats.steps == taken
    runner.execute(rig.batch(4, x=y))
    assert runner.stats.steps != taken
    assert torch.equal(first, y * 2 + 1)


@pytest.mark.parametrize("outputs", ["copy", "view"])
def test_an_eager_result_never_lies_in_the_static_buffers(rig, rows, outputs):
    """
    Guards against sgl-project/sglang#23037 without a graph: a forward may return its input, which a runtime
    may have written into a buffer of the runner.
    """
    runner = rig.start(lambda batch: [batch.inputs["x"][:]], outputs=outputs)
    lent, x = runner.buffers(4), rows(4)
    lent["x"].copy_(x)
    (result,) = runner.execute(rig.batch(4, variant="unknown", **lent))
    assert runner.stats.eager == {Reason.UNKNOWN_VARIANT: 1}
    lent["x"].zero_()
    assert torch.equal(result, x)


def test_an_eager_result_is_the_callers_own_too(rig, rows):
    """
    Guards against sgl-project/sglang#23037 without a graph: a step hands out neither the forward's own memory
    nor its containers.
    """
    kept = {"y": rows(32)}

    def forward(batch):
        x = batch.inputs["x"]
        kept["y"][: len(x)].copy_(x)
        return kept if len(x) > 8 else {"y": x * 2}

    runner = rig.start(forward)
    x = rows(20)
    result = runner.execute(rig.batch(20, x=x))
    result["z"] = 1
    runner.execute(rig.batch(20, x=x + 1))
    assert runner.stats.eager == {Reason.OVER_MAX_BUCKET: 2}
    assert torch.equal(result["y"][:20], x)
    assert list(kept) == ["y"]
    runner.release()
    result = runner.execute(rig.batch(20, x=x))
    kept["y"].zero_()
    assert torch.equal(result["y"][:20], x)


class Refusing(torch.Tensor):
    """A tensor that nobody can copy from."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.copy_, torch._foreach_copy_):
            raise ArithmeticError("the copy failed")
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_copy_that_fails_leaves_no_row_of_another_bucket(rig, rows):
    """
    Guards against sgl-project/sglang#10892 after a failure: what a step that was cut short left in the static
    memory is in no padded row of a smaller bucket, which held it before.
    """
    spec = InputSpec(x=rig.tensor(3, fill=9), y=rig.tensor(3))
    runner = rig.start(
        lambda batch: {"y": rig.cut(batch.inputs["x"] + batch.inputs["y"]), "sum": batch.inputs["y"].sum()},
        spec,
        buckets=(4, 8),
    )
    one = rig.batch(1, x=rows(1), y=rows(1))
    for _ in range(2):
        assert runner.execute(one)["sum"] == one.inputs["y"].sum()
    with pytest.raises(ArithmeticError, match="the copy failed"):
        runner.execute(rig.batch(5, x=rows(5).cpu().as_subclass(Refusing), y=rows(5)))
    assert runner.execute(one)["sum"] == one.inputs["y"].sum()


class Watched:
    """A lock that says when a thread has to wait for it."""

    def __init__(self, lock: Any, says: queue.SimpleQueue[str]) -> None:
        self.lock, self.says = lock, says

    def __enter__(self) -> None:
        if not self.lock.acquire(blocking=False):
            self.says.put("waits")
            self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()


def test_a_release_waits_for_the_step_of_another_thread(rig, rows):
    """Guards against pytorch/pytorch#170646 between threads: no graph goes while a step is under way."""
    inside, gate, says = threading.Event(), threading.Event(), queue.SimpleQueue()
    waiting = False

    def forward(batch):
        if waiting:
            inside.set()
            assert gate.wait(60)
        return batch.inputs["x"] * 2

    runner = rig.start(forward, buckets=(2,))
    waiting = True
    arena = runner.context.arena
    arena.lock = Watched(arena.lock, says)

    def let_go():
        runner.release()
        says.put("done")

    step = threading.Thread(target=runner.execute, args=(rig.batch(20, x=rows(20)),))
    release = threading.Thread(target=let_go)
    step.start()
    try:
        assert inside.wait(60)
        release.start()
        assert says.get(timeout=60) == "waits"
        assert runner.buckets == (2,)
    finally:
        gate.set()
        step.join()
        release.join()
    assert says.get(timeout=60) == "done"
    assert runner.buckets == ()


def test_a_view_may_be_the_input_of_a_step_that_captures(rig, rows):
    """
    Guards against pytorch/pytorch#144386 where the next step captures: it writes where views lie, and has
    read its inputs before.
    """
    runner = rig.start(lambda batch: rig.cut(batch.inputs["x"]) * 2, outputs="view", capture="lazy")
    x = rows(4)
    view = runner.execute(rig.batch(4, x=x))
    assert torch.equal(runner.execute(rig.batch(2, x=view[:2])), x[:2] * 4)
    assert runner.buckets == (2, 4)


@pytest.mark.parametrize("backend", ["full", "breakable"])
def test_a_view_may_be_the_input_of_a_step_that_captures_again(runtime, device, rows, backend):
    """
    Guards against pytorch/pytorch#144386 where a weight moved, and graphs of another phase keep the memory of
    the view in use.
    """
    model = torch.nn.Linear(3, 3, bias=False, device=device)
    torch.nn.init.eye_(model.weight)
    config = PhaseConfig(backend=backend, buckets=(2, 4), outputs="view")
    toy = runtime(
        lambda batch: model(batch.inputs["x"]) * 2,
        {phase: InputSpec(x=TensorSpec((dim, 3), dtype=torch.float32)) for phase, dim in ROWS.items()},
        model=model,
        decode=config,
        prefill=msgspec.structs.replace(config, weights="off"),
    )
    capture = capture_cuda_graphs(model_runner=toy)
    x = rows(4)
    view = capture.decode_runner.execute(ForwardBatch(Phase.DECODE, 4, 4, {"x": x}))
    model.weight.data = model.weight.data.clone()
    assert torch.equal(capture.decode_runner.execute(ForwardBatch(Phase.DECODE, 4, 4, {"x": view})), x * 4)
    assert capture.decode_runner.stats.recaptures == 1
    capture.decode_runner.release()
    capture.prefill_runner.release()


def nested(rig, make):
    """A spec, a maker of inputs and the eager result of a structure that *make* builds of three leaves."""
    spec = InputSpec(
        meta=make(rig.tensor(), rig.tensor(3), rig.tensor(3, dtype=torch.int64)),
        flag=HostSpec(values=(3, 4)),
    )

    def leaves(meta):
        return tensors(meta)

    def forward(batch):
        scale, one, two = leaves(batch.inputs["meta"])
        return rig.cut(one * scale[:, None]) + two * batch.inputs["flag"]

    return spec, forward


STRUCTURES = {
    "dict": lambda a, b, c: {"a": a, "b": b, "c": c},
    "list": lambda a, b, c: [a, [b, c]],
    "tuple": lambda a, b, c: (a, (b, (c,))),
    "named tuple": lambda a, b, c: Pair(a, Pair(b, c)),
    "frozen dataclass": lambda a, b, c: Frozen({"a": a, "in": Frozen([b, c])}),
    "attrs": lambda a, b, c: Defined([a, Defined((b, c))]),
    "struct": lambda a, b, c: Structured([a, Structured([b, c])]),
    "dict subclass": lambda a, b, c: Named(a=a, deep=Named(b=b, c=[c])),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_every_tensor_inside_a_structure_is_read_anew(rig, rows, name):
    """
    Guards against pytorch/torchtitan#4432, #4463 and NVIDIA/Megatron-LM#5931: whatever holds the tensors, at
    any depth, each replay reads the new ones, and the caller's structure is left as it was.
    """
    make = STRUCTURES[name]
    spec, forward = nested(rig, make)
    runner = rig.start(forward, spec, buckets=(4,))
    for n in (4, 2, 3):
        given = rows(n)[:, 0].contiguous(), rows(n), rows(n, dtype=torch.int64)
        meta = make(*given)
        found = runner.execute(rig.batch(n, meta=meta, flag=3))
        assert torch.equal(found, given[1] * given[0][:, None] + given[2] * 3)
        assert all(one is two for one, two in zip(tensors(meta), given, strict=True))
    assert runner.stats.replayed == 3


def test_another_structure_or_host_leaf_is_never_answered_by_the_old_graph(rig, rows):
    """
    Guards against pytorch/torchtitan#4432: a missing or additional leaf is an error that names it; another
    declared host value has a graph of its own; an undeclared one runs eagerly; dict order does not matter.
    """
    spec, forward = nested(rig, STRUCTURES["dict"])
    runner = rig.start(forward, spec, buckets=(4,))
    n = 3
    scale, one, two = rows(n)[:, 0].contiguous(), rows(n), rows(n, dtype=torch.int64)
    good = {"c": two, "a": scale, "b": one}
    # The forward unpacks in order; the library hands it the spec's order.
    found = runner.execute(rig.batch(n, meta=good, flag=3))
    assert torch.equal(found, one * scale[:, None] + two * 3)
    for flag in (4, 3):
        given = {"a": scale, "b": one, "c": two}
        found = runner.execute(rig.batch(n, meta=given, flag=flag))
        assert torch.equal(found, one * scale[:, None] + two * flag)
    found = runner.execute(rig.batch(n, meta={"a": scale, "b": one, "c": two}, flag=9))
    assert torch.equal(found, one * scale[:, None] + two * 9)
    assert (runner.stats.replayed, runner.stats.ran_eagerly) == (3, 1)
    for meta, path in (
        ({"a": scale, "b": one}, "meta.c"),
        (good | {"d": one}, "meta.d"),
        ([scale, one, two], "meta"),
        ({"a": scale, "b": one, "c": None}, "meta.c"),
    ):
        with pytest.raises(InputError) as caught:
            runner.execute(rig.batch(n, meta=meta, flag=3))
        assert caught.value.field == path


def test_what_a_graph_reads_outlives_its_owner(rig, rows):
    """
    Guards against pytorch/pytorch#170646, #174649 and microsoft/onnxruntime#32121: static inputs,
    capture-only tensors and what crosses a break are owned until the graph is destroyed; the dummy batch,
    the caller's batch and everything else may die, and their memory be handed to others.
    """
    made = []

    def forward(batch):
        x = rig.cut(batch.inputs["x"] * 2)
        counts = batch.capture_only.get("counts")
        return x + (1.0 if counts is None else counts)

    runtime = rig.runtime(forward)

    def prepare(batch):
        batch.capture_only["counts"] = torch.full((3,), 1.0).to(rig.device)
        made.append(1)

    runtime.prepare_capture_batch = prepare
    runner = rig.runner(runtime)
    gc.collect()
    poison = [torch.full((size,), 1e30).to(rig.device) for size in (1, 3, 6, 12, 24) for _ in range(40)]
    for n in (3, 8, 1):
        x = rows(n)
        assert torch.equal(runner.execute(rig.batch(n, x=x)), x * 2 + 1)
        del x
        poison += [torch.full((size,), 1e30).to(rig.device) for size in (3, 9, 24)]
    assert runner.stats.replayed == 3
    assert made
    del poison


@pytest.mark.parametrize("contiguous", [True, False])
def test_a_host_batch_may_die_or_change_at_once(rig, rows, contiguous):
    """
    Guards against microsoft/onnxruntime#32121: the host memory that a step reads is the library's own until
    the device has read it; the caller's tensors are free when the step returns, many steps ahead of the
    device too.
    """
    runner = rig.start(lambda batch: rig.cut(batch.inputs["x"] * 2) + 1)
    found, wanted = [], []
    for _ in range(30):
        x = rows(3).cpu()
        x = x if contiguous else x.t().contiguous().t()
        wanted.append(x * 2 + 1)
        found.append(runner.execute(rig.batch(3, x=x)))
        x.fill_(-1e9)
        del x
    for one, two in zip(found, wanted, strict=True):
        assert torch.equal(one.cpu(), two)
    assert runner.stats.replayed == 30


def test_staged_batches_wait_for_a_device_that_lags(sim, rig):
    """
    Guards against microsoft/onnxruntime#32121: on a device that queues all work, the host memory of a step is
    not written again before the device has read it, however many steps follow.
    """
    runner = rig.start(lambda batch: rig.cut(batch.inputs["x"] * 2) + 1)
    sim.set_deferred(True)
    try:
        found, wanted = [], []
        for step in range(40):
            x = torch.full((3, 3), float(step))  # made on the host: a copy from the device would wait for it
            wanted.append(x * 2 + 1)
            found.append(runner.execute(rig.batch(3, x=x)))
            x.fill_(-1e9)
        for one, two in zip(found, wanted, strict=True):
            assert torch.equal(one.cpu(), two)
    finally:
        sim.set_deferred(False)


def test_staged_batches_of_many_sizes_keep_a_bounded_record(rig, rows, monkeypatch):
    """
    Guards against NVIDIA/warp#1957: however many sizes come from host memory, what is remembered of them, in
    all places of the ring together, is bounded, and steps of sizes seen long ago are right.
    """
    from graphplat import staging

    if not rig.platform.capabilities.pinned_memory:
        pytest.skip("this platform stages nothing")
    monkeypatch.setattr(staging, "_FEWEST", 4)
    monkeypatch.setattr(staging, "_MOST", 4)
    monkeypatch.setattr(staging, "_MOST_CUTS", 6)
    runner = rig.start(lambda batch: rig.cut(batch.inputs["x"] * 2), buckets=(8,))
    (entry,) = runner.entries.values()
    remembered = []
    for step in range(80):
        n = 1 + (step + step // 8) % 8  # each place of the ring meets each size
        x = rows(n).cpu()
        assert torch.equal(runner.execute(rig.batch(n, x=x)).cpu(), x * 2)
        slots = entry.inputs.staging._slots
        remembered.append(sum(len(slot.heads) for slot in slots))
    assert len(slots) == 4
    assert max(remembered) == 6


class Tables:
    """A forward that keeps a table it makes on first use: one, one a size, or that of the last size."""

    def __init__(self, rig, kind):
        self.rig, self.kind, self.kept, self.read = rig, kind, {}, False

    def __call__(self, batch):
        x = batch.inputs["x"]
        size = x.shape[0] if self.kind != "one" else 8
        if size not in self.kept:
            if self.kind == "last":
                self.kept.clear()
            self.kept[size] = torch.arange(size, device=x.device) + 1.0
            if self.read:
                float(x.sum())
        table = self.kept[size]
        return self.rig.cut(x * (table[:, None] if self.kind != "one" else table[0])) + x

    def wanted(self, x):
        scale = torch.arange(x.shape[0], device=x.device) + 1.0 if self.kind != "one" else x.new_ones(1)
        return x * scale[:, None] + x


@pytest.mark.parametrize("capture", ["startup", "lazy"])
@pytest.mark.parametrize("kind", ["one", "each", "each, with a host read", "last"])
def test_a_table_made_on_first_use_holds_its_values(rig, rows, kind, capture):
    """
    Guards against huggingface/transformers#30775 and sgl-project/sglang-omni#579: what a forward makes and
    keeps on its first call at a size is right in eager steps of that size before any replay, in replays, and
    after the graphs are gone, even if that call was part of a capture, or failed in one.
    """
    forward = Tables(rig, kind.partition(",")[0])
    forward.read = "read" in kind
    runtime = rig.runtime(forward, capture=capture, on_failure="eager")
    if kind == "last":  # a table that comes and goes must be declared
        runtime.extra_tensors = lambda: {str(size): table for size, table in forward.kept.items()}
    runner = rig.runner(runtime)
    for n in (1, 2, 4, 8):
        batch = rig.batch(n, x=rows(n))
        assert torch.equal(rig.eagerly(runner, batch), forward.wanted(batch.inputs["x"]))
    for n in (8, 3, 3, 20, 5, 2, 1):
        batch = rig.batch(n, x=rows(n))
        found = runner.execute(batch)
        wanted = forward.wanted(torch.cat([batch.inputs["x"], batch.inputs["x"].new_zeros(8, 3)]))[:n]
        assert torch.equal(found, wanted)
    assert kind == "last" or runner.stats.replayed == 6
    runner.release()
    poison = [torch.full((size,), 1e30).to(rig.device) for size in (1, 2, 4, 8) for _ in range(40)]
    for n in (4, 8, 2, 1):
        batch = rig.batch(n, x=rows(n))
        assert torch.equal(runner.execute(batch), forward.wanted(batch.inputs["x"]))
    del poison


@pytest.mark.parametrize("outputs", ["copy", "view"])
@pytest.mark.parametrize("capture", ["startup", "lazy"])
@pytest.mark.parametrize("early", [False, True], ids=["made on first use", "made before"])
def test_a_table_that_is_returned_is_never_written(rig, rows, early, capture, outputs):
    """
    Guards against sgl-project/sglang#23037: a table for each size, kept by the runtime and returned among the
    results, holds its values whatever sizes are run afterwards, and so do the results.
    """
    tables = {}

    def forward(batch):
        x = batch.inputs["x"]
        size = x.shape[0]
        if size not in tables:
            tables[size] = torch.full((size,), float(size), device=x.device)
        return {"y": rig.cut(x * 2), "table": tables[size]}

    if early:
        tables |= {size: torch.full((size,), float(size)).to(rig.device) for size in range(1, 9)}
    runner = rig.start(forward, capture=capture, outputs=outputs)
    for n in (2, 8, 4, 2, 1, 8, 3):
        x, bucket = rows(n), {3: 4}.get(n, n)
        found = runner.execute(rig.batch(n, x=x))
        assert torch.equal(found["y"], x * 2)
        assert torch.equal(found["table"], torch.full((n,), float(bucket)).to(rig.device))
        assert all((table == size).all() for size, table in tables.items())
    assert runner.stats.replayed == 7


@pytest.mark.parametrize("capture", ["startup", "lazy"])
def test_a_table_that_only_comes_in_addition_costs_no_graph(rig, rows, capture):
    """
    Guards against sgl-project/sglang-omni#579: a forward that registers a buffer at its first run at each
    size replaces nothing that earlier graphs read; all of them stay and replay.
    """
    model = torch.nn.Module()

    def forward(batch):
        x = batch.inputs["x"]
        name = f"table_{x.shape[0]}"
        if not hasattr(model, name):
            model.register_buffer(name, torch.arange(x.shape[0], device=x.device) + 1.0)
        return rig.cut(x * getattr(model, name)[:, None]) + x

    runner = rig.start(forward, capture=capture, model=model, on_failure="raise")
    for n in (8, 4, 8, 2, 1, 4, 8, 2, 1):
        x = rows(n)
        scale = torch.arange(n, device=x.device) + 1.0
        assert torch.equal(runner.execute(rig.batch(n, x=x)), x * scale[:, None] + x)
    assert runner.buckets == (1, 2, 4, 8)
    assert len(runner.context.shapes) == 4, "a graph was captured twice"
    assert (runner.stats.replayed, runner.stats.ran_eagerly, runner.stats.recaptures) == (9, 0, 0)


def test_graphs_whose_table_was_replaced_are_not_kept(rig, rows):
    """
    Guards against pytorch/pytorch#170646: graphs whose memory the forward itself replaced while later ones
    were captured are not kept; the error names the tensor; the latest graph replays, and eager steps are
    right.
    """
    forward = Tables(rig, "last")
    runtime = rig.runtime(forward, on_failure="raise")
    runtime.extra_tensors = lambda: {"table": table for table in forward.kept.values()}
    with pytest.raises(CaptureError) as caught:
        rig.runner(runtime)
    assert caught.value.field == "table"
    del caught  # it holds the runner
    runtime = rig.runtime(forward, on_failure="eager")
    runtime.extra_tensors = lambda: {"table": table for table in forward.kept.values()}
    runner = rig.runner(runtime)
    for n in (8, 3, 1):
        batch = rig.batch(n, x=rows(n))
        assert torch.equal(runner.execute(batch), forward.wanted(batch.inputs["x"]))
    assert (runner.stats.replayed, runner.stats.eager[Reason.CAPTURE_FAILED]) == (1, 2)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32, torch.float64, torch.bool])
def test_another_dtype_is_refused_and_changes_nothing(rig, rows, dtype):
    """
    Guards against ikawrakow/ik_llama.cpp#2158: a graph recorded for one element type never runs on another;
    the error names field and both types, also after good steps of the same size, and the next step is right.
    """
    spec = InputSpec(x=rig.tensor(3, dtype=torch.int64), y=rig.tensor(3))
    runner = rig.start(lambda batch: rig.cut(batch.inputs["y"]) + batch.inputs["x"], spec)
    x, y = rows(3, dtype=torch.int64) + (1 << 40), rows(3)
    for _ in range(2):
        assert torch.equal(runner.execute(rig.batch(3, x=x, y=y)), y + x)
        with pytest.raises(InputError, match=rf"torch.int64.*{dtype}") as caught:
            runner.execute(rig.batch(3, x=x.to(dtype), y=y))
        assert caught.value.field == "x"
    assert torch.equal(runner.execute(rig.batch(3, x=x, y=y)), y + x)


LAYOUTS = {
    "transposed": lambda rows, n: rows(n).t().contiguous().t(),
    "strided": lambda rows, n: rows(n, width=6)[:, ::2],
    "expanded": lambda rows, n: rows(1).expand(n, 3),
    "offset": lambda rows, n: rows(n + 2)[2:],
    "reversed rows": lambda rows, n: rows(n).flip(0),
}


@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_gives_the_eager_result(rig, rows, layout, host):
    """
    Guards against vllm-project/vllm#20426: transposed, strided, expanded and offset inputs, on the device or
    the host, give what eager gives, on the first step of a size and later ones, mixed with plain ones.
    """
    runner = rig.start(lambda batch: rig.cut(batch.inputs["x"] * 2) + batch.inputs["x"])
    for n in (3, 3, 4):
        for x in (LAYOUTS[layout](rows, n), rows(n)):
            found = runner.execute(rig.batch(n, x=x.cpu() if host else x))
            assert torch.equal(found, x * 3)
    assert runner.stats.replayed == 6


def test_tensors_of_a_former_stage_are_read_anew(rig, rows):
    """
    Guards against vllm-project/vllm#13353: two chained runners, the second fed with new tensors in a new dict
    at every step, give what eager gives over changing sizes; the first one's results are cut before they
    are handed on.
    """
    first = rig.start(
        lambda batch: {"hidden": rig.cut(batch.inputs["x"] * 2), "residual": batch.inputs["x"] + 1}
    )
    stage = {"hidden": rig.tensor(3, fill=4), "residual": rig.tensor(3, fill=9)}
    second = rig.start(
        lambda batch: rig.cut(batch.inputs["stage"]["hidden"]) - batch.inputs["stage"]["residual"],
        InputSpec(stage=stage),
    )
    for n in (3, 8, 1, 3, 2):
        x = rows(n)
        handed = first.execute(rig.batch(n, x=x))
        assert handed["hidden"].shape == (n, 3)
        assert torch.equal(second.execute(rig.batch(n, stage=dict(handed))), x * 2 - (x + 1))
    assert (first.stats.replayed, second.stats.replayed) == (5, 5)


def test_what_libraries_let_go_of_hides_nothing_that_a_forward_keeps(rig, monkeypatch):
    """
    Where a capture begins by freeing a library's workspaces, a small table that the forward made inside the
    recording is noticed all the same, and holds its values.
    """
    if not rig.platform.capabilities.memory_counters:
        pytest.skip("this platform counts no memory")
    workspaces, kept = [], {}
    begin = rig.platform.capture_begin

    def beginning(*args, **keywords):
        workspaces.clear()
        return begin(*args, **keywords)

    def forward(batch):
        x = batch.inputs["x"]
        if len(x) == 4 and not kept:
            kept[4] = torch.arange(4.0, device=x.device)[:, None] + 1
        return rig.cut(x * kept[4] if len(x) == 4 else x)

    monkeypatch.setattr(rig.platform, "capture_begin", beginning)
    monkeypatch.setattr(rig.platform, "drop_workspaces", workspaces.clear)
    runtime = rig.runtime(forward, buckets=(4, 8))

    def prepare(batch):
        if batch.num_tokens == 4:
            workspaces.append(torch.ones(1 << 20, device=rig.device))

    runtime.prepare_capture_batch = prepare
    runner = rig.runner(runtime)
    x = torch.ones(4, 3)
    found = runner.execute(rig.batch(4, x=x.to(rig.device)))
    assert torch.equal(found.cpu(), x * (torch.arange(4.0)[:, None] + 1))
    noted = {shape.key.size: shape.note for shape in runner.context.shapes}
    assert runner.stats.replayed == 1
    assert "kept" in noted[4] or rig.backend == "breakable"
