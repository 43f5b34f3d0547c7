"""Graph outputs: which axes are rows, one shared buffer for all graphs, cutting to real rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import attrs
import torch

from graphplat import tree
from graphplat.errors import CaptureError

if TYPE_CHECKING:
    from graphplat.keys import ShapeKey
    from graphplat.model_runner import ModelRunner

RowAxis = tuple[int, Literal["requests", "tokens"]]


def infer_row_axes(runs: Sequence[tuple[tuple[int, int], Any]]) -> dict[str, RowAxis]:
    """The row axis of each output leaf, from runs of different ``(requests, tokens)``.

    An axis counts requests, or tokens, if it has their number in every run.
    Comparing several runs tells a batch axis from a feature axis that happens to
    have a batch's size. Raises :class:`CaptureError` if the structure differs.
    """
    rows = [counts for counts, _ in runs]
    leaves = [dict(tree.walk(output)) for _, output in runs]
    for other in leaves[1:]:
        if other.keys() != leaves[0].keys():
            raise CaptureError(
                f"the forward's outputs depend on the batch size: {sorted(other.keys() ^ leaves[0].keys())}",
                hint="A graph needs one output structure for all sizes",
            )
    axes: dict[str, RowAxis] = {}
    for path in leaves[0]:
        found = [leaf[path] for leaf in leaves]
        if all(isinstance(leaf, torch.Tensor) for leaf in found):
            axis = _row_axis([tuple(leaf.shape) for leaf in found], rows)
            if axis is not None:
                axes[path] = axis
    return axes


def _row_axis(shapes: list[tuple[int, ...]], rows: list[tuple[int, int]]) -> RowAxis | None:
    if len({len(shape) for shape in shapes}) != 1:
        return None
    requests, tokens = [r for r, _ in rows], [t for _, t in rows]
    for axis in range(len(shapes[0])):
        sizes = [shape[axis] for shape in shapes]
        if len(set(sizes)) == 1:
            continue  # a feature axis, or one row in every bucket
        if sizes == requests:
            return axis, "requests"
        if sizes == tokens:
            return axis, "tokens"
    return None


@attrs.define(eq=False)
class GraphSharedOutput:
    """The memory that graphs of one model runner write their row outputs to.

    Graphs replay one at a time, so one buffer per output serves all of them. The
    largest capture's own output tensor becomes that buffer, which costs neither
    memory nor a copy; smaller graphs copy into its beginning, inside the graph.
    """

    _stores: dict[tuple[str, torch.dtype], torch.Tensor] = attrs.field(factory=dict)

    @classmethod
    def create_for_model_runner(cls, model_runner: ModelRunner) -> GraphSharedOutput:
        """The shared output of *model_runner*; holds no memory until the first capture."""
        del model_runner  # sizes become known with the first output
        return cls()

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers now shared."""
        return sum(store.numel() * store.element_size() for store in self._stores.values())

    def place(self, output: Any, axes: Mapping[str, RowAxis], persistent: set[int]) -> Any:
        """*output* with its row leaves moved into the shared buffers.

        Called inside a capture. *persistent* holds the data pointers of tensors that
        live outside the graph; those are copied, never adopted.
        """

        def move(path: str, leaf: Any) -> Any:
            if path not in axes or not isinstance(leaf, torch.Tensor):
                return leaf
            store = self._stores.get((path, leaf.dtype))
            if store is not None and store.numel() >= leaf.numel():
                target = store[: leaf.numel()].view(leaf.shape)
                target.copy_(leaf)
                return target
            if not _owns_memory(leaf) or leaf.data_ptr() in persistent:
                leaf = leaf.clone(memory_format=torch.contiguous_format)
            self._stores[(path, leaf.dtype)] = leaf.view(-1)
            return leaf

        return tree.map_leaves(move, output)

    def release(self) -> None:
        """Let go of the buffers; graphs that still live keep theirs."""
        self._stores.clear()


def _owns_memory(leaf: torch.Tensor) -> bool:
    return (
        leaf.is_contiguous()
        and leaf.storage_offset() == 0
        and leaf.untyped_storage().nbytes() == leaf.numel() * leaf.element_size()
    )


@attrs.define(eq=False)
class GraphOutput:
    """What one graph leaves behind after a replay, cut to the real rows on request."""

    value: Any
    axes: Mapping[str, RowAxis]
    key: ShapeKey
    _views: dict[tuple[int, int], Any] = attrs.field(factory=dict)

    def head(self, requests: int, tokens: int) -> Any:
        """Views on the first *requests* and *tokens* rows, nested structures included."""
        view = self._views.get((requests, tokens))
        if view is None:
            if len(self._views) >= 1024:  # bounds the cache where token counts vary widely
                self._views.clear()
            view = self._views[(requests, tokens)] = self._cut(requests, tokens)
        return view

    def own_bytes(self) -> int:
        """Bytes of outputs that are no rows and so keep memory of their own."""
        return sum(
            leaf.untyped_storage().nbytes()
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
    """*output* with every tensor cloned, so that later steps cannot change it."""
    if isinstance(output, torch.Tensor):
        return output.clone()
    return tree.map_leaves(lambda _, leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, output)
