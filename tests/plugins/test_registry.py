"""Which platform serves a device, why, and which plugins are asked."""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.metadata
import itertools
import multiprocessing
import subprocess
import sys
import threading
import weakref

import msgspec
import pytest
import torch

from graphplat import Phase, Platform, hookimpl, registry
from graphplat.errors import AmbiguousPlatformError, InputError, PlatformError, PluginError
from graphplat.hookspecs import CaptureProgress
from graphplat.registry import GraphplatWarning, Outcome, current_platform, hooks_for, platform_for, resolve

UNAVAILABLE = "raise RuntimeError('no such device')"


class ByHand(Platform):
    name = "byhand"
    device_type = "cpu"


class BringsByHand:
    @hookimpl
    def provide_platforms(self):
        return [ByHand]


class AddOn:
    """Brings no platform; gives what it was made with."""

    def __init__(self, participant=None, log=None):
        self.participant, self.log = participant, log

    @hookimpl
    def capture_participants(self, platform, model_runner, phase):
        return self.participant

    @hookimpl
    def capture_progress(self, event):
        if isinstance(self.log, list):
            self.log.append(event.kind)
        elif self.log is not None:
            raise self.log


def outcomes(device_type):
    return {one.plugin: str(one.outcome) for one in resolve(device_type).candidates}


# Which device


@pytest.mark.parametrize("device", ["npu", "npu:1", torch.device("xpu"), torch.device("cuda", 3), "cpu:0"])
def test_devices_with_and_without_index(site, device):
    """A device string, with an index or without, and a torch.device resolve by device type."""
    site.builtin(cpu="pass", npu="pass", xpu="pass", cuda="pass")
    assert platform_for(device).name == str(device).partition(":")[0]


@pytest.mark.parametrize("device", ["", ":1", "cpu:", "cpu:x", "two words", 3, None])
def test_what_is_no_device_is_an_input_error(site, device):
    """Something that is no device is refused before any plugin is loaded."""
    with pytest.raises(InputError, match=r"is no device"):
        platform_for(device)
    assert site.events == []


def test_only_plugins_of_the_asked_type_are_imported(site):
    """Resolving one type imports its plugins and those of TYPE-VARIANT, and no others."""
    site.builtin(cpu="pass", npu="pass", cuda="pass")
    site.vendor("cuda-acme", "acme", probe=UNAVAILABLE)
    site.vendor("cudalike", "like")
    assert platform_for("cuda").name == "cuda"
    assert {event for event in site.events if event.startswith("import")} == {
        "import own_cuda",
        "import mod_acme",
    }


