"""The driver's state: devices, current device and streams of each thread, active captures, counters."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from attrs import define, field
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from .errors import CaptureViolationError, SimulatedDeviceError
from .memory import DeviceMemory, Pool, Segment
from .profiles import SimProfile
from .streams import BUSY, DEVICE_LOCK, Capture, StreamState


@define
class Counters:
    """Running totals that `ledger` reports."""

    graphs: int = 0
    executables: int = 0
    begins: int = 0
    ends: int = 0
    failed_ends: int = 0
    instantiations: int = 0
    replays: int = 0
    updates: int = 0
    resets: int = 0
    operators: int = 0
    host_reads: int = 0
    device_synchronizations: int = 0
    stream_synchronizations: int = 0
    empty_caches: int = 0
    generator_registrations: int = 0


@define(eq=False)
class Device:
    """One simulated accelerator."""

    index: int
    torch_device: torch.device
    memory: DeviceMemory
    default_stream: StreamState
    generator: torch.Generator
    streams: weakref.WeakSet[StreamState] = field(factory=weakref.WeakSet)

    def all_streams(self) -> list[StreamState]:
        """Every stream ever made here."""
        with DEVICE_LOCK:
            return [self.default_stream, *self.streams]


class _Thread(threading.local):
    """What each thread has of its own."""

    def __init__(self) -> None:
        self.device = 0
        self.streams: dict[int, StreamState] = {}
        self.pools: list[Pool] = []


@define(eq=False)
class Runtime:
    """The one simulated driver of this process."""

    name: str
    profile: SimProfile
    devices: list[Device] = field(factory=list)
    counters: Counters = field(factory=Counters)
    lock: Any = DEVICE_LOCK
    captures: list[Capture] = field(factory=list)
    journal: deque[tuple[str, dict[str, Any]]] = field(factory=lambda: deque(maxlen=10_000))
    pinned: dict[int, Any] = field(factory=dict)
    _thread: _Thread = field(factory=_Thread)
    _ids: Iterator[int] = field(factory=lambda: itertools.count(1))

    def new_id(self) -> int:
        """A number not given out before."""
        return next(self._ids)

    def note(self, call: str, **details: Any) -> None:
        """Write one driver call into the journal."""
        self.journal.append((call, details))

    def add_device(self) -> None:
        """Plug in one more device."""
        index = len(self.devices)
        memory = DeviceMemory(
            total=self.profile.memory_bytes,
            segment_bytes=self.profile.segment_bytes,
            poison_freed=self.profile.poison_freed,
            on_grow=self._on_grow,
            on_free=lambda segment, offset, size: self._on_free(index, segment, offset, size),
        )
        where = torch.device(self.name, index)
        stream = StreamState(0, index, deferred=self.profile.deferred)
        self.devices.append(Device(index, where, memory, stream, torch.Generator()))

    # -- current device, stream, pool ------------------------------------------------------------------

    @property
    def current_index(self) -> int:
        """This thread's device."""
        return self._thread.device

    def set_index(self, index: int) -> None:
        """Make *index* this thread's device; raises for one that does not exist."""
        if not 0 <= index < len(self.devices):
            raise SimulatedDeviceError(f"invalid device ordinal {index}; have {len(self.devices)}")
        self._thread.device = index

    def index_of(self, device: Any = None) -> int:
        """The ordinal meant by a device, a string, a number or ``None`` for the current one."""
        if device is None:
            return self.current_index
        if isinstance(device, int):
            index: int | None = device
        else:
            where = torch.device(device)
            if where.type != self.name:
                raise ValueError(f"expected a {self.name} device, got {where}")
            index = where.index
        if index is None:
            return self.current_index
        if not 0 <= index < len(self.devices):
            raise SimulatedDeviceError(f"invalid device ordinal {index}; have {len(self.devices)}")
        return index

    def device(self, device: Any = None) -> Device:
        """The state of a device."""
        return self.devices[self.index_of(device)]

    def stream(self, index: int | None = None) -> StreamState:
        """This thread's current stream on a device."""
        index = self.current_index if index is None else index
        return self._thread.streams.get(index, self.devices[index].default_stream)

    def set_stream(self, stream: StreamState) -> None:
        """Make *stream* current, and its device too, as ``torch.cuda.set_stream`` does."""
        self._thread.device = stream.device
        self._thread.streams[stream.device] = stream

    def new_stream(self, index: int, priority: int) -> StreamState:
        """A stream of its own on a device."""
        stream = StreamState(self.new_id(), index, priority=priority, deferred=self.profile.deferred)
        with self.lock:
            self.devices[index].streams.add(stream)
        return stream

    @contextmanager
    def routed_to(self, pool: Pool) -> Iterator[None]:
        """Let this thread's allocations come from *pool*."""
        self._thread.pools.append(pool)
        try:
            yield
        finally:
            self._thread.pools.remove(pool)

    def pool_for(self, stream: StreamState) -> Pool:
        """Where a tensor made on *stream* now takes its memory."""
        capture = stream.capture
        if capture is not None and (stream is capture.origin or self.profile.side_streams_use_pool):
            pool: Pool = capture.pool
            return pool
        if self._thread.pools:
            return self._thread.pools[-1]
        return self.devices[stream.device].memory.default

    # -- capture rules ---------------------------------------------------------------------------------

    def refuse_while_capturing(self, stream: StreamState, what: str) -> None:
        """Raise, and invalidate the capture, if *stream* is capturing."""
        if stream.capture is not None:
            raise self.violated(stream.capture, what)

    def violated(self, capture: Capture, what: str) -> CaptureViolationError:
        """Mark *capture* invalid; the error to raise."""
        message = f"{what}: operation not permitted when stream is capturing"
        capture.invalidate(message)
        return CaptureViolationError(message)

    def unsafe_call(self, what: str, *, quiet: bool = False, malloc: bool = False) -> None:
        """Apply the capture error mode to a call such as a device malloc or an event query.

        ``global``: illegal from any thread while a capture is active; ``thread_local``: from the capturing
        thread; ``relaxed``: never. A device malloc by the capturing thread is the allocator's own and legal.
        *quiet* invalidates without raising, as for a finalizer that cannot raise.
        """
        here = threading.get_ident()
        for capture in list(self.captures):
            own = capture.thread == here
            hit = capture.mode == "global" or (capture.mode == "thread_local" and own)
            if hit and not (malloc and own):
                error = self.violated(capture, what)
                if not quiet:
                    raise error

    def refuse_device_wide(self, what: str) -> None:
        """Raise for a device-wide synchronization that an active capture does not permit."""
        here = threading.get_ident()
        for capture in list(self.captures):
            if capture.thread == here or capture.mode == "global":
                raise self.violated(capture, what)

    def _on_grow(self) -> None:
        self.unsafe_call("device memory allocation", malloc=True)

    def _on_free(self, index: int, segment: Segment, offset: int, size: int) -> None:
        pending = [stream for stream in BUSY if stream.device == index]
        owner = next((stream for stream in pending if stream.id == segment.stream), None)
        if owner is not None:
            owner.submit(lambda: segment.poison(offset, size), "poison")
        elif not pending:
            segment.poison(offset, size)

    def synchronize(self, index: int) -> None:
        """Run everything queued on a device."""
        for stream in self.devices[index].all_streams():
            if stream.capture is None:
                stream.synchronize()

    def recover(self) -> None:
        """Forget captures, queued work and current streams, as only a new process does with a real device."""
        for capture in list(self.captures):
            capture.finish()
            capture.graph.forget_capture()
        self.captures.clear()
        for device in self.devices:
            for stream in device.all_streams():
                stream.drop_queue()
        while (modes := _get_current_dispatch_mode_stack()) and getattr(modes[-1], "simulated", False):
            modes[-1].__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._thread.device = 0
        self._thread.streams.clear()
        self._thread.pools.clear()

    def poke(self) -> None:
        """Something a stalled stream may have waited for has happened: let immediate streams go on."""
        for device in self.devices:
            for stream in device.all_streams():
                if stream.queue and not stream.deferred:
                    stream.run(stream.submitted)


_runtime: Runtime | None = None


def installed() -> Runtime | None:
    """The simulated driver of this process, or ``None``."""
    return _runtime


def active() -> Runtime:
    """The simulated driver of this process; raises if none is installed."""
    if _runtime is None:
        raise SimulatedDeviceError("no simulated device here; call install_simulated(name) first")
    return _runtime


def adopt(runtime: Runtime) -> None:
    """Make *runtime* the driver of this process."""
    global _runtime  # noqa: PLW0603 - one PrivateUse1 device per process is torch's rule
    _runtime = runtime
