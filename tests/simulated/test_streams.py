"""Streams, events and deferred work."""

import pytest
import torch

from graphplat.testing.simulated import DeviceHangError, ledger


def test_current_stream(dev):
    """
    ``stream(...)`` sets the current stream and restores it, also across devices; ``None`` changes nothing.
    """
    stream, elsewhere = dev.Stream(), dev.Stream(device=1, priority=-1)
    assert (stream.device_index, elsewhere.device_index, elsewhere.priority) == (0, 1, -1)
    with dev.stream(stream):
        assert dev.current_stream() == stream
        with dev.stream(elsewhere):
            assert dev.current_device() == 1
            assert dev.current_stream() == elsewhere
        with dev.stream(None):
            assert dev.current_stream() == stream
    assert dev.current_stream() == dev.default_stream()
    assert dev.current_stream(1) == dev.default_stream(1)
    with stream:
        assert dev.current_stream() == stream
    assert len({stream, dev.Stream(), dev.default_stream()}) == 3


def test_deferred_work_runs_at_a_synchronize(sim, dev, deferred):
    """
    Operators and asynchronous copies wait in the queue until someone waits for them.
    """
    x = torch.zeros(3, device=sim.name)
    y = x + 1
    assert ledger().queued > 0
    assert not dev.current_stream().query()
    dev.synchronize()
    assert ledger().queued == 0
    assert dev.current_stream().query()
    assert y.tolist() == [1, 1, 1]


def test_a_pinned_staging_buffer_is_read_late(sim, dev, deferred):
    """
    An asynchronous upload reads pinned memory when it runs, so overwriting it too early shows; pageable
    memory is staged at once.
    """
    staging, pageable = torch.ones(3).pin_memory(), torch.ones(3)
    x, y = torch.zeros(3, device=sim.name), torch.zeros(3, device=sim.name)
    x.copy_(staging, non_blocking=True)
    y.copy_(pageable, non_blocking=True)
    staging.fill_(9)
    pageable.fill_(9)
    dev.synchronize()
    assert x.tolist() == [9, 9, 9]
    assert y.tolist() == [1, 1, 1]


def test_an_asynchronous_download_is_poison_until_waited_for(sim, dev, deferred):
    """
    A non-blocking copy to the host has not happened yet when the call returns.
    """
    x = torch.ones(3, device=sim.name)
    here = x.to("cpu", non_blocking=True)
    assert here.isnan().all()
    dev.current_stream().synchronize()
    assert here.tolist() == [1, 1, 1]


def test_a_missing_wait_between_streams_shows(sim, dev, deferred):
    """
    A stream that does not wait for another one reads stale values; one that waits reads the new ones.
    """
    x = torch.zeros(3, device=sim.name)
    dev.synchronize()
    side, other = dev.Stream(), dev.Stream()
    with dev.stream(side):
        x.add_(1)
    with dev.stream(other):
        stale = x.clone()
        other.synchronize()
        assert stale.tolist() == [0, 0, 0]
        other.wait_stream(side)
        fresh = x.clone()
        other.synchronize()
        assert fresh.tolist() == [1, 1, 1]


def test_a_host_read_waits_for_the_current_stream_only(sim, dev, deferred):
    """
    ``item`` runs what its own stream has queued, and no other.
    """
    x = torch.zeros(1, device=sim.name)
    dev.synchronize()
    with dev.stream(dev.Stream()):
        x.add_(1)
    assert x.item() == 0
    dev.synchronize()
    assert x.item() == 1


def test_events(sim, dev, deferred):
    """
    An event is passed once the work before it has run.
    """
    start, end = dev.Event(enable_timing=True), dev.Event(enable_timing=True)
    start.record()
    x = torch.zeros(3, device=sim.name)
    end.record()
    x.add_(1)
    assert not end.query()
    assert end.query()
    assert ledger().queued == 1
    end.synchronize()
    assert start.elapsed_time(end) >= 0
    dev.synchronize()
    with pytest.raises(RuntimeError, match="enable_timing"):
        dev.Event().elapsed_time(end)


def test_memory_freed_with_work_pending_is_safe_on_its_stream(sim, dev, deferred):
    """
    A tensor dropped while queued work still reads it is not overwritten before that work has run.
    """
    x = torch.ones(1000, device=sim.name)
    dev.synchronize()
    y = x * 3
    del x
    z = torch.zeros(1000, device=sim.name)
    assert y.sum().item() == 3000
    assert z.sum().item() == 0


def test_record_stream_keeps_memory_until_another_stream_is_done(sim, dev, deferred):
    """
    ``record_stream`` is what makes dropping a tensor safe that another stream still reads.
    """
    results = []
    for careful in (False, True):
        x = torch.ones(1000, device=sim.name)
        dev.synchronize()
        side = dev.Stream()
        with dev.stream(side):
            y = x * 3
        if careful:
            x.record_stream(side)
        del x
        torch.full((1000,), 50.0, device=sim.name)
        dev.current_stream().synchronize()
        side.synchronize()
        results.append(y.max().item())
        dev.synchronize()
        del y
    assert results[0] != 3
    assert results[1] == 3


def test_an_external_event_may_be_waited_for_before_it_is_recorded(sim, dev):
    """
    The stream stalls at the wait and goes on when the event comes; waiting for one that never comes hangs
    loudly.
    """
    if not hasattr(dev, "ExternalEvent"):
        pytest.skip("this vendor has no external events")
    event, x = dev.ExternalEvent(), torch.zeros(1, device=sim.name)
    stream, other = dev.Stream(), dev.Stream()
    with dev.stream(stream):
        event.wait()
        event.reset()
        x.add_(1)
        with pytest.raises(DeviceHangError, match="external event wait"):
            stream.synchronize()
    event.record(other)
    assert x.item() == 1
    with dev.stream(stream):
        event.wait()
        with pytest.raises(DeviceHangError):
            dev.synchronize()
    event.record(other)
    stream.synchronize()
