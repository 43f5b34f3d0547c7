"""Graph or eager: which captured shape holds a batch, or the reason why none does."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch

from graphplat import buckets as ladders
from graphplat.errors import InputError, ReplayError, WeightsMovedError
from graphplat.report import Decision, Reason

if TYPE_CHECKING:
    from graphplat.batch import ForwardBatch
    from graphplat.keys import Family, ShapeKey
    from graphplat.peers import PeerAgreement, Step
    from graphplat.runners.base import CheckedBatch
    from graphplat.runners.graph import Entry, GraphRunner

_NONE: Any = object()


def families(runner: GraphRunner) -> Iterator[Family]:
    """Every combination of variant, present inputs and host constants that gets graphs."""
    if cannot_update(runner):
        return
    hosts = [[(path, v) for v in runner.spec.hosts[path].capture_values] for path in runner.fixed_hosts]
    variants: tuple[str | None, ...] = (None, *runner.config.variants)
    for present in runner.spec.presence_sets():
        for host in itertools.product(*hosts):
            for variant in variants:
                yield variant, present, tuple(host)


def cannot_update(runner: GraphRunner) -> str | None:
    """Why no graph of *runner* can serve its updated host values, if that is so."""
    if runner.update_paths and runner.platform.capabilities.update_after_capture == "none":
        return f"{runner.platform.name} cannot rewrite {', '.join(runner.update_paths)} in a graph"
    return None


def decide(runner: GraphRunner, batch: ForwardBatch, checked: CheckedBatch, size: int) -> Decision:
    """What to do with *batch*, as far as this rank alone knows."""
    refused = _refuse(runner, batch, checked, size)
    if refused is not None:
        return refused
    family = _family(runner, batch, checked)
    return family if isinstance(family, Decision) else find(runner, size, family)


def _refuse(runner: GraphRunner, batch: ForwardBatch, checked: CheckedBatch, size: int) -> Decision | None:
    if runner.released:
        return Decision(reason=Reason.RELEASED, detail="call recapture()")
    if size == 0:
        return Decision(reason=Reason.EMPTY_BATCH)
    if checked.over is not None:
        return Decision(reason=Reason.OVER_MAX_DIM, detail=checked.over)
    bucket = ladders.fit(runner.ladder, size)
    if bucket is None:
        return Decision(reason=Reason.OVER_MAX_BUCKET, detail=f"{size} is over {runner.ladder[-1]}")
    return runner.refuse(batch, bucket)


def _family(runner: GraphRunner, batch: ForwardBatch, checked: CheckedBatch) -> Family | Decision:
    if (detail := cannot_update(runner)) is not None:
        return Decision(reason=Reason.HOST_VALUE, detail=detail)
    if batch.variant is not None and batch.variant not in runner.config.variants:
        return Decision(reason=Reason.UNKNOWN_VARIANT, detail=repr(batch.variant))
    host = fit_hosts(runner, checked.leaves)
    if isinstance(host, Decision):
        return host
    present = frozenset(path for path in runner.spec.optional if checked.leaves.get(path) is not None)
    return batch.variant, present, host


def fit_hosts(runner: GraphRunner, values: Mapping[str, Any]) -> tuple[tuple[str, Any], ...] | Decision:
    """The captured host constants that serve *values*, by path, or which of them none serves."""
    host: list[tuple[str, Any]] = []
    for path in runner.fixed_hosts:
        rule, value = runner.spec.hosts[path], values[path]
        if rule.values:
            match = next((v for v in rule.values if type(v) is type(value) and v == value), _NONE)
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

    Host constants left out are the first ones captured. Raises :class:`ReplayError` if there is none.
    """
    first = {path: runner.spec.hosts[path].capture_values[0] for path in runner.fixed_hosts}
    if unknown := sorted(host.keys() - first.keys()):
        raise InputError(f"no host constants {unknown}", phase=runner.phase, hint=f"Declared: {[*first]}")
    fitted = fit_hosts(runner, first | dict(host))
    decision = fitted if isinstance(fitted, Decision) else find(runner, size, (*kind, fitted))
    entry = None if decision.key is None else runner.entries.get(decision.key)
    if entry is None or requests > entry.key.requests:
        raise ReplayError(
            f"no captured bucket holds {size}" + (f": {decision.detail}" if decision.detail else ""),
            phase=runner.phase,
            hint=f"Captured: {list(runner.buckets)}",
        )
    return entry


