"""One captured shape, and what a live batch may say that its graph does not follow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import torch

from graphplat import tree
from graphplat.errors import InputError
from graphplat.report import Decision, Reason

if TYPE_CHECKING:
    from graphplat.batch import ForwardBatch
    from graphplat.buffers import BoundInputs
    from graphplat.keys import ShapeKey
    from graphplat.outputs import GraphOutput

_FIELDS = ("global_num_tokens_gpu", "global_dp_buffer_len", "capture_only")


@attrs.define(eq=False)
class Entry:
    """All that one shape key needs at replay."""

    key: ShapeKey
    inputs: BoundInputs
    output: GraphOutput
    installed: dict[str, Any]
    """What ``prepare_capture_batch`` left on the batch, see :func:`installed_on`."""


def installed_on(batch: ForwardBatch) -> dict[str, Any]:
    """The fields of *batch* that are for capture alone, by path: host values, and where tensors lie."""
    return {
        path: _place(leaf) if isinstance(leaf, torch.Tensor) else leaf
        for path, leaf in _leaves(batch).items()
    }


def refuse_live(entries: Iterable[Entry], batch: ForwardBatch) -> Decision | None:
    """Why none but an eager run follows the capture-only fields of *batch*, if it may meet any of *entries*.

    What *batch* leaves ``None`` is as captured. Raises :class:`InputError` for a tensor that no graph reads.
    """
    leaves = _leaves(batch)
    if not leaves or not (entries := list(entries)):
        return None
    found: Decision | None = None
    for path, leaf in leaves.items():
        known = [entry.installed.get(path) for entry in entries]
        if isinstance(leaf, torch.Tensor):
            place = _place(leaf)
            if place not in known:
                raise _elsewhere(path, entries, known)
            other = next((entry for entry, lies in zip(entries, known, strict=True) if lies != place), None)
            detail = None if other is None else f"the graph of {other.key} reads another {path}"
        else:
            differing = [value for value in known if type(value) is not type(leaf) or value != leaf]
            detail = f"{path}={leaf!r} was captured as {differing[0]!r}" if differing else None
        if detail is not None and found is None:
            found = Decision(reason=Reason.HOST_VALUE, detail=detail)
    return found


def _leaves(batch: ForwardBatch) -> dict[str, Any]:
    return {
        path: leaf
        for name in _FIELDS
        for path, leaf in tree.walk(getattr(batch, name), name)
        if leaf is not None
    }


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _elsewhere(path: str, entries: Sequence[Entry], known: Sequence[Any]) -> InputError:
    key = entries[0].key
    bucket = key.size if len(entries) == 1 else None
    if all(place is None for place in known):
        what, hint = "no tensor was there at capture", "Install it in prepare_capture_batch, or leave it out"
    else:
        what = "expected the tensor that was there at capture, found another"
        hint = "Write the numbers into the captured tensor, in place"
    return InputError(what, phase=key.phase, bucket=bucket, field=path, hint=hint)
