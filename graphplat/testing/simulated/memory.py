"""Device memory: pools that hand dead bytes to the next tensor, first fit.

A block is what one tensor owns. Its bytes come from a segment; when the last tensor over it dies they go
back to the segment and the next allocation that fits takes them, so a graph that still reads them reads
somebody else's values, as on a real device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Final

import torch
from attrs import define, field

from .faults import faults
from .streams import DEVICE_LOCK

GRAIN: Final = 512
_ALIGN: Final = 64
#: Every aligned 2, 4 or 8 bytes of this pattern read as NaN, or as a huge integer.
POISON: Final = 0x7FFF


def rounded(nbytes: int) -> int:
    """*nbytes* in whole allocation grains."""
    return max(1, -(-nbytes // GRAIN)) * GRAIN


@define(eq=False)
class Segment:
    """One region taken from the device, serving one stream of one pool."""

    size: int
    stream: int
    buffer: bytearray = field(init=False)
    start: int = field(init=False)
    free: list[tuple[int, int]] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.buffer = bytearray(self.size + _ALIGN)
        self.start = -torch.frombuffer(self.buffer, dtype=torch.uint8).data_ptr() % _ALIGN
        self.free = [(0, self.size)]
        self.poison(0, self.size)

    def take(self, size: int) -> int | None:
        """The offset of the first hole of at least *size* bytes, which is then no longer free."""
        for index, (offset, room) in enumerate(self.free):
            if room >= size:
                rest = [(offset + size, room - size)] if room > size else []
                self.free[index : index + 1] = rest
                return offset
        return None

    def give(self, offset: int, size: int) -> None:
        """Make ``[offset, offset + size)`` free again."""
        merged: list[tuple[int, int]] = []
        for start, room in sorted([*self.free, (offset, size)]):
            if merged and merged[-1][0] + merged[-1][1] == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + room)
            else:
                merged.append((start, room))
        self.free = merged

    def poison(self, offset: int, size: int) -> None:
        """Overwrite a region with NaN / huge integers."""
        with torch.inference_mode(False), torch.no_grad():
            where = self.start + offset
            torch.frombuffer(self.buffer, dtype=torch.int16, count=size // 2, offset=where).fill_(POISON)

    @property
    def unused(self) -> bool:
        """Whether no block lives here."""
        return self.free == [(0, self.size)]


@define(eq=False)
class Block:
    """The memory of one tensor and all its views; ``bytes`` is a CPU tensor that aliases it."""

    pool: Pool
    segment: Segment
    offset: int
    size: int
    nbytes: int
    bytes: torch.Tensor
    users: dict[Any, int] = field(factory=dict)

    def __del__(self) -> None:
        # A garbage collection may run this anywhere, also inside the allocator: only leave a note.
        self.pool.dead.append((self.segment, self.offset, self.size, self.users))


@define(eq=False)
class Pool:
    """A set of segments; ``users`` counts the graphs and MemPools that keep it."""

    id: tuple[int, int]
    device: DeviceMemory
    users: int = 0
    segments: list[Segment] = field(factory=list)
    dead: deque[tuple[Segment, int, int, dict[Any, int]]] = field(factory=deque)
    allocated: int = 0

    @property
    def reserved(self) -> int:
        """Bytes this pool holds from the device, used or not."""
        return sum(segment.size for segment in self.segments)

    def collect(self) -> None:
        """Take back what died, unless a stream that was told about it has yet to finish with it."""
        with DEVICE_LOCK:
            for _ in range(len(self.dead)):
                self._bury(*self.dead.popleft())

    def _bury(self, segment: Segment, offset: int, size: int, users: dict[Any, int]) -> None:
        if any(stream.completed < ticket for stream, ticket in users.items()):
            self.dead.append((segment, offset, size, users))
            return
        if self.device.poison_freed:
            self.device.on_free(segment, offset, size)
        segment.give(offset, size)
        self.allocated -= size

    def allocate(self, nbytes: int, stream: int) -> Block:
        """First fit among what *stream* freed here before, else a new segment."""
        self.collect()
        faults.hit("alloc")
        size = rounded(nbytes)
        for segment in self.segments:
            if segment.stream == stream and (offset := segment.take(size)) is not None:
                break
        else:
            segment = self.device.grow(self, size, stream)
            offset = segment.take(size) or 0
        self.allocated += size
        self.device.note_peak()
        return Block(self, segment, offset, size, nbytes, _alias(segment, offset, nbytes))

    def trim(self) -> None:
        """Return unused segments to the device."""
        self.collect()
        self.segments = [segment for segment in self.segments if not segment.unused]


def _alias(segment: Segment, offset: int, nbytes: int) -> torch.Tensor:
    """The bytes as a tensor with a storage of its own, so that storage offsets count from the block."""
    with torch.inference_mode(False):
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        start = segment.start + offset
        return torch.frombuffer(segment.buffer, dtype=torch.uint8, count=nbytes, offset=start)


@define(eq=False)
class DeviceMemory:
    """All memory of one device: its default pool, its private pools, its size."""

    total: int
    segment_bytes: int
    poison_freed: bool
    on_grow: Callable[[], None]
    on_free: Callable[[Segment, int, int], None]
    pools: dict[tuple[int, int], Pool] = field(factory=dict)
    peak_allocated: int = 0
    peak_reserved: int = 0
    oom_count: int = 0

    def pool(self, key: tuple[int, int]) -> Pool:
        """The pool of that handle, made on first use."""
        if key not in self.pools:
            self.pools[key] = Pool(key, self)
        return self.pools[key]

    @property
    def default(self) -> Pool:
        """The pool of ordinary tensors."""
        return self.pool((0, 0))

    def collect(self) -> None:
        """Take back what died in every pool."""
        for pool in list(self.pools.values()):
            pool.collect()

    @property
    def allocated(self) -> int:
        """Bytes under live tensors."""
        return sum(pool.allocated for pool in self.pools.values())

    @property
    def reserved(self) -> int:
        """Bytes taken from the device."""
        return sum(pool.reserved for pool in self.pools.values())

    def note_peak(self) -> None:
        """Keep the highest figures."""
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def grow(self, pool: Pool, size: int, stream: int) -> Segment:
        """A new segment of *pool*; raises ``torch.OutOfMemoryError`` when the device is full."""
        self.on_grow()
        if self.reserved + max(size, self.segment_bytes) <= self.total:
            size = max(size, self.segment_bytes)
        if self.reserved + size > self.total:
            self.release_cached()
        if self.reserved + size > self.total:
            self.oom_count += 1
            raise torch.OutOfMemoryError(
                f"simulated device out of memory: tried to allocate {size} bytes; {self.total} bytes in all, "
                f"{self.reserved} reserved, {self.allocated} allocated"
            )
        segment = Segment(size, stream)
        pool.segments.append(segment)
        self.note_peak()
        return segment

    def release_cached(self) -> None:
        """Give back unused segments of the default pool and of pools that nobody keeps."""
        for key, pool in list(self.pools.items()):
            if key == (0, 0) or pool.users <= 0:
                pool.trim()
                if key != (0, 0) and not pool.segments:
                    del self.pools[key]