def decide_with_peers(
    runner: GraphRunner, batch: ForwardBatch
) -> tuple[ForwardBatch, CheckedBatch, Decision]:
    """Agree with all ranks; every rank reaches the collective, also with a bad batch.

    Gives the batch too, taken out of the static buffers, since any rank may make all of them capture.

    A rank without work takes the others' size and family, so that it replays the same graph. Ranks that
    ask for different families run eagerly, all of them. Raises what :meth:`PeerAgreement.step` raises.
    """
    peers = cast("PeerAgreement", runner.context.peers)
    where = f"a {runner.phase} step"
    try:
        checked = runner.checker.check(batch)
        if any(map(runner.context.arena.holds, checked.leaves.values())):
            batch = runner.out_of_buffers(batch)
            checked = runner.checker.check(batch)
        size = runner.size_of(batch)
        own = _own_part(runner, batch, checked, size)
        family = own if isinstance(own, tuple) else None
        moved = None if isinstance(own, Decision) else moved_weights(runner)
        if moved is not None and runner.config.weights != "recapture":
            own = _policy(runner, moved)
    except BaseException as error:
        peers.refuse(where, error)
        raise
    index = None if family is None else runner.families.index(family)
    can_graph = not isinstance(own, Decision)
    held = (len(runner.entries) << 20) + len(runner.missing)
    agreed = peers.step(size, index, held, can_graph=can_graph, moved=moved is not None, where=where)
    return batch, checked, _common(runner, own, agreed)


def _common(runner: GraphRunner, own: Family | Decision | None, agreed: Step) -> Decision:
    """What all ranks do, given this one's own part; captures anew where a weight moved on any."""
    if isinstance(own, Decision):
        return own
    if not agreed.all_graph:
        return Decision(reason=Reason.PEER_RANK_EAGER, detail="another rank cannot replay")
    if not agreed.size:
        return Decision(reason=Reason.EMPTY_BATCH)
    if agreed.family is None:
        return Decision(reason=Reason.PEER_RANK_EAGER, detail="ranks ask for different graphs")
    if not agreed.same_graphs:
        detail = "ranks hold different graphs: call recapture() on all of them"
        return Decision(reason=Reason.PEER_RANK_EAGER, detail=detail)
    if agreed.any_moved:
        _recapture(runner)
    return find(runner, agreed.size, runner.families[agreed.family])


def _own_part(
    runner: GraphRunner, batch: ForwardBatch, checked: CheckedBatch, size: int
) -> Family | Decision | None:
    """What this rank asks of a common step: a family, nothing where it has no work, or a reason against."""
    if size == 0 and not runner.released:
        return None
    refused = _refuse(runner, batch, checked, size)
    return _family(runner, batch, checked) if refused is None else refused


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


def check_weights(runner: GraphRunner, decision: Decision) -> Decision:
    """*decision*, unless a weight moved since capture: then what the settings say.

    Raises :class:`WeightsMovedError`, or what a new capture raises.
    """
    moved = moved_weights(runner)
    if moved is None:
        return decision
    if runner.config.weights != "recapture":
        return _policy(runner, moved)
    _recapture(runner)
    key = cast("ShapeKey", decision.key)
    return find(runner, key.size, key.family)


def moved_weights(runner: GraphRunner) -> str | None:
    """What the graphs of *runner* have baked in and lies elsewhere now, if that is watched."""
    # Without a graph nothing has baked in an address.
    return None if runner.config.weights == "off" or not runner.entries else runner.watch.moved()


def _policy(runner: GraphRunner, moved: str) -> Decision:
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


def _recapture(runner: GraphRunner) -> None:
    runner.stats.recaptures += 1
    runner.recapture()
