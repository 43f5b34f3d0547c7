"""Broken, rude and slow plugins: each is reported, and none disturbs the others."""

from __future__ import annotations

import importlib
import itertools
import sys
import threading

import pytest

from graphplat import plugin_state, registry
from graphplat.errors import ConfigError, PlatformError, PluginError
from graphplat.registry import GraphplatWarning, Outcome, current_platform, platform_for, resolve

HOOK = "from graphplat import Platform, hookimpl\n"


def record(name):
    [found] = [one for one in registry.list_plugins() if one.name == name]
    return found


def provides(expression, before=""):
    return f"{HOOK}{before}\n@hookimpl\ndef provide_platforms():\n    {expression}\n"


ACME = 'class Acme(Platform):\n    name = "acme"\n    device_type = "npu"\n'

# Failures are kept, shown, and never turn into cpu


@pytest.mark.parametrize(
    "error", ["ImportError", "OSError", "RuntimeError", "SystemExit", "SyntaxError", "Odd"]
)
@pytest.mark.parametrize("phase", ["import", "validate"])
def test_any_failure_is_the_cause_of_the_error(site, error, phase):
    """Whatever a plugin raises, at import or when asked, asking for its device is chained to it."""
    odd = "class Odd(BaseException): pass\n"
    source = f"{odd}raise {error}('libacme.so')"
    if phase == "validate":
        source = provides(f"raise {error}('libacme.so')", odd)
    site.install("acme-npu", {"npu-acme": "mod_acme"}, mod_acme=source)
    with pytest.raises(PlatformError) as caught:
        platform_for("npu:0")
    assert type(caught.value.__cause__).__name__ == error
    where = "" if phase == "import" else " (validate)"
    assert str(caught.value) == (
        "no platform for 'npu'; have cpu. "
        f"Plugin npu-acme (acme-npu 1.0) failed to load{where}: {error}: libacme.so. "
        'Run "graphplat platforms" for details'
    )
    assert platform_for("cpu").name == "cpu"
    assert record("npu-acme").failure.phase == phase
    assert "libacme.so" in record("npu-acme").failure.traceback


@pytest.mark.parametrize("order", list(itertools.permutations(["good", "bad", "fine"])))
def test_a_bad_plugin_between_good_ones(site, order):
    """In every order, the good ones load and the bad one is on record."""
    for name in order:
        if name == "bad":
            site.install("dist-bad", {"npu-bad": "mod_bad"}, mod_bad="raise OSError('no lib')")
        else:
            site.vendor(
                f"npu-{name}", name, probe="pass" if name == "good" else "raise RuntimeError('absent')"
            )
    with pytest.warns(GraphplatWarning, match=r"npu-bad .dist-bad 1.0.*no lib.*served by platform 'good'"):
        result = resolve("npu")
    assert {one.plugin: str(one.outcome) for one in result.candidates} == {
        "npu-bad": "load_failed",
        "npu-fine": "unavailable",
        "npu-good": "chosen",
    }
    assert platform_for("npu").name == "good"


def test_a_failure_is_not_tried_again(site):
    """A plugin that failed is imported once; the answer stays until the registry is reset."""
    site.install(
        "dist-bad", {"npu-bad": "mod_bad"}, mod_bad="import plugin_log; plugin_log.events.append(1); 1 / 0"
    )
    for _ in range(3):
        with pytest.raises(PlatformError, match=r"ZeroDivisionError"):
            platform_for("npu")
    assert site.events == [1, *site.events[1:]]
    assert site.events.count(1) == 1


def test_an_interrupt_leaves_no_trace(site):
    """Ctrl-C during an import goes through, and the next call loads the plugin as if nothing had been."""
    importlib.import_module("plugin_log").interrupt = True
    head = "import plugin_log\nif plugin_log.interrupt:\n    raise KeyboardInterrupt\n"
    site.install("dist-acme", {"npu-acme": "mod_acme"}, mod_acme=head + site.source("acme", "npu"))
    with pytest.raises(KeyboardInterrupt):
        platform_for("npu")
    sys.modules["plugin_log"].interrupt = False
    assert platform_for("npu").name == "acme"


def test_strict_mode_raises_at_load(site, monkeypatch):
    """With the switch on, a broken plugin of the type is an error even if another would do."""
    site.builtin(cpu="pass", npu="pass")
    site.install("dist-bad", {"npu-bad": "mod_bad"}, mod_bad="raise OSError('no lib')")
    monkeypatch.setenv("GRAPHPLAT_STRICT_PLUGINS", "1")
    for ask in (lambda: platform_for("npu"), current_platform):
        with pytest.raises(PluginError, match=r"GRAPHPLAT_STRICT_PLUGINS.*npu-bad.*no lib") as caught:
            ask()
        assert isinstance(caught.value.__cause__, OSError)
    assert platform_for("cpu").name == "cpu"
    assert record("npu-bad").outcome is Outcome.LOAD_FAILED
    monkeypatch.setenv("GRAPHPLAT_STRICT_PLUGINS", "0")
    with pytest.warns(GraphplatWarning, match=r"no lib"):
        assert platform_for("npu").name == "npu"


