"""Dispatch and plugins: the device asked for, through its own plugin, or an error that says why not."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import warnings

import msgspec
import pytest
import torch

from graphplat import (
    AmbiguousPlatformError,
    DecodeGraphRunner,
    GraphplatWarning,
    PhaseConfig,
    PlatformError,
    PluginError,
    Reason,
    capture_cuda_graphs,
    current_platform,
    platform_for,
    registry,
)
from graphplat.platform import PlatformCapabilities
from graphplat_cpu import CpuPlatform

GOOD = """
from graphplat import Platform, hookimpl

class {cls}(Platform):
    name = {name!r}
    device_type = {kind!r}

@hookimpl
def provide_platforms():
    return [{cls}]
"""
BROKEN = {
    "import": ("raise {error}('libvendor.so')\n", "import"),
    "activate": (
        "from graphplat import hookimpl\n@hookimpl\ndef provide_platforms():\n"
        "    raise {error}('libvendor.so')\n",
        "provide_platforms",
    ),
}


def vendor_class(name="vendor", base=CpuPlatform, **members):
    """A vendor's platform on the cpu."""
    return type("VendorPlatform", (base,), {"name": name, "is_out_of_tree": lambda self: True, **members})


@pytest.fixture
def toy(runtime):
    """A runtime on the cpu; settings by name."""

    def make(**settings):
        members = {k: settings.pop(k) for k in list(settings) if k not in PhaseConfig.__struct_fields__}
        one = runtime(
            lambda batch: batch.inputs["x"] * 2, decode=PhaseConfig(buckets=(2, 4), **settings), **members
        )
        one.device = torch.device("cpu")
        return one

    return make