def test_the_real_installation_imports_only_what_is_asked_for():
    """With graphplat installed, resolving cpu imports none of the other built-in plugins."""
    try:
        importlib.metadata.distribution("graphplat")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("graphplat is not installed here, only importable")
    code = (
        "import sys, graphplat; assert graphplat.platform_for('cpu').name == 'cpu';"
        "print(sorted(name for name in sys.modules if name.startswith('graphplat_')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['graphplat_cpu']"


# The order of precedence


def test_out_of_tree_precedes_builtin(site):
    """An available out-of-tree platform wins; the built-in is listed as available."""
    site.builtin(cpu="pass", cuda="pass")
    site.vendor("cuda-acme", "acme")
    assert platform_for("cuda").name == "acme"
    assert outcomes("cuda") == {"cuda": "available", "cuda-acme": "chosen"}
    assert "out of tree" in resolve("cuda").because


def test_unavailable_out_of_tree_leaves_the_builtin(site):
    """A vendor's plugin for other hardware gives way in silence, with its reason on record."""
    site.builtin(cpu="pass", cuda="pass")
    site.vendor("cuda-acme", "acme", probe=UNAVAILABLE)
    result = resolve("cuda")
    assert result.platform.name == "cuda"
    [acme] = [one for one in result.candidates if one.plugin == "cuda-acme"]
    assert acme.outcome is Outcome.UNAVAILABLE
    assert "RuntimeError: no such device" in acme.reason
    assert (acme.distribution, acme.version, acme.in_tree) == ("dist-acme", "1.0", False)


@pytest.mark.parametrize("order", list(itertools.permutations(["cuda-acme", "cuda-zeta", "cuda-mid"])))
def test_installation_order_does_not_matter(site, order):
    """Any order of installation gives the same platform, candidates and order of import."""
    site.builtin(cpu="pass", cuda="pass")
    for entry in order:
        name = entry.partition("-")[2]
        site.vendor(entry, name, probe="pass" if name == "mid" else UNAVAILABLE)
    assert platform_for("cuda").name == "mid"
    assert [one.plugin for one in resolve("cuda").candidates] == [
        "cuda",
        "cuda-acme",
        "cuda-mid",
        "cuda-zeta",
    ]
    imported = [event for event in site.events if event.startswith("import")]
    assert imported == ["import own_cuda", "import mod_acme", "import mod_mid", "import mod_zeta"]


@pytest.mark.parametrize("order", [("acme", "zeta"), ("zeta", "acme")])
def test_two_available_vendors_are_a_tie(site, order, monkeypatch):
    """A real tie names both distributions and the variable; naming either one breaks it."""
    site.builtin(cpu="pass", cuda="pass")
    for name in order:
        site.vendor(f"cuda-{name}", name)
    with pytest.raises(AmbiguousPlatformError) as caught:
        platform_for("cuda")
    for part in ("dist-acme 1.0", "dist-zeta 1.0", "GRAPHPLAT_PLATFORM", "acme, zeta"):
        assert part in str(caught.value)
    for name in ("acme", "zeta", "cuda"):
        assert platform_for("cuda", name=name).name == name
        monkeypatch.setenv("GRAPHPLAT_PLATFORM", name)
        assert platform_for("cuda").name == name
        assert current_platform().name == name
        monkeypatch.delenv("GRAPHPLAT_PLATFORM")


def test_argument_precedes_the_variable(site, monkeypatch):
    """The argument is the nearer choice."""
    site.builtin(cpu="pass", cuda="pass")
    site.vendor("cuda-acme", "acme")
    monkeypatch.setenv("GRAPHPLAT_PLATFORM", "acme")
    assert platform_for("cuda", name="cuda").name == "cuda"


def test_an_explicit_choice_does_not_wait_for_others(site):
    """Naming a platform probes that one alone."""
    site.builtin(cpu="pass", cuda="pass")
    site.vendor("cuda-acme", "acme", probe="raise AssertionError")
    assert platform_for("cuda", name="cuda").name == "cuda"
    assert "probe acme" not in site.events


def test_an_explicit_choice_fails_hard(site, monkeypatch):
    """A named platform that cannot be used is an error chained to the reason, not another platform."""
    site.builtin(cpu="pass", cuda="pass")
    site.vendor("cuda-acme", "acme", probe=UNAVAILABLE)
    monkeypatch.setenv("GRAPHPLAT_PLATFORM", "acme")
    for ask in (lambda: platform_for("cuda"), current_platform):
        with pytest.raises(PlatformError, match=r"'acme'.*GRAPHPLAT_PLATFORM.*no such device") as caught:
            ask()
        assert isinstance(caught.value.__cause__, RuntimeError)


def test_an_unknown_explicit_choice_says_what_there_is(site, monkeypatch):
    """A name that no plugin brings is an error that lists the available platforms."""
    with pytest.raises(PlatformError, match=r"no platform named 'nope'.*have cpu"):
        platform_for("cpu", name="nope")
    monkeypatch.setenv("GRAPHPLAT_PLATFORM", "nope")
    with pytest.raises(PlatformError, match=r"no platform named 'nope'.*have cpu"):
        current_platform()


def test_an_explicit_choice_of_another_type_names_both(site, monkeypatch):
    """A variable that names a platform of another type than the device says both."""
    site.builtin(cpu="pass", npu="pass")
    monkeypatch.setenv("GRAPHPLAT_PLATFORM", "npu")
    with pytest.raises(PlatformError, match=r"for 'cpu' was asked for.*names 'npu', a platform for 'npu'"):
        platform_for("cpu")


def test_no_platform_names_what_there_is(site):
    """An absent device type is an error, never cpu."""
    with pytest.raises(PlatformError, match=r'no platform for .npu.; have cpu.*Run "graphplat platforms"'):
        platform_for("npu")


def test_a_checkout_that_is_not_installed_is_told_apart(site):
    """Without the metadata of graphplat there are no built-in platforms, and the error says why."""
    site.builtin()
    with pytest.raises(PlatformError, match=r"no platform for 'cpu'") as caught:
        platform_for("cpu")
    assert "graphplat is not installed here" in caught.value.__notes__[0]


# The platform of the machine


@pytest.mark.parametrize("entries", list(itertools.permutations([("cuda-acme", "acme"), ("foo", "foo")])))
def test_accelerator_over_cpu(site, entries):
    """The one available accelerator is current, however plugins were installed."""
    site.builtin(cpu="pass", cuda=UNAVAILABLE)
    for entry, name in entries:
        site.vendor(entry, name, probe="pass" if name == "acme" else UNAVAILABLE)
    assert current_platform().name == "acme"


def test_two_accelerators_are_a_tie(site):
    """Two device types with an accelerator need a choice, and the error names it."""
    site.builtin(cpu="pass", cuda="pass", xpu="pass")
    with pytest.raises(
        AmbiguousPlatformError, match=r"'cuda'.*'xpu'.*GRAPHPLAT_PLATFORM to one of cuda, xpu"
    ):
        current_platform()


def test_cpu_when_nothing_else_is_there(site, recwarn):
    """Without an accelerator cpu is current, and plugins for absent hardware are no warning."""
    site.builtin(cpu="pass", cuda=UNAVAILABLE)
    assert current_platform().name == "cpu"
    assert "no out-of-tree" in registry.resolve_current().because
    assert not recwarn.list


def test_cpu_with_a_broken_plugin_is_warned_of_once(site, recwarn):
    """A plugin that failed to load may be why there is no accelerator: that is said, once."""
    site.install("dist-bad", {"npu-bad": "mod_bad"}, mod_bad="raise OSError('libascendcl.so')")
    with pytest.warns(GraphplatWarning, match=r"npu-bad \(dist-bad 1.0\).*OSError: libascendcl.so.*'cpu'"):
        assert current_platform().name == "cpu"
    assert current_platform().name == "cpu"
    assert not recwarn.list


# Once per process


def test_each_probe_runs_once(site):
    """Asking again, listing, and asking for the machine's platform make and probe nothing anew."""
    site.builtin(cpu="pass", npu="pass")
    first = platform_for("npu")
    registry.list_plugins()
    assert platform_for("npu:1") is first is current_platform()
    assert sorted(site.events) == sorted(
        f"{what} {name}"
        for kind in ("cpu", "npu")
        for what, name in (("import", f"own_{kind}"), ("provide", kind), ("make", kind), ("probe", kind))
    )


def test_threads_share_one_load(site):
    """Eight threads that ask at once get one instance, made and probed once."""
    site.builtin(cpu="pass", npu="import time; time.sleep(0.05)")
    barrier, found = threading.Barrier(8), []

    def ask():
        barrier.wait()
        found.append(platform_for("npu"))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len({id(platform) for platform in found}) == 1
    assert site.events == ["import own_npu", "provide npu", "make npu", "probe npu"]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_loads_again(site):
    """A child registers and probes anew, keeps plugins added by hand, and leaves the parent's state alone."""
    platform = platform_for("cpu")
    registry.register_plugin(AddOn(), "kept")
    before = list(site.events)
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def child():
        fresh = platform_for("cpu")
        kept = [one.name for one in registry.list_plugins()]
        owner = hooks_for(platform).own
        sender.send((fresh is platform, site.events[len(before) :], kept, owner is not None and owner.name))

    process = context.Process(target=child)
    process.start()
    assert receiver.poll(60)
    same, events, kept, owner = receiver.recv()
    process.join()
    assert not same
    assert events == ["provide cpu", "make cpu", "probe cpu"]
    assert kept == ["cpu", "kept"]
    assert owner == "cpu"
    assert site.events == before


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_while_another_thread_loads_does_not_hang_the_child(site):
    """A child forked while a thread holds the registry has a lock of its own."""
    site.builtin(cpu="pass", npu="plugin_log.reached.set(); plugin_log.go.wait(60)")
    log = importlib.import_module("plugin_log")
    log.reached, log.go = threading.Event(), threading.Event()
    thread = threading.Thread(target=platform_for, args=("npu",))
    thread.start()
    assert log.reached.wait(60)
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=lambda: sender.send(platform_for("cpu").name))
    process.start()
    try:
        assert receiver.poll(60)
        assert receiver.recv() == "cpu"
    finally:
        log.go.set()
        thread.join()
        process.join()


