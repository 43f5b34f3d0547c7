"""Deliberately broken runners, as a vendor's own may be; see :mod:`graphplat.testing.broken`."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import attrs
import msgspec
import torch

from graphplat import DecodeGraphRunner, EagerRunner, ForwardBatch, Platform, ShapeKey
from graphplat.backends import FullBackend
from graphplat.buffers import BoundInputs
from graphplat.testing.broken import FAULTS, Base, Fault, runner_fault


@runner_fault(test_padded_rows_hold_their_fill="AssertionError: padded rows of x after 5 rows")
class LostPadding(DecodeGraphRunner):
    """Leaves the rows of earlier batches in the padding."""

    def bind(self, key: ShapeKey) -> BoundInputs:
        """Inputs that are never reset."""
        bound = super().bind(key)

        class Unreset(BoundInputs):
            def _reset_outside(self, field: Any, extent: Any, *, foreign: bool) -> None:
                field.extent = extent

        return Unreset(**{name: getattr(bound, name) for name in ("arena", "key", "fields", "packed")})


@runner_fault(
    test_outputs_survive_later_steps="AssertionError: a kept result of 2 rows",
    test_threads_in_one_runner_never_mix="AssertionError: thread .*, turn ",
)
class SharedOutputs(DecodeGraphRunner):
    """Hands out views of the memory that the next step writes, and lets threads in together."""

    def execute(self, batch: ForwardBatch) -> Any:
        """Without the lock, and without the copy."""
        self.context.arena.lock = contextlib.nullcontext()  # type: ignore[assignment]
        return super().execute(batch)

    def _result(self, view: Any) -> Any:
        time.sleep(0.001)  # lets the other thread in
        return view


@runner_fault(
    test_every_output_comes_back_cut="AssertionError: shape .* field y",
    test_every_size_equals_the_reference="AssertionError: shape .* for 3 rows",
)
class UncutOutputs(DecodeGraphRunner):
    """Returns padded rows too."""

    def execute(self, batch: ForwardBatch) -> Any:
        """The whole bucket."""
        super().execute(batch)
        decision = self.stats.last
        assert decision is not None  # noqa: S101 - a step was just run
        assert decision.key is not None  # noqa: S101 - of a captured size
        return self.entries[decision.key].output.value


@runner_fault(test_nested_and_keyword_inputs_are_refreshed="AssertionError: step 0")
class FrozenNestedInputs(DecodeGraphRunner):
    """Copies only top-level tensors in."""

    def bind(self, key: ShapeKey) -> BoundInputs:
        """Inputs of which nested ones are never written."""
        bound = super().bind(key)

        class TopLevel(BoundInputs):
            def load(self, leaves: Any, requests: int, tokens: int) -> None:
                held = {f.path: f.static[:requests] for f in self.fields if f.path not in {"x"}}
                super().load({**leaves, **held}, requests, tokens)

        return TopLevel(**{name: getattr(bound, name) for name in ("arena", "key", "fields", "packed")})


@runner_fault(test_replays_read_fresh_inputs="AssertionError: a replay ran the model's Python")
class RunsPython(DecodeGraphRunner):
    """Runs the model again and calls it a replay."""

    def execute(self, batch: ForwardBatch) -> Any:
        """The right numbers, by the wrong way."""
        super().execute(batch)
        return self.eager_runner.forward(batch)


@runner_fault(test_a_bad_batch_changes_nothing="Failed: DID NOT RAISE .*GraphplatError")
class CastsInputs(DecodeGraphRunner):
    """Casts what has the wrong type, without a word."""

    def execute(self, batch: ForwardBatch) -> Any:
        """Anything goes."""
        batch.inputs["x"] = batch.inputs["x"].to(torch.float32)
        return super().execute(batch)


@runner_fault(test_weights_updated_in_place_are_seen="AssertionError: after the weight was replaced")
class IgnoresMovedWeights(DecodeGraphRunner):
    """Never looks whether a weight moved."""

    def capture(self) -> None:
        """Capture, and look away."""
        super().capture()
        self._watched = False
        self.config = msgspec.structs.replace(self.config, weights="off")


@runner_fault(test_release_and_recapture="AssertionError: graphs outlive their release")
class NeverReleases(DecodeGraphRunner):
    """Keeps its graphs and goes on replaying them."""

    def release(self) -> None:
        """Nothing."""


@runner_fault(test_capture_goes_from_large_to_small="AssertionError: assert .1, 2, 4, 8. == .8, 4, 2, 1.")
class SmallestFirst(DecodeGraphRunner):
    """Captures in the order that no pool can serve well."""

    def capture(self) -> None:
        """From small to large."""
        ladder, self.ladder = self.ladder, tuple(reversed(self.ladder))
        super().capture()
        self.ladder = ladder


@runner_fault(test_a_limit_on_graphs_keeps_both_ends="AssertionError: .* for a limit of 3")
class IgnoresLimit(DecodeGraphRunner):
    """Captures as many graphs as it likes."""

    def capture(self) -> None:
        """Every bucket."""
        capabilities = vars(self.platform).pop("capabilities", None)
        super().capture()
        if capabilities is not None:
            self.platform.capabilities = capabilities


@attrs.define(eq=False)
class _RetainingBackend(FullBackend):
    def capture_one(self, shape_key: Any, forward_fn: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs["capture_inputs"] = {"weight": self.context.model_runner.model.scale}
        return super().capture_one(shape_key, forward_fn, *args, **kwargs)


@attrs.define(eq=False)
class _ForgetfulBackend(FullBackend):
    def capture_one(self, shape_key: Any, forward_fn: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs["capture_inputs"] = None
        return super().capture_one(shape_key, forward_fn, *args, **kwargs)


def _with_backend(runner: DecodeGraphRunner, kind: type[FullBackend]) -> None:
    context = runner.context
    context.backends.remove(runner.backend)
    runner.backend = kind(
        platform=runner.platform, device=context.device, context=context, place=runner.place
    )
    context.backends.append(runner.backend)


@runner_fault(test_nothing_is_retained_without_need="AssertionError: assert .16, 16, 16, 16. == .0, 0, 0, 0.")
class RetainsWithoutNeed(DecodeGraphRunner):
    """Keeps tensors alive for graphs that somebody else owns."""

    def capture(self) -> None:
        """Capture through a backend that keeps too much."""
        _with_backend(self, _RetainingBackend)
        super().capture()


class ForgetsCaptureInputs(DecodeGraphRunner):
    """Does not keep capture-only tensors."""

    def capture(self) -> None:
        """Capture through a backend that keeps nothing."""
        _with_backend(self, _ForgetfulBackend)
        super().capture()


class WrongEagerRunner(EagerRunner):
    """Runs something else than the model's forward."""

    def forward(self, batch: ForwardBatch) -> Any:
        """Twice too much."""
        return super().forward(batch) * 2


def _without_graphs(base: Base) -> Base:
    class Broken(base, abstract=True):  # type: ignore[valid-type, misc, call-arg]
        capabilities = Platform.capabilities

    return Broken


FAULTS["WrongEagerRunner"] = Fault(
    "WrongEagerRunner",
    {"test_without_graphs_steps_run_eagerly": "AssertionError"},
    _without_graphs,
    eager_runner=WrongEagerRunner,
)
# A recorded graph of the host owns what it reads by itself; a device's does not.
FAULTS["ForgetsCaptureInputs"] = Fault(
    "ForgetsCaptureInputs",
    {"test_capture_only_tensors_live_as_long_as_the_graph": "AssertionError: 0 capture-only tensors"},
    lambda base: base,
    decode_runner=ForgetsCaptureInputs,
    needs="api",
)
