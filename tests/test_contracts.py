"""The contract classes are checked when a subclass is defined, not in the middle of serving."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from graphplat import (
    CaptureError,
    ContractError,
    ForwardBatch,
    GraphplatError,
    InputError,
    InputSpec,
    ModelRunner,
    Phase,
    PhaseConfig,
    Platform,
    PlatformCapabilities,
    PlatformError,
    capture_cuda_graphs,
)
from graphplat.streamgraph import StreamGraphApi, StreamGraphPlatform


def define(base: type, name: str, members: dict[str, Any], **keywords: Any) -> type:
    return type(base)(name, (base,), members, **keywords)


PLATFORM = {"name": "acme", "device_type": "acme"}
RUNTIME = {"input_spec": lambda self, phase: InputSpec(), "forward": lambda self, batch: None}


def test_a_platform_that_declares_nothing_is_valid_and_cautious() -> None:
    """Two names are enough; every capability then says no, and what needs one raises."""
    platform = define(Platform, "Acme", PLATFORM)()
    assert platform.support_cuda_graph() is False
    assert platform.is_out_of_tree() is True
    device = torch.device("cpu")
    assert platform.memory_info(device) is None
    assert platform.current_stream(device) is None
    assert platform.padding_fill("x", 7) == 7
    assert platform.is_capturing() is False
    for call in (
        platform.create_graph,
        lambda: platform.capture_begin(None, pool=None, stream=None),
        lambda: platform.capture_end(None),
        lambda: platform.update_graph(None, {}),
        lambda: platform.register_generator(None, torch.Generator()),
    ):
        with pytest.raises(PlatformError, match="acme"):
            call()


@pytest.mark.parametrize("field", PlatformCapabilities.__struct_fields__)
def test_every_capability_defaults_to_the_cautious_answer(field: str) -> None:
    """
    A plugin written before a capability existed claims nothing by it. A device-wide synchronize is the
    rule.
    """
    value = getattr(PlatformCapabilities(), field)
    assert value in (False, "none", None) or (field == "device_synchronize" and value is True)


def test_capabilities_are_frozen() -> None:
    """What a platform claims cannot change after it was asked."""
    with pytest.raises(AttributeError):
        PlatformCapabilities().graph_capture = True  # type: ignore[misc]


@pytest.mark.parametrize(
    ("members", "says"),
    [
        ({"name": None}, "name must be a short name, found None"),
        ({"device_type": None}, "device_type must be a short name"),
        ({"name": "my platform"}, "found 'my platform'"),
        ({"name": 3}, "found 3"),
        ({"capabilities": {}}, "capabilities must be a PlatformCapabilities"),
        ({"capabilities": lambda self: None}, "capabilities must be a value, not a method"),
        ({"prob": lambda self: None}, "prob is no member of Platform.*'probe'"),
        ({"suport_cuda_graph": lambda self: True}, "'support_cuda_graph'"),
        ({"create_graphs": lambda self: None}, "'create_graph'"),
        ({"probe": True}, "probe must be a method"),
        ({"probe": lambda self, device: None}, "does not take the contract's arguments"),
        ({"capture_begin": lambda self, graph, pool: None}, "does not take the contract's arguments"),
        ({"synchronize": lambda self: None}, "does not take the contract's arguments"),
        ({"padding_fill": lambda self, field: 0}, "does not take the contract's arguments"),
    ],
)
def test_a_wrong_platform_is_refused_at_its_definition(members: dict[str, Any], says: str) -> None:
    """
    A missing or misspelt member, a method that takes other arguments: each is named, with the next step.
    """
    with pytest.raises(ContractError, match=says):
        define(Platform, "Acme", PLATFORM | members)


def test_what_a_platform_adds_under_its_own_names_is_its_own() -> None:
    """Helpers, underscored look-alikes, and further optional arguments are fine."""
    define(
        Platform,
        "Acme",
        PLATFORM
        | {
            "vendor_helper": lambda self: None,
            "_prob": lambda self: None,
            "probe": lambda self, verbose=False: None,
            "synchronize": lambda self, *args, **keywords: None,
            "empty_cache": staticmethod(lambda: None),
            "capabilities": property(lambda self: PlatformCapabilities(graph_capture=True)),
        },
    )


def test_a_base_of_platforms_needs_no_name() -> None:
    """An intermediate class says so; its subclasses are checked."""
    base = define(Platform, "Family", {"probe": lambda self: None}, abstract=True)
    define(base, "Member", PLATFORM)
    with pytest.raises(ContractError, match="name"):
        define(base, "Nameless", {})
    with pytest.raises(ContractError, match="'probe'"):
        define(Platform, "Wrong", {"prob": lambda self: None}, abstract=True)


@pytest.mark.parametrize("members", [{}, {"api": None}, {"api": "acme"}, {"api": StreamGraphApi}])
def test_a_stream_graph_platform_names_its_graph_api(members: dict[str, Any]) -> None:
    """Without one the class is refused where it is written; a base needs none, a property will do."""
    with pytest.raises(ContractError, match=r"Acme\.api must be a StreamGraphApi, found"):
        define(StreamGraphPlatform, "Acme", PLATFORM | members)
    api = StreamGraphApi(module="acme", graph_class="Graph")
    base = define(StreamGraphPlatform, "Family", {}, abstract=True)
    with pytest.raises(ContractError, match=r"Member\.api"):
        define(base, "Member", PLATFORM)
    member = define(base, "Member", PLATFORM | {"api": api})
    assert define(member, "Newer", {}).api is api
    define(base, "Computed", PLATFORM | {"api": property(lambda self: api)})


@pytest.mark.parametrize(
    ("members", "says"),
    [
        ({"forward": None}, "forward must be a method"),
        ({"forwards": lambda self, batch: None}, "forwards is no member of ModelRunner.*'forward'"),
        ({"input_specs": lambda self, phase: None}, "'input_spec'"),
        ({"foward_hooks": ()}, "'forward_hooks'"),
        ({"is_draft_workers": True}, "'is_draft_worker'"),
        ({"prepare_capture_batches": lambda self, batch: None}, "'prepare_capture_batch'"),
        ({"forward": lambda self: None}, "does not take the contract's arguments"),
        ({"post_warmup": lambda self, batch: None}, "does not take the contract's arguments"),
        ({"is_draft_worker": lambda self: False}, "is_draft_worker must be a value, not a method"),
        ({"enable_symm_mem": lambda self: False}, "must be a value"),
    ],
)
def test_a_wrong_runtime_is_refused_at_its_definition(members: dict[str, Any], says: str) -> None:
    """
    No member is sniffed for: a name that nearly is one is an error, and so is a method in a value's place.
    """
    with pytest.raises(ContractError, match=says):
        define(ModelRunner, "Toy", RUNTIME | members)


@pytest.mark.parametrize(
    ("members", "meant"),
    [
        ({"token_per_request": 3}, "tokens_per_request"),
        ({"tokens_per_requests": 3}, "tokens_per_request"),
        ({"graph_conf": None}, "graph_config"),
        ({"foward_stream": None}, "forward_stream"),
        ({"forward_hook": [("", print)]}, "forward_hooks"),
        ({"symm_mem_byte": 1}, "symm_mem_bytes"),
    ],
)
def test_a_misspelt_setting_of_an_instance_is_refused(
    runtime: Any, members: dict[str, Any], meant: str
) -> None:
    """What ``__init__`` sets under nearly the right name would be ignored: it is named before a capture."""
    toy = runtime(lambda batch: batch.inputs["x"])
    del toy.graph_config
    vars(toy).update(members)
    with pytest.raises(ContractError, match=f"{next(iter(members))} is no member .* mean '{meant}'"):
        capture_cuda_graphs(model_runner=toy)


@pytest.mark.parametrize(
    ("members", "says"),
    [
        ({"device": "cpu"}, r"device must be a device, found str. Set it to torch.device\('cpu'\)"),
        ({"forward_hooks": [print]}, "forward_hooks must be pairs of a submodule's name and a hook"),
        ({"forward_hooks": [("", 3)]}, "forward_hooks must be pairs of a submodule's name and a hook"),
        ({"generators": torch.Generator()}, "generators must be a sequence of torch.Generator"),
        ({"canary_manager": object()}, r"canary_manager must be an object with mark_init_finished\(\)"),
        ({"process_group": "world"}, "process_group must be a torch.distributed process group.*'world'"),
    ],
)
def test_a_member_that_cannot_be_used_is_refused_before_anything_runs(
    runtime: Any, members: dict[str, Any], says: str
) -> None:
    """It would fail deep within set-up, after captures, in words of somebody else."""
    toy = runtime(lambda batch: pytest.fail("the forward ran"))
    vars(toy).update(members)
    with pytest.raises(ContractError, match=says):
        capture_cuda_graphs(model_runner=toy)


@pytest.mark.parametrize(
    "members",
    [
        {"_token_per_request": 3},
        {"forwards": 0, "decoder": torch.nn.Linear(2, 2), "config": {}, "models": [], "devices": []},
        {"process_groups": {"tp": None}, "generator": torch.Generator()},
        {"canary_managers": [], "tokens": 3, "request": None, "forward_streams": (None,)},
        {"generators": (), "generator_s": 1, "generatos": 2},
        {
            "draft_worker": None,
            "tp_process_group": None,
            "max_tokens_per_request": 8,
            "forward_stream2": None,
        },
        {"forward_streams": object(), "process_groups": object()},
    ],
)
def test_names_of_a_runtimes_own_are_its_own(runtime: Any, members: dict[str, Any]) -> None:
    """Underscored look-alikes, several of one thing, one of several, and what is set beside the member."""
    toy = runtime(lambda batch: batch.inputs["x"], decode=PhaseConfig(backend="disabled"))
    vars(toy).update(members)
    capture_cuda_graphs(model_runner=toy)


def test_an_unknown_phase_names_the_phases() -> None:
    """A batch of another phase is refused where it is made, and an InputError as every bad field."""
    for phase in ("deco", None, 1):
        with pytest.raises(InputError, match="expected one of 'decode', 'prefill', found") as caught:
            ForwardBatch(phase=phase, num_requests=1, num_tokens=1)  # type: ignore[arg-type]
        assert caught.value.field == "phase"
    assert ForwardBatch(phase="decode", num_requests=1, num_tokens=1).phase is Phase.DECODE


@pytest.mark.parametrize("missing", ["input_spec", "forward"])
def test_the_two_methods_of_a_runtime_are_required(missing: str) -> None:
    """Without either there is nothing to run."""
    members = {name: value for name, value in RUNTIME.items() if name != missing}
    with pytest.raises(ContractError, match=f"does not define {missing}"):
        define(ModelRunner, "Toy", members)


def test_members_of_a_runtime_may_be_properties() -> None:
    """Optional members can be computed."""
    toy = define(
        ModelRunner,
        "Toy",
        RUNTIME | {"is_draft_worker": property(lambda self: True), "my_own": 3, "decode_stream": None},
    )
    assert toy().is_draft_worker is True


def test_errors_are_of_one_tree() -> None:
    """Every error that is raised here derives from GraphplatError, and says where it happened."""
    from graphplat import errors

    kinds = [
        kind for _, kind in inspect.getmembers(errors, inspect.isclass) if kind.__module__ == errors.__name__
    ]
    assert kinds
    assert all(issubclass(kind, (GraphplatError, Warning)) for kind in kinds)
    error = errors.CaptureError(
        "it broke", platform="acme", phase="decode", bucket=4, field="x", hint="Try 3"
    )
    assert str(error) == "it broke [platform 'acme', phase 'decode', bucket 4, field 'x']. Try 3"
    assert str(errors.InputError("alone")) == "alone"
    assert isinstance(errors.InputError("x"), ValueError)


def test_an_input_spec_of_another_type_is_told_at_once(runtime: Any) -> None:
    """A runtime whose input_spec forgets to return gets an error that names it, before anything runs."""
    made = runtime(lambda batch: batch.inputs["x"])
    made.input_spec = lambda phase: None
    with pytest.raises(ContractError, match="must return an InputSpec, found NoneType"):
        capture_cuda_graphs(model_runner=made)


def test_a_forward_that_fails_names_its_line(runtime: Any) -> None:
    """The error of the first run has platform, phase and bucket, and the line of the runtime's own code."""
    with pytest.raises(CaptureError, match=r"KeyError: 'y' \(at .*test_contracts.py:\d+"):
        capture_cuda_graphs(model_runner=runtime(lambda batch: batch.inputs["y"]))