@pytest.mark.parametrize("name", ["npu-bad", "dist-bad", " other , npu-bad "])
def test_a_disabled_plugin_is_not_imported(site, monkeypatch, name):
    """The list of names, of plugins or distributions, is heeded before any import."""
    site.builtin(cpu="pass", npu="pass")
    site.install("dist-bad", {"npu-bad": "mod_bad"}, mod_bad="raise KeyboardInterrupt")
    monkeypatch.setenv("GRAPHPLAT_DISABLED_PLUGINS", name)
    assert platform_for("npu").name == "npu"
    assert record("npu-bad").outcome is Outcome.DISABLED


def test_a_disabled_plugin_is_named_when_its_device_is_missing(site, monkeypatch):
    """Nobody looks for hours for a plugin that was switched off."""
    site.vendor("npu-acme", "acme")
    monkeypatch.setenv("GRAPHPLAT_DISABLED_PLUGINS", "npu-acme")
    with pytest.raises(PlatformError, match=r"npu-acme.*disabled by GRAPHPLAT_DISABLED_PLUGINS"):
        platform_for("npu")


# Names


def test_one_name_in_two_distributions_is_nobodys(site):
    """Neither loads, both are on record with both distributions; switching one off frees the other."""
    site.install("dist-a", {"npu-x": "mod_a"}, mod_a=site.source("a", "npu"))
    site.install("dist-b", {"npu-x": "mod_b"}, version="2.0", mod_b=site.source("b", "npu"))
    with pytest.raises(PlatformError, match=r"claimed more than once: dist-a 1.0, dist-b 2.0"):
        platform_for("npu")
    assert [one.outcome for one in registry.list_plugins() if one.name == "npu-x"] == [Outcome.REJECTED] * 2
    assert not any(event.startswith("import mod_") for event in site.events)


@pytest.mark.parametrize(("off", "left"), [("dist-a", "b"), ("dist-b", "a")])
def test_a_clash_is_settled_by_switching_one_off(site, monkeypatch, off, left):
    """The list of disabled names takes distributions, since the plugin name is the same."""
    for name in "ab":
        site.install(f"dist-{name}", {"npu-x": f"mod_{name}"}, **{f"mod_{name}": site.source(name, "npu")})
    monkeypatch.setenv("GRAPHPLAT_DISABLED_PLUGINS", off)
    assert platform_for("npu").name == left


def test_a_reserved_name_does_not_displace_the_builtin(site):
    """A distribution that calls its entry point as a built-in is refused, unimported; the built-in works."""
    site.builtin(cpu="pass", cuda="pass")
    site.install("dist-rude", {"cuda": "mod_rude"}, mod_rude=site.source("rude", "cuda"))
    with pytest.warns(
        GraphplatWarning, match=r"'cuda' of distribution dist-rude 1.0 is reserved for.*graphplat"
    ):
        assert platform_for("cuda").name == "cuda"
    assert "import mod_rude" not in site.events


def test_a_distribution_seen_twice_is_one(site):
    """A second copy of a distribution further down the path is shadowed, as its modules are."""
    site.install("dist_a", {"npu-a": "mod_old"}, mod_old="raise OSError")
    site.install("dist-A", {"npu-a": "mod_a"}, mod_a=site.source("a", "npu"))
    assert platform_for("npu").name == "a"


def test_unreadable_metadata_hides_nobody(site):
    """One distribution with broken entry points is on record; the others load."""
    folder = site.install("dist-torn", {"npu-torn": "mod_torn"})
    (folder / "dist_torn-1.0.dist-info" / "entry_points.txt").write_text("[graphplat]\nno equals sign\n")
    with pytest.warns(GraphplatWarning, match=r"dist-torn 1.0"):
        assert platform_for("cpu").name == "cpu"
    [torn] = [one for one in registry.list_plugins() if one.distribution == "dist-torn"]
    assert torn.failure.phase == "discover"


@pytest.mark.parametrize("value", ["mod_absent", "mod_there:absent", "not a module!", ""])
def test_an_entry_point_that_leads_nowhere(site, value):
    """A wrong module, attribute or value is a failure like any other."""
    site.install("dist-lost", {"npu-lost": value}, mod_there="")
    with pytest.raises(PlatformError, match=r"dist-lost 1.0"):
        platform_for("npu")
    assert platform_for("cpu")


