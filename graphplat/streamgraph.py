"""One implementation for every device whose graphs record a stream.

Such devices differ in class and keyword names and in a few abilities. A plugin
states those as data (:class:`StreamGraphApi`) and overrides what is truly its own.
Everything is reached through the device's torch module, looked up when used, so
that importing a plugin imports no vendor package.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ClassVar, cast

import torch

from graphplat.errors import ContractError, PlatformError
from graphplat.platform import DeviceGraph, MemoryInfo, Platform
from graphplat.streamapi import StreamGraphApi

__all__ = ["StreamGraphApi", "StreamGraphPlatform"]


class StreamGraphPlatform(Platform, abstract=True):
    """A platform whose graphs record the work of one stream.

    Subclasses set ``api`` beside what every :class:`Platform` sets; :class:`ContractError` is
    raised at class definition without it.
    """

    api: ClassVar[StreamGraphApi]

    def __init_subclass__(cls, *, abstract: bool = False, **kwargs: Any) -> None:
        super().__init_subclass__(abstract=abstract, **kwargs)
        found = inspect.getattr_static(cls, "api", None)
        if not abstract and not isinstance(found, (StreamGraphApi, property)):
            raise ContractError(
                f"{cls.__qualname__}.api must be a StreamGraphApi, found {found!r}",
                hint="Write api = StreamGraphApi(module=..., graph_class=...), or pass abstract=True",
            )

    def __init__(self) -> None:
        self._contexts: dict[int, Any] = {}
        self._begun: set[int] = set()
        self._generators: dict[int, list[torch.Generator]] = {}

    @property
    def _module(self) -> Any:
        module = getattr(torch, self.api.module, None)
        if module is None and self.api.package is not None:
            importlib.import_module(self.api.package)
            module = getattr(torch, self.api.module, None)
        if module is None:
            raise PlatformError(f"torch.{self.api.module} does not exist", platform=self.name)
        return module

    @functools.cached_property
    def _raw_stream(self) -> Any:
        """Gives the current stream of a device index as a number, or ``None``; looked up but once."""
        name = self.api.raw_stream
        return None if name is None else getattr(torch._C, name, None)

    @functools.cached_property
    def _clear_workspaces(self) -> Callable[[], object] | None:
        """Frees workspaces; ``None`` where the device keeps none, or its release has no such call."""
        name, _, function = (self.api.clear_workspaces or "").rpartition(".")
        try:
            module = importlib.import_module(name) if name else None
        except ModuleNotFoundError:
            return None
        return getattr(module, function, None)

    def _optional(self, name: str, *args: Any, **keywords: Any) -> Any:
        """Call a member that some releases lack; ``None`` where it does."""
        function = getattr(self._module, name, None)
        return None if function is None else function(*args, **keywords)

    def probe(self) -> None:
        """Raise unless the device's torch module is there and counts a device.

        Imports no vendor package: torch loads installed ones itself, and tensors on the
        device need it loaded. ``device_count()`` creates no context.
        """
        module = getattr(torch, self.api.module, None)
        package = self.api.package
        if module is None and package is not None and importlib.util.find_spec(package) is None:
            raise RuntimeError(f"{package} is not installed")
        if module is None:
            hint = "" if package is None else f"; import {package} before graphplat looks for platforms"
            raise RuntimeError(f"torch.{self.api.module} does not exist{hint}")
        if not hasattr(module, self.api.graph_class):
            raise RuntimeError(f"torch.{self.api.module} has no {self.api.graph_class} in this release")
        if module.device_count() == 0:
            raise RuntimeError(f"no {self.device_type} device is visible")

    # Streams and events

    def current_stream(self, device: torch.device) -> Any:
        """The calling thread's current stream."""
        return self._module.current_stream(device)

    def stream_key(self, device: torch.device) -> Any:
        """The current stream's handle, or the stream itself where torch has no cheaper token."""
        if self._raw_stream is None or device.index is None:
            return self.current_stream(device)
        return self._raw_stream(device.index)

    def new_stream(self, device: torch.device) -> Any:
        """A stream from the device's pool, never the default one."""
        return self._module.Stream(device=device)

    def use_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Make *stream* current and restore the former one."""
        return cast(AbstractContextManager[Any], self._module.stream(stream))

    def wait_stream(self, waiting: Any, awaited: Any) -> None:
        """Order *waiting* after *awaited* on the device."""
        waiting.wait_stream(awaited)

    def record_event(self, stream: Any) -> Any:
        """An event recorded on *stream*."""
        return stream.record_event()

    def synchronize_event(self, event: Any) -> None:
        """Wait for *event* on the host."""
        event.synchronize()

    def synchronize(self, device: torch.device) -> None:
        """Wait for the device, or for its current stream where only that is safe."""
        if self.capabilities.device_synchronize:
            self._module.synchronize(device)
        else:
            self.current_stream(device).synchronize()

    def synchronize_stream(self, stream: Any) -> None:
        """Wait for *stream* on the host."""
        stream.synchronize()

    # Memory

    def memory_info(self, device: torch.device) -> MemoryInfo | None:
        """Free and total bytes as the driver sees them."""
        found = self._optional("mem_get_info", device)
        return None if found is None else MemoryInfo(*found)

    def allocated_bytes(self, device: torch.device) -> int | None:
        """Bytes in live tensors."""
        return self._counter("allocated_bytes", device)

    def reserved_bytes(self, device: torch.device) -> int | None:
        """Bytes held by torch's allocator."""
        return self._counter("reserved_bytes", device)

    def _counter(self, name: str, device: torch.device) -> int | None:
        if not self.capabilities.memory_counters:
            return None
        # The flat memory_stats() formats some 200 entries; the nested one does not.
        nested = self._optional("memory_stats_as_nested_dict", device)
        if nested is not None:
            return int(nested[name]["all"]["current"])
        flat = self._optional("memory_stats", device) or {}
        return flat.get(f"{name}.all.current")

    def rng_state(self, device: torch.device) -> torch.Tensor | None:
        """The state of the default generator."""
        return cast("torch.Tensor | None", self._optional("get_rng_state", device))

    def set_rng_state(self, device: torch.device, state: torch.Tensor) -> None:
        """Put the state of the default generator back."""
        self._optional("set_rng_state", state, device)

    def empty_cache(self) -> None:
        """Return unused blocks to the device."""
        self._optional("empty_cache")

    # Graphs

    def graph_pool(self) -> Any:
        """A pool handle that graphs share."""
        return self._module.graph_pool_handle()

    def create_graph(self, *, updatable: bool = False) -> DeviceGraph:
        """A new graph of the device's own class."""
        del updatable
        return cast(DeviceGraph, getattr(self._module, self.api.graph_class)())

    def drop_workspaces(self) -> None:
        """By the function that the device's API names, a private one of torch where it does."""
        if self._clear_workspaces is not None:
            self._clear_workspaces()

    def capture_begin(self, graph: Any, *, pool: Any, stream: Any) -> None:
        """Record from here on, by the device's verb or its context manager.

        Workspaces are dropped first, so that the recording allocates its own in the graphs' pool. torch
        keeps one for each stream, and a graph has its address baked in. Anyone may drop them, as torch's
        compiler does around its own recordings, and torch itself when a graph of the same stream is destroyed
        (pytorch#193402); the memory of one that a warm-up allocated would then belong to others while
        graphs still write to it.
        """
        self.drop_workspaces()
        if self.api.context is None:
            graph.capture_begin(
                **self._supported(graph.capture_begin, {"pool": pool} | self.api.begin_keywords)
            )
            self._begun.add(id(graph))
            return
        factory = getattr(self._module, self.api.context)
        keywords = {"pool": pool, "stream": stream} | self.context_keywords(graph)
        context = factory(graph, **self._supported(factory, keywords))
        context.__enter__()
        self._contexts[id(graph)] = context
        self._begun.add(id(graph))

    def context_keywords(self, graph: Any) -> dict[str, Any]:
        """What the capture context of *graph* is given beside pool and stream."""
        del graph
        return self.api.context_keywords

    def capture_end(self, graph: Any) -> None:
        """Finish the recording; the next one in the pool uses the same memory for its workspaces."""
        context = self._contexts.pop(id(graph), None)
        try:
            if context is None:
                graph.capture_end()
            else:
                context.__exit__(None, None, None)
        finally:
            self.drop_workspaces()
        self._begun.discard(id(graph))
        self._generators.pop(id(graph), None)

    def abort_capture(self, graph: Any, *, pool: Any, stream: Any) -> bool:
        """Take the stream out of capture, and destroy the graph, also where ending it fails."""
        sound = False
        try:
            sound = self._end_somehow(graph)
        finally:
            if not sound:
                self._after_invalid(graph, pool, stream)
            graph.reset()
            self._begun.discard(id(graph))
            self._contexts.pop(id(graph), None)
            self._generators.pop(id(graph), None)
        return sound

    def _end_somehow(self, graph: Any) -> bool:
        """End the capture; returns whether it had begun and ended as it should."""
        begun = id(graph) in self._begun
        try:
            if begun or self.is_capturing():
                self.capture_end(graph)
        except Exception:  # noqa: BLE001 - an invalidated capture always ends with an error
            if self.is_capturing():  # it failed before it reached the device, which must not go on recording
                graph.capture_end()
            return False
        return begun

    def _after_invalid(self, graph: Any, pool: Any, stream: Any) -> None:
        """Undo what a failed ``capture_begin`` or ``capture_end`` left; nothing by default."""

    def is_capturing(self) -> bool:
        """Whether the current stream is being captured."""
        return bool(self._module.is_current_stream_capturing())

    def register_generator(self, graph: Any, generator: torch.Generator) -> None:
        """Hand *generator* to the graph before it is captured."""
        if not self.capabilities.generators_in_capture:
            super().register_generator(graph, generator)
        graph.register_generator_state(generator)
        self._generators.setdefault(id(graph), []).append(generator)

    def _supported(self, function: Any, keywords: dict[str, Any]) -> dict[str, Any]:
        """*keywords* for *function*, without those it does not know that would say nothing.

        Raises :class:`PlatformError` for any other unknown one: a capture mode that never
        arrived would show only under load. A built-in hides its signature and checks itself.
        """
        try:
            parameters = inspect.signature(function).parameters
        except (TypeError, ValueError):
            return keywords
        if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            return keywords
        known = {name: value for name, value in keywords.items() if name in parameters}
        if lost := [name for name in keywords if name not in known and keywords[name] is not None]:
            raise PlatformError(
                f"torch.{self.api.module}: {function.__name__} does not take {', '.join(lost)}",
                platform=self.name,
                hint="Correct the plugin's StreamGraphApi, which may have been made for another release",
            )
        return known