@pytest.mark.parametrize("error", ["ImportError", "OSError", "RuntimeError"])
@pytest.mark.parametrize("phase", BROKEN)
def test_a_broken_plugin_is_the_error_of_who_asked_for_its_device(installed, toy, monkeypatch, phase, error):
    """
    Guards against vllm-project/vllm#48277, #52238 and sgl-project/sglang#21388: setting up on a device
    whose plugin fails, in any phase with any exception, raises with that cause, never runs on the cpu; the
    cpu works beside it without a warning about others' devices; the strict switch makes a failure of its
    type an error.
    """
    source, _ = BROKEN[phase]
    installed("dist-vendor", {"hpu": "mod_vendor"}, mod_vendor=source.format(error=error))
    one = toy()
    one.device = torch.device("hpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GraphplatWarning)
        with pytest.raises(PlatformError, match="libvendor") as caught:
            capture_cuda_graphs(model_runner=one)
    assert type(caught.value.__cause__).__name__ == error
    assert "dist-vendor" in str(caught.value)
    assert capture_cuda_graphs(model_runner=toy()).report.platform == "cpu"
    (listed,) = [record for record in registry.list_plugins() if record.name == "hpu"]
    assert "libvendor" in msgspec.json.encode(listed).decode()
    monkeypatch.setenv("GRAPHPLAT_STRICT_PLUGINS", "1")
    with pytest.raises(PluginError, match="libvendor"):
        platform_for("hpu")


def test_an_operator_is_warned_where_the_cpu_stands_in(installed):
    """
    Guards against vllm-project/vllm#48277: a machine whose only other plugin failed is a cpu machine with a
    visible warning that names the plugin and its cause.
    """
    if os.environ.get("GRAPHPLAT_SIMULATED"):
        pytest.skip("this process has an accelerator")
    if torch.cuda.is_available():
        pytest.skip("this machine has an accelerator")
    installed("dist-vendor", {"hpu": "mod_vendor"}, mod_vendor="raise OSError('libvendor.so')\n")
    with pytest.warns(GraphplatWarning, match=r"dist-vendor.*libvendor"):
        assert current_platform().name == "cpu"


@pytest.mark.parametrize("order", ["vendor first", "vendor last"])
def test_out_of_tree_precedes_builtin_and_ties_are_errors(vendor, toy, monkeypatch, order):
    """
    Guards against vllm-project/vllm#11739 and #13358: an available vendor's platform serves its device type
    in any order of installation; two of them are an error naming both and the setting; that setting
    decides, the built-in one included.
    """
    names = ["alpha", "omega"] if order == "vendor first" else ["omega", "alpha"]
    vendor(vendor_class(names[0]))
    capture = capture_cuda_graphs(model_runner=toy())
    assert capture.report.platform == names[0]
    vendor(vendor_class(names[1]))
    with pytest.raises(AmbiguousPlatformError, match=r"alpha.*omega.*GRAPHPLAT_PLATFORM"):
        platform_for("cpu")
    for name in (*names, "cpu"):
        monkeypatch.setenv("GRAPHPLAT_PLATFORM", name)
        capture = capture_cuda_graphs(model_runner=toy())
        assert capture.report.platform == name
        assert "GRAPHPLAT_PLATFORM" in capture.report.chosen_because


@pytest.mark.parametrize("how", ["answers for all", "raises for all"])
@pytest.mark.parametrize("order", [1, -1])
def test_a_vendors_hooks_are_asked_for_its_own_devices_only(installed, toy, how, order):
    """
    Guards against pytest-dev/pluggy#62, #250 and getindata/kedro-kubeflow#72: an installed vendor that
    answers first-result hooks for every device, or raises in all of them, changes nothing for others'
    devices, in either order of names.
    """
    body = "return 'mine'" if how == "answers for all" else "raise RuntimeError('greedy')"
    name = "aaa" if order == 1 else "zzz"
    source = GOOD.format(cls="Greedy", name="greedy", kind="hpu") + textwrap.dedent(f"""
        @hookimpl(tryfirst=True)
        def supports_cuda_graph(platform, phase):
            {body}

        @hookimpl(tryfirst=True)
        def create_decode_runner(platform, model_runner, eager_runner):
            {body}

        @hookimpl(tryfirst=True)
        def create_eager_runner(platform, model_runner):
            {body}
    """)
    installed(f"dist-{name}", {f"hpu-{name}": "mod_greedy"}, mod_greedy=source)
    platform_for("hpu")  # loaded, and in the same manager
    capture = capture_cuda_graphs(model_runner=toy())
    assert type(capture.decode.runner) is DecodeGraphRunner
    assert capture.decode.runner.buckets == (2, 4)


BAD = {
    "half": "from graphplat import Platform, hookimpl\nclass P(Platform):\n    name = 'half'\n"
    "    device_type = 'hpu'\n@hookimpl\ndef provide_platforms():\n    return [P, 3]\n",
    "mistyped": GOOD.format(cls="P", name="mistyped", kind="hpu")
    + "\n@hookimpl\ndef create_decode_runer(platform):\n    return None\n",
    "raises": "raise ImportError('gone')\n",
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("names", ["gbz", "bgz", "gzb"])
def test_a_bad_plugin_stops_no_other(installed, bad, names):
    """
    Guards against pytest-dev/pluggy#8, simonw/llm#1465, #1351 and conda/conda#12460: in any place among good
    ones, a plugin that fails, is half right or mistypes a hook takes part in nothing, is reported with its
    distribution, and leaves the others whole.
    """
    for index, letter in enumerate(names):
        source = BAD[bad] if letter == "b" else GOOD.format(cls="P", name=f"good{letter}", kind="hpu")
        installed(
            f"dist-{index}{letter}", {f"hpu-{index}{letter}": f"mod_{letter}"}, **{f"mod_{letter}": source}
        )
    records = {record.name[-1]: record for record in registry.list_plugins() if record.name.startswith("hpu")}
    states = {letter: [one.name for one in record.platforms] for letter, record in records.items()}
    assert states == {"g": ["goodg"], "z": ["goodz"], "b": []}
    assert "dist-" in msgspec.json.encode(records["b"]).decode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GraphplatWarning)
        assert platform_for("hpu", name="goodz").name == "goodz"


def test_two_distributions_of_one_name_are_reported(installed):
    """
    Guards against PyCQA/flake8#1090, conda/conda#12460 and sgl-project/sglang#37547: entry points of one name
    are nobody's; the error names both distributions, whatever the order on disk.
    """
    for name in ("dist-one", "dist-two"):
        module = f"mod_{name[-3:]}"
        installed(name, {"hpu": module}, **{module: GOOD.format(cls="P", name=name[-3:], kind="hpu")})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GraphplatWarning)
        with pytest.raises(PlatformError, match=r"claimed more than once: dist-one.*dist-two"):
            platform_for("hpu")
    assert not {"mod_one", "mod_two"} & set(sys.modules)


