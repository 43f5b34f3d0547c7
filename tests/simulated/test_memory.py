"""Pools, counts and lifetimes of the simulated device's memory."""

import gc

import pytest
import torch

from graphplat.testing.simulated import ledger


@pytest.fixture(autouse=True)
def _no_garbage(_clean):
    """What earlier tests left in cycles does not die while bytes are counted."""
    gc.collect()


def capture(dev, graph, function, **settings):
    """Record *function* into *graph* on a stream of its own; its result."""
    with dev.graph(graph, **settings):
        return function()


def test_bytes_are_counted_and_come_back(sim, dev):
    """
    ``memory_allocated`` rises with a tensor and falls with it; views cost nothing; ``empty_cache`` gives the
    rest back.
    """
    base = dev.memory_allocated()
    x = torch.zeros(1 << 20, device=sim.name)
    view = x[10:]
    assert dev.memory_allocated() == base + (4 << 20)
    assert dev.mem_get_info()[0] == sim.profile.memory_bytes - dev.memory_reserved()
    del x
    assert dev.memory_allocated() == base + (4 << 20)
    del view
    assert dev.memory_allocated() == base
    reserved = dev.memory_reserved()
    dev.empty_cache()
    assert dev.memory_reserved() <= reserved - (4 << 20)
    assert dev.memory_stats()["allocated_bytes.all.current"] == base


def test_dead_memory_is_handed_to_the_next_tensor(sim):
    """
    The next tensor that fits takes the bytes of a dead one, first fit, and a freed region is poisoned.
    """
    a = torch.zeros(1000, device=sim.name)
    guard = torch.zeros(1000, device=sim.name)
    address = a.data_ptr()
    del a
    b = torch.empty(900, device=sim.name)
    assert b.data_ptr() == address
    assert b.isnan().all().item()
    assert guard.sum().item() == 0


def test_streams_do_not_share_freed_memory(sim, dev):
    """
    Memory freed on one stream is reused on that stream only, as in torch's caching allocators.
    """
    a = torch.zeros(1000, device=sim.name)
    address = a.data_ptr()
    del a
    with dev.stream(dev.Stream()):
        assert torch.empty(1000, device=sim.name).data_ptr() != address


def test_out_of_memory(sim, dev):
    """
    A device that is full raises torch's own error, after giving back what was cached; nothing is lost.
    """
    dev.empty_cache()
    sim.set_memory(dev.memory_reserved() + (1 << 20))
    try:
        with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
            torch.zeros(1 << 20, device=sim.name)
        x = torch.zeros(200_000, device=sim.name)
        del x
        torch.zeros(220_000, device=sim.name)  # fits only if the cached segment goes first
    finally:
        sim.set_memory(sim.profile.memory_bytes)


def test_a_graph_reads_an_address_and_not_an_owner(sim, dev, graph_type):
    """
    An input that dies after capture is recycled, and the replay reads what is there now: the lifetime bug
    shows as a wrong value.
    """
    x = torch.full((1000,), 3.0, device=sim.name)
    graph = graph_type()
    with dev.graph(graph):
        y = x * 2
    graph.replay()
    assert y[0].item() == 6
    del x
    graph.replay()
    assert y.isnan().all().item()
    squatter = torch.full((1000,), 50.0, device=sim.name)
    graph.replay()
    assert y[0].item() == 100
    del squatter


def test_a_shared_pool_hands_on_what_a_capture_dropped(sim, dev, graph_type):
    """
    Memory that died in one capture serves the next one in the same pool, and memory that lives does not.
    """
    stream = dev.Stream()
    x = torch.ones(5000, device=sim.name)
    first, second = graph_type(), graph_type()
    kept = capture(dev, first, lambda: (x + 1) * 2, stream=stream)
    bytes_of_one = ledger().pool_bytes
    other = capture(dev, second, lambda: (x + 3) * 4, stream=stream, pool=first.pool())
    assert other.data_ptr() != kept.data_ptr()
    assert ledger().pool_bytes < 2 * bytes_of_one
    first.replay()
    second.replay()
    assert kept[0].item() == 4
    assert other[0].item() == 16
    third = graph_type()
    address = other.data_ptr()
    del other
    # First fit: the hole that the first capture's intermediate left comes before the dead output.
    _, taken = capture(dev, third, lambda: (x * 7, x * 8), stream=stream, pool=first.pool())
    assert taken.data_ptr() == address
    second.replay()  # its output died: it now writes over the third graph's
    assert taken[0].item() == 16
    for graph in (first, second, third):
        graph.reset()


