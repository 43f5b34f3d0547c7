"""The platform contract: all that graphplat needs from a device family.

A vendor subclasses :class:`Platform`. Every default is the cautious answer, so
a platform that declares nothing runs eagerly and correctly.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Literal, Protocol

import msgspec
import torch

from graphplat.errors import ContractError, PlatformError

IN_TREE_DEVICE_TYPES = ("cuda", "musa", "cpu", "npu", "xpu")
"""Device types whose platforms ship with graphplat; their decode graphs need no opt-in."""


class PlatformCapabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What a platform claims. Every default is the cautious answer."""

    graph_capture: bool = False
    """Work on a stream can be recorded and replayed."""
    executes_in_capture: bool = False
    """Recorded work also runs while it is recorded."""
    shared_pool: bool = False
    """Graphs that replay one at a time may share one memory pool."""
    thread_local_capture: bool = False
    """Other threads may use the device while this one captures.

    Nothing in graphplat decides by it, since captures of one process take turns anyway: it tells users what
    their own threads may do, and which tests of the conformance suite apply.
    """
    breakable: bool = False
    """Captures may end and begin again around eager parts, on one pool."""
    compiled: bool = False
    """``torch.compile`` can produce kernels for this device inside a graph."""
    update_after_capture: Literal["none", "before_replay", "with_replay"] = "none"
    """How host values baked into a graph can be rewritten: not at all, by an update that
    must come before its replay, or by one that may overlap it."""
    max_graphs: int | None = None
    """Live graphs a process may hold; ``None``: bounded by memory alone."""
    trusted_free_memory: bool = False
    """``memory_info`` is exact enough to budget with."""
    memory_counters: bool = False
    """``allocated_bytes`` and ``reserved_bytes`` count graph pools too."""
    collectives_in_capture: bool = False
    """Collectives may be recorded. Without it, a model runner with a process group gets no graphs."""
    generators_in_capture: bool = False
    """Extra random generators can be registered with a graph."""
    device_synchronize: bool = True
    """A device-wide synchronize is safe around captures; otherwise streams are synchronized."""
    pinned_memory: bool = False
    """Copies from pinned host memory run asynchronously."""
    memory_aliases: bool = False
    """``alias`` gives tensors on memory that they do not keep allocated."""
    symmetric_memory: bool = False
    """A symmetric memory pool can be preallocated. Without it, ``enable_symm_mem`` is refused at set-up."""


class MemoryInfo(msgspec.Struct, frozen=True):
    """Device memory in bytes."""

    free: int
    total: int


class DeviceGraph(Protocol):
    """The device's graph object. Verbs follow ``torch.accelerator.Graph``."""

    def replay(self) -> None:
        """Launch the recorded work on the current stream."""

    def reset(self) -> None:
        """Destroy the recording and let go of its memory."""


