"""What all runners of one model runner share."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, cast

import attrs
import torch

from graphplat import guard
from graphplat.arena import StaticArena
from graphplat.batch import ForwardBatch, Phase
from graphplat.errors import ContractError
from graphplat.inputs import InputSpec
from graphplat.output_layout import OutputLayout
from graphplat.outputs import GraphSharedOutput
from graphplat.peers import Cost, PeerAgreement
from graphplat.report import Decision, Reason, ShapeReport, SkipReport
from graphplat.runners.streams import StreamLease

if TYPE_CHECKING:
    from graphplat.backends.base import CaptureBackend
    from graphplat.keys import ShapeKey
    from graphplat.model_runner import ModelRunner
    from graphplat.platform import Platform
    from graphplat.registry import PlatformHooks
    from graphplat.runners.graph import GraphRunner


@attrs.define(eq=False)
class ForwardHooks:
    """The runtime's forward hooks, which can be taken off while a graph is recorded.

    All set-ups of one runtime share one, so that a second set-up does not put the hooks on twice.
    """

    _model_runner: weakref.ref[ModelRunner]
    _handles: list[Any] = attrs.field(factory=list)
    registered: bool = False

    @classmethod
    def of(cls, model_runner: ModelRunner) -> ForwardHooks:
        """Those of *model_runner*; they are known as long as it lives, since nothing is written onto it."""
        found = _hooks_of.get(id(model_runner))
        if found is None:
            found = _hooks_of[id(model_runner)] = cls(weakref.ref(model_runner))
            weakref.finalize(model_runner, _hooks_of.pop, id(model_runner), None).atexit = False
        return found

    def register(self) -> None:
        """Put every hook on, or none: ``AttributeError`` where the model lost the named submodule."""
        model_runner = cast("ModelRunner", self._model_runner())  # alive: a context of it asks
        found = [(model_runner.model.get_submodule(name), hook) for name, hook in model_runner.forward_hooks]
        self.remove()
        self._handles = [module.register_forward_hook(hook) for module, hook in found]
        self.registered = True

    def remove(self) -> None:
        """Take every hook off."""
        for handle in self._handles:
            handle.remove()
        self._handles, self.registered = [], False

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Keep the hooks off, so that none is traced into a graph."""
        if not self.registered:
            yield
            return
        self.remove()  # a suspension inside this one finds none and puts none back on
        try:
            yield
        finally:
            self.register()


_hooks_of: dict[int, ForwardHooks] = {}


