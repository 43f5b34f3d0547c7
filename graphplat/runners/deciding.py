"""Graph or eager: which captured shape holds a batch, or the reason why none does."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from graphplat import buckets as ladders
from graphplat.batch import ForwardBatch, Phase
from graphplat.errors import InputError, ReplayError, WeightsMovedError
from graphplat.outputs import copy_output
from graphplat.report import Decision, Reason
from graphplat.runners.entry import autocast_now, refuse_live, same_constant

if TYPE_CHECKING:
    from graphplat.keys import Family, ShapeKey
    from graphplat.runners.base import CheckedBatch
    from graphplat.runners.entry import Entry
    from graphplat.runners.graph import GraphRunner

_NONE: Any = object()


def families(runner: GraphRunner) -> Iterator[Family]:
    """Every combination of variant, present inputs and host constants that gets graphs."""
    hosts = [[(path, v) for v in runner.spec.hosts[path].capture_values] for path in runner.fixed_hosts]
    variants: tuple[str | None, ...] = (None, *runner.config.variants)
    for present in runner.spec.presence_sets():
        for host in itertools.product(*hosts):
            for variant in variants:
                yield variant, present, tuple(host)


def decide(runner: GraphRunner, batch: ForwardBatch, checked: CheckedBatch, size: int) -> Decision:
    """What to do with *batch*, as far as this rank alone knows."""
    family = wanted(runner, batch, checked, size)
    return family if isinstance(family, Decision) else find(runner, size, family)


def decide_alone(runner: GraphRunner, batch: ForwardBatch) -> tuple[ForwardBatch, CheckedBatch, Decision]:
    """Check *batch*, and decide for this process alone; captures anew where a weight moved.

    Gives the batch too, with copies of its tensors where a capture comes first. Raises :class:`InputError`,
    :class:`WeightsMovedError`, or what a new capture raises.
    """
    checked = runner.checker.check(batch)
    decision = decide(runner, batch, checked, runner.size_of(batch))
    if decision.key is None:
        return batch, checked, decision
    moved = moved_weights(runner)
    if moved is not None and runner.config.weights != "recapture":
        return batch, checked, policy(runner, moved)
    if moved is not None or decision.key not in runner.entries:
        batch, checked = set_apart(runner, batch)
    if moved is not None:
        recapture(runner)
        decision = find(runner, decision.key.size, decision.key.family)
    return batch, checked, check_live(runner, batch, decision)


def set_apart(runner: GraphRunner, batch: ForwardBatch) -> tuple[ForwardBatch, CheckedBatch]:
    """*batch* with copies of its tensors, checked.

    A capture runs the forward, which writes to the static buffers and to whatever a result given as a view
    lies in: a batch made of either must be out of there before.
    """
    taken = copy.copy(batch)
    with torch.no_grad():
        taken.inputs = copy_output(batch.inputs)
    return taken, runner.checker.check(taken)


def wanted(runner: GraphRunner, batch: ForwardBatch, checked: CheckedBatch, size: int) -> Family | Decision:
    """The family of graphs that *batch* asks for, or why none can serve it."""
    if (refused := _refuse(runner, batch, size, checked.over)) is not None:
        return refused
    if (now := autocast_now(runner.autocast_type)) is not runner.autocast:
        detail = f"under autocast {now or 'off'}, captured under {runner.autocast or 'off'}"
        return Decision(reason=Reason.HOST_VALUE, detail=detail)
    present = (path for path in runner.spec.optional if checked.leaves.get(path) is not None)
    return _family(runner, batch.variant, frozenset(present), checked.leaves)


def _refuse(runner: GraphRunner, batch: ForwardBatch, size: int, over: str | None = None) -> Decision | None:
    if runner.released:
        return Decision(reason=Reason.RELEASED, detail="call recapture()")
    if size == 0:
        return Decision(reason=Reason.EMPTY_BATCH)
    if over is not None:
        return Decision(reason=Reason.OVER_MAX_DIM, detail=over)
    bucket = ladders.fit(runner.ladder, size)
    if bucket is None:
        return Decision(reason=Reason.OVER_MAX_BUCKET, detail=f"{size} is over {runner.ladder[-1]}")
    return runner.refuse(batch, bucket)


def _family(
    runner: GraphRunner, variant: str | None, present: frozenset[str], values: Mapping[str, Any]
) -> Family | Decision:
    if variant is not None and variant not in runner.config.variants:
        return Decision(reason=Reason.UNKNOWN_VARIANT, detail=repr(variant))
    host = fit_hosts(runner, values)
    return host if isinstance(host, Decision) else (variant, present, host)


def fit_hosts(runner: GraphRunner, values: Mapping[str, Any]) -> tuple[tuple[str, Any], ...] | Decision:
    """The captured host constants that serve *values*, by path, or which of them none serves."""
    host: list[tuple[str, Any]] = []
    for path in runner.fixed_hosts:
        rule, value = runner.spec.hosts[path], values[path]
        if rule.values:
            match = next((v for v in rule.values if same_constant(v, value)), _NONE)
            if match is _NONE:
                return Decision(reason=Reason.HOST_VALUE, detail=f"{path}={value!r} was not captured")
            host.append((path, match))
        elif value <= rule.maximum:
            host.append((path, rule.maximum))
        else:
            return Decision(reason=Reason.HOST_VALUE, detail=f"{path}={value!r} is over {rule.maximum!r}")
    return tuple(host)


def find(runner: GraphRunner, size: int, family: Family) -> Decision:
    """The smallest shape that holds *size* and has a graph, or may get one.

    Where a smaller bucket was never tried, a larger one steps in; a bucket whose capture
    failed runs eagerly.
    """
    missed: Decision | None = None
    for bucket in runner.ladder[ladders.index(runner.ladder, size) :]:
        key = runner.keys.get((bucket, family))
        if key is None:
            continue
        if key in runner.missing:
            reason, detail = runner.missing[key]
            missed = missed or Decision(reason=reason, detail=detail)
            if reason is Reason.CAPTURE_FAILED:
                return missed
            continue
        return runner.refuse_bucket(size, bucket) or Decision(key=key)
    absent = f"no graphs with {sorted(family[1])} present"
    return missed or Decision(reason=Reason.OPTIONAL_INPUTS, detail=absent)


def held(
    runner: GraphRunner,
    size: int,
    requests: int,
    kind: tuple[str | None, frozenset[str]],
    host: Mapping[str, Any],
) -> Entry:
    """The captured shape of a batch of *size* and *requests*, with variant and present inputs of *kind*.

    Host constants left out are the first ones captured. Raises :class:`ReplayError` if there is none, and
    :class:`InputError` for what no batch can have.
    """
    for name, value in (("size", size), ("requests", requests)):
        if type(value) is not int or value < 1:
            what = f"expected a count of 1 or more, found {value!r}"
            raise InputError(what, phase=runner.phase, field=name)
    first = {path: runner.spec.hosts[path].capture_values[0] for path in runner.fixed_hosts}
    if unknown := sorted(host.keys() - first.keys()):
        raise InputError(f"no host constants {unknown}", phase=runner.phase, hint=f"Declared: {[*first]}")
    tokens = requests * runner.checker.tokens_per_request if runner.phase is Phase.DECODE else size
    batch = ForwardBatch(phase=runner.phase, num_requests=requests, num_tokens=tokens, variant=kind[0])
    family = _refuse(runner, batch, size) or _family(runner, *kind, first | dict(host))
    decision = family if isinstance(family, Decision) else find(runner, size, family)
    entry = None if decision.key is None else runner.entries.get(decision.key)
    if entry is not None and requests <= entry.key.requests:
        return entry
    why = f"{decision.reason}, {decision.detail}"
    if decision.key is not None:
        why = "not captured yet" if entry is None else f"{requests} requests are too many"
    raise ReplayError(
        f"no graph holds a batch of size {size}: {why}",
        phase=runner.phase,
        hint=f"Captured: {list(runner.buckets)}",
    )


def check_live(runner: GraphRunner, batch: ForwardBatch, decision: Decision) -> Decision:
    """*decision*, unless the capture-only fields of *batch* are not those that its graph was captured with.

    Raises :class:`InputError` for a tensor that the graph does not read.
    """
    entry = None if decision.key is None else runner.entries.get(decision.key)
    return decision if entry is None else refuse_live([entry], batch) or decision


def zero_rows(runner: GraphRunner, key: ShapeKey, checked: CheckedBatch) -> dict[str, Any]:
    """The leaves of a batch without rows, as *key*'s graph needs them: absent optional inputs are made."""
    leaves = {path: leaf for path, leaf in checked.leaves.items() if leaf is not None}
    for path in key.present:
        spec = runner.spec.tensors.get(path)
        if path not in leaves and spec is not None:
            fill = 0 if spec.fill == "last" else spec.fill
            shape, device = spec.shape(0, 0), runner.context.arena.device
            leaves[path] = torch.full(shape, fill, dtype=spec.dtype, device=device)
    return leaves


