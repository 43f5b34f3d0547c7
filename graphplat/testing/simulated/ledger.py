"""What the simulated driver counts, at one moment."""

from __future__ import annotations

from attrs import asdict, frozen

from .runtime import active


@frozen(kw_only=True)
class Ledger:
    """Live objects, bytes of all devices, and running totals of driver calls.

    ``pools`` counts private pools that a graph or a ``MemPool`` keeps. ``capture_modes`` lists the error
    mode of each capture so far, oldest first, up to the length of the journal.
    """

    graphs: int
    executables: int
    captures: int
    pools: int
    allocated_bytes: int
    reserved_bytes: int
    pool_bytes: int
    queued: int
    begins: int
    ends: int
    failed_ends: int
    instantiations: int
    replays: int
    updates: int
    resets: int
    operators: int
    host_reads: int
    device_synchronizations: int
    stream_synchronizations: int
    empty_caches: int
    generator_registrations: int
    capture_modes: tuple[str, ...]


def ledger() -> Ledger:
    """The figures of this process's simulated driver, now."""
    runtime = active()
    memories = [device.memory for device in runtime.devices]
    with runtime.lock:
        for memory in memories:
            memory.collect()
        private = [p for m in memories for key, p in m.pools.items() if key != (0, 0)]
        return Ledger(
            captures=len(runtime.captures),
            pools=sum(pool.users > 0 for pool in private),
            allocated_bytes=sum(memory.allocated for memory in memories),
            reserved_bytes=sum(memory.reserved for memory in memories),
            pool_bytes=sum(pool.reserved for pool in private),
            queued=sum(len(s.queue) for d in runtime.devices for s in d.all_streams()),
            capture_modes=tuple(d["mode"] for call, d in runtime.journal if call == "capture_begin"),
            **asdict(runtime.counters),
        )
