"""Plugins that change torch at import, in a probe or in a hook: each is named, refused and undone."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import threading

import pytest
import torch

from graphplat import Phase, hookimpl, registry
from graphplat.errors import PlatformError, PluginError
from graphplat.hookspecs import CaptureProgress
from graphplat.registry import GraphplatWarning, Outcome, hooks_for, platform_for

ATTRIBUTES = {
    "torch.zeros": "del torch.zeros",
    "torch.float32": "torch.float32 = torch.float64",
    "torch.nn": "torch.nn = None",
    "torch.Tensor.add": "torch.Tensor.add = None",
    "torch.Tensor.relu": "torch.Tensor.relu = lambda self: self * 0",
    "torch.Tensor.__add__": "torch.Tensor.__add__ = lambda a, b: a",
    "torch.nn.Module.to": "torch.nn.Module.to = lambda self: self",
    "torch.nn.Linear": "torch.nn.Linear = torch.nn.Identity",
    "torch.nn.Linear.forward": "torch.nn.Linear.forward = lambda self, x: x * 0",
    "torch.nn.Linear.__call__": "torch.nn.Linear.__call__ = lambda self, x: x * 0",
    "torch.nn.functional.linear": "torch.nn.functional.linear = lambda x, w, b=None: x * 0",
    "torch.nn.init.zeros_": "torch.nn.init.zeros_ = torch.nn.init.ones_",
    "torch.linalg.norm": "torch.linalg.norm = lambda x: x",
    "torch.distributed.all_reduce": "torch.distributed.all_reduce = lambda x: None",
    "torch.accelerator.is_available": "torch.accelerator.is_available = lambda: True",
    "torch.cuda.is_available": "torch.cuda.is_available = lambda: True",
    "torch.cuda.Event": "torch.cuda.Event = object",
    "torch.cuda.CUDAGraph.replay": "torch.cuda.CUDAGraph.replay = lambda self: None",
    "torch.cuda.graph.__enter__": "torch.cuda.graph.__enter__ = lambda self: None",
    "torch.cuda.Stream.wait_stream": "torch.cuda.Stream.wait_stream = lambda self, other: None",
}
"""Attributes, and how a plugin changes them."""

BACKENDS = "torch.backends"
SETTINGS = {
    "default dtype": ("torch.set_default_dtype(torch.float64)", "torch.get_default_dtype()"),
    "default device": ("torch.set_default_device('meta')", "torch.zeros(1).device"),
    "grad mode": ("torch.set_grad_enabled(False)", "torch.is_grad_enabled()"),
    "deterministic algorithms": (
        "torch.use_deterministic_algorithms(True)",
        "torch.are_deterministic_algorithms_enabled()",
    ),
    "number of threads": ("torch.set_num_threads(torch.get_num_threads() + 1)", "torch.get_num_threads()"),
    "autocast": ("torch.set_autocast_enabled('cpu', True)", "torch.is_autocast_enabled('cpu')"),
    "float32 matmul precision": (
        "torch.set_float32_matmul_precision('medium')",
        "(torch.get_float32_matmul_precision(), torch.backends.mkldnn.matmul.fp32_precision)",
    ),
    f"{BACKENDS}.cuda.matmul.fp32_precision": (
        f"{BACKENDS}.cuda.matmul.fp32_precision = 'tf32'",
        f"({BACKENDS}.cuda.matmul.fp32_precision, {BACKENDS}.mkldnn.matmul.fp32_precision,"
        " torch.get_float32_matmul_precision())",
    ),
    f"{BACKENDS}.cudnn.deterministic": (
        f"{BACKENDS}.cudnn.deterministic = True",
        f"{BACKENDS}.cudnn.deterministic",
    ),
    "global module hooks": (
        "torch.nn.modules.module.register_module_forward_hook(lambda module, x, y: y * 0)",
        "torch.nn.Linear(1, 1)(torch.ones(1)).tolist() == [0.0]",
    ),
}
"""Settings, how a plugin changes them, and how their value shows."""

CHANGES = {
    **{name: (change, name) for name, change in ATTRIBUTES.items()},
    **SETTINGS,
}


def record(name):
    [found] = [one for one in registry.list_plugins() if one.name == name]
    return found


def undone(failure):
    """The changes that a failure names."""
    return re.search(r"undone: ([\w ., ]+?)(?: \[|\. |\n)", failure.traceback)[1].split(", ")


def shown(expression):
    """The value here and in a new thread."""
    values = [eval(expression, {"torch": torch})]
    thread = threading.Thread(target=lambda: values.append(eval(expression, {"torch": torch})))
    thread.start()
    thread.join()
    return values


@pytest.mark.parametrize("end", ["", "raise OSError('and more')"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_plugin_that_changes_torch_is_refused_and_undone(site, name, end):
    """Each change is named with the distribution and put back, whether the plugin loads or fails."""
    change, expression = CHANGES[name]
    before = shown(expression)
    site.install(
        "dist-acme",
        {"npu-acme": "mod_acme"},
        mod_acme=f"import torch\n{change}\n{end}\n" + site.source("acme", "npu"),
    )
    with pytest.raises(PlatformError, match=r"npu-acme \(dist-acme 1.0\)"):
        platform_for("npu")
    assert shown(expression) == before
    found = record("npu-acme")
    assert found.outcome is (Outcome.LOAD_FAILED if end else Outcome.REJECTED)
    assert name in undone(found.failure)


@pytest.mark.parametrize("end", ["", "raise OSError('and more')"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_probe_that_changes_torch_is_refused_and_undone(site, name, end):
    """The same holds for probe(), although it runs in a thread of its own."""
    change, expression = CHANGES[name]
    before = shown(expression)
    site.vendor("npu-acme", "acme", probe=f"import torch; {change}; {end}")
    with pytest.raises(PlatformError, match=r"npu-acme \(dist-acme 1.0\)") as caught:
        platform_for("npu")
    assert shown(expression) == before
    found = record("npu-acme")
    assert found.outcome is Outcome.UNAVAILABLE
    assert name in undone(found.platforms[0].failure)
    assert ("OSError: and more" if end else name) in str(caught.value)


def test_the_operator_is_warned_where_the_builtin_stands_in(site):
    """A platform that lost its place for changing torch is no missing device: somebody should know."""
    site.builtin(cpu="pass", npu="pass")
    site.vendor("npu-acme", "acme", probe="import torch; torch.nn.functional.relu = None")
    with pytest.warns(GraphplatWarning, match=r"dist-acme 1.0.*torch\.nn\.functional\.relu"):
        assert platform_for("npu").name == "npu"


def test_a_probe_that_is_given_up_is_undone_then_and_not_later(site, monkeypatch):
    """What it changed is put back when it is given up; what others set after that stays when it ends."""
    log = importlib.import_module("plugin_log")
    log.go, log.ended = threading.Event(), threading.Event()
    monkeypatch.setenv("GRAPHPLAT_PROBE_TIMEOUT", "0.5")
    relu = torch.relu
    site.vendor(
        "npu-slow",
        "slow",
        probe="import torch, threading; torch.relu = None; torch.set_default_dtype(torch.float64);"
        " plugin_log.thread = threading.current_thread(); plugin_log.go.wait(60)",
    )
    try:
        with torch.no_grad():
            with pytest.raises(PlatformError, match=r"did not return within 0.5 s"):
                platform_for("npu")
            assert not torch.is_grad_enabled()
        assert torch.relu is relu
        assert torch.get_default_dtype() is torch.float32
        assert undone(record("npu-slow").platforms[0].failure) == ["default dtype", "torch.relu"]
        torch.set_default_dtype(torch.bfloat16)
        log.go.set()
        log.thread.join()
        assert torch.get_default_dtype() is torch.bfloat16
    finally:
        log.go.set()
        torch.set_default_dtype(torch.float32)


HOOKS = {
    "supports_cuda_graph": (
        "platform, phase",
        lambda hooks, platform: hooks.supports_cuda_graph(platform, Phase.DECODE),
    ),
    "create_eager_runner": (
        "platform, model_runner",
        lambda hooks, platform: hooks.create_eager_runner(platform, None),
    ),
    "create_decode_runner": (
        "platform, model_runner, eager_runner",
        lambda hooks, platform: hooks.create_decode_runner(platform, None, None),
    ),
    "capture_participants": (
        "platform, model_runner, phase",
        lambda hooks, platform: hooks.capture_participants(platform, None, Phase.DECODE),
    ),
}


@pytest.mark.parametrize("end", ["return None", "raise OSError('and more')"])
@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_that_changes_torch_is_an_error(site, hook, end):
    """Whoever asked gets the error with plugin, distribution and hook; torch is as before."""
    arguments, ask = HOOKS[hook]
    relu, dtype = torch.nn.ReLU.forward, torch.get_default_dtype()
    site.vendor(
        "npu-acme",
        "acme",
        tail=f"""
        import torch
        @hookimpl
        def {hook}({arguments}):
            torch.nn.ReLU.forward = None
            torch.set_default_dtype(torch.float64)
            {end}
        """,
    )
    platform = platform_for("npu")
    with pytest.raises(PluginError, match=rf"npu-acme \(dist-acme 1.0\): hook {hook} ") as caught:
        ask(hooks_for(platform), platform)
    assert (torch.nn.ReLU.forward, torch.get_default_dtype()) == (relu, dtype)
    told = [str(caught.value), *getattr(caught.value.__cause__, "__notes__", [])]
    assert any("undone: default dtype, torch.nn.ReLU.forward" in text for text in told)


def test_an_observer_that_changes_torch_is_a_warning(site):
    """A capture goes on, and what the observer changed is put back."""

    class Bar:
        @hookimpl
        def capture_progress(self, event):
            torch.set_num_threads(torch.get_num_threads() + 1)

    before = torch.get_num_threads()
    registry.register_plugin(Bar(), "a-bar")
    event = CaptureProgress(kind="start", phase=Phase.DECODE, total=1, done=0)
    with pytest.warns(GraphplatWarning, match=r"a-bar.*capture_progress changes torch.*number of threads"):
        hooks_for(platform_for("cpu")).capture_progress(event)
    assert torch.get_num_threads() == before


def test_the_built_in_plugins_change_nothing():
    """They are not watched, so that a process without other plugins pays nothing; nor need they be."""
    code = (
        "from graphplat import registry; from graphplat.torch_guard import torch_unchanged\n"
        "with torch_unchanged() as changes: found = registry.list_plugins()\n"
        "print([one.name for one in found if one.in_tree], changes)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names, changes = done.stdout.rsplit(" [", 1)
    if "cpu" not in names:
        pytest.skip("graphplat is not installed here, only importable")
    assert changes == "]\n"


# What is allowed


def test_a_plugin_may_add_to_torch(site):
    """A new torch.DEVICE module or tensor method replaces nothing, and stays."""
    add = "import torch, types; torch.acme = types.ModuleType('acme'); torch.Tensor.acme = lambda self: self"
    site.install("dist-acme", {"npu-acme": "mod_acme"}, mod_acme=f"{add}\n" + site.source("acme", "npu"))
    site.vendor("xpu-late", "late", probe=add.replace("acme", "late"))
    try:
        assert platform_for("npu").name == "acme"
        assert platform_for("xpu").name == "late"
        assert all(hasattr(owner, name) for owner in (torch, torch.Tensor) for name in ("acme", "late"))
    finally:
        del torch.acme, torch.Tensor.acme, torch.late, torch.Tensor.late


def test_the_module_of_another_vendor_is_watched_too(site):
    """A device module that came after torch was first looked at is protected from the next plugin."""
    site.vendor("xpu-first", "first")
    site.vendor("npu-rude", "rude", probe="import torch; torch.acme.device_count = lambda: 7")
    module = type(torch)("acme")
    module.device_count = lambda: 1
    try:
        assert platform_for("xpu").name == "first"
        torch.acme = module
        with pytest.raises(PlatformError, match=r"torch\.acme\.device_count"):
            platform_for("npu")
        assert torch.acme.device_count() == 1
    finally:
        del torch.acme


ORDINARY = {
    "compile": "torch.compile(lambda x: x + 1, backend='eager')(torch.zeros(1))",
    "copy": "import copy, pickle; pickle.loads(pickle.dumps(copy.deepcopy(torch.nn.LSTM(2, 2))))",
    "trace": "torch.fx.symbolic_trace(torch.nn.Linear(2, 2)); torch.jit.script(torch.nn.ReLU())",
    "modes": "torch.inference_mode()(torch.autocast('cpu')(torch.ones))(1)",
    "import": "import torch.distributed.tensor, torch._inductor",
    "ask": "[one.is_available() for one in (torch.cuda, torch.xpu, torch.accelerator)]",
    "capture": "torch.cuda.graph.default_capture_stream = object()",  # as the first capture on a GPU does
}


@pytest.mark.parametrize("where", ["import", "probe"])
@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_use_of_torch_is_no_change(site, name, where):
    """What torch itself changes in torch on first use is not held against a plugin."""
    use = "import torch; " + ORDINARY[name]
    head, probe = (use, "pass") if where == "import" else ("", use)
    site.install(
        "dist-acme", {"npu-acme": "mod_acme"}, mod_acme=f"{head}\n" + site.source("acme", "npu", probe=probe)
    )
    code = """
        import graphplat
        print(graphplat.platform_for("npu").name)
    """
    assert site.python(code).splitlines()[-1] == "acme"
