"""What a forward's outputs are at every size: structure, host values, dtypes, which axes are rows."""

from __future__ import annotations

import numbers
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import attrs
import torch

from graphplat import tree
from graphplat.errors import CaptureError

RowAxis = tuple[int, Literal["requests", "tokens"]]

_PLAIN = (numbers.Number, str, bytes, tuple, range, torch.device)
"""Values that a step gives as well as any equal ones; a tuple is the shape and the dtype of a tensor."""


class UnlikeLayoutError(CaptureError):
    """A captured output is not what the small runs of its family found, which may have been long ago."""


@attrs.frozen(eq=False)
class OutputLayout:
    """What small eager runs of one family found its outputs to be; no bucket may differ from it."""

    axes: dict[str, RowAxis]
    shared: frozenset[str]
    """The outputs that lie in memory of the runtime's own."""
    found: dict[str, Any]
    """Each output of the first run: shape and dtype of a tensor, the host value, a reference to an object."""

    @classmethod
    def infer(cls, runs: Sequence[tuple[tuple[int, int], Any]]) -> OutputLayout:
        """The layout of the outputs of *runs* of different ``(requests, tokens)``, all of them still held.

        An axis counts requests, or tokens, if it has their number in every run.
        Comparing several runs tells a batch axis from a feature axis that happens to
        have a batch's size. Raises :class:`CaptureError` for whatever else differs from run to
        run: the structure, a host value, a dtype, any other axis. A replay would repeat that of the bucket.
        Also for two outputs of one path.
        """
        rows = [counts for counts, _ in runs]
        described = [_described(output) for _, output in runs]
        first, *others = described
        axes: dict[str, RowAxis] = {}
        for other in others:
            _same_paths(first, other)
        for path, leaf in first.items():
            found = [other[path] for other in described]
            axis = _row_axis(path, found, rows) if all(isinstance(one, tuple) for one in found) else None
            if axis is not None:
                axes[path] = axis
                continue
            for other in found[1:]:
                _same(path, leaf, other)
        return cls(axes, _shared_leaves(runs), {path: _noted(leaf) for path, leaf in first.items()})

    def check(self, output: Any, requests: int, tokens: int) -> None:
        """Raise :class:`UnlikeLayoutError` where the output of a run of so many rows is of another layout."""
        leaves, rows = _described(output), {"requests": requests, "tokens": tokens}
        expected = dict(self.found)
        for path, (axis, unit) in self.axes.items():
            shape, dtype = expected[path]
            expected[path] = (*shape[:axis], rows[unit], *shape[axis + 1 :]), dtype
        try:
            _same_paths(expected, leaves)
            for path, leaf in leaves.items():
                _same(path, expected[path], leaf)
        except CaptureError as error:
            raise UnlikeLayoutError(error.what, field=error.field, hint=error.hint) from error


def _described(output: Any) -> dict[str, Any]:
    """The leaves of *output* by path, with shape and dtype in the place of a tensor."""
    for path, value in tree.carried(output):
        if isinstance(value, torch.Tensor):
            raise CaptureError(
                f"output {path} is a tensor beside the fields of its container, which no step would renew",
                field=path,
                hint="Make it a field, or a functools.cached_property of fields",
            )
    return {
        path: (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf
        for path, leaf in tree.leaves(output, "outputs", CaptureError).items()
    }


def _noted(leaf: Any) -> Any:
    """*leaf* to compare others with; one that equals itself alone is not kept alive: it may be a cache."""
    if _has_equals(leaf):
        return leaf
    try:
        return weakref.ref(leaf)
    except TypeError:
        return leaf


def _has_equals(leaf: Any) -> bool:
    return bool(getattr(type(leaf), "__eq__") is not getattr(object, "__eq__"))  # noqa: B009 - for mypy


def _equal(one: Any, other: Any) -> bool:
    """Whether two objects say of themselves that they are equal; what compares in parts says nothing."""
    try:
        return (one == other) is True
    except Exception:  # noqa: BLE001 - somebody else's comparison, such as that of arrays of two shapes
        return False


def _same_paths(expected: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    apart = sorted(expected.keys() ^ found.keys())
    if apart:
        raise CaptureError(
            f"the forward's outputs depend on the batch size: {apart}",
            field=apart[0] or None,
            hint="A graph needs one output structure for all sizes",
        )


def _row_axis(path: str, found: list[Any], rows: list[tuple[int, int]]) -> RowAxis | None:
    shapes = [shape for shape, _ in found]
    if len({len(shape) for shape in shapes}) != 1:
        raise _unstable(path, f"has shapes {shapes}")
    requests, tokens = [r for r, _ in rows], [t for _, t in rows]
    varying = [axis for axis, sizes in enumerate(zip(*shapes, strict=True)) if len(set(sizes)) > 1]
    if not varying:
        return None  # features only, or one row in every bucket
    sizes = [shape[varying[0]] for shape in shapes]
    if len(varying) > 1 or sizes not in (requests, tokens):
        raise _unstable(path, f"has shapes {shapes} for requests {requests} and tokens {tokens}")
    return varying[0], "requests" if sizes == requests else "tokens"


def _same(path: str, expected: Any, found: Any) -> None:
    """Raise unless *found* is what a replay that gives *expected* would give: equal, or that very object."""
    if isinstance(expected, weakref.ref) and not isinstance(found, weakref.ref):
        expected = expected()
    plain = type(found) is type(expected) and isinstance(found, _PLAIN)
    if found is expected or (plain and (found == expected or repr(found) == repr(expected))):
        return
    if type(found) is type(expected) and _has_equals(found) and _equal(found, expected):
        return
    if plain or isinstance(found, (*_PLAIN, type(None))) or isinstance(expected, (*_PLAIN, type(None))):
        raise _unstable(path, f"is {_shown(expected)}, then {_shown(found)}")
    raise CaptureError(
        f"output {path or 'of the forward'} is another {type(found).__qualname__} at each run: a graph could "
        "neither cut the tensors in it to the real rows nor give a new one",
        field=path or None,
        hint="Return tensors in dicts, lists, tuples, dataclasses, attrs classes or msgspec Structs",
    )


def _shown(leaf: Any) -> str:
    return f"a tensor of shape {leaf[0]} and {leaf[1]}" if isinstance(leaf, tuple) else repr(leaf)


def _unstable(path: str, what: str) -> CaptureError:
    return CaptureError(
        f"output {path or 'of the forward'} depends on the batch size in a way that a graph cannot repeat: "
        f"it {what}",
        field=path or None,
        hint="Return tensors with one axis of request or token rows; compute the rest from the real batch",
    )


def _shared_leaves(runs: Sequence[tuple[tuple[int, int], Any]]) -> frozenset[str]:
    """The paths at which two of *runs*, all held, gave the same storage: the forward keeps it."""
    found: dict[str, set[int]] = {}
    for _, output in runs:
        for path, leaf in tree.walk(output):
            if isinstance(leaf, torch.Tensor) and leaf.numel():
                found.setdefault(path, set()).add(leaf.untyped_storage().data_ptr())
    return frozenset(path for path, storages in found.items() if len(storages) < len(runs))
