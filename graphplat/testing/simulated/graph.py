"""The graph primitive: capture begin and end, instantiate, replay, reset, as one vendor spells them."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

from .errors import SimulatedDeviceError, Stall
from .faults import faults
from .memory import Pool
from .profiles import ERROR_MODES, SimProfile
from .runtime import active
from .signatures import parameters, signed
from .streams import Capture, Node
from .updates import DispatchMode, UpdateRecord, apply_update


class SimGraph:
    """What every vendor's graph class does; `graph_class` gives it the vendor's names."""

    def __init__(self, keep_graph: bool = False) -> None:
        self.keep_graph = keep_graph
        self.nodes: list[Node] | None = None
        self.records: list[UpdateRecord] = []
        self.executable = False
        self.generators: list[Any] = []
        self.auto_dispatch_capture = False
        self.graph_dispatch_mode = DispatchMode()  # type: ignore[no-untyped-call]
        self.updates_issued = 0
        self.replays_done = 0
        self._capture: Capture | None = None
        self._pool: Pool | None = None
        self._holds_pool = False
        self._device: int | None = None
        self._id = active().new_id()

    # -- capture -----------------------------------------------------------------------------------------

    def _begin(
        self, pool: Any = None, capture_error_mode: str | None = None, check_input_liveness: bool = False
    ) -> None:
        del check_input_liveness
        runtime = active()
        mode = runtime.profile.default_error_mode if capture_error_mode is None else capture_error_mode
        if mode not in ERROR_MODES:
            raise RuntimeError(
                f"Unknown capture error mode. Expected `global`, `thread_local`, or `relaxed`, got {mode}"
            )
        stream = runtime.stream()
        self._check_begin(pool)
        faults.hit("begin")
        with runtime.lock:
            self._pool = runtime.devices[stream.device].memory.pool(pool or (self._id, 0))
            if not self._holds_pool:
                self._pool.users += 1
                self._holds_pool = True
            self._device = stream.device
            self._capture = Capture(self, stream, self._pool, mode)
            self._capture.start()
            runtime.captures.append(self._capture)
        runtime.counters.begins += 1
        runtime.note("capture_begin", stream=stream.id, pool=self._pool.id, mode=mode)

    def _check_begin(self, pool: Any) -> None:
        runtime = active()
        stream = runtime.stream()
        if self.nodes is not None:
            raise RuntimeError(
                "This graph instance already owns a captured graph. "
                "To capture a new graph, create a new instance or call reset() first."
            )
        if stream.capture is not None or (runtime.captures and runtime.profile.single_capture):
            raise SimulatedDeviceError("another capture is in progress: one at a time")
        if stream.id == 0 and runtime.profile.refuses_default_stream:
            raise RuntimeError("graphs must be captured on a non-default stream")
        if pool is not None:
            first, second = pool
            if bool(first) == bool(second):
                raise RuntimeError(f"a pool handle is (0, n) or (n, 0), got {tuple(pool)}")
            if self._holds_pool and self._pool is not None and self._pool.id != tuple(pool):
                self._release_pool()

    def capture_end(self) -> None:
        """Stop recording; raises if the capture was spoilt or a forked stream never joined again."""
        runtime = active()
        capture = self._capture
        if capture is None:
            raise RuntimeError("capture_end() without capture_begin()")
        if runtime.stream(capture.origin.device) is not capture.origin:
            raise RuntimeError("Capture must end on the same stream it began on.")
        runtime.counters.ends += 1
        unjoined = capture.unjoined()
        with runtime.lock:
            capture.finish()
            runtime.captures.remove(capture)
            self._capture = None
        runtime.note("capture_end", invalid=capture.invalid)
        if unjoined:
            capture.invalidate(f"unjoined work: streams {unjoined} were forked and never joined")
        try:
            faults.hit("end")
            capture.check()
        except BaseException:
            runtime.counters.failed_ends += 1
            raise
        self.nodes, self.records = capture.nodes, capture.records
        self.graph_dispatch_mode.graph_dispatch_records = capture.records
        runtime.counters.graphs += 1
        if not self.nodes and runtime.profile.warns_when_empty:
            warnings.warn(
                "The graph is empty. This usually means that the graph was attempted to be captured on "
                "wrong device or stream.",
                stacklevel=2,
            )
        if not self.keep_graph:
            self._instantiate()

    def _instantiate(self) -> None:
        runtime = active()
        if self.nodes is None:
            raise RuntimeError("instantiate() before a successful capture")
        faults.hit("instantiate")
        limit = runtime.profile.max_graphs
        with runtime.lock:
            if not self.executable:
                if limit is not None and runtime.counters.executables >= limit:
                    raise SimulatedDeviceError(f"too many live graphs: the device holds at most {limit}")
                runtime.counters.executables += 1
                self.executable = True
        runtime.counters.instantiations += 1

    # -- use ---------------------------------------------------------------------------------------------

    def replay(self) -> None:
        """Queue the recorded operations on the current stream of the device they were captured on."""
        runtime = active()
        if self.nodes is None:
            raise RuntimeError("Called replay() without a preceding successful capture.")
        if not self.executable:
            self._instantiate()
        stream = runtime.stream(self._device)
        runtime.refuse_while_capturing(stream, "graph launch")
        faults.hit("replay")
        runtime.devices[stream.device].memory.collect()
        runtime.counters.replays += 1
        stream.submit(_Launch(self, self.nodes), f"replay of graph {self._id}")

    def reset(self) -> None:
        """Destroy the graph and give up its pool; the instance can capture again."""
        runtime = active()
        if self._capture is not None:
            raise RuntimeError("reset() during capture; end the capture first")
        runtime.unsafe_call("graph destruction")
        faults.hit("reset")
        if self.nodes is not None or self._holds_pool:
            runtime.counters.resets += 1
        self._destroy()

    def _destroy(self) -> None:
        runtime = active()
        with runtime.lock:
            runtime.counters.graphs -= self.nodes is not None
            runtime.counters.executables -= self.executable
            self.nodes, self.records, self.executable = None, [], False
        self.graph_dispatch_mode.graph_dispatch_records = []
        self.updates_issued = self.replays_done = 0
        if runtime.profile.reset_releases_pool:
            self._release_pool()

    def _release_pool(self) -> None:
        if self._holds_pool and self._pool is not None:
            self._pool.users -= 1
            self._holds_pool = False

    def __del__(self) -> None:
        # An interpreter that shuts down, or a constructor that failed, leaves nothing to destroy.
        if getattr(self, "_id", None) is None or active is None:
            return
        runtime = active()
        if self.nodes is not None and runtime.profile.finalizer_invalidates:
            runtime.unsafe_call("graph destruction in a finalizer", quiet=True)
        if self.nodes is not None or self._holds_pool:
            self._destroy()
            self._release_pool()

    def forget_capture(self) -> None:
        """Drop an unfinished capture, as a device reset does."""
        self._capture = None

    def pool(self) -> tuple[int, int]:
        """The handle of this graph's pool, for other captures to share; raises before a capture."""
        if self.nodes is None or self._pool is None:
            raise RuntimeError("Called pool() without a preceding successful capture.")
        return self._pool.id


