"""Failure injection: make a chosen call of the simulated driver raise a chosen exception."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Final

import torch
from attrs import define, field

POINTS: Final = frozenset(
    {
        "begin",
        "forward",
        "op",
        "end",
        "instantiate",
        "replay",
        "update",
        "reset",
        "alloc",
        "synchronize",
        "empty_cache",
        "debug_dump",
        "mem_get_info",
    }
)


@define(eq=False)
class Fault:
    """One armed failure; ``hits`` counts the calls seen, ``raised`` those that failed."""

    point: str
    error: BaseException | type[BaseException]
    nth: int = 1
    times: int | None = 1
    hits: int = 0
    raised: int = 0

    def meet(self) -> bool:
        """Count one call; tell whether it has to fail."""
        self.hits += 1
        if self.hits < self.nth or (self.times is not None and self.raised >= self.times):
            return False
        self.raised += 1
        return True


@define(eq=False)
class Faults:
    """The armed failures of this process.

    Points: ``begin``, ``forward`` (an operator recorded by a capture), ``op`` (any operator), ``end``,
    ``instantiate``, ``replay``, ``update``, ``reset``, ``alloc``, ``synchronize`` (device-wide),
    ``empty_cache``, ``debug_dump``, ``mem_get_info``.
    """

    _armed: list[Fault] = field(factory=list)
    _lock: Lock = field(factory=Lock)

    def arm(
        self,
        point: str,
        error: BaseException | type[BaseException] | None = None,
        *,
        nth: int = 1,
        times: int | None = 1,
    ) -> Fault:
        """Let the *nth* call from now on at *point* raise *error*, and the ``times - 1`` calls after it.

        *error* is an instance or a class, ``KeyboardInterrupt`` included; left out, it is what the driver
        would raise there. ``times=None`` fails for ever. Raises ``ValueError`` for an unknown point.
        """
        if point not in POINTS:
            raise ValueError(f"no fault point {point!r}; have {', '.join(sorted(POINTS))}")
        fault = Fault(point, error if error is not None else _usual_error(point), nth, times)
        with self._lock:
            self._armed.append(fault)
        return fault

    @contextmanager
    def inject(
        self,
        point: str,
        error: BaseException | type[BaseException] | None = None,
        *,
        nth: int = 1,
        times: int | None = 1,
    ) -> Iterator[Fault]:
        """`arm` for the length of a ``with`` block."""
        fault = self.arm(point, error, nth=nth, times=times)
        try:
            yield fault
        finally:
            with self._lock:
                if fault in self._armed:
                    self._armed.remove(fault)

    def clear(self) -> None:
        """Disarm everything."""
        with self._lock:
            self._armed.clear()

    def hit(self, point: str) -> None:
        """Called by the device at *point*; raises what is armed there."""
        if not self._armed:
            return
        with self._lock:
            due = [fault for fault in self._armed if fault.point == point and fault.meet()]
        if due:
            raise due[0].error


def _usual_error(point: str) -> BaseException:
    if point == "alloc":
        return torch.OutOfMemoryError("simulated device out of memory (injected)")
    return RuntimeError(f"simulated device failed at {point} (injected)")


faults: Final = Faults()
