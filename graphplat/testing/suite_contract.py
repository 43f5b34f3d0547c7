"""Conformance: what the contract promises of every platform, with graphs or without."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from graphplat import Platform, Reason, capture_decode_graph
from graphplat.testing.suite_runtime import (
    SuiteRuntime,
    assert_at_rest,
    assert_equal,
    batch_of,
    captured,
    expected,
    numbers,
    prepared,
    scaled,
    step,
)
from graphplat.torch_guard import torch_unchanged


def test_it_serves_its_device_type(platform: Platform, device: torch.device) -> None:
    """
    Tensors on the device carry the declared type, the probe may be repeated, and nothing captures.
    """
    assert device.type == platform.device_type
    platform.probe()
    assert platform.is_capturing() is False
    assert isinstance(platform.is_out_of_tree(), bool)


def test_capabilities_do_not_contradict_each_other(platform: Platform) -> None:
    """
    What needs graphs is declared only with graphs, and a limit is a positive number.
    """
    can = platform.capabilities
    if not can.graph_capture:
        dependent = ("breakable", "shared_pool", "collectives_in_capture", "generators_in_capture")
        assert not any(getattr(can, name) for name in dependent), "needs graph_capture"
        assert can.update_after_capture == "none", "needs graph_capture"
        assert platform.support_cuda_graph() is False
    assert can.max_graphs is None or can.max_graphs > 0


def test_without_graphs_steps_run_eagerly(platform: Platform, device: torch.device) -> None:
    """
    A platform without graphs gives the right results eagerly, and the report says why.
    """
    if platform.support_cuda_graph():
        pytest.skip("this platform captures graphs")
    eager = prepared(platform, SuiteRuntime(device, scaled))
    assert capture_decode_graph(model_runner=eager.context.model_runner, eager_runner=eager).runner is None
    assert [skip.reason for skip in eager.context.skipped] == [Reason.UNSUPPORTED]
    assert_equal(eager.execute(batch_of(device, x=numbers(3))), expected(numbers(3)))


def test_a_stream_is_restored_however_the_body_ends(platform: Platform, device: torch.device) -> None:
    """
    ``use_stream`` makes a stream current and puts the former one back, also after an error, which it passes
    on.
    """
    before = platform.current_stream(device)
    stream = platform.new_stream(device)
    if stream is None:
        pytest.skip("the platform has no streams")
    with platform.use_stream(stream):
        assert platform.current_stream(device) == stream
    assert platform.current_stream(device) == before, "after a body that ended well"
    with pytest.raises(ZeroDivisionError), platform.use_stream(stream):
        raise ZeroDivisionError
    assert platform.current_stream(device) == before, "after a body that raised"


def test_streams_can_be_ordered(platform: Platform, device: torch.device) -> None:
    """
    Work queued after ``wait_stream`` sees what the other stream was given before; events and synchronizes
    return once the work is done.
    """
    stream = platform.new_stream(device)
    if stream is None:
        pytest.skip("the platform has no streams")
    x = numbers(64).to(device)
    platform.wait_stream(stream, platform.current_stream(device))
    with platform.use_stream(stream):
        y = x * 2
        event = platform.record_event(stream)
    platform.wait_stream(platform.current_stream(device), stream)
    z = y + 1
    assert_equal(z, numbers(64) * 2 + 1, "read before the other stream was waited for")
    platform.synchronize_event(event)
    platform.synchronize_stream(stream)
    platform.synchronize(device)
    assert_equal(y, numbers(64) * 2)


@pytest.mark.requires("pinned_memory")
def test_synchronize_waits_for_asynchronous_copies(platform: Platform, device: torch.device) -> None:
    """
    After ``synchronize`` a copy into pinned memory has arrived.
    """
    source = torch.ones(1 << 20, device=device)
    for _ in range(8):
        source = source + 1
    landed = torch.zeros(1 << 20).pin_memory()
    landed.copy_(source, non_blocking=True)
    platform.synchronize(device)
    assert landed.eq(9).all().item(), "the copy had not arrived"


def test_memory_figures_make_sense(platform: Platform, device: torch.device) -> None:
    """
    What the platform tells of its memory is whole, and within its size.
    """
    info = platform.memory_info(device)
    assert info is not None or not platform.capabilities.trusted_free_memory
    if info is not None:
        assert 0 <= info.free <= info.total
    allocated, reserved = platform.allocated_bytes(device), platform.reserved_bytes(device)
    if platform.capabilities.memory_counters:
        assert allocated is not None
        assert reserved is not None
        assert 0 <= allocated <= reserved
    platform.empty_cache()


def test_the_random_state_can_be_put_back(platform: Platform, device: torch.device) -> None:
    """
    The same state gives the same numbers.
    """
    state = platform.rng_state(device)
    if state is None:
        pytest.skip("the platform does not tell its random state")
    state = state.clone()
    first = torch.rand(8, device=device).to("cpu")
    platform.set_rng_state(device, state)
    assert torch.equal(torch.rand(8, device=device).to("cpu"), first)


@pytest.mark.requires("graph_capture")
def test_a_capture_leaves_things_as_they_were(platform: Platform, device: torch.device) -> None:
    """
    A capture and its replays leave the current stream, torch itself and its settings as they found them.
    """
    before = platform.current_stream(device)
    methods = _methods(platform)
    with torch_unchanged() as changes:
        runner = captured(platform, SuiteRuntime(device, scaled))
        step(runner, device, x=numbers(3))
        assert_at_rest(platform, device, before)
        runner.release()
    assert not changes, f"changed torch for the whole process: {', '.join(changes)}"
    assert _methods(platform) == methods, "changed the device's torch module"


def _methods(platform: Platform) -> dict[str, Any]:
    module = getattr(torch, platform.device_type, None)
    if module is None or module is torch.cpu:
        return {}
    return {name: value for name, value in vars(module).items() if inspect.isroutine(value)}