def test_a_spawned_process_loads_for_itself(site):
    """A new process finds the same plugins."""
    site.vendor("npu-acme", "acme")
    assert platform_for("npu").name == "acme"
    code = "import graphplat, plugin_log; print(graphplat.platform_for('npu').name, plugin_log.events)"
    answer = "acme ['import mod_acme', 'provide acme', 'make acme', 'probe acme']"
    assert site.python(code).strip() == answer


def test_platforms_are_looked_up_on_use(site):
    """After a plugin came, went, or the registry was reset, the next call sees it."""
    builtin = platform_for("cpu")
    registry.register_plugin(BringsByHand(), "hand")
    assert platform_for("cpu").name == "byhand"
    registry.unregister_plugin("hand")
    assert platform_for("cpu") is builtin
    registry.reset_registry()
    assert platform_for("cpu") is not builtin


def test_importing_and_listing_touch_no_device(site):
    """A new process that imports, lists and forks has no device context in the parent."""
    code = """
        import os, torch
        def forbidden(*args, **kwargs): raise AssertionError("a device context was created")
        torch.cuda._lazy_init = forbidden
        torch._C._cuda_init = forbidden
        import graphplat
        from graphplat.registry import list_plugins
        names = [one.name for one in list_plugins()]
        assert not torch.cuda.is_initialized()
        print(names)
    """
    assert site.python(code).strip() == "['cpu']"