class _Launch:
    """One replay on its way through a stream; goes on where a wait stopped it."""

    def __init__(self, graph: SimGraph, nodes: list[Node]) -> None:
        self.graph, self.nodes, self.position = graph, nodes, 0
        self.consumed: set[int] = set()

    def __call__(self) -> None:
        import torch

        with torch.no_grad():
            while self.position < len(self.nodes):
                self.nodes[self.position].run()
                self.position += 1
        self.graph.replays_done += 1


def _update(self: SimGraph, cpu_update_input: list[dict[str, Any]]) -> None:
    """Rewrite the host values of the recorded operators for exactly one replay."""
    apply_update(self, cpu_update_input)


def _register_generator_state(self: SimGraph, generator: Any) -> None:
    """Let the captured operators draw from *generator*."""
    active().counters.generator_registrations += 1
    self.generators.append(generator)


def _enable_debug_mode(self: SimGraph) -> None:
    """Accepted and without effect."""
    del self


def _debug_dump(self: SimGraph, path: str) -> None:
    """Write the recorded operations to *path*."""
    faults.hit("debug_dump")
    suffix = active().profile.dump_suffix
    if suffix is not None and not str(path).endswith(suffix):
        raise RuntimeError(f"debug_dump needs a path that ends in {suffix}")
    Path(path).write_text(json.dumps([node.label for node in self.nodes or []]), encoding="utf-8")


def _raw_graph(self: SimGraph) -> int:
    """An opaque number; needs ``keep_graph=True``."""
    if not self.keep_graph:
        raise RuntimeError("You cannot access the raw graph instance unless keep_graph=True")
    return self._id


def _reinstantiate_graph(self: SimGraph) -> None:
    """Make the executable anew."""
    self._instantiate()


_OPTIONAL = {
    "update": _update,
    "register_generator_state": _register_generator_state,
    "enable_debug_mode": _enable_debug_mode,
    "debug_dump": _debug_dump,
    "reinstantiate_graph": _reinstantiate_graph,
}


def graph_class(profile: SimProfile) -> type[SimGraph]:
    """The graph class of *profile*: its name, its signatures, its optional methods and no others."""
    members: dict[str, Any] = {name: _OPTIONAL[name] for name in _OPTIONAL if name in profile.graph_methods}
    members["capture_begin"] = signed(
        SimGraph._begin, "capture_begin", parameters(profile.begin_keywords, profile)
    )
    members["__init__"] = signed(SimGraph.__init__, "__init__", parameters(profile.init_keywords, profile))
    if "instantiate" in profile.graph_methods:
        members["instantiate"] = _public_instantiate
    if "raw_graph" in profile.graph_methods:
        vendor = profile.graph_argument.removesuffix("_graph")
        members[f"raw_{vendor}_graph"] = _raw_graph
    members["__doc__"] = "A captured graph of the simulated device."
    return type(profile.graph_class, (SimGraph,), members)


def _public_instantiate(self: SimGraph) -> None:
    """Make the executable; `replay` does it where it was left out."""
    self._instantiate()


__all__ = ["SimGraph", "Stall", "graph_class"]