@pytest.mark.parametrize("device", ["hpu", "hpu:1", torch.device("hpu", 1)])
def test_device_strings_and_objects_resolve_alike(installed, device):
    """
    Guards against MooreThreads/torchada#8, sgl-project/sglang#8027, sgl-project/sglang-omni#1911, #2071 and
    flagos-ai/sglang-plugin-FL#31: a name, a name with an index and a torch.device reach the plugin of that
    type, and a variant of it under another platform name; no family test decides. (That each device gets its
    own graph class and keywords is tested on each simulated device.)
    """
    installed(
        "dist-vendor", {"hpu-metal": "mod_vendor"}, mod_vendor=GOOD.format(cls="P", name="metal", kind="hpu")
    )
    assert platform_for(device).name == "metal"


ABILITY = {
    "declared": ({"capabilities": CpuPlatform.capabilities}, True),
    "not declared": ({"capabilities": PlatformCapabilities()}, False),
    "withheld": ({"support_cuda_graph": lambda self: False}, False),
}


@pytest.mark.parametrize("ability", ABILITY)
def test_an_ability_is_asked_of_the_platform(vendor, toy, ability, decode, rows):
    """
    Guards against vllm-project/vllm#23005, #15417, flagos-ai/vllm-plugin-FL#279 and
    sgl-project/sglang-omni#1911: graphs are on where the platform says so, whatever family it belongs to,
    and off for an older plugin that says nothing; then the report says why, and on_unsupported="raise" is
    an error.
    """
    members, expected = ABILITY[ability]
    vendor(vendor_class(**members))
    one = toy()
    capture = capture_cuda_graphs(model_runner=one)
    assert (capture.decode.runner is not None) is expected
    x = rows(3).cpu()
    assert torch.equal(capture.decode_runner.execute(decode(3, x=x)), x * 2)
    if expected:
        return
    (skip,) = [skip for skip in capture.report.skipped if skip.phase == "decode"]
    assert skip.reason is Reason.UNSUPPORTED
    assert "'vendor'" in skip.detail
    one.graph_config = msgspec.structs.replace(one.graph_config, on_unsupported="raise")
    with pytest.raises(PlatformError, match="vendor"):
        capture_cuda_graphs(model_runner=one)


def test_an_ability_that_cannot_be_told_is_an_error(vendor, toy):
    """
    Guards against vllm-project/vllm#15417: a platform or hook that raises when asked is an error with its
    cause, no quiet "no".
    """

    def cannot(self):
        raise OSError("no driver")

    vendor(vendor_class(support_cuda_graph=cannot))
    with pytest.raises(PlatformError, match="no driver") as caught:
        capture_cuda_graphs(model_runner=toy())
    assert isinstance(caught.value.__cause__, OSError)