# Listing


def test_listing_explains_everything_and_encodes(site, monkeypatch):
    """Every plugin is listed with its state, reason, traceback and capabilities, as JSON."""
    site.builtin(cpu="pass", npu=UNAVAILABLE)
    site.vendor("cuda-acme", "acme", graphs=True)
    site.vendor("cuda-off", "off")
    site.install("dist-bad", {"xpu-bad": "mod_bad"}, mod_bad="import mod_nowhere")
    site.install("dist-rude", {"cpu": "mod_rude"}, mod_rude="")
    monkeypatch.setenv("GRAPHPLAT_DISABLED_PLUGINS", "cuda-off")
    registry.register_plugin(AddOn(), "watch")
    listed = msgspec.json.decode(msgspec.json.encode(registry.list_plugins()))
    found = {(one["name"], one["distribution"]): one for one in listed}
    assert {key: one["outcome"] for key, one in found.items()} == {
        ("cpu", "graphplat"): "available",
        ("cpu", "dist-rude"): "rejected",
        ("npu", "graphplat"): "unavailable",
        ("cuda-acme", "dist-acme"): "available",
        ("cuda-off", "dist-off"): "disabled",
        ("xpu-bad", "dist-bad"): "load_failed",
        ("watch", None): "available",
    }
    bad = found["xpu-bad", "dist-bad"]
    assert bad["failure"]["phase"] == "import"
    assert "ModuleNotFoundError: No module named 'mod_nowhere'" in bad["reason"]
    assert "mod_bad.py" in bad["failure"]["traceback"]
    [npu] = found["npu", "graphplat"]["platforms"]
    assert npu["failure"]["phase"] == "probe"
    assert "no such device" in npu["failure"]["error"]
    [acme] = found["cuda-acme", "dist-acme"]["platforms"]
    assert acme["capabilities"]["graph_capture"] is True
    assert found["watch", None]["hooks"] == ["capture_participants", "capture_progress"]
    assert "import mod_off" not in site.events


# Hooks


def test_first_result_hooks_are_asked_only_of_the_plugin_that_brought_the_platform(site):
    """A vendor that answers, or raises, for every device is not even asked for others' devices."""
    site.builtin(cpu="pass", cuda="pass")
    greedy = """
    @hookimpl
    def supports_cuda_graph(platform, phase):
        return True
    """
    angry = greedy.replace("return True", "raise RuntimeError('not mine')")
    site.vendor("cuda-greedy", "greedy", tail=greedy, probe=UNAVAILABLE)
    site.vendor("npu-angry", "angry", tail=angry)
    registry.list_plugins()
    for kind in ("cuda", "cpu"):
        platform = platform_for(kind)
        assert hooks_for(platform).supports_cuda_graph(platform, Phase.DECODE) is False


@pytest.mark.parametrize(
    ("hook", "graphs", "expected"),
    [
        ("return True", False, True),
        ("return False", True, False),
        ("return None", True, True),
        (None, True, True),
        (None, False, False),
    ],
)
def test_graph_support_is_the_hook_or_the_capability(site, hook, graphs, expected):
    """The hook's answer decides; None or no hook leaves it to the capabilities."""
    tail = f"@hookimpl\ndef supports_cuda_graph(platform, phase):\n    {hook}\n" if hook else ""
    site.vendor("npu-acme", "acme", tail=tail, graphs=graphs)
    platform = platform_for("npu")
    assert hooks_for(platform).supports_cuda_graph(platform, Phase.DECODE) is expected


