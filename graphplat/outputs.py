"""Graph outputs: one shared buffer for all graphs, cutting to real rows."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from graphplat import tree

if TYPE_CHECKING:
    from graphplat.keys import ShapeKey
    from graphplat.model_runner import ModelRunner
    from graphplat.output_layout import RowAxis
    from graphplat.platform import Platform


def storages(output: Any) -> dict[int, StorageWeakRef]:
    """The storages of *output* by identity, which no other storage gets while the references are held."""
    references = [
        StorageWeakRef(leaf.untyped_storage())  # type: ignore[no-untyped-call]
        for _, leaf in tree.walk(output)
        if isinstance(leaf, torch.Tensor)
    ]
    return {reference.cdata: reference for reference in references}


@attrs.define(eq=False)
class GraphSharedOutput:
    """The memory that graphs of one model runner write their row outputs to.

    Graphs replay one at a time, so one buffer per output serves all of them. The
    largest capture's own output tensor becomes that buffer, which costs neither
    memory nor a copy; smaller graphs copy into its beginning, inside the graph.
    """

    _stores: dict[tuple[str, torch.dtype], torch.Tensor] = attrs.field(factory=dict)
    adopted_bytes: int = 0
    """Bytes of all outputs that ever became such a buffer."""

    @classmethod
    def create_for_model_runner(cls, model_runner: ModelRunner) -> GraphSharedOutput:
        """The shared output of *model_runner*; holds no memory until the first capture."""
        del model_runner  # sizes become known with the first output
        return cls()

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers now shared."""
        return sum(store.numel() * store.element_size() for store in self._stores.values())

    def place(self, output: Any, axes: Mapping[str, RowAxis], persistent: Callable[[str, Any], bool]) -> Any:
        """*output* with its row leaves moved into the shared buffers.

        Called inside a capture. *persistent* tells which leaves may live outside the graph, such
        as a table that the runtime keeps for each size; those are copied, never adopted.
        """
        taken = {store.data_ptr() for store in self._stores.values()}

        def move(path: str, leaf: Any) -> Any:
            if path not in axes or not isinstance(leaf, torch.Tensor):
                return leaf
            store = self._stores.get((path, leaf.dtype))
            if store is not None and store.numel() >= leaf.numel():
                target = store[: leaf.numel()].view(leaf.shape)
                with torch.inference_mode():  # the one mode that may write to either kind of tensor
                    target.copy_(leaf)
                return target
            leaf = _own(path, leaf, taken, persistent)
            self._stores[(path, leaf.dtype)] = leaf.view(-1)
            self.adopted_bytes += blocks(leaf)
            return leaf

        return tree.map_leaves(move, output)

    @staticmethod
    def leave(output: Any, axes: Mapping[str, RowAxis], persistent: Callable[[str, Any], bool]) -> Any:
        """*output* with each row leaf in memory of its own, where the capture allocated it.

        For platforms with ``memory_aliases``: there :meth:`GraphOutput.lend` lets later captures
        use the same memory, so no buffer is needed and nothing is copied. Called inside a capture.
        """
        taken: set[int] = set()

        def keep(path: str, leaf: Any) -> Any:
            if path not in axes or not isinstance(leaf, torch.Tensor):
                return leaf
            return _own(path, leaf, taken, persistent)

        return tree.map_leaves(keep, output)

    def release(self) -> None:
        """Let go of the buffers; graphs that still live keep theirs."""
        self._stores.clear()


def _own(
    path: str, leaf: torch.Tensor, taken: set[int], persistent: Callable[[str, Any], bool]
) -> torch.Tensor:
    """*leaf*, or a copy where its memory is not all its own; its address is added to *taken*."""
    if not _owns_memory(leaf) or leaf.data_ptr() in taken or persistent(path, leaf):
        leaf = leaf.clone(memory_format=torch.contiguous_format)
    taken.add(leaf.data_ptr())
    return leaf


def _owns_memory(leaf: torch.Tensor) -> bool:
    return (
        leaf.is_contiguous()
        and leaf.storage_offset() == 0
        and leaf.untyped_storage().nbytes() == leaf.numel() * leaf.element_size()
    )


def blocks(leaf: torch.Tensor) -> int:
    """Bytes of *leaf*'s storage in an allocator's blocks: those of torch's devices are multiples of 512."""
    return -(-leaf.untyped_storage().nbytes() // 512) * 512


@attrs.define(eq=False)
class Loan:
    """What keeps the memory behind lent views from being returned to the device."""

    recording: Any


@attrs.define(eq=False)
class GraphOutput:
    """What one graph leaves behind after a replay, cut to the real rows on request."""

    value: Any
    axes: Mapping[str, RowAxis]
    key: ShapeKey
    _views: dict[tuple[int, int], Any] = attrs.field(factory=dict)
    _loan: weakref.ref[Loan] | None = None

    def lend(self, platform: Platform, recording: Any) -> None:
        """Keep the row leaves' addresses and give their memory back to the pool of *recording*.

        Captures of the same pool may then put their own outputs there: graphs replay one at a
        time, and a result is copied, or used up, before the next step. *recording* lives as
        long as anyone holds a view.
        """
        loan = Loan(recording)

        def alias(path: str, leaf: Any) -> Any:
            if path not in self.axes or not isinstance(leaf, torch.Tensor) or not leaf.numel():
                return leaf
            return platform.alias(leaf, loan)

        self.value = tree.map_leaves(alias, self.value)
        self._loan = weakref.ref(loan)

    def let_go(self) -> bool:
        """Drop every tensor held here; returns whether a caller still holds a view that was lent."""
        self.value = None
        self._views.clear()
        return self._loan is not None and self._loan() is not None

    def head(self, requests: int, tokens: int) -> Any:
        """Views on the first *requests* and *tokens* rows, nested structures included."""
        view = self._views.get((requests, tokens))
        if view is None:
            if len(self._views) >= 1024:  # bounds the cache where token counts vary widely
                self._views.clear()
            view = self._views[(requests, tokens)] = self._cut(requests, tokens)
        return view

    def own_bytes(self) -> int:
        """Bytes of outputs that are no rows and so keep memory of their own, as the allocator counts them."""
        return sum(
            blocks(leaf)
            for path, leaf in tree.walk(self.value)
            if isinstance(leaf, torch.Tensor) and path not in self.axes
        )

    def _cut(self, requests: int, tokens: int) -> Any:
        rows = {"requests": requests, "tokens": tokens}

        def cut(path: str, leaf: Any) -> Any:
            if path not in self.axes:
                return leaf
            axis, unit = self.axes[path]
            return leaf.narrow(axis, 0, rows[unit])

        return tree.map_leaves(cut, self.value)


def copy_output(output: Any) -> Any:
    """*output* with every tensor cloned, so that later steps cannot change it, and no step a host value."""
    if isinstance(output, torch.Tensor):
        return output.clone()
    return tree.map_leaves(
        lambda _, leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else own_value(leaf), output
    )


def own_value(leaf: Any) -> Any:
    """*leaf*, or a copy of a host value that its holder could change, such as a set."""
    return leaf if type(leaf).__hash__ is not None else copy.deepcopy(leaf)
