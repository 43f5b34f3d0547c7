"""The order of capture_cuda_graphs, and what it returns."""

from __future__ import annotations

import contextlib
import gc
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import distributed

from graphplat import (
    CaptureError,
    CudaGraphsCapture,
    DecodeGraphCapture,
    DecodeGraphRunner,
    EagerRunner,
    ForwardBatch,
    GraphConfig,
    InputSpec,
    ModelRunner,
    Phase,
    PhaseConfig,
    Platform,
    PlatformCapabilities,
    PlatformError,
    PrefillGraphRunner,
    Reason,
    TensorSpec,
    capture_cuda_graphs,
    capture_decode_graph,
    capture_prefill_graph,
    hookimpl,
    registry,
)
from graphplat.backends import CaptureBackend
from graphplat.errors import ContractError, PluginError
from graphplat.outputs import GraphSharedOutput
from graphplat.recorded import RecordedGraph, RecordedPool


class Events(list[str]):
    """What happened, without repetitions in a row."""

    def note(self, event: str) -> None:
        if not self or self[-1] != event:
            self.append(event)


def make_plugin(
    events: Events, *, device_type: str = "cpu", graphs: bool = True, foreign: bool = True, **more: Any
) -> Any:
    """A plugin whose platform, hooks and graphs write down when they are used; *more* are capabilities."""

    kind = device_type

    class Recording(Platform):
        name = "recording"
        device_type = kind
        capabilities = PlatformCapabilities(
            **{"graph_capture": graphs, "executes_in_capture": True, "shared_pool": True}
            | {"symmetric_memory": True, "collectives_in_capture": True}
            | more
        )

        def probe(self) -> None:
            events.note("platform")

        def is_out_of_tree(self) -> bool:
            return foreign

        def graph_pool(self) -> Any:
            return RecordedPool()

        def create_graph(self, *, updatable: bool = False) -> Any:
            return RecordedGraph()

        def capture_begin(self, graph: Any, *, pool: Any, stream: Any) -> None:
            events.note("begin")
            graph.capture_begin(pool)

        def capture_end(self, graph: Any) -> None:
            events.note("end")
            graph.capture_end()

        def abort_capture(self, graph: Any, *, pool: Any, stream: Any) -> bool:
            graph.abort()
            return True

        def preallocate_symmetric_memory(self, *, device: Any, stream: Any, **more: Any) -> Any:
            events.note(f"symmetric memory on {device} {stream}")
            return "pool"

    class Plugin:
        @hookimpl
        def provide_platforms(self) -> Any:
            return [Recording]

        @hookimpl
        def create_eager_runner(self, platform: Any, model_runner: Any) -> Any:
            events.note("eager runner")

        @hookimpl
        def create_prefill_runner(self, platform: Any, model_runner: Any, eager_runner: Any) -> Any:
            events.note("prefill runner")

        @hookimpl
        def create_decode_runner(self, platform: Any, model_runner: Any, eager_runner: Any) -> Any:
            events.note("decode runner")

        @hookimpl
        def capture_participants(self, platform: Any, model_runner: Any, phase: Phase) -> Any:
            @contextlib.contextmanager
            def around() -> Iterator[None]:
                events.note(f"enter {phase}")
                yield
                events.note(f"leave {phase}")

            return around()

    return Plugin()


