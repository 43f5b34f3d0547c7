"""Memory that crosses a break, and the eager parts that read and write it."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import attrs
import torch

from graphplat import breaks, tree
from graphplat.errors import CaptureError, ReplayError

if TYPE_CHECKING:
    from graphplat.breaks import BreakOptions
    from graphplat.keys import ShapeKey


def _references(flat: torch.Tensor) -> int | None:
    """How many tensors share *flat*'s storage, or ``None`` where torch does not tell.

    No public call counts the aliases of a storage; torch's own graph trees use this one.
    """
    count = getattr(torch._C, "_storage_Use_Count", None)
    return None if count is None else int(count(flat.untyped_storage()._cdata))


@attrs.define(eq=False)
class _Store:
    """A flat piece of bridge memory; free once nothing in the forward refers to it."""

    flat: torch.Tensor
    idle: int | None
    """References when nobody uses it."""
    held: list[tuple[weakref.ref[torch.Tensor], int]] = attrs.field(factory=list)
    """What eager parts hold to write into it, and the references that each takes, while they live."""

    @classmethod
    def like(cls, tensor: torch.Tensor) -> _Store:
        flat = _empty(tensor)
        return cls(flat, _references(flat))

    def lend(self, like: torch.Tensor) -> torch.Tensor:
        before = _references(self.flat)
        lent = _shaped(self.flat, like)
        taken = (_references(self.flat) or 0) - (before or 0)
        if taken == 0:  # views of such a tensor have storages of their own: no telling who reads it
            self.idle = None
        self.held.append((weakref.ref(lent), taken))
        return lent

    def is_free(self) -> bool:
        self.held = [(ref, taken) for ref, taken in self.held if ref() is not None]
        if self.idle is None:
            return False
        return _references(self.flat) == self.idle + sum(taken for _, taken in self.held)


@attrs.define(eq=False)
class Bridges:
    """Memory between segments, owned until the backend is cleaned up.

    Graphs replay one at a time and in order, so what one break no longer needs serves the
    next one, and what a large bucket needed serves a smaller one. A piece is
    handed out again only when the forward under capture holds no tensor in it.
    """

    _stores: list[_Store] = attrs.field(factory=list)
    _inputs: list[_Store] = attrs.field(factory=list)
    _inputs_used: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(s.flat.numel() for s in (*self._stores, *self._inputs))

    def hold(self, like: torch.Tensor) -> torch.Tensor:
        """A tensor of *like*'s shape in bridge memory, for the next segment to read."""
        for store in self._stores:
            if _fits(store, like) and store.is_free():
                break
        else:
            store = _Store.like(like)
            self._stores.append(store)
        return store.lend(like)

    def copy_in(self, value: Any) -> Any:
        """*value* with its tensors copied into memory that lives until the end of this break."""

        def move(_: str, leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            index = self._inputs_used
            self._inputs_used += 1
            if index < len(self._inputs) and _fits(self._inputs[index], leaf):
                store = self._inputs[index]
            else:
                store = _Store.like(leaf)
                self._inputs[index : index + 1] = [store]
            view = _shaped(store.flat, leaf)
            view.copy_(leaf)
            return view

        return tree.map_leaves(move, value)

    def lends(self, tensor: torch.Tensor) -> bool:
        """Whether *tensor* lies in memory of :meth:`copy_in`, which the next break writes again."""
        pointer = tensor.untyped_storage().data_ptr()
        return any(store.flat.untyped_storage().data_ptr() == pointer for store in self._inputs)

    def next_break(self) -> None:
        """The eager part has read its inputs, or the capture ended; their memory serves the next break."""
        self._inputs_used = 0

    def release(self) -> None:
        """Let go of all memory; only after every graph was destroyed."""
        self._stores.clear()
        self._inputs.clear()


@attrs.define(eq=False)
class EagerPart:
    """One call between two segments, repeated at every replay."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    options: BreakOptions
    key: ShapeKey
    _own: dict[str, torch.Tensor] = attrs.field(factory=dict)
    """Where the next segment reads each tensor of the result, by path."""
    _written: list[torch.Tensor] = attrs.field(factory=list)
    """The arguments that the function writes rows of."""

    @classmethod
    def make(cls, function: Any, args: Any, kwargs: Any, options: BreakOptions, key: ShapeKey) -> EagerPart:
        """Take containers apart now, so that later changes to them do not reach the replay."""
        keep: Callable[[str, Any], Any] = lambda _, leaf: leaf  # noqa: E731
        args = tuple(tree.map_leaves(keep, arg) for arg in args)
        kwargs = {name: tree.map_leaves(keep, arg) for name, arg in kwargs.items()}
        part = cls(function, args, kwargs, options, key)
        if options.rows is not None and options.writes:
            given = inspect.signature(function).bind(*args, **kwargs).arguments
            written = [given[name] for name in options.writes if name in given]
            part._written = [leaf for _, leaf in tree.walk(written) if isinstance(leaf, torch.Tensor)]
        return part

    def call_for_capture(self, bridges: Bridges) -> Any:
        """Run once, and settle where each result will lie for the next segment."""
        function = self.options.capture_stub or self.function
        result = function(*self.args, **self.kwargs)
        self._check_result(tree.leaves(result, "results", CaptureError))
        given = {
            id(leaf)
            for _, leaf in tree.walk((self.args, self.kwargs))
            if isinstance(leaf, torch.Tensor) and not bridges.lends(leaf)
        }

        def settle(path: str, leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if id(leaf) in given:  # written in place: the next segment reads it where it is
                self._own[path] = leaf
                return leaf
            own = bridges.hold(leaf)
            own.copy_(leaf)
            self._own[path] = own
            # An alias of its own, so that its life can be told from this part's.
            return own.view(own.shape)

        return tree.map_leaves(settle, result)

    def _check_result(self, returned: dict[str, Any]) -> None:
        tensors = any(isinstance(leaf, torch.Tensor) for leaf in returned.values())
        if self.options.rows is not None and not self.options.writes and not tensors:
            raise CaptureError(
                f"{self._name} returned no tensor: rows={self.options.rows!r} has nothing to keep rows of",
                hint="Name the arguments that it writes in place: writes=('out',)",
            )

    def run(self) -> None:
        """Call the function again and bring its results to where the next segment reads them."""
        result = self.function(*self.args, **self.kwargs)
        if self._own and isinstance(result, torch.Tensor):
            self._bring("", result)
        elif self._own:
            found = dict(tree.walk(result))
            for path in self._own:
                self._bring(path, found.get(path))
        for written in self._written:
            if written.dim() and (rows := self._live_rows()) < written.shape[0]:
                written[rows:].zero_()

    def _live_rows(self) -> int:
        live = breaks.live_batch()
        return live.num_tokens if self.options.rows == "tokens" else live.num_requests

    @property
    def _name(self) -> str:
        return str(getattr(self.function, "__qualname__", self.function))

    def _bring(self, path: str, value: Any) -> None:
        own = self._own.get(path)
        if own is None or not isinstance(value, torch.Tensor):
            raise self._error(f"returned another structure than during capture, at {path or 'its result'!r}")
        rows = own.shape[0] if own.dim() else 0
        if self.options.rows is not None:
            rows = self._live_rows()
        elif value is not own and value.dim():
            rows = value.shape[0]
        if value is not own:
            self._copy(own, value, rows)
        if own.dim() and rows < own.shape[0]:
            own[rows:].zero_()

    def _copy(self, own: torch.Tensor, value: torch.Tensor, rows: int) -> None:
        if value.dtype != own.dtype or value.dim() != own.dim() or value.shape[1:] != own.shape[1:]:
            raise self._error(f"returned {_describe(value)}, captured {_describe(own)}")
        if own.dim() == 0 or (rows == own.shape[0] and value.shape == own.shape):
            own.copy_(value)
        elif rows <= min(own.shape[0], value.shape[0]):
            own[:rows].copy_(value[:rows])
        else:
            raise self._error(f"returned {value.shape[0]} rows for {rows}, captured {own.shape[0]}")

    def _error(self, what: str) -> ReplayError:
        return ReplayError(
            f"{self._name} {what}",
            phase=self.key.phase,
            bucket=self.key.size,
            hint="An eager part may return fewer rows than captured, never other shapes or types",
        )


def _describe(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} of {tensor.dtype}"


def _fits(store: _Store, like: torch.Tensor) -> bool:
    return store.flat.device == like.device and store.flat.numel() >= like.numel() * like.element_size()


def _empty(like: torch.Tensor) -> torch.Tensor:
    size = -(-like.numel() * like.element_size() // 16) * 16
    with torch.inference_mode(False):
        return torch.empty(max(size, 16), dtype=torch.uint8, device=like.device)


def _shaped(flat: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    size = like.numel() * like.element_size()
    return flat[:size].view(like.dtype).view(like.shape)