@attrs.define(eq=False)
class RunnerContext:
    """Made by the eager runner, then shared: platform, memory, stream, pool, report."""

    platform: Platform
    model_runner: ModelRunner
    arena: StaticArena
    forward_hooks: ForwardHooks
    shared_output: GraphSharedOutput
    hooks: PlatformHooks | None = None
    peers: PeerAgreement | None = None
    shapes: list[ShapeReport] = attrs.field(factory=list)
    skipped: list[SkipReport] = attrs.field(factory=list)
    estimates: dict[Phase, int] = attrs.field(factory=dict)
    """Bytes that the graphs of a phase were expected to take."""
    layouts: dict[Any, OutputLayout] = attrs.field(factory=dict)
    old_layouts: set[Any] = attrs.field(factory=set)
    """The families whose layout was found before the present capture, and has met no output of it."""
    """Per phase and family: what its outputs are."""
    backends: list[CaptureBackend] = attrs.field(factory=list)
    kept: str = ""
    """What showed that first runs at a size may leave memory allocated, such as a table made for it."""
    pool_is_spoilt: bool = False
    """Whether the forward keeps memory in the pool, to which graphs recorded before may write."""
    runners: list[GraphRunner] = attrs.field(factory=list)
    """All that recorded graphs, or were to, in the order in which they began."""
    symmetric_memory: Any = None
    refusals: dict[Phase, tuple[Reason, str] | None] = attrs.field(factory=dict)
    """Per phase: why it gets no graphs, asked for once."""
    without_graphs: dict[Phase, Decision] = attrs.field(factory=dict)
    """Per phase that was handed to the eager runner: what that one answers to its batches."""
    _specs: dict[Phase, InputSpec] = attrs.field(factory=dict)
    _stream: StreamLease | None = None
    _pool: Any = None

    @classmethod
    def create(cls, platform: Platform, model_runner: ModelRunner) -> RunnerContext:
        """An empty context; touches no device."""
        group = model_runner.process_group
        return cls(
            platform,
            model_runner,
            StaticArena(platform, model_runner.device),
            ForwardHooks.of(model_runner),
            GraphSharedOutput(),
            peers=None if group is None else PeerAgreement(group),
        )

    @property
    def device(self) -> torch.device:
        """The device of the model runner."""
        return self.model_runner.device

    @property
    def stream(self) -> Any:
        """The one stream that everything is captured on; taken when first needed."""
        if self._stream is None:
            self._stream = StreamLease.take(self.platform, self.arena.device)
        return self._stream.stream

    @property
    def pool(self) -> Any:
        """The one pool of all graphs, or ``None`` where graphs cannot share."""
        if self._pool is None and self.platform.capabilities.shared_pool:
            self._pool = self.platform.graph_pool()
        return self._pool

    @contextlib.contextmanager
    def random_state_kept(self) -> Iterator[None]:
        """Give the device's generator and those of the runtime back the states they have now."""
        state = self.platform.rng_state(self.device)
        private = [(generator, generator.get_state()) for generator in self.model_runner.generators]
        try:
            yield
        finally:
            if state is not None:
                self.platform.set_rng_state(self.device, state)
            for generator, kept in private:
                generator.set_state(kept)

    def renew_pool(self) -> None:
        """Capture into a new pool from now on; graphs in the old one keep it alive."""
        self._pool = None

    def together(self, where: str) -> AbstractContextManager[None]:
        """Run a body on all ranks or, where it fails on one, on none; nothing without peers."""
        return contextlib.nullcontext() if self.peers is None else self.peers.together(where)

    def stage(self, where: str, cost: Cost | None = None) -> AbstractContextManager[None]:
        """Run a part of a capture whose failure all ranks learn of; nothing without peers."""
        return contextlib.nullcontext() if self.peers is None else self.peers.stage(where, cost)

    @property
    def counts_pool(self) -> bool:
        """Whether bytes are measured as growth of a pool that graphs share."""
        return self.platform.capabilities.shared_pool and self.platform.capabilities.memory_counters

    def shapes_of(self, phase: Phase) -> list[ShapeReport]:
        """What was captured of *phase*, in order."""
        return [shape for shape in self.shapes if shape.key.phase is phase]

    @property
    def live_graphs(self) -> int:
        """Device graphs that all runners hold now."""
        return sum(backend.live_graphs for backend in self.backends)

    def release_all(self, error: BaseException) -> None:
        """Destroy the graphs of every runner because of *error*; what fails here is noted on it."""
        for runner in self.runners:
            try:
                runner.release()
            except Exception as cleanup:  # noqa: BLE001 - the first error is the one to report
                what = f"{type(cleanup).__name__}: {cleanup}"
                error.add_note(f"releasing {runner.phase} graphs failed too: {what}")

    def release_memory(self) -> None:
        """Let go of the pool, the shared outputs and the stream once no graph is left."""
        if self.live_graphs:
            return
        self.renew_unused_pool()
        if self._stream is not None:
            self._stream.give_back()
            self._stream = None

    def renew_unused_pool(self) -> None:
        """Take a new pool if no graph is in this one: devices forget a pool with its last graph.

        Its memory goes back to the device, since no other pool could use it.
        """
        if self.live_graphs:
            return
        self.shared_output.release()
        if self._pool is not None:
            pool, self._pool = self._pool, None
            self.platform.release_pool(pool)
            with guard.CAPTURE_LOCK:  # not while another thread captures
                self.platform.empty_cache()

    def spec(self, phase: Phase) -> InputSpec:
        """The input spec of *phase*, asked for once."""
        if phase not in self._specs:
            spec = self.model_runner.input_spec(phase)
            if not isinstance(spec, InputSpec):
                raise ContractError(
                    f"{type(self.model_runner).__qualname__}.input_spec({phase}) must return an InputSpec, "
                    f"found {type(spec).__name__}"
                )
            self._specs[phase] = spec
        return self._specs[phase]

    def dummy_batch(self, key: ShapeKey, tensors: dict[str, torch.Tensor]) -> ForwardBatch:
        """A batch of *key*'s size on *tensors*, with host values at their worst case."""
        spec = self.spec(key.phase)
        leaves: dict[str, Any] = dict(tensors)
        host = dict(key.host)
        for path, rule in spec.hosts.items():
            if rule.update:
                leaves[path] = [rule.fill] * rule.rows(key.requests, key.tokens)
            else:
                leaves[path] = host[path]
        return ForwardBatch(
            phase=key.phase,
            num_requests=key.requests,
            num_tokens=key.tokens,
            inputs=spec.build(leaves),
            variant=key.variant,
        )

    def host_fills(self, key: ShapeKey) -> dict[str, list[int]]:
        """The updatable host values that *key* is captured with."""
        hosts = self.spec(key.phase).hosts
        return {
            path: [rule.fill] * rule.rows(key.requests, key.tokens)
            for path, rule in hosts.items()
            if rule.update
        }

    def forget(self, phase: Phase) -> None:
        """Drop what was noted about *phase*, whose graphs are gone."""
        self.shapes = [shape for shape in self.shapes if shape.key.phase is not phase]
        self.skipped = [skip for skip in self.skipped if skip.phase is not phase]
        self.estimates.pop(phase, None)
        # The runtime may return something else by the next capture; if it does, the small runs come again.
        self.old_layouts |= {family for family in self.layouts if family[0] is phase}
        if self.peers is not None:  # where one rank alone would find out
            self.layouts = {family: found for family, found in self.layouts.items() if family[0] is not phase}

    def forget_shape(self, key: ShapeKey) -> None:
        """Drop what was noted about the graph of *key*, which is gone."""
        self.shapes = [shape for shape in self.shapes if shape.key != key]

    def skip(self, phase: Phase, reason: Reason, detail: str, key: ShapeKey | None = None) -> None:
        """Note something that was asked for and has no graph."""
        self.skipped.append(SkipReport(phase=phase, reason=reason, detail=detail, key=key))
