"""Which shapes to keep within a budget of memory: those that save the most for their bytes.

Sizes are taken to come equally often. A size costs the rows of the bucket it runs in; one that no bucket
holds runs eagerly and costs twice the rows of the largest planned bucket. What a shape saves is what
the sizes it serves would cost more without it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from graphplat.keys import ShapeKey


@attrs.frozen
class Budget:
    """A choice among planned shapes, largest first, some of them measured.

    The same measurements give the same choice. *pooled*: the shapes share a pool, so that the bytes of
    each are what it added to those before it. Then the largest kept shape takes, by its size, what the
    largest measured one took. A shape that was not measured is taken to need as little per size as any
    measured one.
    """

    keys: Sequence[ShapeKey]
    measured: Mapping[ShapeKey, int]
    limit: int
    pooled: bool

    def keep(self) -> list[ShapeKey]:
        """The shapes to keep, in order; fewer than planned wherever what was measured is over the limit.

        Of three choices the one that costs fewest rows: to drop what saves least per byte until the rest
        fits, and take back what still fits; to take what saves most as long as it fits; or the largest first.
        """
        return min(self._refilled(self._thinned()), self._refilled([]), self._in_order(), key=self.rows)

    def _thinned(self) -> list[ShapeKey]:
        kept = list(self.keys)
        while self.bytes(kept) > self.limit:
            freed = {key: self._freed(kept, key) for key in kept}
            useful = [key for key in kept if freed[key] > 0]
            if not useful:
                return []
            kept.remove(min(useful, key=lambda key: (self.saving(kept, key) / freed[key], -freed[key])))
        return kept

    def _in_order(self) -> list[ShapeKey]:
        kept: list[ShapeKey] = []
        for key in self.keys:
            if self.bytes([*kept, key]) <= self.limit:
                kept.append(key)
        return kept

    def _refilled(self, kept: list[ShapeKey]) -> list[ShapeKey]:
        while True:
            options = []
            for key in self.keys:
                more = [other for other in self.keys if other in kept or other == key]
                if key not in kept and self.bytes(more) <= self.limit:
                    options.append((self.saving(more, key), more))
            if not options:
                return kept
            kept = max(options, key=lambda option: option[0])[1]

    def rows(self, kept: Sequence[ShapeKey]) -> int:
        """Rows that all sizes of all families cost with *kept*."""
        total, eager = 0, 2 * self.keys[0].size
        for family in {key.family for key in self.keys}:
            below = 0
            for size in sorted(key.size for key in kept if key.family == family):
                total += (size - below) * size
                below = size
            total += (self.keys[0].size - below) * eager
        return total

    def bytes(self, kept: Sequence[ShapeKey]) -> int:
        """What *kept*, largest first, is expected to take."""
        sizes = [self._expected(key) for key in kept]
        if self.pooled and kept and self.measured:
            first = next(iter(self.measured))
            sizes[0] = max(sizes[0], self.measured[first] * kept[0].size // first.size)
        return sum(sizes)

    def saving(self, kept: Sequence[ShapeKey], key: ShapeKey) -> int:
        """Rows that *key* saves beside the others of *kept*, over all sizes."""
        family = [other.size for other in kept if other.family == key.family and other != key]
        below = max((size for size in family if size < key.size), default=0)
        above = min((size for size in family if size > key.size), default=2 * self.keys[0].size)
        return (key.size - below) * (above - key.size)

    def _expected(self, key: ShapeKey) -> int:
        if key in self.measured:
            return self.measured[key]
        return min((taken * key.size // other.size for other, taken in self.measured.items()), default=0)

    def _freed(self, kept: list[ShapeKey], key: ShapeKey) -> int:
        return self.bytes(kept) - self.bytes([other for other in kept if other != key])


def estimate(keys: Sequence[ShapeKey], measured: Sequence[int], *, pooled: bool) -> int | None:
    """Bytes that all of *keys*, largest first, are expected to take, from the first one or two of them.

    In a pool the smaller shapes reuse what the largest took, and each adds what the second did; elsewhere
    bytes follow the size.
    """
    if not measured or (pooled and len(measured) < 2 <= len(keys)):
        return None
    if pooled:
        return measured[0] + sum(measured[1:2]) * (len(keys) - 1)
    return sum(measured[0] * key.size // keys[0].size for key in keys)
