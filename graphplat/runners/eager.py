"""The eager runner: runs anything, warms kernels up, owns what graph runners share."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from graphplat import breaks, guard, tree
from graphplat.batch import ForwardBatch, Phase
from graphplat.buffers import bind_inputs, layout_bytes
from graphplat.errors import CaptureError
from graphplat.keys import ShapeKey
from graphplat.output_layout import OutputLayout, RowAxis
from graphplat.report import Decision, Reason, RunnerStats
from graphplat.runners.base import BaseRunner, BatchChecker, CheckedBatch, expect_batch
from graphplat.runners.context import RunnerContext

if TYPE_CHECKING:
    from graphplat.model_runner import ModelRunner
    from graphplat.platform import Platform


_EAGER = Decision(reason=Reason.PHASE_DISABLED, detail="this is the eager runner")
"""The answer of an eager runner that is asked beside a graph runner."""


class EagerRunner(BaseRunner):
    """Runs the model's own forward. Every fallback ends here."""

    def __init__(self, platform: Platform, model_runner: ModelRunner) -> None:
        self.context = RunnerContext.create(platform, model_runner)
        self.stats = RunnerStats()
        self._checkers: dict[Phase, BatchChecker] = {}

    @property
    def buckets(self) -> tuple[int, ...]:
        """No size has a graph here."""
        return ()

    def explain(self, batch: ForwardBatch) -> Decision:
        """Always eager, for the reason that left the phase of *batch* without a runner of its own."""
        self._check(batch)
        return self._decision(batch.phase)

    def execute(self, batch: ForwardBatch) -> Any:
        """Check *batch* and run the model's forward, in turn with the steps and captures of all runners."""
        with self.context.arena.lock:
            checked = self._check(batch)
            size = batch.num_requests if batch.phase is Phase.DECODE else batch.num_tokens
            self.stats.count(self._decision(batch.phase), size)
            return self.run(batch, checked.leaves)

    def _check(self, batch: ForwardBatch) -> CheckedBatch:
        try:
            phase = batch.phase
        except AttributeError as error:
            expect_batch(batch, Phase.DECODE, error)
            raise
        return self.checker(phase).check(batch)

    def _decision(self, phase: Phase) -> Decision:
        return self.context.without_graphs.get(phase, _EAGER)

    def run(self, batch: ForwardBatch, leaves: dict[str, Any]) -> Any:
        """Run a checked *batch*, which the caller counts."""
        device = self.context.device
        if device.type != "cpu" and any(
            isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu" for leaf in leaves.values()
        ):
            batch = _moved(batch, device)
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self.forward(batch)
        return self.forward(batch)

    def forward(self, batch: ForwardBatch) -> Any:
        """The model runner's forward, with *batch* as the live one."""
        with breaks.running(batch):
            return self.context.model_runner.forward(batch)

    def checker(self, phase: Phase) -> BatchChecker:
        """What checks batches of *phase*."""
        if phase not in self._checkers:
            runner = self.context.model_runner
            self._checkers[phase] = BatchChecker(
                phase, self.context.spec(phase), runner.device, runner.tokens_per_request
            )
        return self._checkers[phase]

    def warm_up(self, phases: Iterable[Phase] = tuple(Phase)) -> None:
        """Reserve the largest static buffers and run the largest batch of each of *phases* once.

        *phases* are those that will be captured. Random state is afterwards as before, also on failure.
        """
        keys = [key for phase in phases if (key := self.largest_key(phase)) is not None]
        if not keys:
            return
        self.context.arena.reserve(max(layout_bytes(self.context.spec(key.phase), key) for key in keys))
        with self.context.random_state_kept():
            for key in keys:
                self._run_first(key)

    def _run_first(self, key: ShapeKey) -> None:
        try:
            self._run_dummy(key)
        except Exception as error:
            if not guard.is_out_of_memory(error):
                where = guard.user_frame(error)
                raise CaptureError(
                    f"the first run of the largest batch failed: {type(error).__name__}: {error}"
                    + (f" (at {where})" if where else ""),
                    platform=self.context.platform.name,
                    phase=key.phase,
                    bucket=key.size,
                ) from error
            self.context.skip(key.phase, Reason.OUT_OF_MEMORY, f"warm-up: {error}", key)

    def largest_key(self, phase: Phase) -> ShapeKey | None:
        """The key of the largest bucket of *phase* with every optional input, or ``None``."""
        settings = self.context.model_runner.graph_config.phase(phase)
        ladder = settings.ladder(phase)
        if not ladder:
            return None
        spec = self.context.spec(phase)
        return self.make_key(phase, ladder[-1], None, spec.presence_sets()[0], _first_host(spec))

    def make_key(
        self,
        phase: Phase,
        size: int,
        variant: str | None,
        present: frozenset[str],
        host: tuple[tuple[str, Any], ...],
        *,
        requests: int | None = None,
    ) -> ShapeKey:
        """The key of bucket *size*, with *requests* or as many rows of requests as the bucket has."""
        spec = self.context.spec(phase)
        per = self.context.model_runner.tokens_per_request if phase is Phase.DECODE else 1
        return ShapeKey(
            phase=phase,
            size=size,
            requests=self.request_rows(phase, size) if requests is None else requests,
            tokens=size * per,
            tokens_per_request=per,
            variant=variant,
            present=tuple(sorted(present)),
            host=host,
            dtypes=tuple((path, str(t.dtype).removeprefix("torch.")) for path, t in spec.tensors.items()),
        )

    def request_rows(self, phase: Phase, size: int) -> int:
        """Rows of requests in bucket *size*; those of prefill follow ``max_requests``."""
        if phase is Phase.DECODE:
            return size
        return min(self.context.model_runner.graph_config.prefill.max_requests, size)

    def row_axes(self, key: ShapeKey) -> dict[str, RowAxis]:
        """The row axes of the outputs of *key*'s family."""
        return self.output_layout(key).axes

    def forget_outputs(self, key: ShapeKey) -> None:
        """Find the outputs of *key*'s family anew when next needed."""
        self.context.layouts.pop((key.phase, key.family), None)
        self.context.old_layouts.discard((key.phase, key.family))

    def output_layout(self, key: ShapeKey) -> OutputLayout:
        """What the outputs of *key*'s family are, found once by a few small eager runs.

        Raises :class:`CaptureError` where they depend on the batch in a way that no graph can repeat.
        """
        family = key.phase, key.family
        if family not in self.context.layouts:
            platform, device = self.context.platform, self.context.device
            probes = [
                self.make_key(
                    key.phase, size, key.variant, frozenset(key.present), key.host, requests=requests
                )
                for requests, size in self._probe_sizes(key)
            ]
            with self.context.random_state_kept():
                self._run_dummy(probes[0])  # what libraries allocate once is no table of the forward's
                before = platform.allocated_bytes(device)
                runs = [((probe.requests, probe.tokens), self._run_dummy(probe)) for probe in probes]
            self.context.layouts[family] = OutputLayout.infer(runs)
            self.context.old_layouts.discard(family)
            del runs
            # More or less than before: a table for each size, or one that follows the latest.
            if platform.allocated_bytes(device) != before:
                self.context.kept = "the forward's memory changed with the sizes of its first runs"
        return self.context.layouts[family]

    def _probe_sizes(self, key: ShapeKey) -> list[tuple[int, int]]:
        """Sizes that tell requests, tokens and features apart, within what the runtime holds.

        They follow the largest bucket, whichever is captured first: all buckets share the answer.
        """
        settings = self.context.model_runner.graph_config.phase(key.phase)
        size = max(key.size, *settings.ladder(key.phase))
        if key.phase is Phase.DECODE:
            most = min(3, size)
            return [(most, most), (max(1, most - 1), max(1, most - 1))]
        requests = self.request_rows(key.phase, size)
        if size >= 7 and requests >= 3:
            return [(3, 7), (2, 5)]
        few = min(2, requests, size)
        return [(few, size), (1, max(1, size - 1)), (1, size)]

    def _run_dummy(self, key: ShapeKey) -> Any:
        context = self.context
        bound = bind_inputs(context.spec(key.phase), key, context.arena)
        batch = context.dummy_batch(key, bound.views())
        context.model_runner.prepare_capture_batch(batch)
        with torch.no_grad(), context.forward_hooks.suspended():
            output = self.forward(batch)
        context.model_runner.post_warmup()
        return output


def _first_host(spec: Any) -> tuple[tuple[str, Any], ...]:
    return tuple((path, rule.capture_values[0]) for path, rule in spec.hosts.items() if not rule.update)


def _moved(batch: ForwardBatch, device: torch.device) -> ForwardBatch:
    """*batch* with every host tensor on *device*; the caller's batch is left alone."""
    moved: dict[str, Any] = tree.map_leaves(
        lambda _, leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, batch.inputs
    )
    clone = copy.copy(batch)  # a runtime's own subclass stays one
    clone.inputs = moved
    return clone