def test_largest_first_costs_little_more_than_the_largest(sim, dev, graph_type):
    """
    In one pool, captures from the largest to the smallest fit into the memory of the first; in the other
    order each needs its own.
    """
    dev.empty_cache()
    costs = []
    for sizes in ((64, 32, 16, 8), (8, 16, 32, 64)):
        stream, pool, graphs = dev.Stream(), dev.graph_pool_handle(), []
        for size in sizes:
            x = torch.ones(size, 10_000, device=sim.name)
            graphs.append(graph_type())
            capture(dev, graphs[-1], lambda x=x: ((x + 1) * 2).sum(), stream=stream, pool=pool)
        costs.append(dev.memory_stats()[f"reserved_bytes_by_private_pools.0_{pool[1]}"])
    assert costs[0] < 0.6 * costs[1]


def test_counts_return_after_reset(sim, dev, graph_type):
    """
    After ``reset`` and ``empty_cache`` no graph, pool or byte of a graph is left.
    """
    dev.empty_cache()
    before = ledger()
    x = torch.ones(1000, device=sim.name)
    graph = graph_type()
    with dev.graph(graph):
        y = x * 2
    during = ledger()
    assert (during.graphs, during.executables) == (before.graphs + 1, before.executables + 1)
    assert during.pools == before.pools + 1
    assert during.pool_bytes > before.pool_bytes
    del y
    graph.reset()
    if not sim.profile.reset_releases_pool:
        assert ledger().pools == before.pools + 1
        del graph
    del x
    dev.empty_cache()
    after = ledger()
    for field in ("graphs", "executables", "pools", "pool_bytes", "allocated_bytes"):
        assert getattr(after, field) == getattr(before, field), field


def test_a_thousand_cycles_change_nothing(sim, dev, graph_type):
    """
    Capturing and resetting a graph 1000 times leaves every count and figure as it was after the first.
    """
    x = torch.ones(100, device=sim.name)
    stream, graph = dev.Stream(), graph_type()

    def cycle():
        with dev.stream(stream):  # by hand, since some vendors' context collects garbage each time
            graph.capture_begin()
            y = x + 1
            graph.capture_end()
        graph.replay()
        assert y[0].item() == 2
        del y
        graph.reset()

    cycle()
    dev.empty_cache()
    before = ledger()
    for _ in range(1000):
        cycle()
    dev.empty_cache()
    after = ledger()
    for field in (
        "graphs",
        "executables",
        "captures",
        "pools",
        "allocated_bytes",
        "reserved_bytes",
        "pool_bytes",
    ):
        assert getattr(after, field) == getattr(before, field), field


def test_a_dropped_graph_frees_what_it_held(sim, dev, graph_type):
    """
    A graph that nobody holds any more counts no more, also when only the garbage collector finds it.
    """
    before = ledger().graphs
    graph = graph_type()
    capture(dev, graph, lambda: torch.ones(3, device=sim.name))
    graph.myself = graph
    del graph
    assert ledger().graphs == before + 1
    gc.collect()
    assert ledger().graphs == before


def test_graph_limit(sim, dev, graph_type):
    """
    The device holds a limited number of executables: the next one fails, and fits after a reset.
    """
    usual = sim.profile.max_graphs
    sim.set_max_graphs(ledger().executables + 2)
    try:
        graphs = [graph_type() for _ in range(3)]
        for graph in graphs[:2]:
            capture(dev, graph, lambda: torch.ones(1, device=sim.name))
        stream = dev.current_stream()
        with pytest.raises(RuntimeError, match="too many live graphs"):
            capture(dev, graphs[2], lambda: torch.ones(1, device=sim.name))
        dev.set_stream(stream)  # as with a real module, a failing end leaves the stream set
        graphs[2].reset()
        graphs[0].reset()
        capture(dev, graphs[2], lambda: torch.ones(1, device=sim.name))
    finally:
        sim.set_max_graphs(usual)


def test_mem_pool(sim, dev):
    """
    A ``MemPool`` serves the thread that uses it, and is a pool handle.
    """
    pool = dev.MemPool()
    with dev.use_mem_pool(pool):
        x = torch.ones(1000, device=sim.name)
    assert dev.memory_stats()[f"reserved_bytes_by_private_pools.0_{pool.id[1]}"] > 0
    assert pool.id[0] == 0 < pool.id[1]
    assert pool.use_count() == 1
    del x
