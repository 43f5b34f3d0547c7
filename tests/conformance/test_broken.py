"""Each test of the conformance suite catches the fault that it is there for."""

import gc
import inspect
import re
import warnings

import pytest
import torch

from graphplat.testing import (  # noqa: F401 - they register their faults
    broken_captures,
    broken_devices,
    broken_replays,
    broken_runners,
    suite,
)
from graphplat.testing.broken import FAULTS, applies, broken

PAIRS = [(fault, test) for fault in FAULTS.values() for test in fault.caught_by]


def host_operator():
    if not hasattr(torch.ops.sim, "fused_infer_attention"):
        pytest.skip("no operator to update")
    name = "actual_seq_lengths_kv"
    operator = torch.ops.sim.fused_infer_attention
    return name, lambda query, key, value, lengths: operator(query, key, value, **{name: lengths})


def call(name, platform, monkeypatch):
    """Run one test of the suite as pytest would, with the first of each of its parameters."""
    test = suite.TESTS[name]
    marks = getattr(test, "pytestmark", [])
    for mark in marks:
        for capability in mark.args if mark.name == "requires" else ():
            if getattr(platform.capabilities, capability) in (False, None, "none"):
                pytest.skip(f"{platform.name} does not declare {capability}")
    given = {m.args[0]: m.args[1][0] for m in marks if m.name == "parametrize"}
    known = {
        "platform": lambda: platform,
        "device": lambda: torch.zeros(1, device=platform.device_type).device,
        "monkeypatch": lambda: monkeypatch,
        "host_operator": host_operator,
    }
    for argument in inspect.signature(test).parameters:
        if argument not in given:
            given[argument] = known[argument]()
    test(**given)


@pytest.fixture
def mended(sim, sound):
    """Whatever a broken platform leaves behind is put right."""
    stack = sim and sim.name
    yield
    if stack:
        sim.set_deferred(False)
        sim.recover()
        _leave_modes()
    elif sound.is_capturing():
        from graphplat import recorded

        recorded._capturing.graph.abort()
    gc.collect()


def _leave_modes():
    from torch.utils import _python_dispatch

    for mode in reversed(_python_dispatch._get_current_dispatch_mode_stack()):
        mode.__exit__(None, None, None)


@pytest.mark.parametrize(("fault", "test"), PAIRS, ids=[f"{fault.name}-{test}" for fault, test in PAIRS])
def test_a_fault_is_caught(sound, sim, mended, monkeypatch, fault, test):
    """
    The named test fails on the platform with the fault, and for the reason that the fault declares.
    """
    if not applies(fault, sound):
        pytest.skip(f"{sound.name} has nothing that this fault breaks")
    if sim and fault.deferred:
        sim.set_deferred(True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a broken platform may well warn
        with broken(fault, sound) as platform:
            try:
                call(test, platform, monkeypatch)
            except pytest.skip.Exception as skipped:
                pytest.skip(f"skipped on the broken platform: {skipped}")
            except (Exception, pytest.fail.Exception) as error:
                found = f"{type(error).__name__}: {error}"
                if re.search(fault.caught_by[test], found, re.DOTALL) is None:
                    raise
                return
    pytest.fail(f"{test} passed on a platform with the fault {fault.name}")


@pytest.mark.parametrize("test", suite.TESTS)
def test_the_sound_platform_passes(sound, mended, monkeypatch, test):
    """
    Called in the same way, the test passes on the platform without the fault.
    """
    call(test, sound, monkeypatch)


def test_every_test_catches_some_fault():
    """
    No test of the suite is without a fault that it is known to catch, and no fault names an unknown test.
    """
    caught = {test for _, test in PAIRS}
    assert caught - suite.TESTS.keys() == set()
    assert suite.TESTS.keys() - caught == set()
