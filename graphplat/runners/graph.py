"""The graph runner: buckets, static inputs, the graph-or-eager decision, replay."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import attrs
import torch

from graphplat import buckets as ladders
from graphplat.backends import make_backend
from graphplat.batch import ForwardBatch, Phase
from graphplat.buffers import BoundInputs, bind_inputs
from graphplat.errors import InputError, ReplayError, WeightsMovedError
from graphplat.outputs import GraphOutput, copy_output
from graphplat.report import Decision, Reason, RunnerStats
from graphplat.runners.base import BaseRunner, CheckedBatch
from graphplat.runners.capturing import CapturePlan, capture_shapes

if TYPE_CHECKING:
    from graphplat.config import PhaseConfig
    from graphplat.keys import ShapeKey
    from graphplat.model_runner import ModelRunner
    from graphplat.platform import Platform
    from graphplat.runners.eager import EagerRunner

_Host = tuple[tuple[str, Any], ...]
_Family = tuple[str | None, frozenset[str], _Host]


@attrs.define(eq=False)
class Entry:
    """All that one shape key needs at replay."""

    key: ShapeKey
    inputs: BoundInputs
    output: GraphOutput


class GraphRunner(BaseRunner):
    """Runs one phase through captured graphs, and eagerly where there is none.

    Steps are serialized by a lock that all runners of one model runner share, since
    they share static memory.
    """

    phase: ClassVar[Phase]

    def __init__(self, platform: Platform, model_runner: ModelRunner, eager_runner: EagerRunner) -> None:
        self.platform = platform
        self.model_runner = model_runner
        self.eager_runner = eager_runner
        self.context = eager_runner.context
        self.stats = RunnerStats()
        self.config: PhaseConfig = model_runner.graph_config.phase(self.phase)
        self.checker = eager_runner.checker(self.phase)
        self.spec = self.context.spec(self.phase)
        self.ladder = self.config.ladder(self.phase)
        self.backend = make_backend(self.config, self.context, self.place)
        self.entries: dict[ShapeKey, Entry] = {}
        self.missing: dict[ShapeKey, tuple[Reason, str]] = {}
        self.context.graph_runners.append(self)
        self._keys: dict[tuple[int, _Family], ShapeKey] = {}
        self._released = True
        self._update_paths = tuple(path for path, rule in self.spec.hosts.items() if rule.update)
        self._fixed_hosts = tuple(path for path, rule in self.spec.hosts.items() if not rule.update)

    # What a phase defines

    def size_of(self, batch: ForwardBatch) -> int:
        """The size of *batch* in this phase's unit."""
        raise NotImplementedError

    def refuse(self, batch: ForwardBatch, bucket: int) -> Decision | None:
        """A phase's own reason not to run *batch* in *bucket*, if any."""
        del batch, bucket
        return None

    # Public

    @property
    def buckets(self) -> tuple[int, ...]:
        """Sizes that have a graph, ascending."""
        return tuple(sorted({key.size for key in self.entries}))

    def buffers(self, size: int, **family: Any) -> dict[str, torch.Tensor]:
        """The static inputs of the bucket that holds *size*, cut to *size* rows, by field path.

        A runtime that writes here and passes these tensors as inputs saves the copy. They
        hold until the next step of another size or phase; write real rows only. *size*
        counts requests for decode and tokens for prefill. *family* may name ``variant``,
        ``present`` and, for prefill, ``requests``. Raises :class:`ReplayError` if no graph
        holds it.
        """
        requests = family.pop("requests", size if self.phase is Phase.DECODE else 1)
        present = frozenset(family.pop("present", ()))
        variant = family.pop("variant", None)
        if family:
            raise InputError(f"unknown arguments {sorted(family)}", phase=self.phase)
        bucket = ladders.fit(self.ladder, size)
        for key, entry in self.entries.items():
            if key.size == bucket and key.variant == variant and frozenset(key.present) == present:
                tokens = requests * key.tokens_per_request if self.phase is Phase.DECODE else size
                return entry.inputs.head(requests, tokens)
        raise ReplayError(
            f"no captured bucket holds {size}", phase=self.phase, hint=f"Captured: {list(self.buckets)}"
        )

    def explain(self, batch: ForwardBatch) -> Decision:
        """What :meth:`execute` would do with *batch* on this rank alone."""
        checked = self.checker.check(batch)
        decision = self._decide(batch, checked, self.size_of(batch))
        if decision.is_graph and self.config.weights == "eager" and (moved := self.context.watch.moved()):
            return Decision(reason=Reason.WEIGHTS_MOVED, detail=moved)
        return decision

    def execute(self, batch: ForwardBatch) -> Any:
        """Replay the graph that holds *batch*, or run eagerly; either is counted in ``stats``."""
        with self.context.arena.lock:
            peers = self.context.peers
            if peers is None:
                checked = self.checker.check(batch)
                decision = self._decide(batch, checked, self.size_of(batch))
            else:
                checked, decision = self._decide_with_peers(batch)
            if decision.key is not None:
                decision = self._check_weights(decision)
            self.stats.last = decision
            if decision.key is None:
                return self._run_eagerly(batch, checked, decision)
            return self._replay(decision.key, batch, checked)

    def release(self) -> None:
        """Destroy this runner's graphs; steps run eagerly until :meth:`recapture`."""
        with self.context.arena.lock:
            self.backend.cleanup()
            self.entries.clear()
            self.missing.clear()
            self._keys.clear()
            self._released = True
            self.context.release_memory()

    def capture(self) -> None:
        """Record a graph for every planned shape, largest first.

        Raises :class:`CaptureError` under ``on_failure="raise"``; graphs captured
        before stay usable.
        """
        with self.context.arena.lock:
            self._released = False
            self.context.watch.remember()
            plan = CapturePlan.make(self)
            self._keys = {(key.size, _family(key)): key for key in plan.keys}
            if self.context.peers is not None:
                self.context.peers.same_plan(plan.keys)
            if self.config.capture == "startup":
                capture_shapes(self, plan.keys)

    # Deciding

    def families(self) -> Iterator[_Family]:
        """Every combination of variant, present inputs and host constants that gets graphs."""
        hosts = [[(path, v) for v in self.spec.hosts[path].capture_values] for path in self._fixed_hosts]
        variants: tuple[str | None, ...] = (None, *self.config.variants)
        for present in self.spec.presence_sets():
            for host in itertools.product(*hosts):
                for variant in variants:
                    yield variant, present, tuple(host)

    def _decide(self, batch: ForwardBatch, checked: CheckedBatch, size: int) -> Decision:
        if self._released:
            return Decision(reason=Reason.RELEASED, detail="call recapture()")
        if size == 0:
            return Decision(reason=Reason.EMPTY_BATCH)
        if checked.over is not None:
            return Decision(reason=Reason.OVER_MAX_DIM, detail=checked.over)
        bucket = ladders.fit(self.ladder, size)
        if bucket is None:
            return Decision(reason=Reason.OVER_MAX_BUCKET, detail=f"{size} is over {self.ladder[-1]}")
        if (refused := self.refuse(batch, bucket)) is not None:
            return refused
        family = self._family_of(batch, checked)
        if isinstance(family, Decision):
            return family
        return self._find(size, family)

    def _family_of(self, batch: ForwardBatch, checked: CheckedBatch) -> _Family | Decision:
        if self._update_paths and self.platform.capabilities.update_after_capture == "none":
            return Decision(
                reason=Reason.HOST_VALUE,
                detail=f"{self.platform.name} cannot rewrite {', '.join(self._update_paths)} in a graph",
            )
        if batch.variant is not None and batch.variant not in self.config.variants:
            return Decision(reason=Reason.UNKNOWN_VARIANT, detail=repr(batch.variant))
        host: list[tuple[str, Any]] = []
        for path in self._fixed_hosts:
            rule, value = self.spec.hosts[path], checked.leaves[path]
            if rule.values:
                match = next((v for v in rule.values if v == value and type(v) is type(value)), _NONE)
                if match is _NONE:
                    return Decision(reason=Reason.HOST_VALUE, detail=f"{path}={value!r} was not captured")
                host.append((path, match))
            elif value > rule.maximum:
                return Decision(reason=Reason.HOST_VALUE, detail=f"{path}={value!r} is over {rule.maximum!r}")
            else:
                host.append((path, rule.maximum))
        present = frozenset(path for path in self.spec.optional if checked.leaves.get(path) is not None)
        return batch.variant, present, tuple(host)

    def _find(self, size: int, family: _Family) -> Decision:
        """The smallest planned shape that holds *size* and can run."""
        reason, detail = Reason.OPTIONAL_INPUTS, f"no graphs with {sorted(family[1])} present"
        for bucket in self.ladder:
            if bucket < size:
                continue
            key = self._keys.get((bucket, family))
            if key is None:
                continue
            if key in self.missing:
                reason, detail = self.missing[key]
                continue
            if (refused := self._refuse_bucket(size, bucket)) is not None:
                return refused
            return Decision(key=key)
        return Decision(reason=reason, detail=detail)

    def _refuse_bucket(self, size: int, bucket: int) -> Decision | None:
        """A phase's limit on padding, checked again when a larger bucket must step in."""
        del size, bucket
        return None

    def _decide_with_peers(self, batch: ForwardBatch) -> tuple[CheckedBatch, Decision]:
        """Agree with all ranks; every rank reaches the collective, also with a bad batch."""
        peers = self.context.peers
        assert peers is not None
        try:
            checked = self.checker.check(batch)
        except InputError:
            peers.agree(0, can_graph=False, error=True)
            raise
        size = self.size_of(batch)
        own = self._decide(batch, checked, size) if size else Decision()
        agreed = peers.agree(size, can_graph=own.is_graph or size == 0)
        if agreed.any_error:
            raise ReplayError("a peer rank refused its batch", phase=self.phase, hint="See that rank's error")
        if not agreed.all_graph:
            mine = own if own.reason is not None else None
            return checked, mine or Decision(reason=Reason.PEER_RANK_EAGER)
        decision = self._decide(batch, checked, agreed.size) if agreed.size else own
        if not peers.all_ok(decision.is_graph or not agreed.size):
            return checked, Decision(reason=decision.reason or Reason.PEER_RANK_EAGER, detail=decision.detail)
        return checked, decision if agreed.size else Decision(reason=Reason.EMPTY_BATCH)

    def _check_weights(self, decision: Decision) -> Decision:
        if self.config.weights == "off":
            return decision
        moved = self.context.watch.moved()
        if moved is None:
            return decision
        if self.config.weights == "raise":
            raise WeightsMovedError(
                "a tensor that graphs read has moved since capture",
                platform=self.platform.name,
                phase=self.phase,
                field=moved,
                hint="Update it in place, or call recapture()",
            )
        if self.config.weights == "eager":
            return Decision(reason=Reason.WEIGHTS_MOVED, detail=moved)
        self.stats.recaptures += 1
        for runner in self.context.graph_runners:
            runner.recapture()
        return decision

    # Running

    def _run_eagerly(self, batch: ForwardBatch, checked: CheckedBatch, decision: Decision) -> Any:
        assert decision.reason is not None
        self.stats.eager[decision.reason] += 1
        return self.eager_runner.run(batch, checked.leaves, decision.reason)

    def _replay(self, key: ShapeKey, batch: ForwardBatch, checked: CheckedBatch) -> Any:
        entry = self.entries.get(key)
        if entry is None:
            entry = self._capture_on_use(key)
            if entry is None:
                reason, detail = self.missing[key]
                return self._run_eagerly(batch, checked, Decision(reason=reason, detail=detail))
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self._launch(entry, batch, checked)
        return self._launch(entry, batch, checked)

    def _launch(self, entry: Entry, batch: ForwardBatch, checked: CheckedBatch) -> Any:
        key, requests, tokens = entry.key, batch.num_requests, batch.num_tokens
        self.context.arena.enter_stream()
        entry.inputs.load(checked.leaves, requests, tokens)
        if self._update_paths:
            self._update_hosts(key, checked)
        self.backend.replay(key, batch)
        if self._update_paths:
            self.backend.fence()
        stats = self.stats
        stats.replays[key.size] += 1
        stats.sizes[self.size_of(batch)] += 1
        view = entry.output.head(requests, tokens)
        return view if self.config.outputs == "view" else copy_output(view)

    def _update_hosts(self, key: ShapeKey, checked: CheckedBatch) -> None:
        values = {}
        for path in self._update_paths:
            rule, given = self.spec.hosts[path], list(checked.leaves[path])
            values[path] = given + [rule.fill] * (rule.rows(key.requests, key.tokens) - len(given))
        self.backend.update(key, values)

    # Capturing

    def place(self, key: ShapeKey, output: Any) -> GraphOutput:
        """Move a captured output's rows into the shared buffers."""
        axes = self.eager_runner.row_axes(key)
        moved = self.context.shared_output.place(output, axes, self.context.watch.pointers())
        return GraphOutput(moved, axes, key)

    def bind(self, key: ShapeKey) -> BoundInputs:
        """The static inputs of *key*, filled."""
        return bind_inputs(self.spec, key, self.context.arena)

    def _capture_on_use(self, key: ShapeKey) -> Entry | None:
        limit = self.config.max_graphs
        while limit is not None and len(self.entries) >= limit:
            oldest = next(iter(self.entries))
            del self.entries[oldest]
            self.backend.drop(oldest)
        capture_shapes(self, [key])
        return self.entries.get(key)


_NONE: Any = object()


def _family(key: ShapeKey) -> _Family:
    return key.variant, frozenset(key.present), key.host