@pytest.mark.parametrize("body", ["raise OSError('driver gone')", "return 'yes'", "return 1"])
def test_graph_support_that_fails_is_an_error(site, body):
    """A hook that raises or answers with no bool is an error naming plugin, distribution and hook."""
    site.vendor(
        "npu-acme", "acme", tail=f"@hookimpl\ndef supports_cuda_graph(platform, phase):\n    {body}\n"
    )
    platform = platform_for("npu")
    with pytest.raises(PluginError, match=r"npu-acme \(dist-acme 1.0\): hook supports_cuda_graph") as caught:
        hooks_for(platform).supports_cuda_graph(platform, Phase.DECODE)
    assert isinstance(caught.value.__cause__, OSError) or "not a bool" in str(caught.value)


@pytest.mark.parametrize("answer", [OSError("driver gone"), "yes"])
def test_a_platform_that_cannot_say_is_an_error(site, answer):
    """support_cuda_graph() of the platform itself is held to the same rule."""

    class Unsure(Platform):
        name = "unsure"
        device_type = "npu"

        def support_cuda_graph(self):
            if isinstance(answer, Exception):
                raise answer
            return answer

    platform = Unsure()
    with pytest.raises(PluginError, match=r"support_cuda_graph"):
        hooks_for(platform).supports_cuda_graph(platform, Phase.DECODE)


@pytest.mark.parametrize("hook", ["create_decode_runner", "create_prefill_runner", "create_eager_runner"])
def test_runner_hooks_give_a_runner_or_nothing(site, hook):
    """None means the default runner; anything but a runner, or an exception, is an error with its origin."""
    names = "platform, model_runner" + ("" if "eager" in hook else ", eager_runner")
    body = f"@hookimpl\ndef {hook}({names}):\n    return answer()\n"
    module = site.vendor("npu-acme", "acme", tail=f"answer = lambda: None\n{body}")
    platform = platform_for("npu")
    ask = getattr(hooks_for(platform), hook)
    arguments = (platform, None) if "eager" in hook else (platform, None, None)
    assert ask(*arguments) is None
    sys.modules[module].answer = lambda: "a runner"
    with pytest.raises(PluginError, match=rf"dist-acme 1.0.*{hook} returned 'a runner', not a .*Runner"):
        ask(*arguments)
    sys.modules[module].answer = lambda: 1 / 0
    with pytest.raises(PluginError, match=rf"dist-acme 1.0.*{hook} raised ZeroDivisionError") as caught:
        ask(*arguments)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_participants_come_in_plugin_name_order(site):
    """Own plugin, add-ons of the device type and those added by hand take part; other vendors do not."""
    tail = """
    import contextlib
    @hookimpl
    def capture_participants(platform, model_runner, phase):
        return contextlib.nullcontext(__name__)
    """
    site.builtin(cpu="pass", npu="pass")
    site.vendor("npu-own", "own", tail=tail)
    site.vendor("npu-absent", "absent", tail=tail, probe=UNAVAILABLE)
    site.vendor("xpu-other", "other", tail=tail)
    addon = "from graphplat import hookimpl\n" + "\n".join(line[4:] for line in tail.splitlines())
    site.install("dist-extra", {"npu-extra": "mod_extra"}, mod_extra=addon)
    registry.register_plugin(AddOn(contextlib.nullcontext("z")), "z")
    registry.register_plugin(AddOn(contextlib.nullcontext("a")), "a")
    registry.register_plugin(AddOn(None), "nothing")
    registry.list_plugins()
    platform = platform_for("npu")
    found = hooks_for(platform).capture_participants(platform, None, Phase.DECODE)
    assert [one.enter_result for one in found] == ["a", "mod_extra", "mod_own", "z"]


@pytest.mark.parametrize("wrong", ["text", 3, [contextlib.nullcontext()]])
def test_a_participant_of_the_wrong_type_is_an_error(site, wrong):
    """What is no context manager is refused, naming the plugin, before anything is entered."""
    registry.register_plugin(AddOn(wrong), "odd")
    platform = platform_for("cpu")
    with pytest.raises(PluginError, match=r"odd \(registered in this process\).*not a context manager"):
        hooks_for(platform).capture_participants(platform, None, Phase.DECODE)


def test_an_observer_that_raises_disturbs_nobody(site):
    """Every observer hears of an event; one that raises becomes a warning with its name."""
    heard: list[str] = []
    registry.register_plugin(AddOn(log=RuntimeError("broken bar")), "a-bar")
    registry.register_plugin(AddOn(log=heard), "b-log")
    event = CaptureProgress(kind="start", phase=Phase.DECODE, total=3, done=0)
    with pytest.warns(GraphplatWarning, match=r"a-bar.*capture_progress raised RuntimeError: broken bar"):
        hooks_for(platform_for("cpu")).capture_progress(event)
    assert heard == ["start"]