def host_values(runner: GraphRunner, key: ShapeKey, checked: CheckedBatch) -> dict[str, list[int]]:
    """What the host arguments of *key*'s graph become, padded rows included."""
    values = {}
    for path in runner.update_paths:
        rule, given = runner.spec.hosts[path], list(checked.leaves[path])
        values[path] = given + [rule.fill] * (rule.rows(key.requests, key.tokens) - len(given))
    return values


def moved_weights(runner: GraphRunner) -> str | None:
    """What the graphs of *runner* have baked in and lies elsewhere now, if that is watched."""
    # Without a graph nothing has baked in an address.
    return None if runner.config.weights == "off" or not runner.entries else runner.watch.moved()


def policy(runner: GraphRunner, moved: str) -> Decision:
    """What the settings say of *moved*, other than to capture anew. Raises :class:`WeightsMovedError`."""
    runner.watch.give_up(moved)
    if runner.config.weights == "eager":
        return Decision(reason=Reason.WEIGHTS_MOVED, detail=moved)
    raise WeightsMovedError(
        "a tensor that graphs read has moved since capture",
        platform=runner.platform.name,
        phase=runner.phase,
        field=moved,
        hint="Update it in place, or call recapture()",
    )


def recapture(runner: GraphRunner) -> None:
    """Capture anew, counted."""
    runner.stats.recaptures += 1
    runner.recapture()
