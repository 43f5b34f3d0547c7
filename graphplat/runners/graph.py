"""The graph runner: buckets, static inputs, the graph-or-eager decision, replay."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import get_autocast_dtype, is_autocast_enabled

from graphplat import tree
from graphplat.backends import make_backend
from graphplat.batch import ForwardBatch, Phase
from graphplat.buffers import BoundInputs, bind_inputs
from graphplat.errors import GraphplatError
from graphplat.outputs import GraphOutput, copy_output, own_value
from graphplat.report import Decision, Reason, RunnerStats
from graphplat.runners import agreeing, deciding
from graphplat.runners.base import BaseRunner, CheckedBatch
from graphplat.runners.capturing import capture_on_use, capture_planned, place_output
from graphplat.runners.entry import Entry, autocast_now, autocast_type, fresh_casts
from graphplat.runners.fitting import warn_if_short
from graphplat.runners.planning import CapturePlan
from graphplat.runners.steps import StepPlan
from graphplat.weights import WeightWatch

if TYPE_CHECKING:
    from graphplat.config import PhaseConfig
    from graphplat.keys import Family, ShapeKey
    from graphplat.model_runner import ModelRunner
    from graphplat.platform import Platform
    from graphplat.runners.eager import EagerRunner

__all__ = ["Entry", "GraphRunner"]


class GraphRunner(BaseRunner):
    """Runs one phase through captured graphs, and eagerly where there is none.

    Steps are serialized by a lock that all runners of one model runner share, since
    they share static memory.
    """

    phase: ClassVar[Phase]

    def __init__(self, platform: Platform, model_runner: ModelRunner, eager_runner: EagerRunner) -> None:
        self.platform = platform
        self.eager_runner = eager_runner
        self.context = eager_runner.context
        self.stats = RunnerStats()
        self.config: PhaseConfig = model_runner.graph_config.phase(self.phase)
        self.checker = eager_runner.checker(self.phase)
        self.spec = self.context.spec(self.phase)
        self.ladder = self.config.ladder(self.phase)
        self.update_paths = tuple(path for path, rule in self.spec.hosts.items() if rule.update)
        self.backend = make_backend(self.config, self.context, self.place, updatable=bool(self.update_paths))
        self.entries: dict[ShapeKey, Entry] = {}
        self.missing: dict[ShapeKey, tuple[Reason, str]] = {}
        self.watch = WeightWatch(model_runner)
        self.families: list[Family] = []
        self.keys: dict[tuple[int, Family], ShapeKey] = {}
        self._plans: dict[tuple[int, int, str | None], StepPlan] = {}
        self._watched = self.config.weights != "off"
        self._view = self.config.outputs == "view"
        self.autocast_type = autocast_type(model_runner.device)
        self.autocast: torch.dtype | None = None
        self.released = True
        self.fixed_hosts = tuple(path for path, rule in self.spec.hosts.items() if not rule.update)

    # What a phase defines

    def size_of(self, batch: ForwardBatch) -> int:
        """The size of *batch* in this phase's unit."""
        raise NotImplementedError

    def refuse(self, batch: ForwardBatch, bucket: int) -> Decision | None:
        """A phase's own reason not to run *batch* in *bucket*, if any."""
        del batch, bucket
        return None

    def refuse_bucket(self, size: int, bucket: int) -> Decision | None:
        """A phase's limit on padding, checked again when a larger bucket must step in."""
        del size, bucket
        return None

    # Public

    @property
    def buckets(self) -> tuple[int, ...]:
        """Sizes that have a graph, ascending."""
        return tuple(sorted({key.size for key in self.entries}))

    def has_room(self) -> bool:
        """Whether any planned shape has a graph, or may get one by another capture."""
        lost = {key for key, (reason, _) in self.missing.items() if reason is not Reason.CAPTURE_FAILED}
        return any(key not in lost for key in self.keys.values())

    def buffers(
        self,
        size: int,
        *,
        requests: int | None = None,
        variant: str | None = None,
        present: Iterable[str] = (),
        host: Mapping[str, Any] | None = None,
    ) -> dict[str, torch.Tensor]:
        """The static inputs of the bucket that holds *size*, cut to *size* rows, by field path.

        A runtime that writes here and passes these tensors as inputs saves the copy. They
        hold until the next step of another size or phase; write real rows only. *size*
        counts requests for decode and tokens for prefill, where *requests* counts the rest.
        *present* are the optional inputs of the batch, *host* its host constants by path; those left
        out are taken to be the first ones captured. Raises :class:`ReplayError` with the reason if no graph
        holds it, and :class:`InputError` for a size that is no count.
        """
        decode = self.phase is Phase.DECODE
        requests = (size if decode else 1) if requests is None else requests
        entry = deciding.held(self, size, requests, (variant, frozenset(present)), host or {})
        return entry.inputs.head(requests, requests * entry.key.tokens_per_request if decode else size)

    def device_graphs(self) -> dict[ShapeKey, Sequence[Any]]:
        """The platform's graph objects by shape, in capture order."""
        return {key: self.backend.device_graphs(key) for key in self.entries}

    def explain(self, batch: ForwardBatch) -> Decision:
        """What :meth:`execute` would do on this rank alone; ``WEIGHTS_MOVED`` also where it raises that."""
        checked = self.checker.check(batch)
        decision = deciding.decide(self, batch, checked, self.size_of(batch))
        if decision.is_graph and self.config.weights in ("eager", "raise"):
            moved = deciding.moved_weights(self)
            if moved is not None:
                return Decision(reason=Reason.WEIGHTS_MOVED, detail=moved)
        return deciding.check_live(self, batch, decision)

    def execute(self, batch: ForwardBatch) -> Any:
        """Replay the graph that holds *batch*, or run eagerly; either is counted in ``stats``."""
        context = self.context
        with context.arena.lock:
            try:
                requests, tokens = batch.num_requests, batch.num_tokens
                plan = self._plans.get((requests, tokens, batch.variant))
                kind = self.autocast_type
                usual = (  # equal keys may be other types, and what was for capture must be compared with it
                    requests.__class__ is tokens.__class__ is int
                    and batch.phase is self.phase
                    and batch.global_dp_buffer_len is None
                    and batch.global_num_tokens_gpu is None
                    and not batch.capture_only
                    # autocast_now(), without the call
                    and (get_autocast_dtype(kind) if is_autocast_enabled(kind) else None) is self.autocast
                )
            except (AttributeError, TypeError):  # no batch, or counts that are none: the full way says which
                return self._execute_checked(batch)
            if plan is None or not usual or (self._watched and self.watch.moved()):
                return self._execute_checked(batch)
            context.arena.enter_stream()
            if not plan.load(batch.inputs):
                return self._execute_checked(batch)
            try:
                plan.launch(batch)
            except GraphplatError:
                raise
            except Exception as error:
                raise self.backend.replay_error(plan.entry.key, error) from error
            self.stats.count(plan.decision, plan.size)
            return self._result(plan.output)

    def _execute_checked(self, batch: ForwardBatch) -> Any:
        """The full way: check everything, decide, and remember how for the next such step."""
        alone = self.context.peers is None
        decide = deciding.decide_alone if alone else agreeing.decide_with_peers
        batch, checked, decision = decide(self, batch)
        if decision.key is None:
            return self._run_eagerly(batch, checked, decision)
        return self._replay(decision.key, batch, checked)

    def _plan_step(self, entry: Entry, decision: Decision, batch: ForwardBatch) -> None:
        """Remember the short way for batches of exactly this size."""
        if self.context.peers is not None or not self.spec.is_flat or self.spec.hosts:
            return
        if self.config.max_graphs is not None:
            return  # the full way keeps count of which graph was used last
        if len(self._plans) >= 1024:  # bounds the cache where token counts vary widely
            self._plans.clear()
        where = (batch.num_requests, batch.num_tokens, batch.variant)
        if where not in self._plans:
            launch = self.backend.launcher(entry.key)
            plan = StepPlan.make(entry, launch, decision, batch, self.size_of(batch))
            if plan is not None:
                self._plans[where] = plan

    def drop(self, key: ShapeKey) -> None:
        """Destroy one graph; its batches run in a larger bucket or eagerly."""
        self.entries.pop(key, None)
        self._plans.clear()
        self.backend.drop(key)
        self.context.forget_shape(key)

    def release(self) -> None:
        """Destroy this runner's graphs; steps run eagerly until :meth:`recapture`."""
        with self.context.arena.lock:
            self.entries.clear()
            self.missing.clear()
            self.keys.clear()
            self._plans.clear()
            self.released = True
            self.context.forget(self.phase)
            self.watch.forget()
            try:
                self.backend.cleanup()
            finally:
                self.context.release_memory()

    def capture(self) -> None:
        """Record a graph for every planned shape, largest first.

        Raises :class:`CaptureError` under ``on_failure="raise"``; graphs captured
        before stay usable.
        """
        with self.context.arena.lock, self.context.together(f"the capture of {self.phase} graphs"):
            if self.entries:  # what they have baked in is about to be forgotten
                self.release()
            self.released = False
            self.autocast = autocast_now(self.autocast_type)
            self.families = list(deciding.families(self))
            plan = CapturePlan.make(self)
            self.keys = {(key.size, key.family): key for key in (*plan.keys, *plan.dropped)}
            self.missing = dict.fromkeys(plan.dropped, (Reason.GRAPH_LIMIT, plan.why))
            with fresh_casts():
                capture_planned(self, plan)
        warn_if_short(self, [*plan.keys, *plan.dropped])

    # Running

    def _run_eagerly(self, batch: ForwardBatch, checked: CheckedBatch, decision: Decision) -> Any:
        self.stats.count(decision, self.size_of(batch))
        result = self.eager_runner.run(batch, checked.leaves)
        with torch.no_grad():
            return self.context.arena.copied_out(result) if self._view else copy_output(result)

    def _replay(self, key: ShapeKey, batch: ForwardBatch, checked: CheckedBatch) -> Any:
        entry = self.entries.get(key)
        if entry is None:
            with fresh_casts():
                entry = capture_on_use(self, key)
            if entry is None:
                reason, detail = self.missing[key]
                return self._run_eagerly(batch, checked, Decision(reason=reason, detail=detail))
            decision = agreeing.confirm(self, batch, Decision(key=key))
            if decision.key is None:
                return self._run_eagerly(batch, checked, decision)
        elif self.config.max_graphs is not None:
            self.entries[key] = self.entries.pop(key)  # the most recent is the last to be evicted
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self._launch(entry, batch, checked)
        return self._launch(entry, batch, checked)

    def _launch(self, entry: Entry, batch: ForwardBatch, checked: CheckedBatch) -> Any:
        key, requests, tokens = entry.key, batch.num_requests, batch.num_tokens
        self.context.arena.enter_stream()
        leaves = checked.leaves if requests else deciding.zero_rows(self, key, checked)
        entry.inputs.load(leaves, requests, tokens)
        if self.update_paths:
            self.backend.replay_updated(key, deciding.host_values(self, key, checked), batch)
        else:
            self.backend.replay(key, batch)
        decision = Decision(key=key)
        self.stats.count(decision, self.size_of(batch))
        self._plan_step(entry, decision, batch)
        return self._result(entry.output.head(requests, tokens))

    def _result(self, view: Any) -> Any:
        """What the caller gets; containers are new, since the cached ones must stay whole."""
        if not self._view:
            return copy_output(view)
        if isinstance(view, torch.Tensor):
            return view
        return tree.map_leaves(lambda _, leaf: own_value(leaf), view)

    # Capturing

    def place(self, key: ShapeKey, output: Any) -> GraphOutput:
        """Put a captured output's rows where all graphs of the pool put theirs."""
        return place_output(self, key, output)

    def bind(self, key: ShapeKey) -> BoundInputs:
        """The static inputs of *key*, filled."""
        return bind_inputs(self.spec, key, self.context.arena)
