"""What was captured, what it cost, what was skipped, and why a step ran as it did."""

from __future__ import annotations

import collections
import enum
from collections.abc import Iterable
from typing import Protocol

import attrs
import msgspec

from graphplat.batch import Phase
from graphplat.keys import ShapeKey


class Reason(enum.StrEnum):
    """Why a batch did not replay a graph, or a shape has none."""

    OVER_MAX_BUCKET = "over_max_bucket"
    OVER_MAX_DIM = "over_max_dim"
    OVER_MAX_REQUESTS = "over_max_requests"
    EMPTY_BATCH = "empty_batch"
    UNKNOWN_VARIANT = "unknown_variant"
    OPTIONAL_INPUTS = "optional_inputs"
    HOST_VALUE = "host_value"
    PHASE_DISABLED = "phase_disabled"
    UNSUPPORTED = "unsupported"
    CAPTURE_FAILED = "capture_failed"
    OUT_OF_MEMORY = "out_of_memory"
    MEMORY_BUDGET = "memory_budget"
    GRAPH_LIMIT = "graph_limit"
    PADDING_WASTE = "padding_waste"
    WEIGHTS_MOVED = "weights_moved"
    PEER_RANK_EAGER = "peer_rank_eager"
    RELEASED = "released"
    DRAFT_RUNNER = "draft_runner"

    def __str__(self) -> str:
        return self.value


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """What a runner will do with a batch: replay *key*, or run eagerly for *reason*."""

    key: ShapeKey | None = None
    reason: Reason | None = None
    detail: str = ""

    @property
    def is_graph(self) -> bool:
        """Whether a graph is replayed."""
        return self.key is not None


class ShapeReport(msgspec.Struct, frozen=True, kw_only=True):
    """One captured graph."""

    key: ShapeKey
    backend: str
    seconds: float
    warmup_seconds: float
    """Seconds of warm-up runs, not counted in ``seconds``."""
    bytes: int | None
    """Device bytes that this capture added; ``None`` where the platform cannot say."""
    retained_bytes: int
    """Bytes of capture-only tensors kept alive for this graph."""
    warmups: int
    segments: int = 1
    note: str = ""


class Measured(Protocol):
    """Something whose device bytes may be unknown."""

    @property
    def bytes(self) -> int | None:
        """Device bytes; ``None`` where the platform cannot say."""


def total_bytes(shapes: Iterable[Measured]) -> int | None:
    """Bytes of all *shapes* together; ``None`` if those of any are unknown."""
    total = 0
    for shape in shapes:
        if shape.bytes is None:
            return None
        total += shape.bytes
    return total


class SkipReport(msgspec.Struct, frozen=True, kw_only=True):
    """Something that was asked for and has no graph."""

    phase: Phase
    reason: Reason
    detail: str
    key: ShapeKey | None = None


class CaptureReport(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of :func:`~graphplat.capture_cuda_graphs`; encodes to JSON."""

    platform: str
    device: str
    chosen_because: str
    shapes: tuple[ShapeReport, ...] = ()
    """In capture order."""
    skipped: tuple[SkipReport, ...] = ()
    seconds: float = 0.0
    static_buffer_bytes: int = 0
    output_buffer_bytes: int = 0
    memory_estimate_bytes: int | None = None
    """What all graphs were expected to take once the two largest buckets of each phase were captured, to
    compare with ``graph_bytes``; ``None`` where the platform cannot say."""

    def to_json(self) -> str:
        """This report as JSON text."""
        return msgspec.json.encode(self).decode()

    @property
    def graph_bytes(self) -> int | None:
        """Bytes added by all captures; ``None`` where the platform cannot say what one of them added."""
        return total_bytes(self.shapes)


@attrs.define
class RunnerStats:
    """Counts of one runner's steps; plain integers, safe to read at any time."""

    replays: collections.Counter[int] = attrs.field(factory=collections.Counter)
    """Replayed steps by bucket."""
    eager: collections.Counter[Reason] = attrs.field(factory=collections.Counter)
    """Eager steps by reason."""
    sizes: collections.Counter[int] = attrs.field(factory=collections.Counter)
    """Steps by real size: the histogram a bucket planner reads."""
    recaptures: int = 0
    """Times that moved weights made this runner record again."""
    last: Decision | None = None

    def count(self, decision: Decision, size: int | None) -> None:
        """Note a step of so many requests or tokens, where that is known, and how it ran."""
        self.last = decision
        if size is not None:
            self.sizes[size] += 1
        if decision.key is not None:
            self.replays[decision.key.size] += 1
        elif decision.reason is not None:
            self.eager[decision.reason] += 1

    @property
    def steps(self) -> int:
        """Steps taken. A result got as a view holds while no runner of its model takes another one."""
        return self.replayed + self.ran_eagerly

    @property
    def replayed(self) -> int:
        """Steps that replayed a graph."""
        return sum(self.replays.values())

    @property
    def ran_eagerly(self) -> int:
        """Steps that ran eagerly."""
        return sum(self.eager.values())
