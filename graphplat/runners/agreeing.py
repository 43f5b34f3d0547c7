"""Graph or eager where ranks must choose alike: every rank speaks, then all do the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

from graphplat.report import Decision, Reason
from graphplat.runners import deciding
from graphplat.runners.entry import refuse_live

if TYPE_CHECKING:
    from graphplat.batch import ForwardBatch
    from graphplat.keys import Family
    from graphplat.peers import PeerAgreement, Step
    from graphplat.runners.base import CheckedBatch
    from graphplat.runners.entry import Entry
    from graphplat.runners.graph import GraphRunner


def decide_with_peers(
    runner: GraphRunner, batch: ForwardBatch
) -> tuple[ForwardBatch, CheckedBatch, Decision]:
    """Agree with all ranks; every rank reaches the collective, also with a bad batch.

    Gives the batch too, with copies of its tensors where all ranks capture first.

    A rank without work takes the others' size and family, so that it replays the same graph. Ranks that
    ask for different families run eagerly, all of them. Raises what :meth:`PeerAgreement.step` raises.
    """
    peers = cast("PeerAgreement", runner.context.peers)
    where = f"a {runner.phase} step"
    try:
        checked = runner.checker.check(batch)
        size = runner.size_of(batch)
        own = _own_part(runner, batch, checked, size)
        family = own if isinstance(own, tuple) else None
        moved = None if isinstance(own, Decision) else deciding.moved_weights(runner)
        if moved is not None and runner.config.weights != "recapture":
            own = deciding.policy(runner, moved)
        if moved is None and not isinstance(own, Decision):
            # Which graph is known only when all have spoken, and then nobody can step back from it.
            own = refuse_live(_reachable(runner, size, family), batch) or own
    except BaseException as error:
        peers.refuse(where, error)
        raise
    index = None if family is None else runner.families.index(family)
    can_graph = not isinstance(own, Decision)
    held = (len(runner.entries) << 20) + len(runner.missing)
    agreed = peers.step(size, index, held, can_graph=can_graph, moved=moved is not None, where=where)
    against = _against(own, agreed)
    if against is not None:
        return batch, checked, against
    family = runner.families[cast("int", agreed.family)]
    decision = None if agreed.any_moved else deciding.find(runner, agreed.size, family)
    if decision is None or not (decision.key is None or decision.key in runner.entries):
        with runner.context.together(f"{where}, before a capture"):
            batch, checked = deciding.set_apart(runner, batch)
    if decision is None:
        deciding.recapture(runner)
        decision = confirm(runner, batch, deciding.find(runner, agreed.size, family))
    return batch, checked, decision


def _reachable(runner: GraphRunner, size: int, family: Family | None) -> Iterator[Entry]:
    """The graphs that a step of all ranks may replay, if this rank brings *size* and *family*."""
    for key, entry in runner.entries.items():
        if key.size >= size and family in (None, key.family):
            yield entry


def _against(own: Family | Decision | None, agreed: Step) -> Decision | None:
    """Why all ranks run eagerly, given this one's own part; ``None`` where they replay, or capture."""
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
    return None


def confirm(runner: GraphRunner, batch: ForwardBatch, decision: Decision) -> Decision:
    """*decision* for a graph captured within this step, unless the batch of some rank is against it.

    Raises what :func:`~graphplat.runners.deciding.check_live` and :meth:`PeerAgreement.step` raise.
    """
    peers = runner.context.peers
    if peers is None:
        return deciding.check_live(runner, batch, decision)
    where = f"a {runner.phase} step in a new graph"
    try:
        own = deciding.check_live(runner, batch, decision)
    except BaseException as error:
        peers.refuse(where, error)
        raise
    agreed = peers.step(0, None, 0, can_graph=own.is_graph, moved=False, where=where)
    if own.is_graph and not agreed.all_graph:
        return Decision(reason=Reason.PEER_RANK_EAGER, detail="another rank cannot replay")
    return own


def _own_part(
    runner: GraphRunner, batch: ForwardBatch, checked: CheckedBatch, size: int
) -> Family | Decision | None:
    """What this rank asks of a common step: a family, nothing where it has no work, or a reason against."""
    if size == 0 and not runner.released:
        return None
    return deciding.wanted(runner, batch, checked, size)
