"""Streams as work queues, events as places in them, and captures as the record of a stream."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from attrs import define, field

from .errors import DeviceHangError, SimulatedDeviceError, Stall

Work = Callable[[], None]

#: One lock for the whole device: work of one stream may wait for, or wake, work of another.
DEVICE_LOCK: Final = threading.RLock()
#: Streams with queued work, kept alive until it has run.
BUSY: Final[set[StreamState]] = set()


@define(eq=False)
class StreamState:
    """One stream: work runs in order, at once or, when *deferred*, at the next synchronize.

    ``submitted`` and ``completed`` are tickets: the n-th item is done when ``completed >= n``.
    """

    id: int
    device: int
    priority: int = 0
    deferred: bool = False
    queue: deque[tuple[Work, str]] = field(factory=deque)
    submitted: int = 0
    completed: int = 0
    capture: Capture | None = None
    running: bool = False

    @property
    def waits(self) -> bool:
        """Whether new work has to queue."""
        return self.deferred or bool(self.queue)

    def submit(self, work: Work, label: str) -> None:
        """Append one item; an immediate stream runs it now unless it is stalled."""
        with DEVICE_LOCK:
            self.submitted += 1
            self.queue.append((work, label))
            BUSY.add(self)
            if not self.deferred:
                self.run(self.submitted)

    def run(self, upto: int) -> bool:
        """Run items up to ticket *upto*; tell whether all are done. An item's error surfaces here."""
        with DEVICE_LOCK:
            if self.running:
                return self.completed >= upto
            self.running = True
            try:
                while self.queue and self.completed < upto:
                    try:
                        self.queue[0][0]()
                    except Stall:
                        return False
                    except BaseException:
                        self._pop()
                        raise
                    self._pop()
            finally:
                self.running = False
        return self.completed >= upto

    def _pop(self) -> None:
        self.queue.popleft()
        self.completed += 1
        if not self.queue:
            BUSY.discard(self)

    def drop_queue(self) -> None:
        """Lose queued work, as a device reset does."""
        while self.queue:
            self._pop()

    def synchronize(self) -> None:
        """Run everything; raises `DeviceHangError` if some item can never run."""
        if not self.run(self.submitted):
            label = self.queue[0][1] if self.queue else "work on another stream"
            raise DeviceHangError(
                f"stream {self.id} of device {self.device} would block for ever at {label!r}: "
                "it waits for an event, or for a graph update, that was never issued"
            )

    def wait_for(self, other: StreamState, ticket: int) -> None:
        """Let later items here start only after *other* has finished *ticket*."""
        if other is self or other.completed >= ticket:
            return

        def wait() -> None:
            if not other.run(ticket):
                raise Stall

        self.submit(wait, f"wait for stream {other.id}")


@define(eq=False)
class EventState:
    """A place in a stream, or, recorded on a capturing stream, a place in that capture."""

    stream: StreamState | None = None
    ticket: int = 0
    capture: Capture | None = None
    frontier: dict[StreamState, int] = field(factory=dict)
    stamp: float | None = None

    def record(self, stream: StreamState) -> None:
        """Mark what *stream* has been given so far."""
        self.stream, self.capture = stream, stream.capture
        if stream.capture is not None:
            self.frontier = stream.capture.frontier_of(stream)
            return
        self.stamp = None
        stream.submit(self._stamp, "event record")
        self.ticket = stream.submitted

    def _stamp(self) -> None:
        self.stamp = time.perf_counter()

    def make_wait(self, stream: StreamState) -> None:
        """Order *stream* after this event; in a capture this is what forks and joins streams."""
        if self.capture is not None:
            self.capture.adopt(stream, self.frontier)
        elif self.stream is not None:
            if stream.capture is not None and stream is not self.stream:
                message = "dependency created on uncaptured work in another stream"
                stream.capture.invalidate(message)
                raise SimulatedDeviceError(f"{message}: record the event inside the capture")
            if stream.capture is None:
                stream.wait_for(self.stream, self.ticket)

    @property
    def done(self) -> bool:
        """Whether the device has passed this event; one never recorded counts as passed."""
        return self.stream is None or self.stream.completed >= self.ticket


@define(eq=False)
class Node:
    """One captured operation."""

    run: Work
    label: str


@define(eq=False)
class Capture:
    """What is being recorded, by which streams, and whether it is still good."""

    graph: Any
    origin: StreamState
    pool: Any
    mode: str
    thread: int = field(factory=threading.get_ident)
    nodes: list[Node] = field(factory=list)
    records: list[Any] = field(factory=list)
    invalid: str | None = None
    marked: bool = False
    active: bool = True
    _last: dict[StreamState, int] = field(factory=dict)
    _frontiers: dict[StreamState, dict[StreamState, int]] = field(factory=dict)

    def start(self) -> None:
        """Put the origin stream into capture."""
        self.origin.capture = self
        self._frontiers[self.origin] = {}

    def invalidate(self, why: str) -> None:
        """Nothing good can come of this capture any more; the first reason is kept."""
        if self.invalid is None:
            self.invalid = why

    def check(self) -> None:
        """Raise if an earlier error has spoilt this capture."""
        if self.invalid is not None:
            raise SimulatedDeviceError(
                f"operation failed due to a previous error during capture: {self.invalid}"
            )

    def record(self, stream: StreamState, run: Work, label: str) -> None:
        """Append one operation of *stream*."""
        self.check()
        self.nodes.append(Node(run, label))
        self._last[stream] = self._last.get(stream, 0) + 1

    def frontier_of(self, stream: StreamState) -> dict[StreamState, int]:
        """What *stream* has done or waited for up to now, per stream."""
        return {**self._frontiers[stream], stream: self._last.get(stream, 0)}

    def adopt(self, stream: StreamState, frontier: dict[StreamState, int]) -> None:
        """*stream* waits for an event of this capture, and so becomes part of it."""
        if not self.active:
            raise SimulatedDeviceError("the event was recorded in a capture that has ended")
        if stream.capture is None:
            if stream.id == 0:
                self.invalidate("the default stream cannot join a capture")
                raise SimulatedDeviceError("the default stream cannot join a capture")
            stream.capture = self
            self._frontiers[stream] = {}
        elif stream.capture is not self:
            self.invalidate("two captures were merged")
            stream.capture.invalidate("two captures were merged")
            raise SimulatedDeviceError("an event of one capture was waited for in another capture")
        mine = self._frontiers[stream]
        for other, index in frontier.items():
            mine[other] = max(mine.get(other, 0), index)

    def unjoined(self) -> list[int]:
        """Ids of forked streams whose work the origin never waited for."""
        seen = self.frontier_of(self.origin)
        return [s.id for s, last in self._last.items() if seen.get(s, 0) < last]

    def finish(self) -> None:
        """Take every stream out of capture."""
        self.active = False
        for stream in self._frontiers:
            stream.capture = None