class Platform:
    """One vendor's device family.

    Subclasses set ``name``, ``device_type`` and ``capabilities`` and override
    what their capabilities promise. Instances are made once per process, after
    :meth:`probe` succeeded; constructing one must not touch the device.
    Intermediate classes pass ``abstract=True``. :class:`ContractError` is raised
    at class definition when a member is missing or misspelt.
    """

    name: ClassVar[str]
    """Unique name; may differ from the torch device type."""
    device_type: ClassVar[str]
    """``torch.device.type`` of tensors on this platform."""
    capabilities: PlatformCapabilities = PlatformCapabilities()

    def __init_subclass__(cls, *, abstract: bool = False, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_contract(cls, Platform)
        if not abstract:
            _check_identity(cls)

    def probe(self) -> None:
        """Raise the reason why this platform cannot be used here; return if it can.

        Called once per process, before anything else touches the device. Must not
        create a device context.
        """

    def is_out_of_tree(self) -> bool:
        """Whether another distribution brings this platform."""
        return True

    def support_cuda_graph(self) -> bool:
        """Whether decode graphs may be captured."""
        return self.capabilities.graph_capture

    # Streams and events

    def current_stream(self, device: torch.device) -> Any:
        """The calling thread's current stream on *device*; ``None`` where there are no streams."""

    def stream_key(self, device: torch.device) -> Any:
        """A cheap token of the current stream, compared at every step; ``None`` without streams."""
        return self.current_stream(device)

    def new_stream(self, device: torch.device) -> Any:
        """A stream of its own on *device*, fit for capture."""

    def use_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Make *stream* current, and restore the former one however the body ends."""
        return contextlib.nullcontext(stream)

    def wait_stream(self, waiting: Any, awaited: Any) -> None:
        """Order *waiting* after all work queued on *awaited* so far; no host wait."""

    def record_event(self, stream: Any) -> Any:
        """An event that completes when the work queued on *stream* so far has; ``None``: already."""

    def synchronize_event(self, event: Any) -> None:
        """Block the host until *event* completes."""

    def synchronize(self, device: torch.device) -> None:
        """Block the host until all work on *device* is done."""

    def synchronize_stream(self, stream: Any) -> None:
        """Block the host until *stream* is done.

        For runtimes and the conformance suite: graphplat itself orders streams on the device.
        """

    # Memory

    def memory_info(self, device: torch.device) -> MemoryInfo | None:
        """Free and total bytes of *device*, or ``None`` when unknown."""

    def allocated_bytes(self, device: torch.device) -> int | None:
        """Bytes in live tensors, graph pools included, or ``None`` when unknown."""

    def reserved_bytes(self, device: torch.device) -> int | None:
        """Bytes held by the allocator, graph pools included, or ``None`` when unknown."""

    def rng_state(self, device: torch.device) -> torch.Tensor | None:
        """The state of *device*'s default random generator, or ``None`` when unknown."""

    def set_rng_state(self, device: torch.device, state: torch.Tensor) -> None:
        """Put a state from :meth:`rng_state` back."""

    def empty_cache(self) -> None:
        """Return unused cached memory to the device."""

    def drop_workspaces(self) -> None:
        """Free memory that math libraries keep from call to call; a capture begins and ends without it."""

    def preallocate_symmetric_memory(
        self, *, device: torch.device, stream: Any, group: Any, nbytes: int
    ) -> Any:
        """Set up *nbytes* of symmetric memory of *group*, on *stream* if given; returns what owns it.

        Needs the capability ``symmetric_memory``.
        """
        raise PlatformError(
            "symmetric memory is not available", platform=self.name, hint="Set enable_symm_mem=False"
        )

    def alias(self, tensor: torch.Tensor, owner: object) -> torch.Tensor:
        """A tensor on the memory of contiguous *tensor* that keeps *owner* alive, and not that memory.

        Lets the graphs of one pool leave their outputs in the same place. Needs the
        capability ``memory_aliases``; called outside captures.
        """
        raise PlatformError("memory cannot be aliased", platform=self.name)

    # Graphs

    def graph_pool(self) -> Any:
        """A new memory pool that graphs can share."""

    def create_graph(self, *, updatable: bool = False) -> DeviceGraph:
        """A new, empty graph. Needs the capability ``graph_capture``.

        *updatable*: its host values will be rewritten by :meth:`update_graph`.
        """
        raise PlatformError("this platform cannot capture graphs", platform=self.name)

    def capture_begin(self, graph: DeviceGraph, *, pool: Any, stream: Any) -> None:
        """Start recording the work of the current *stream* into *graph*."""
        raise PlatformError("this platform cannot capture graphs", platform=self.name)

    def capture_end(self, graph: DeviceGraph) -> None:
        """Finish *graph*, so that it can replay."""
        raise PlatformError("this platform cannot capture graphs", platform=self.name)

    def abort_capture(self, graph: DeviceGraph, *, pool: Any, stream: Any) -> bool:
        """End a capture that failed, wherever it failed; the stream can capture again after.

        Returns whether *pool* can be captured into again; graphs in it live on either way.
        """
        raise PlatformError("this platform cannot capture graphs", platform=self.name)

    def release_pool(self, pool: Any) -> None:
        """Let go of *pool* after its last graph was reset."""

    def is_capturing(self) -> bool:
        """Whether the current stream is being captured."""
        return False

    def replay(self, graph: DeviceGraph) -> None:
        """Launch *graph* on the current stream."""
        graph.replay()

    def update_graph(self, graph: DeviceGraph, values: Mapping[str, Sequence[int]]) -> None:
        """Rewrite host values baked into *graph*, by field name, for its next replay.

        Needs the capability ``update_after_capture``. Raises when a value finds no
        recorded operator, so that no replay uses stale values.
        """
        raise PlatformError("this platform cannot update graphs", platform=self.name)

    def register_generator(self, graph: DeviceGraph, generator: torch.Generator) -> None:
        """Let captured random operators draw from *generator* at replay."""
        raise PlatformError("extra generators cannot be captured", platform=self.name)

    def padding_fill(self, field: str, fill: Any) -> Any:
        """What padded rows of input *field* hold; *fill* is what the runtime declared."""
        del field
        return fill


def check_contract(cls: type, contract: type) -> None:
    """Raise :class:`ContractError` if *cls* misspells or contradicts a member of *contract*."""
    members = [name for name in vars(contract) if not name.startswith("_")]
    for name, value in vars(cls).items():
        if name.startswith("_"):
            continue
        if name in members:
            _check_signature(cls, name, value, vars(contract)[name])
        elif close := difflib.get_close_matches(name, members, n=1, cutoff=0.88):
            raise ContractError(
                f"{cls.__qualname__}.{name} is no member of {contract.__name__}",
                hint=f"Did you mean {close[0]!r}? Start names of your own with an underscore otherwise",
            )


def _check_signature(cls: type, name: str, value: Any, expected: Any) -> None:
    if not inspect.isfunction(expected):
        if inspect.isfunction(value):
            raise ContractError(
                f"{cls.__qualname__}.{name} must be a value, not a method",
                hint=f"Assign {name}, or make it a property",
            )
        return
    if not callable(value) and not isinstance(value, (staticmethod, classmethod)):
        raise ContractError(f"{cls.__qualname__}.{name} must be a method", hint=f"Define it as {name}(...)")
    if not inspect.isfunction(value):
        return
    wanted = list(inspect.signature(expected).parameters.values())
    try:
        inspect.signature(value).bind(
            *[p.name for p in wanted if p.kind is not p.KEYWORD_ONLY],
            **{p.name: None for p in wanted if p.kind is p.KEYWORD_ONLY},
        )
    except TypeError as error:
        raise ContractError(
            f"{cls.__qualname__}.{name}{inspect.signature(value)} does not take the contract's arguments",
            hint=f"Write {name}{inspect.signature(expected)}",
        ) from error


def _check_identity(cls: type[Platform]) -> None:
    for attribute in ("name", "device_type"):
        value = getattr(cls, attribute, None)
        if not isinstance(value, str) or not value.isidentifier():
            raise ContractError(f"{cls.__qualname__}.{attribute} must be a short name, found {value!r}")
    if not isinstance(inspect.getattr_static(cls, "capabilities", None), (PlatformCapabilities, property)):
        raise ContractError(f"{cls.__qualname__}.capabilities must be a PlatformCapabilities")
