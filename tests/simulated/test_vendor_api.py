"""Each pose has its vendor's names, keywords and abilities, and no others."""

import inspect

import pytest
import torch

CONTEXT = {
    "npu": "(npu_graph, pool=None, stream=None, auto_dispatch_capture=False, capture_error_mode='global')",
    "musa": "(musa_graph, pool=None, stream=None, capture_error_mode='global')",
    "simxpu": "(xpu_graph, pool=None, stream=None)",
    "simcuda": "(cuda_graph, pool=None, stream=None, capture_error_mode='global', enable_annotations=False, "
    "check_input_liveness=False)",
    "acme": "(acme_graph, pool=None, stream=None, capture_error_mode='global', enable_annotations=False, "
    "check_input_liveness=False)",
}
BEGIN = {
    "npu": "(self, pool=None, capture_error_mode='global')",
    "musa": "(self, pool=None, capture_error_mode='global')",
    "simxpu": "(self, pool=None)",
    "simcuda": "(self, pool=None, capture_error_mode='global', check_input_liveness=False)",
    "acme": "(self, pool=None, capture_error_mode='global', check_input_liveness=False)",
}
CLASS = {
    "npu": "NPUGraph",
    "musa": "MUSAGraph",
    "simxpu": "XPUGraph",
    "simcuda": "CUDAGraph",
    "acme": "AcmeGraph",
}
EVENT = {
    "npu": "(enable_timing=False, blocking=False, interprocess=False)",
    "musa": "(enable_timing=False, blocking=False, interprocess=False)",
    "simxpu": "(enable_timing=False)",
    "simcuda": "(enable_timing=False, blocking=False, interprocess=False, external=False)",
    "acme": "(enable_timing=False, blocking=False, interprocess=False, external=False)",
}
METHODS = {
    "instantiate",
    "update",
    "debug_dump",
    "enable_debug_mode",
    "register_generator_state",
    "reinstantiate_graph",
}
ABILITIES = {
    "npu": {"update", "debug_dump"},
    "musa": {"debug_dump", "enable_debug_mode", "reinstantiate_graph"},
    "simxpu": {"instantiate", "debug_dump", "enable_debug_mode", "register_generator_state"},
    "simcuda": {"instantiate", "debug_dump", "enable_debug_mode", "register_generator_state"},
    "acme": {"instantiate", "debug_dump", "enable_debug_mode", "register_generator_state"},
}


def test_names_and_signatures(sim, dev):
    """
    Class, context manager and event take exactly the vendor's arguments, and only its methods exist.
    """
    name = sim.name
    graph = getattr(dev, CLASS[name])
    assert graph.__name__ == CLASS[name]
    assert str(inspect.signature(dev.graph)) == CONTEXT[name]
    assert str(inspect.signature(graph.capture_begin)) == BEGIN[name]
    keep = "(keep_graph=False)" if name in ("simxpu", "simcuda", "acme") else "()"
    assert str(inspect.signature(graph)) == keep
    assert str(inspect.signature(dev.Event)) == EVENT[name]
    assert {method for method in METHODS if hasattr(graph, method)} == ABILITIES[name]
    assert hasattr(dev, "ExternalEvent") == (name == "npu")
    assert inspect.signature(dev.Stream.__init__).parameters.keys() == {"self", "device", "priority"}


def test_unknown_keywords_are_type_errors(sim, dev, graph_type):
    """
    As in the real module, a keyword of another vendor is a ``TypeError``.
    """
    wrong = "cuda_graph" if sim.name != "simcuda" else "npu_graph"
    with pytest.raises(TypeError):
        dev.graph(**{wrong: graph_type()})
    with pytest.raises(TypeError):
        dev.graph(graph_type(), capture_mode="global")
    with pytest.raises(TypeError):
        graph_type(keep=True)
    with pytest.raises(TypeError):
        graph_type().capture_begin(mode="global")
    with pytest.raises(TypeError):
        dev.Event(timing=True)
    if sim.name != "npu":
        with pytest.raises(TypeError):
            dev.graph(graph_type(), auto_dispatch_capture=True)
    if sim.name == "simxpu":
        with pytest.raises(TypeError):
            graph_type().capture_begin(capture_error_mode="global")
    if sim.name in ("npu", "musa"):
        with pytest.raises(TypeError):
            graph_type(keep_graph=True)


def test_the_argument_has_the_vendors_name(sim, dev, graph_type):
    """
    The graph may be given by position or by the vendor's own keyword.
    """
    graph = graph_type()
    with dev.graph(**{sim.profile.graph_argument: graph}, pool=dev.graph_pool_handle(), stream=dev.Stream()):
        y = torch.ones(2, device=sim.name)
    graph.replay()
    assert y.tolist() == [1, 1]
    assert graph.pool()[0] == 0


def test_keep_graph(sim, dev, graph_type):
    """
    Where a template can be kept, the executable is made by ``instantiate`` or by the first replay.
    """
    if "keep_graph" not in sim.profile.init_keywords:
        pytest.skip("this vendor keeps no template")
    from graphplat.testing.simulated import ledger

    graph = graph_type(keep_graph=True)
    before = ledger().executables
    with dev.graph(graph):
        y = torch.ones(2, device=sim.name)
    assert ledger().executables == before
    graph.replay()
    assert ledger().executables == before + 1
    assert y.tolist() == [1, 1]


def test_torch_knows_the_device(sim, dev):
    """
    torch treats the name as a device: strings, default device, tensor attributes, current accelerator.
    """
    assert torch.accelerator.current_accelerator().type == sim.name
    assert torch.get_device_module(sim.name) is dev
    x = torch.ones(1, device=f"{sim.name}:1")
    assert getattr(x, f"is_{sim.name}")
    assert str(x.device) == f"{sim.name}:1"
    assert getattr(torch.ones(1), sim.name)().device == torch.device(sim.name, 0)
    with torch.device(f"{sim.name}:1"):
        assert torch.zeros(2).device.index == 1
    assert dev.is_available()
    assert dev.device_count() == 2
    assert "Simulated" in dev.get_device_name()
    assert dev.get_device_properties(0).total_memory == dev.mem_get_info()[1]


def test_debug_dump(sim, dev, graph_type, tmp_path):
    """
    The dump names the captured operators; xpu insists on a ``.dot`` path.
    """
    graph = graph_type()
    with dev.graph(graph):
        torch.ones(2, device=sim.name).mul_(2)
    path = tmp_path / "graph.dot"
    graph.debug_dump(str(path))
    assert "aten.mul_" in path.read_text()
    if sim.name == "simxpu":
        with pytest.raises(RuntimeError, match=r"\.dot"):
            graph.debug_dump(str(tmp_path / "graph.json"))


def test_auto_dispatch_mode_stays_pushed_after_a_failed_end(sim, dev, graph_type):
    """
    As in torch_npu, a failing end leaves the dispatch mode on torch's stack.
    """
    if sim.name != "npu":
        pytest.skip("only npu pushes a mode")
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    graph, x, before = graph_type(), torch.ones(2, device=sim.name), dev.current_stream()
    with pytest.raises(RuntimeError, match="previous error"):
        with dev.graph(graph, auto_dispatch_capture=True):
            x.sum().item()
    assert graph.graph_dispatch_mode in _get_current_dispatch_mode_stack()
    graph.graph_dispatch_mode.__exit__(None, None, None)
    assert not _get_current_dispatch_mode_stack()
    dev.set_stream(before)