def test_an_observer_registered_later_is_heard(site):
    """Hooks are looked up when called, so a recapture tells observers that came since."""
    hooks, heard = hooks_for(platform_for("cpu")), []
    registry.register_plugin(AddOn(log=heard), "late")
    hooks.capture_progress(CaptureProgress(kind="end", phase=Phase.DECODE, total=0, done=0))
    assert heard == ["end"]


# By hand


def test_a_plugin_added_by_hand_counts_as_out_of_tree(site):
    """What is registered in the process precedes the built-in, and is told apart."""
    registry.register_plugin(BringsByHand(), "hand")
    result = resolve("cpu")
    assert result.platform.name == "byhand"
    assert (result.plugin, result.candidates[1].distribution) == ("hand", None)


def test_a_stand_in_may_take_the_name_of_a_builtin(site):
    """A platform added by hand under a built-in's name is the one that the name means."""

    class StandIn(Platform):
        name = "cpu"
        device_type = "cpu"

        def is_out_of_tree(self):
            return False

    class Brings:
        @hookimpl
        def provide_platforms(self):
            return [StandIn]

    registry.register_plugin(Brings(), "stand-in")
    assert type(platform_for("cpu")) is StandIn
    assert type(platform_for("cpu", name="cpu")) is StandIn


def test_names_of_plugins_added_by_hand_are_unique(site):
    """A taken name, the same plugin twice and an unknown name are errors that change nothing."""
    plugin = BringsByHand()
    registry.register_plugin(plugin, "hand")
    for source, name, why in (
        (AddOn(), "hand", "taken by hand"),
        (AddOn(), "cpu", r"taken by cpu \(graphplat 1.0\)"),
        (plugin, "again", "already registered, as 'hand'"),
    ):
        with pytest.raises(PluginError, match=why):
            registry.register_plugin(source, name)
    with pytest.raises(PluginError, match=r"no plugin 'other'.*have hand"):
        registry.unregister_plugin("other")
    assert registry.unregister_plugin("hand") is plugin
    assert [one.name for one in registry.list_plugins()] == ["cpu"]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (lambda: 1 / 0, "ZeroDivisionError"),
        (lambda: [int], "no subclass"),
        (lambda: sys.exit(2), "SystemExit"),
    ],
)
def test_a_bad_plugin_added_by_hand_is_refused_at_once(site, answer, why):
    """Registering by hand raises, and nothing of the plugin stays."""

    class Bad:
        @hookimpl
        def provide_platforms(self):
            return answer()

    with pytest.raises(PluginError, match=why):
        registry.register_plugin(Bad(), "bad")
    assert [one.name for one in registry.list_plugins()] == ["cpu"]
    registry.register_plugin(AddOn(), "bad")


def test_a_disabled_name_added_by_hand_does_nothing(site, monkeypatch):
    """The operator's list also silences a plugin that a program adds."""
    monkeypatch.setenv("GRAPHPLAT_DISABLED_PLUGINS", "hand")
    registry.register_plugin(BringsByHand(), "hand")
    assert platform_for("cpu").name == "cpu"
    assert outcomes("cpu")["hand"] == "disabled"


def test_an_unregistered_plugin_can_be_collected(site):
    """The registry keeps nothing of a plugin that is gone, nor of its platform."""
    plugin = BringsByHand()
    registry.register_plugin(plugin, "hand")
    platform = platform_for("cpu")
    gone = [weakref.ref(plugin), weakref.ref(platform)]
    registry.unregister_plugin("hand")
    del plugin, platform
    gc.collect()
    assert [one() for one in gone] == [None, None]


# Traced code


def test_platform_flags_are_constants_for_the_tracer(site):
    """A forward that asks for its platform traces without a graph break; the probe runs once, at tracing."""

    def forward(x):
        if platform_for(x.device).capabilities.graph_capture:
            return x + 1
        if current_platform().name == "acme" and platform_for("cpu", name="cpu").name == "cpu":
            return x + 2
        return x

    site.vendor("cpu-acme", "acme")
    compiled = torch.compile(forward, fullgraph=True, backend="eager")
    for _ in range(3):
        assert compiled(torch.zeros(2)).tolist() == [2.0, 2.0]
    assert site.events.count("probe acme") == 1
