"""Graphs captured by hand, through the platform's own verbs: what graphplat is held against."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import torch

from graphplat import guard
from graphplat.backends.full import abort
from graphplat.bench.measure import Clock


@attrs.define(eq=False)
class HandGraph:
    """A graph and the output that it writes."""

    graph: Any
    output: Any
    warmup_seconds: float
    capture_seconds: float
    bytes: int | None


@attrs.define(eq=False)
class Hand:
    """Captures on one stream into one pool; remembers what it captured."""

    clock: Clock
    pool: Any = None
    graphs: list[HandGraph] = attrs.field(factory=list)
    _stream: Any = None

    @contextmanager
    def session(self) -> Iterator[None]:
        """The stream of captures, with garbage collection held."""
        platform, device = self.clock.platform, self.clock.device
        if self._stream is None:
            self._stream = platform.new_stream(device)
            if platform.capabilities.shared_pool:
                self.pool = platform.graph_pool()
        caller = platform.current_stream(device)
        with guard.CAPTURE_LOCK, guard.garbage_collection_held():
            if caller is not None:
                platform.wait_stream(self._stream, caller)
            with platform.use_stream(self._stream):
                yield
            if caller is not None:
                platform.wait_stream(caller, self._stream)

    def capture(self, function: Callable[[], Any], *, warmups: int, own_pool: bool = False) -> HandGraph:
        """Warm *function* up and capture it; call inside a :meth:`session`."""
        platform, device = self.clock.platform, self.clock.device
        started = time.perf_counter()
        for _ in range(warmups):
            function()
        if warmups:
            self.clock.sync()
        warmed = time.perf_counter()
        before = platform.reserved_bytes(device)
        graph: Any = platform.create_graph()
        pool = platform.graph_pool() if own_pool else self.pool
        try:
            platform.capture_begin(graph, pool=pool, stream=self._stream)
            output = function()
            platform.capture_end(graph)
        except BaseException as error:
            abort(platform, graph, error, pool=pool, stream=self._stream)
            raise
        seconds = time.perf_counter() - warmed
        after = platform.reserved_bytes(device)
        held = after - before if after is not None and before is not None else _own_bytes(graph)
        made = HandGraph(graph, output, warmed - started, seconds, held)
        self.graphs.append(made)
        return made

    def release(self) -> None:
        """Destroy every graph and give their memory back."""
        for made in self.graphs:
            made.graph.reset()
        self.graphs.clear()
        if self.pool is not None:
            self.clock.platform.release_pool(self.pool)
        self.pool = self._stream = None
        self.clock.platform.empty_cache()


def _own_bytes(graph: Any) -> int | None:
    return getattr(graph, "memory_bytes", None)


def timed_graph_module(device: torch.device) -> Any:
    """The device's torch module if it has a context manager ``graph``, else ``None``."""
    module = torch.get_device_module(device)
    return module if callable(getattr(module, "graph", None)) else None
