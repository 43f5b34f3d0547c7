"""Context managers of ``torch.<name>``: graph, stream, device. No more careful than the vendors'."""

from __future__ import annotations

import gc
from typing import Any

from .profiles import SimProfile
from .runtime import active
from .signatures import parameters, signed


class SimGraphContext:
    """``torch.<name>.graph(...)``: synchronize, empty the cache, enter the stream, begin; end, leave.

    As in the vendors' modules there is no ``try/finally``: where begin raises nothing is undone, and where
    end raises neither the dispatch mode nor the stream is restored.
    """

    default_capture_stream: Any = None

    def __init__(self, graph: Any, **settings: Any) -> None:
        self.graph = graph
        given = settings.get("pool")
        self.begin: dict[str, Any] = {} if given is None else {"pool": given}
        begins = active().profile.begin_keywords
        for name in ("capture_error_mode", "check_input_liveness"):
            if name in settings and name in begins:
                self.begin[name] = settings[name]
        self.auto_dispatch_capture = bool(settings.get("auto_dispatch_capture", False))
        self.module: Any = self._module()
        cls = type(self)
        if cls.default_capture_stream is None:
            cls.default_capture_stream = self.module.Stream()
        stream = settings.get("stream")
        self.capture_stream = stream if stream is not None else cls.default_capture_stream
        self.stream_ctx = self.module.stream(self.capture_stream)

    @staticmethod
    def _module() -> Any:
        import torch

        return getattr(torch, active().name)

    def __enter__(self) -> None:
        self.module.synchronize()
        if active().profile.collects_garbage:
            gc.collect()
        self.module.empty_cache()
        self.stream_ctx.__enter__()
        if self.auto_dispatch_capture:
            self.graph.auto_dispatch_capture = True
            self.graph.graph_dispatch_mode.__enter__()
        self.graph.capture_begin(**self.begin)

    def __exit__(self, *error: object) -> None:
        self.graph.capture_end()
        if self.auto_dispatch_capture:
            self.graph.graph_dispatch_mode.__exit__(*error)
        self.stream_ctx.__exit__(*error)


def _init(self: SimGraphContext, **arguments: Any) -> None:
    graph = arguments.pop(active().profile.graph_argument)
    SimGraphContext.__init__(self, graph, **arguments)


def graph_context(profile: SimProfile) -> type[SimGraphContext]:
    """The ``graph`` context manager with *profile*'s keywords."""
    wanted = parameters(profile.context_keywords, profile, required=profile.graph_argument)
    return type("graph", (SimGraphContext,), {"__init__": signed(_init, "__init__", wanted)})


class StreamContext:
    """``torch.<name>.stream(stream)``; ``None`` changes nothing."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self._before: tuple[Any, Any] | None = None

    def __enter__(self) -> None:
        if self.stream is None:
            return
        runtime = active()
        there = self.stream.device_index
        self._before = (runtime.stream(), runtime.stream(there))
        runtime.set_stream(self.stream.state)

    def __exit__(self, *error: object) -> None:
        if self._before is None:
            return
        here, there = self._before
        for stream in (there, here):  # the last one also restores the current device
            active().set_stream(stream)


class DeviceContext:
    """``torch.<name>.device(device)``; ``None`` and ``-1`` change nothing."""

    def __init__(self, device: Any) -> None:
        runtime = active()
        unchanged = device is None or device == -1
        self.idx = runtime.current_index if unchanged else runtime.index_of(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        runtime = active()
        self.prev_idx = runtime.current_index
        runtime.set_index(self.idx)

    def __exit__(self, *error: object) -> None:
        active().set_index(self.prev_idx)
