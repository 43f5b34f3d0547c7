"""``Stream``, ``Event`` and their kin, as ``torch.<name>`` exposes them."""

from __future__ import annotations

from typing import Any

from .errors import SimulatedDeviceError, Stall
from .profiles import SimProfile
from .runtime import active
from .signatures import parameters, signed
from .streams import EventState, StreamState


class Stream:
    """A queue of device work. ``Stream(device=None, priority=0)``."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        runtime = active()
        self.state = runtime.new_stream(runtime.index_of(device), priority)

    @classmethod
    def over(cls, state: StreamState) -> Stream:
        """The handle of an existing stream."""
        self = cls.__new__(cls)
        self.state = state
        return self

    @property
    def device(self) -> Any:
        """The device it runs on."""
        return active().devices[self.state.device].torch_device

    @property
    def device_index(self) -> int:
        """Ordinal of its device."""
        return self.state.device

    @property
    def stream_id(self) -> int:
        """Its number; 0 is the default stream."""
        return self.state.id

    @property
    def priority(self) -> int:
        """As given at construction."""
        return self.state.priority

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Lowest and highest priority."""
        return 0, -1

    def synchronize(self) -> None:
        """Wait until all work here is done; illegal while it captures."""
        runtime = active()
        runtime.refuse_while_capturing(self.state, "stream synchronization")
        runtime.counters.stream_synchronizations += 1
        self.state.synchronize()

    def query(self) -> bool:
        """Whether all work here is done; asking lets the device go on."""
        active().refuse_while_capturing(self.state, "stream query")
        done = self.state.completed >= self.state.submitted
        self.state.run(self.state.submitted)
        return done

    def record_event(self, event: Any = None) -> Any:
        """Record *event*, or a new one, here."""
        event = _module().Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Any) -> None:
        """Let later work here start only after *event*."""
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:
        """Let later work here start only after what *stream* has been given so far."""
        self.wait_event(stream.record_event())

    def __enter__(self) -> Stream:
        self._context = _module().stream(self)
        self._context.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._context.__exit__(*error)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.state is self.state

    def __hash__(self) -> int:
        return hash((self.state.device, self.state.id))

    def __repr__(self) -> str:
        return f"<torch.{active().name}.Stream device={self.device} stream_id={self.stream_id}>"


def _module() -> Any:
    import torch

    return getattr(torch, active().name)


def _state(stream: Stream | None) -> StreamState:
    return active().stream() if stream is None else stream.state


class SimEvent:
    """A place in a stream; `event_class` gives it the vendor's keywords."""

    def __init__(self, enable_timing: bool = False, *, external: bool = False, **_ignored: Any) -> None:
        if external:
            raise SimulatedDeviceError("Event(external=True) is not simulated")
        self.enable_timing = enable_timing
        self.state = EventState()

    def record(self, stream: Stream | None = None) -> None:
        """Mark the work given to *stream* (the current one) so far."""
        self.state.record(_state(stream))

    def wait(self, stream: Stream | None = None) -> None:
        """Order *stream* (the current one) after this event."""
        self.state.make_wait(_state(stream))

    def query(self) -> bool:
        """Whether the device has passed it; asking lets the device go on."""
        self._ask("event query")
        done = self.state.done
        if not done and self.state.stream is not None:
            self.state.stream.run(self.state.ticket)
        return done

    def synchronize(self) -> None:
        """Wait until the device has passed it."""
        self._ask("event synchronization")
        if self.state.stream is not None and not self.state.stream.run(self.state.ticket):
            self.state.stream.synchronize()

    def _ask(self, what: str) -> None:
        runtime = active()
        if self.state.capture is not None and self.state.capture.active:
            raise runtime.violated(self.state.capture, f"{what} of an event recorded in a capture")
        runtime.unsafe_call(what)

    def elapsed_time(self, end_event: SimEvent) -> float:
        """Milliseconds from this event to *end_event*; both need ``enable_timing=True``."""
        if not (self.enable_timing and end_event.enable_timing):
            raise RuntimeError("both events must be created with enable_timing=True")
        first, second = self.state.stamp, end_event.state.stamp
        if first is None or second is None:
            raise RuntimeError("both events must be recorded and completed before elapsed_time")
        return (second - first) * 1000.0


def event_class(profile: SimProfile) -> type[SimEvent]:
    """``Event`` with *profile*'s keywords."""
    wanted = parameters(profile.event_keywords, profile)
    return type("Event", (SimEvent,), {"__init__": signed(SimEvent.__init__, "__init__", wanted)})


class ExternalEvent:
    """An event that may be waited for before it is recorded; reset it before reuse."""

    def __init__(self) -> None:
        self.signalled = False

    def record(self, stream: Stream | None = None) -> None:
        """Signal it when *stream* gets there."""
        self._submit(stream, self._signal, "external event record")

    def wait(self, stream: Stream | None = None) -> None:
        """Hold *stream* until it is signalled."""
        self._submit(stream, self._wait, "external event wait")

    def reset(self, stream: Stream | None = None) -> None:
        """Make it unsignalled when *stream* gets there."""
        self._submit(stream, self._clear, "external event reset")

    def _submit(self, stream: Stream | None, work: Any, label: str) -> None:
        state = _state(stream)
        if state.capture is not None:
            state.capture.record(state, work, label)
        else:
            state.submit(work, label)

    def _signal(self) -> None:
        self.signalled = True
        active().poke()

    def _wait(self) -> None:
        if not self.signalled:
            raise Stall

    def _clear(self) -> None:
        self.signalled = False


class MemPool:
    """A private pool; ``MemPool.id`` is a pool handle."""

    def __init__(self, allocator: Any = None, use_on_oom: bool = False) -> None:
        del allocator, use_on_oom
        runtime = active()
        self.id = (0, runtime.new_id())
        self._pool = runtime.device().memory.pool(self.id)
        self._pool.users += 1

    def use_count(self) -> int:
        """How many graphs and pool objects keep it."""
        return self._pool.users

    def __del__(self) -> None:
        if hasattr(self, "_pool"):
            self._pool.users -= 1