# Whole or not at all


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (HOOK + "@hookimpl\ndef provide_platfroms(): return []\n", "Did you mean provide_platforms?"),
        (
            provides("return [Acme]", ACME) + "@hookimpl\ndef create_decode_runer(): pass\n",
            "create_decode_runner",
        ),
        (provides("return [Acme]", ACME) + "@hookimpl\ndef capture_progress(event, extra): pass\n", "extra"),
        (HOOK + "def provide_platforms(): return []\n", "provide_platforms is not marked"),
        ("x = 1\n", "implements no hook"),
    ],
)
def test_hooks_that_are_not_right_admit_nothing(site, source, why):
    """A misspelt, unmarked or ill-shaped hook refuses the whole plugin, with the name it should have."""
    site.install("dist-acme", {"npu-acme": "mod_acme"}, mod_acme=source)
    with pytest.raises(PlatformError) as caught:
        platform_for("npu")
    assert why in str(caught.value)
    assert record("npu-acme").failure.phase == "register"
    assert record("npu-acme").platforms == []


def test_a_half_registered_plugin_takes_part_in_nothing(site):
    """A plugin whose platforms are refused has none of its other hooks called either."""
    tail = "@hookimpl\ndef capture_progress(event):\n    raise AssertionError\n"
    site.builtin(cpu="pass", npu="pass")
    site.install("dist-half", {"npu-half": "mod_half"}, mod_half=provides("return [int]") + tail)
    with pytest.warns(GraphplatWarning, match=r"npu-half"):
        platform = platform_for("npu")
    hooks = registry.hooks_for(platform)
    assert [plugin.name for plugin in hooks.others()] == ["npu"]


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("return None", "returned None"),
        ("return 'acme'", "returned 'acme'"),
        ("return Acme", "returned <class"),
        ("return 7", "returned 7"),
        ("return [Acme()]", "no subclass of Platform"),
        ("return [Acme, int]", "no subclass of Platform"),
        ("return [Platform]", "abstract"),
        ("return [Acme, Acme]", "two platforms named acme"),
        ("yield Acme; raise OSError('midway')", "OSError: midway"),
        ("Acme.device_type = 'xpu'; return [Acme]", "serves 'npu'.*Name the entry point xpu-VARIANT"),
        ("Acme.name = 'npu'; return [Acme]", "'npu' is reserved"),
        ("Acme.is_out_of_tree = lambda self: False; return [Acme]", "is_out_of_tree.. must return True"),
        ("Acme.is_out_of_tree = lambda self: None; return [Acme]", "is_out_of_tree.. must return True"),
    ],
)
def test_platforms_that_are_not_right_admit_nothing(site, body, why):
    """Each claim of provide_platforms() is checked before any of its platforms counts."""
    site.install("dist-acme", {"npu-acme": "mod_acme"}, mod_acme=provides(body, ACME))
    with pytest.raises(PlatformError, match=why):
        platform_for("npu")
    assert record("npu-acme").failure.phase == "validate"


# Asking while loading


@pytest.mark.parametrize("device", ["npu", "cpu", "xpu"])
@pytest.mark.parametrize("caught", [False, True])
def test_asking_while_being_imported(site, device, caught):
    """A plugin that asks at import gets an error, and what it asked for works afterwards."""
    ask = f"registry.platform_for('{device}')"
    if caught:
        ask = f"\ntry:\n    {ask}\nexcept PlatformError as error:\n    plugin_log.events.append(str(error))\n"
    head = "import plugin_log\nfrom graphplat import registry\nfrom graphplat.errors import PlatformError\n"
    site.builtin(cpu="pass", xpu="pass")
    site.install(
        "dist-acme", {"npu-acme": "mod_acme"}, mod_acme=head + ask + "\n" + site.source("acme", "npu")
    )
    if caught:
        assert platform_for("npu").name == "acme"
        assert "asks for a platform while it is being loaded" in site.events[0]
    else:
        with pytest.raises(PlatformError, match=r"asks for a platform while it is being loaded"):
            platform_for("npu")
    assert platform_for("cpu").name == "cpu"
    assert platform_for("xpu").name == "xpu"


def test_asking_while_providing_platforms(site):
    """The same holds for provide_platforms()."""
    site.install("dist-acme", {"npu-acme": "m"}, m=provides("import graphplat; graphplat.current_platform()"))
    with pytest.raises(PlatformError, match=r"while it is being loaded"):
        platform_for("npu")


def test_asking_while_probing(site):
    """A probe that asks gets the error at once, instead of waiting for itself."""
    site.vendor("npu-acme", "acme", probe="import graphplat; graphplat.platform_for('cpu')")
    with pytest.raises(PlatformError, match=r"probe\(\) of platform 'acme' asks for a platform"):
        platform_for("npu")


