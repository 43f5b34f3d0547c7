"""One captured shape, and what a live batch may say that its graph does not follow."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import torch

from graphplat import tree
from graphplat.errors import CaptureError, InputError
from graphplat.report import Decision, Reason

if TYPE_CHECKING:
    from graphplat.batch import ForwardBatch
    from graphplat.buffers import BoundInputs
    from graphplat.keys import ShapeKey
    from graphplat.outputs import GraphOutput
    from graphplat.runners.graph import GraphRunner

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


def installed_tensors(before: dict[str, torch.Tensor], batch: ForwardBatch) -> dict[str, torch.Tensor]:
    """The tensors that ``prepare_capture_batch`` put on *batch*, by path."""
    known = {id(tensor) for tensor in before.values()}
    return {path: tensor for path, tensor in batch.tensors().items() if id(tensor) not in known}


def check_inputs_kept(
    runner: GraphRunner, key: ShapeKey, given: Mapping[str, Any], batch: ForwardBatch
) -> None:
    """Raise :class:`CaptureError` where ``prepare_capture_batch`` put something else for a *given* input.

    A graph would go on reading that, and no step writes there. Numbers that a replay rewrites are free.
    """
    found = dict(tree.walk(batch.inputs))
    rewritten = tuple(f"{path}[" for path in runner.update_paths)
    for path, leaf in given.items():
        if not path.startswith(rewritten) and not _same_input(leaf, found.get(path)):
            raise CaptureError(
                "prepare_capture_batch put something else in the place of an input",
                platform=runner.platform.name,
                phase=key.phase,
                bucket=key.size,
                field=path,
                hint="Write into the tensor in place; host values stay those of the input spec",
            )


def _same_input(leaf: Any, found: Any) -> bool:
    if not isinstance(leaf, torch.Tensor):
        return same_constant(leaf, found)
    strided = isinstance(found, torch.Tensor) and found.layout is torch.strided
    return strided and _place(found) == _place(leaf)


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
            differing = [value for value in known if not same_constant(value, leaf)]
            detail = f"{path}={leaf!r} was captured as {differing[0]!r}" if differing else None
        if detail is not None and found is None:
            found = Decision(reason=Reason.HOST_VALUE, detail=detail)
    return found


def same_constant(one: Any, other: Any) -> bool:
    """Whether no forward can tell host values apart: equal, of one type at any depth, zeros of one sign."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float | complex):
        return repr(one) == repr(other)  # also NaN, which equals nothing
    if one is not other and one != other:
        return False
    if isinstance(one, frozenset):
        return set(map(repr, one)) == set(map(repr, other))
    inner, others = tree.children(one) or (), tree.children(other) or ()
    return all(same_constant(mine, its) for (_, mine), (_, its) in zip(inner, others, strict=True))


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


def autocast_type(device: torch.device) -> str:
    """The device type whose autocast a forward on *device* follows; the host's where it has none."""
    try:
        torch.is_autocast_enabled(device.type)
    except RuntimeError:
        return "cpu"
    return device.type


def autocast_now(device_type: str) -> torch.dtype | None:
    """What autocast casts to in this thread, or ``None`` where it is off."""
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


@contextlib.contextmanager
def fresh_casts() -> Iterator[None]:
    """Keep captures from weights that autocast has cast before: those go with the caller's block."""
    inside = torch.autocast_increment_nesting() > 1  # else the forward's own block forgets them at its end
    torch.autocast_decrement_nesting()
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(cached and not inside)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(cached)