class Model(torch.nn.Module):
    def __init__(self, events: Events) -> None:
        super().__init__()
        self.events = events

    def register_forward_hook(self, *args: Any, **kwargs: Any) -> Any:
        self.events.note("forward hooks")
        return super().register_forward_hook(*args, **kwargs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class Canary:
    def __init__(self, events: Events) -> None:
        self.events = events

    def mark_init_finished(self) -> None:
        self.events.note("canary")


class Recorder(ModelRunner):
    """A runtime that uses every optional step."""

    def __init__(self, events: Events, device: str = "cpu", **members: Any) -> None:
        self.device = torch.device(device)
        self.model = Model(events)
        self.graph_config = GraphConfig(
            decode=PhaseConfig(buckets=(4,)), prefill=PhaseConfig(backend="full", buckets=(8,))
        )
        self.enable_symm_mem = True
        self.forward_stream = "stream"
        self.canary_manager = Canary(events)
        self.forward_hooks = [("", lambda module, args, output: output * 100)]
        self._events = events
        for name, value in members.items():
            setattr(self, name, value)

    def input_spec(self, phase: Phase) -> InputSpec:
        return InputSpec(x=TensorSpec(("tokens", 3), dtype=torch.float32))

    def forward(self, batch: ForwardBatch) -> Any:
        self._events.note(f"forward {batch.phase}")
        return self.model(batch.inputs["x"])


PREFILL = ["enter prefill", "forward prefill", "begin", "forward prefill", "end", "leave prefill"]
DECODE = ["enter decode", "forward decode", "begin", "forward decode", "end", "leave decode"]
SETUP = ["platform", "shared output", "eager runner", "forward decode", "forward prefill"]
FINISH = ["forward hooks", "symmetric memory on cpu stream", "canary"]


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Events:
    """The list that everything writes to; the shared output writes to it too."""
    found = Events()
    create = GraphSharedOutput.create_for_model_runner.__func__  # type: ignore[attr-defined]

    def noted(cls: type[GraphSharedOutput], model_runner: ModelRunner) -> GraphSharedOutput:
        found.note("shared output")
        return create(cls, model_runner)

    monkeypatch.setattr(GraphSharedOutput, "create_for_model_runner", classmethod(noted))
    return found


@pytest.fixture
def plugin(events: Events) -> Iterator[Callable[..., None]]:
    """Register the recording plugin, for this test only."""
    names = []

    def register(**settings: Any) -> None:
        registry.register_plugin(make_plugin(events, **settings), "recording")
        names.append("recording")

    yield register
    for name in names:
        registry.unregister_plugin(name)


def test_the_order_is_fixed(plugin: Any, events: Events) -> None:
    """
    Platform, shared output, eager runner and its warm-up, prefill, decode, forward hooks, symmetric memory,
    canary: in this order and no other.
    """
    plugin()
    capture = capture_cuda_graphs(model_runner=Recorder(events))
    assert events == [
        *SETUP,
        "prefill runner",
        *PREFILL,
        "decode runner",
        *DECODE,
        *FINISH,
    ]
    assert isinstance(capture.prefill_runner, PrefillGraphRunner)
    assert isinstance(capture.decode.runner, DecodeGraphRunner)
    assert capture.decode_runner is capture.decode.runner
    assert capture.eager_runner.context.symmetric_memory == "pool"


def test_the_largest_static_buffers_come_first_and_are_shared(plugin: Any, events: Events) -> None:
    """The eager runner allocates what the largest bucket of any phase needs; no graph runner adds to it."""
    plugin()
    capture = capture_cuda_graphs(model_runner=Recorder(events))
    assert capture.report.static_buffer_bytes == 128  # 8 tokens of 3 floats, rounded to 64
    prefill, decode = capture.prefill_runner, capture.decode_runner
    assert isinstance(prefill, PrefillGraphRunner)
    assert isinstance(decode, DecodeGraphRunner)
    assert prefill.buffers(8)["x"].data_ptr() == decode.buffers(4)["x"].data_ptr()


def test_a_draft_runner_captures_its_decode_graphs_later(plugin: Any, events: Events) -> None:
    """
    With capture_decode_cuda_graph=False decode is the eager runner at no cost; a draft worker gets neither
    symmetric memory nor canary. Its decode graphs can be captured afterwards.
    """
    plugin()
    toy = Recorder(events, is_draft_worker=True)
    capture = capture_cuda_graphs(model_runner=toy, capture_decode_cuda_graph=False)
    assert events == [*SETUP, "prefill runner", *PREFILL, "forward hooks"]
    assert capture.decode == DecodeGraphCapture(runner=capture.eager_runner, graph_mem_usage=0)
    assert [skip.reason for skip in capture.report.skipped] == [Reason.DRAFT_RUNNER]
    batch = ForwardBatch(phase=Phase.DECODE, num_requests=1, num_tokens=1, inputs={"x": torch.ones(1, 3)})
    assert capture.decode_runner.explain(batch).reason is Reason.DRAFT_RUNNER
    capture.decode_runner.execute(batch)
    assert capture.decode_runner.stats.eager == {Reason.DRAFT_RUNNER: 1}
    later = capture_decode_graph(model_runner=toy, eager_runner=capture.eager_runner)
    assert isinstance(later.runner, DecodeGraphRunner)
    assert later.graph_mem_usage >= 0
    assert capture.eager_runner.explain(batch).reason is Reason.PHASE_DISABLED, "its own choice from now on"


@pytest.mark.parametrize(
    ("settings", "captures"),
    [
        ({"device_type": "cpu", "graphs": True}, True),
        ({"device_type": "cpu", "graphs": False}, False),
        ({"device_type": "cpu", "graphs": True, "foreign": False}, True),
        ({"device_type": "meta", "graphs": True}, True),
        ({"device_type": "meta", "graphs": False}, False),
        ({"device_type": "meta", "graphs": True, "foreign": False}, False),
    ],
    ids=str,
)
def test_who_captures_decode_graphs(plugin: Any, events: Events, settings: Any, captures: bool) -> None:
    """
    Device types in tree capture where their platform can; any other only if its platform is out of tree and
    supports graphs. Otherwise decode has no runner, costs nothing, and the report says why.
    """
    plugin(**settings)
    toy = Recorder(
        events,
        settings["device_type"],
        graph_config=GraphConfig(decode=PhaseConfig(buckets=(4,), weights="off")),
    )
    toy.enable_symm_mem = False
    capture = capture_cuda_graphs(model_runner=toy)
    if captures:
        assert isinstance(capture.decode.runner, DecodeGraphRunner)
        assert {skip.phase for skip in capture.report.skipped} == {Phase.PREFILL}
        return
    assert capture.decode == DecodeGraphCapture(runner=None, graph_mem_usage=0)
    assert capture.decode_runner is capture.eager_runner
    assert "begin" not in events
    reasons = {skip.phase: skip.reason for skip in capture.report.skipped}
    assert reasons == {Phase.PREFILL: Reason.PHASE_DISABLED, Phase.DECODE: Reason.UNSUPPORTED}
    for phase, reason in reasons.items():
        batch = ForwardBatch(
            phase=phase,
            num_requests=1,
            num_tokens=1,
            inputs={"x": torch.ones(1, 3, device=settings["device_type"])},
        )
        decision = capture.eager_runner.explain(batch)
        assert (decision.reason, bool(decision.detail)) == (reason, True)
        capture.eager_runner.execute(batch)
        assert capture.eager_runner.stats.last == decision
    assert capture.eager_runner.stats.eager == dict.fromkeys(reasons.values(), 1)
    toy.graph_config = GraphConfig(on_unsupported="raise")
    with pytest.raises(PlatformError) as caught:
        capture_cuda_graphs(model_runner=toy)
    assert caught.value.platform == "recording"


def test_disabled_phases_run_eagerly(plugin: Any, events: Events) -> None:
    """Decode disabled: no runner, no cost. Prefill disabled: the eager runner. Neither is an error."""
    plugin()
    off = PhaseConfig(backend="disabled")
    toy = Recorder(events, graph_config=GraphConfig(decode=off, prefill=off, on_unsupported="raise"))
    capture = capture_cuda_graphs(model_runner=toy)
    assert events == ["platform", "shared output", "eager runner", *FINISH]
    assert capture.decode == DecodeGraphCapture(runner=None, graph_mem_usage=0)
    assert capture.prefill_runner is capture.eager_runner is capture.decode_runner
    assert {skip.reason for skip in capture.report.skipped} == {Reason.PHASE_DISABLED}
    batch = ForwardBatch(phase=Phase.DECODE, num_requests=1, num_tokens=1, inputs={"x": torch.ones(1, 3)})
    assert capture.decode_runner.execute(batch).tolist() == [[200.0] * 3]


def test_prefill_without_any_bucket_that_fits_is_the_eager_runner(plugin: Any, events: Events) -> None:
    """Where limits leave prefill no graph, its runner is the eager one, and the report says so."""
    plugin(max_graphs=0)
    prefill = PhaseConfig(backend="full", buckets=(8,))
    toy = Recorder(events, graph_config=GraphConfig(prefill=prefill, decode=PhaseConfig(buckets=(2,))))
    with pytest.warns(match="too few graphs"):
        capture = capture_cuda_graphs(model_runner=toy)
    assert capture.prefill_runner is capture.eager_runner
    assert Reason.GRAPH_LIMIT in {skip.reason for skip in capture.report.skipped}
    packed = ForwardBatch(phase=Phase.PREFILL, num_requests=1, num_tokens=5, inputs={"x": torch.ones(5, 3)})
    assert capture.prefill_runner.explain(packed).reason is Reason.GRAPH_LIMIT


def test_a_platform_that_contradicts_its_capabilities_is_told_so(plugin: Any, events: Events) -> None:
    """support_cuda_graph() without the capability graph_capture is a plugin's mistake, not a fallback."""
    plugin(graphs=False)
    platform = registry.platform_for("cpu")
    type(platform).support_cuda_graph = lambda self: True  # type: ignore[method-assign]
    with pytest.raises(PluginError, match="graph_capture is not declared"):
        capture_cuda_graphs(model_runner=Recorder(events))


def test_symmetric_memory_is_refused_before_anything_is_allocated(plugin: Any, events: Events) -> None:
    """Asked for on a platform that does not declare it, it is an error at once; draft workers need none."""
    plugin(symmetric_memory=False)
    with pytest.raises(PlatformError, match="symmetric_memory") as caught:
        capture_cuda_graphs(model_runner=Recorder(events))
    assert caught.value.platform == "recording"
    assert events == ["platform"]
    capture_cuda_graphs(model_runner=Recorder(events, is_draft_worker=True))
    assert events[-1] == "forward hooks"


def test_ranks_get_no_graphs_where_collectives_cannot_be_recorded(
    plugin: Any, events: Events, tmp_path: Path
) -> None:
    """With a process group both phases are refused, by the capability's name; without one they capture."""
    plugin(collectives_in_capture=False)
    assert capture_cuda_graphs(model_runner=Recorder(events)).decode.runner is not None
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        toy = Recorder(events, process_group=distributed.group.WORLD)
        events.clear()
        capture = capture_cuda_graphs(model_runner=toy)
    finally:
        distributed.destroy_process_group()
    assert capture.decode.runner is None
    assert capture.prefill_runner is capture.eager_runner
    assert "begin" not in events
    assert capture.report.static_buffer_bytes == 0
    assert {skip.reason for skip in capture.report.skipped} == {Reason.UNSUPPORTED}
    assert all("collectives_in_capture" in skip.detail for skip in capture.report.skipped)


@pytest.mark.parametrize("capture", [capture_decode_graph, capture_prefill_graph])
def test_the_eager_runner_of_another_model_runner_is_refused(capture: Any) -> None:
    """Graphs of one model would be captured over the memory of another: a ContractError, nothing captured."""
    ours, theirs = (Recorder(Events(), enable_symm_mem=False) for _ in range(2))
    eager = EagerRunner(registry.platform_for("cpu"), theirs)
    with pytest.raises(ContractError, match="another model runner"):
        capture(model_runner=ours, eager_runner=eager)
    assert eager.context.live_graphs == 0


def test_an_unserved_device_is_an_error() -> None:
    """No platform, no silent fall to another device."""
    with pytest.raises(PlatformError, match="meta"):
        capture_cuda_graphs(model_runner=Recorder(Events(), "meta"))


def test_the_phases_can_be_captured_one_by_one(device: torch.device) -> None:
    """capture_prefill_graph and capture_decode_graph work on an eager runner made by hand."""
    toy = Recorder(Events(), str(device), enable_symm_mem=False)
    eager = EagerRunner(registry.platform_for(device), toy)
    prefill = capture_prefill_graph(model_runner=toy, eager_runner=eager)
    decode = capture_decode_graph(model_runner=toy, eager_runner=eager)
    assert decode.runner is not None
    x = torch.ones(3, 3, device=device)
    batch = ForwardBatch(phase=Phase.DECODE, num_requests=3, num_tokens=3, inputs={"x": x})
    assert torch.equal(decode.runner.execute(batch), x * 2)
    packed = ForwardBatch(phase=Phase.PREFILL, num_requests=2, num_tokens=5, inputs={"x": torch.ones(5, 3)})
    assert prefill.can_run_graph(packed)
    assert torch.equal(prefill.execute(packed).cpu(), torch.ones(5, 3) * 2)


@pytest.mark.parametrize("when", ["startup", "lazy"])
def test_a_forward_hook_is_never_in_a_graph(device: torch.device, when: Any) -> None:
    """
    Hooks fire in eager steps alone: not in the first graphs, not in those captured lazily, and not after a
    recapture; and they are still on afterwards.
    """
    toy = Recorder(Events(), str(device), enable_symm_mem=False)
    toy.graph_config = GraphConfig(decode=PhaseConfig(buckets=(2, 4), capture=when))
    runner = capture_cuda_graphs(model_runner=toy).decode_runner

    def step(n: int) -> float:
        x = torch.ones(n, 3, device=device)
        batch = ForwardBatch(phase=Phase.DECODE, num_requests=n, num_tokens=n, inputs={"x": x})
        return float(runner.execute(batch).sum()) / (3 * n)  # a mean may be rounded

    for _ in range(2):
        assert [step(n) for n in (2, 3, 4, 2)] == [2.0] * 4
        assert step(5) == 200.0
        runner.recapture()
    runner.release()
    assert step(2) == 200.0


def test_a_second_set_up_puts_no_hook_on_twice(device: torch.device) -> None:
    """A runtime may be set up again, with or without a release: each eager step calls its hook once."""
    toy = Recorder(Events(), str(device), enable_symm_mem=False)
    for _ in range(2):
        capture = capture_cuda_graphs(model_runner=toy)
    del capture
    gc.collect()
    capture = capture_cuda_graphs(model_runner=toy)
    assert len(toy.model._forward_hooks) == 1
    capture.decode_runner.release()
    capture.prefill_runner.release()
    assert len(toy.model._forward_hooks) == 1


def test_a_set_up_that_fails_leaves_the_hooks_of_an_earlier_one_on(device: torch.device) -> None:
    """The runners of the first go on to serve, and call them."""
    toy = Recorder(Events(), str(device), enable_symm_mem=False)
    capture_cuda_graphs(model_runner=toy)
    toy.forward = lambda batch: batch.no_such_field
    with pytest.raises(CaptureError):
        capture_cuda_graphs(model_runner=toy)
    assert len(toy.model._forward_hooks) == 1


def test_a_set_up_that_fails_leaves_no_hook_and_no_graph(device: torch.device) -> None:
    """
    Whatever fails last, the model is as before and no graph is alive; what fails beside it is noted on
    the error; another set-up then works.
    """
    events = Events()
    toy = Recorder(events, str(device), enable_symm_mem=False)
    toy.model.register_forward_hook(lambda *_: None)
    backends: list[Any] = []

    class Unwell:
        def mark_init_finished(self) -> None:
            found = (o for o in gc.get_objects() if issubclass(type(o), CaptureBackend))
            backends.extend(o for o in found if o.context.model_runner is toy)
            raise OSError("unwell")

    toy.canary_manager = Unwell()
    with pytest.raises(OSError, match="unwell"):
        capture_cuda_graphs(model_runner=toy)
    assert len(toy.model._forward_hooks) == 1
    assert len(backends) == 2
    assert not any(backend.live_graphs for backend in backends)
    toy.canary_manager = None
    assert capture_cuda_graphs(model_runner=toy).decode_runner.buckets
    assert len(toy.model._forward_hooks) == 2


def test_nothing_is_written_onto_the_model_runner(device: torch.device) -> None:
    """The runtime's object has the attributes that it had before."""
    toy = Recorder(Events(), str(device), enable_symm_mem=False)
    before = dict(vars(toy))
    capture_cuda_graphs(model_runner=toy)
    assert vars(toy) == before
    assert vars(toy).keys() == before.keys()


def test_results_are_frozen_and_keyword_only(device: torch.device) -> None:
    """A result cannot be changed, nor made by position; its report encodes to JSON."""
    capture = capture_cuda_graphs(model_runner=Recorder(Events(), str(device), enable_symm_mem=False))
    for result, field in ((capture, "decode"), (capture.decode, "runner"), (capture.report, "device")):
        with pytest.raises(AttributeError):
            setattr(result, field, None)
    for kind in (CudaGraphsCapture, DecodeGraphCapture):
        assert issubclass(kind, msgspec.Struct)
        with pytest.raises(TypeError):
            kind(None, 0)
    told = json.loads(capture.report.to_json())
    assert told["platform"] == capture.report.platform
    assert [shape["key"]["size"] for shape in told["shapes"]] == [8, 4]
    assert all(shape["seconds"] > 0 for shape in told["shapes"])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"device": "cpu"}, "device must be a device"),
        ({"model": None}, "model must be a Module"),
        ({"graph_config": {}}, "graph_config must be a GraphConfig"),
        ({"tokens_per_request": 0}, "tokens_per_request must be a positive integer"),
        ({"forward_hooks": [("decoder", print)]}, "submodule 'decoder'"),
    ],
)
def test_an_incomplete_runtime_is_refused_before_anything_happens(
    plugin: Any, events: Events, change: dict[str, Any], says: str
) -> None:
    """A ContractError names the member; nothing was resolved, allocated or run."""
    plugin()
    toy = Recorder(events)
    vars(toy).update(change)
    with pytest.raises(ContractError, match=says):
        capture_cuda_graphs(model_runner=toy)
    assert events == []


def test_something_that_is_no_model_runner_is_refused() -> None:
    """No sniffing of attributes: the base class is the contract."""
    with pytest.raises(ContractError, match=r"must be a graphplat\.ModelRunner"):
        capture_cuda_graphs(model_runner=torch.nn.Linear(1, 1))  # type: ignore[arg-type]