def test_a_plugin_imported_by_its_user_is_not_judged_half_done(site):
    """A module that asks while a user imports it gets an error; the plugin is loaded whole later."""
    ask = (
        "import plugin_log\nfrom graphplat import platform_for\nif plugin_log.ask:\n    platform_for('npu')\n"
    )
    importlib.import_module("plugin_log").ask = True
    site.install("dist-acme", {"npu-acme": "mod_acme"}, mod_acme=ask + site.source("acme", "npu"))
    with pytest.raises(PluginError, match=r"npu-acme \(dist-acme 1.0\) asks .* while it is being imported"):
        importlib.import_module("mod_acme")
    sys.modules["plugin_log"].ask = False
    assert platform_for("npu").name == "acme"


def test_a_plugin_whose_import_waits_for_the_registry_is_freed(site, monkeypatch):
    """A plugin that joins a thread which asks for a platform ends in an error there, not in a deadlock."""
    monkeypatch.setattr(plugin_state, "_PATIENCE", 0.2)
    head = """
import threading, plugin_log
from graphplat import platform_for
def ask():
    try:
        platform_for("cpu")
    except Exception as error:
        plugin_log.events.append(str(error))
thread = threading.Thread(target=ask)
thread.start()
thread.join()
"""
    site.install("dist-acme", {"npu-acme": "mod_acme"}, mod_acme=head + site.source("acme", "npu"))
    assert platform_for("npu").name == "acme"
    assert "another thread that loads plugin npu-acme (dist-acme 1.0)" in site.events[0]


# Probes


def test_a_probe_that_hangs_is_given_up(site, monkeypatch):
    """A probe that does not return in time is a failure with a warning; others of the type work."""
    importlib.import_module("plugin_log").go = go = threading.Event()
    monkeypatch.setenv("GRAPHPLAT_PROBE_TIMEOUT", "0.2")
    site.builtin(cpu="pass", npu="pass")
    site.vendor("npu-slow", "slow", probe="plugin_log.go.wait(60)")
    try:
        with pytest.warns(GraphplatWarning, match=r"dist-slow.*did not return within 0.2 s"):
            assert platform_for("npu").name == "npu"
        go.set()
        assert platform_for("npu").name == "npu"
        with pytest.raises(PlatformError, match=r"GRAPHPLAT_PROBE_TIMEOUT"):
            platform_for("npu", name="slow")
        assert record("npu-slow").outcome is Outcome.UNAVAILABLE
    finally:
        go.set()


@pytest.mark.parametrize("seconds", ["soon", "-1", "0", "nan", "inf"])
def test_a_time_limit_that_is_none(site, monkeypatch, seconds):
    """A limit that is no positive number names the variable."""
    monkeypatch.setenv("GRAPHPLAT_PROBE_TIMEOUT", seconds)
    with pytest.raises(ConfigError, match=r"GRAPHPLAT_PROBE_TIMEOUT"):
        platform_for("cpu")
    monkeypatch.delenv("GRAPHPLAT_PROBE_TIMEOUT")
    assert platform_for("cpu").name == "cpu"


@pytest.mark.parametrize(
    ("probe", "why"),
    [
        ("return False", r"probe\(\) returned False"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("type(self).capabilities = {}", "must be a PlatformCapabilities"),
        ("import ctypes; ctypes.CDLL('libacme.so')", "OSError"),
    ],
)
def test_a_probe_that_does_not_say_yes(site, probe, why):
    """Anything but returning nothing means unavailable, with the reason."""
    site.vendor("npu-acme", "acme", probe=probe)
    with pytest.raises(PlatformError, match=why) as caught:
        platform_for("npu")
    assert caught.value.__cause__ is not None
    assert record("npu-acme").outcome is Outcome.UNAVAILABLE


def test_an_interrupted_probe_is_asked_again(site):
    """Ctrl-C in a probe goes through and decides nothing."""
    importlib.import_module("plugin_log").interrupt = True
    site.vendor("npu-acme", "acme", probe="if plugin_log.interrupt: raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        platform_for("npu")
    sys.modules["plugin_log"].interrupt = False
    assert platform_for("npu").name == "acme"


def test_a_constructor_that_raises_is_a_reason(site):
    """A platform that cannot be made is unavailable, and the built-in serves."""
    site.builtin(cpu="pass", npu="pass")
    site.vendor("npu-acme", "acme", tail="AcmePlatform.__init__ = lambda self: 1 / 0\n")
    assert platform_for("npu").name == "npu"
    assert "ZeroDivisionError" in record("npu-acme").reason
