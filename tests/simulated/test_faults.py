"""Failure injection."""

import pytest
import torch

from graphplat.testing.simulated import faults, ledger


def build(sim, dev, graph):
    """Capture by hand, always ending and leaving the stream; the output."""
    x = torch.ones(3, device=sim.name)
    with dev.stream(dev.Stream()):
        graph.capture_begin()
        try:
            y = x + 1
            y = y * 2
        finally:
            graph.capture_end()
    graph.input = x
    return y


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt("stop"), ValueError])
@pytest.mark.parametrize("point", ["begin", "forward", "end", "instantiate", "alloc"])
def test_a_capture_fails_where_told_and_works_again(sim, dev, graph_type, point, error):
    """
    The chosen exception comes out of the chosen call; after ``reset`` the same graph can be captured.
    """
    graph = graph_type()
    before = ledger()
    kind = error if isinstance(error, type) else type(error)
    torch.ones(3, device=sim.name)
    with (
        faults.inject(point, error, nth=2 if point == "forward" else 1) as fault,
        pytest.raises((kind, RuntimeError)),
    ):
        build(sim, dev, graph)
    assert fault.raised == 1
    graph.reset()
    assert ledger().captures == 0
    assert ledger().graphs == before.graphs
    y = build(sim, dev, graph)
    graph.replay()
    assert y.tolist() == [4, 4, 4]


def test_replay_and_reset_faults(sim, dev, graph_type):
    """
    A replay that fails has changed nothing and may be tried again.
    """
    graph = graph_type()
    y = build(sim, dev, graph)
    with faults.inject("replay"), pytest.raises(RuntimeError, match="injected"):
        graph.replay()
    graph.replay()
    assert y.tolist() == [4, 4, 4]
    with faults.inject("reset"), pytest.raises(RuntimeError, match="injected"):
        graph.reset()
    graph.reset()


def test_optional_calls_can_be_broken_for_ever(sim, dev):
    """
    Device-wide synchronize, empty_cache and the memory query can fail on every call, while the rest works.
    """
    with (
        faults.inject("synchronize", times=None),
        faults.inject("empty_cache", times=None),
        faults.inject("mem_get_info", times=None),
    ):
        for _ in range(3):
            for call in (dev.synchronize, dev.empty_cache, dev.mem_get_info):
                with pytest.raises(RuntimeError, match="injected"):
                    call()
        assert torch.ones(2, device=sim.name).sum().item() == 2
        dev.current_stream().synchronize()
    dev.synchronize()


def test_an_injected_allocation_failure_is_torchs_own(sim):
    """
    Without an exception given, an allocation fails with ``torch.OutOfMemoryError``.
    """
    with faults.inject("alloc", nth=2), pytest.raises(torch.OutOfMemoryError):
        [torch.empty(3, device=sim.name) for _ in range(2)]


def test_operators_fail_by_number(sim):
    """
    ``op`` counts every operator, inside or outside a capture.
    """
    x = torch.ones(2, device=sim.name)
    with faults.inject("op", ZeroDivisionError, nth=3) as fault:
        x.add_(1).add_(1)
        with pytest.raises(ZeroDivisionError):
            x.add_(1)
    assert fault.hits == 3
    assert x.tolist() == [3, 3]


def test_unknown_points_are_refused():
    """
    A misspelt point is an error and not a fault that never fires.
    """
    with pytest.raises(ValueError, match="no fault point 'beginn'"):
        faults.arm("beginn")
    faults.clear()
