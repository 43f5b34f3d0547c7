"""Host values that a graph bakes in and an update rewrites: the NPU's task update.

Under auto-dispatch capture each listed operator becomes a record that waits, at every replay, for the event
of one update. So a replay needs exactly one update, before it or while it waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch
from attrs import define, field
from torch.utils._python_dispatch import TorchDispatchMode

from .errors import SimulatedDeviceError, Stall
from .faults import faults
from .runtime import active

#: Operators that an update can reach, with the keywords it may rewrite; `register_update_handler` adds some.
HANDLERS: Final[dict[Any, tuple[str, ...]]] = {}


def register_update_handler(operator: Any, keys: Iterable[str]) -> None:
    """Let updates rewrite the keyword arguments *keys* of *operator* (an ``OpOverload``)."""
    HANDLERS[operator] = tuple(keys)


@define(eq=False)
class UpdateRecord:
    """One recorded operator with its baked-in host values; ``armed`` once an update has been issued."""

    operator: Any
    kwargs: dict[str, Any]
    armed: bool = False
    history: list[dict[str, Any]] = field(factory=list)

    def take(self) -> dict[str, Any]:
        """The values for this replay; a wait for the update's event if there is none."""
        if not self.armed:
            raise Stall
        self.armed = False
        return self.kwargs

    def check(self, given: dict[str, Any], *, strict: bool) -> dict[str, Any]:
        """The new values; a key that was not captured is ignored, as the vendor does."""
        fresh = {}
        for key in HANDLERS[self.operator]:
            if key not in given or key not in self.kwargs:
                continue
            value, old = given[key], self.kwargs[key]
            if isinstance(old, torch.Tensor) != isinstance(value, torch.Tensor):
                raise TypeError(f"{key} must be a {type(old).__name__}, got {type(value).__name__}")
            if strict and len(value) != len(old):
                raise RuntimeError(f"{key}: {len(value)} values given, {len(old)} were captured")
            fresh[key] = value.clone() if isinstance(value, torch.Tensor) else [int(v) for v in value]
        return fresh


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Marks the operators of `HANDLERS` while it is pushed, so that their capture makes a record."""

    simulated = True

    graph_dispatch_records: Sequence[UpdateRecord] = ()
    """The records of the graph that owns this mode, as the vendor keeps them."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Pass every operator on; those with a handler are dispatched as updatable."""
        capture = active().stream().capture
        if func in HANDLERS and capture is not None:
            capture.marked = True
            try:
                return func(*args, **(kwargs or {}))
            finally:
                capture.marked = False
        return func(*args, **(kwargs or {}))


def apply_update(graph: Any, cpu_update_input: list[dict[str, Any]]) -> None:
    """``NPUGraph.update``; see there."""
    runtime = active()
    faults.hit("update")
    if not graph.auto_dispatch_capture:
        raise RuntimeError("update() needs a graph captured with auto_dispatch_capture=True")
    if graph.nodes is None:
        raise RuntimeError("update() before a successful capture")
    records: list[UpdateRecord] = graph.records
    given = cpu_update_input * len(records) if len(cpu_update_input) == 1 else cpu_update_input
    if len(given) != len(records):
        raise RuntimeError(f"cpu_update_input has {len(given)} entries for {len(records)} records")
    if graph.updates_issued != graph.replays_done:
        raise SimulatedDeviceError(
            "update overtakes a replay: the last update has not been consumed by a finished replay; "
            "issue exactly one update per replay, and wait for the previous replay first"
        )
    strict = runtime.profile.update_list_check
    fresh = [record.check(values, strict=strict) for record, values in zip(records, given, strict=True)]
    for record, values in zip(records, fresh, strict=True):
        record.kwargs = {**record.kwargs, **values}
        record.history.append(values)
        record.armed = True
    if records:
        graph.updates_issued += 1
    runtime.counters.updates += 1
    runtime.note("update", values=fresh)
    runtime.poke()