def test_graphs_claimed_without_the_ability_are_refused(vendor, toy):
    """
    Guards against flagos-ai/vllm-plugin-FL#279: a hook that promises graphs on a platform that does not
    declare them is the plugin's error, told before anything is allocated.
    """
    vendor(
        vendor_class(capabilities=PlatformCapabilities()),
        supports_cuda_graph=lambda platform, phase: True,
    )
    with pytest.raises(PluginError, match="graph_capture"):
        capture_cuda_graphs(model_runner=toy())


def test_plugins_load_once_and_again_after_a_fork(installed, tmp_path):
    """
    Guards against vllm-project/vllm#10443, #18326, #27940 and #16601: eight threads and repeated calls
    register once; a forked child and a new process register for themselves; after a reset the next look-up
    sees what is there then, and nothing is bound to the former platform.
    """
    source = GOOD.format(cls="P", name="v", kind="hpu").replace(
        "    return [P]",
        "    with open(os.environ['COUNT'], 'a') as file:\n"
        "        print(os.getpid(), file=file)\n    return [P]",
    )
    installed("dist-vendor", {"hpu": "mod_vendor"}, mod_vendor="import os\n" + source)
    script = """
        import os, threading
        from graphplat import platform_for, registry
        found = []
        threads = [threading.Thread(target=lambda: found.append(platform_for("hpu"))) for _ in range(8)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        assert len(set(map(id, found))) == 1 and platform_for("hpu") is found[0]
        pid = os.fork()
        if not pid:
            child = platform_for("hpu")
            os._exit(0 if child is not found[0] and child is platform_for("hpu") else 1)
        assert os.waitpid(pid, 0)[1] == 0
        registry.reset_registry()
        assert platform_for("hpu") is not found[0]
    """
    count = tmp_path / "count"
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", textwrap.dedent(script)],
        env={
            **os.environ,
            "COUNT": str(count),
            "GRAPHPLAT_SIMULATED": "",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    parent, child, again = count.read_text().split()
    assert parent == again != child


def test_looking_for_platforms_starts_no_driver():
    """
    Guards against vllm-project/vllm#32611 and #44252: importing, listing and resolving start no driver, so
    that a forked child can; a simulated driver's journal, and torch's own flags, show none.
    """
    script = """
        import os, sys, torch
        if os.environ.get("GRAPHPLAT_SIMULATED"):
            from graphplat.testing.simulated import install_from_environment
            sim = install_from_environment()
            before = sim.ledger()
        import graphplat
        from graphplat import registry
        registry.list_plugins()
        graphplat.platform_for("cpu")
        assert not torch.cuda.is_initialized()
        if os.environ.get("GRAPHPLAT_SIMULATED"):
            assert (sim.journal, sim.ledger()) == ([], before)
        pid = os.fork()
        if not pid:
            graphplat.platform_for("cpu")
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", textwrap.dedent(script)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


OPTIONAL = ("synchronize", "empty_cache", "memory_info", "allocated_bytes", "reserved_bytes", "rng_state")


@pytest.mark.parametrize("how", ["absent", "broken"])
def test_optional_features_may_be_absent_or_broken(vendor, toy, decode, rows, how):
    """
    Guards against MooreThreads/torch_musa#97 and pytorch/pytorch#187277: captures and replays need neither a
    device-wide synchronize nor an emptied cache, a debug dump or a memory query; with all of them absent, or
    the first two raising, graphs work and the report says what it could not know.
    """

    def broken(self, *args):
        raise RuntimeError("this call crashes the driver")

    absent = {name: (lambda self, *args: None) for name in OPTIONAL}
    members = absent | ({"synchronize": broken, "empty_cache": broken} if how == "broken" else {})
    vendor(vendor_class(**members))
    capture = capture_cuda_graphs(model_runner=toy())
    assert capture.decode.runner.buckets == (2, 4)
    for n in (1, 3):
        x = rows(n).cpu()
        assert torch.equal(capture.decode_runner.execute(decode(n, x=x)), x * 2)
    assert capture.decode_runner.stats.replayed == 2
    assert '"platform":"vendor"' in capture.report.to_json()
