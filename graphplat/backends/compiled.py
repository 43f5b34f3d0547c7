"""The ``compiled`` backend: the compiler's kernels inside graphs of our own.

The forward is compiled for all sizes at once where dynamic shapes allow it, else for each size, always
outside a capture, and then recorded like any other. On a device with streams a replay launches one
graph of fused kernels. Where a graph is a list of operators, the compiler's kernels cannot be seen by
the recorder; there the compiled function itself is the recording, run on the static inputs.

Compiled kernels round differently. Each captured size is compared with the eager forward; the
difference allowed is :func:`graphplat.backends.numerics.tolerance`, or the setting ``tolerance``.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import attrs
import torch

from graphplat import breaks, guard, tree
from graphplat.backends.base import CapturedShape
from graphplat.backends.full import FullBackend
from graphplat.backends.kernels import CompiledCall, Kernels
from graphplat.backends.numerics import Difference, tolerance
from graphplat.errors import CaptureError
from graphplat.outputs import storages

if TYPE_CHECKING:
    from graphplat.batch import ForwardBatch
    from graphplat.config import PhaseConfig
    from graphplat.keys import ShapeKey
    from graphplat.outputs import GraphOutput


@attrs.define(eq=False)
class CompiledForward:
    """One shape's forward: the compiled one when called, with the eager one at hand."""

    eager: Callable[[ForwardBatch], Any]
    batch: ForwardBatch
    kernels: Kernels | None = None

    def __call__(self) -> Any:
        """Run the compiled forward on the batch to capture."""
        return self.run(self.batch)

    def again(self) -> Any:
        """Run on the batch to capture once more, whose tensors are known to the compiler."""
        assert self.kernels is not None  # noqa: S101 - it was captured
        with breaks.running(self.batch):
            return self.kernels.function(self.batch)

    def run(self, batch: ForwardBatch) -> Any:
        """Run the compiled forward on *batch*."""
        if self.kernels is None:
            raise CaptureError("nothing was compiled", hint="Pass warm-up first")
        with breaks.running(batch):
            return self.kernels(batch)


@attrs.define(eq=False)
class CompiledBackend(FullBackend):
    """Compiles a forward, and records the kernels as a single graph."""

    name: ClassVar[str] = "compiled"
    needs: ClassVar[tuple[str, ...]] = ("graph_capture", "compiled")
    prepares: ClassVar[str | None] = "compiling"
    _kernels: dict[Any, Kernels] = attrs.field(factory=dict)
    _sized: set[Any] = attrs.field(factory=set)
    """Families whose kernels do not serve all sizes."""
    _notes: list[str] = attrs.field(factory=list)

    def bind(
        self, shape_key: ShapeKey, forward: Callable[[ForwardBatch], Any], batch: ForwardBatch
    ) -> Callable[[], Any]:
        """The forward of *batch*, to be compiled when it is warmed up."""
        del shape_key
        return CompiledForward(forward, batch)

    def capture_one(
        self,
        shape_key: ShapeKey,
        forward_fn: Callable[[], Any],
        capture_inputs: Mapping[str, torch.Tensor] | None = None,
        post_warmup_hook: Callable[[], None] | None = None,
    ) -> CapturedShape:
        """Compile *forward_fn*, compare it with eager, and record it.

        *forward_fn* comes from :meth:`bind`. Raises :class:`CaptureError`, chained, if it
        cannot be compiled, or differs from eager by more than is allowed.
        """
        if not isinstance(forward_fn, CompiledForward):
            raise CaptureError(
                "the compiled backend needs the batch beside the forward",
                platform=self.platform.name,
                phase=shape_key.phase,
                bucket=shape_key.size,
                hint="Make forward_fn with bind()",
            )
        self._notes.clear()
        captured = super().capture_one(shape_key, forward_fn, capture_inputs, post_warmup_hook)
        captured = attrs.evolve(captured, note="; ".join(self._notes))
        self.captured[shape_key] = captured
        return captured

    def cleanup(self) -> None:
        """Destroy every graph; compiled kernels stay, and serve another capture if nothing changed."""
        super().cleanup()
        for kernels in self._kernels.values():
            kernels.compiled_now = False

    # Steps

    def _try_cold(self, key: ShapeKey, forward_fn: Callable[[], Any]) -> tuple[Any, str]:
        """Never: a size may need the compiler, and loads kernels at its first run."""
        del key, forward_fn
        return None, ""

    def _warm_up(
        self, key: ShapeKey, forward_fn: Callable[[], Any], post_warmup_hook: Callable[[], None] | None
    ) -> float:
        """Compile, run the very tensors of the capture, and compare with eager."""
        assert isinstance(forward_fn, CompiledForward)  # noqa: S101 - capture_one() checked
        started = time.perf_counter()
        try:
            probe = _probe(forward_fn.batch)
            expected = _kept(forward_fn.eager(probe))
            self._compile(key, forward_fn)
            self._compare(key, forward_fn, probe, expected)
            if post_warmup_hook is not None:
                post_warmup_hook()
        except CaptureError:
            raise
        except Exception as error:
            raise self.error_for(CaptureError, "the forward could not be compiled", key, error) from error
        self._warmed = True
        return time.perf_counter() - started

    def _compile(self, key: ShapeKey, forward: CompiledForward) -> None:
        """Give *forward* kernels that fit *key* and have run it once."""
        started, frames = time.perf_counter(), guard.compiled_frames()
        # A dimension of one is always compiled as such.
        shared = self._config(key).compile == "once" and key.size > 1 and key.family not in self._sized
        if shared and not self._run_shared(key, forward):
            self._sized.add(key.family)
            shared = False
        if not shared:
            self._run_sized(key, forward)
        if guard.compiled_frames() != frames:
            self._notes.append(f"compiled in {time.perf_counter() - started:.1f} s")

    def _run_shared(self, key: ShapeKey, forward: CompiledForward) -> bool:
        """Run with kernels for all sizes; ``False`` where they do not exist."""
        kernels = self._kernels.get((key.family, None))
        if kernels is None:
            kernels = self._make(key, dynamic=True)
            self._kernels[key.family, None] = kernels
        forward.kernels = kernels
        frames = guard.compiled_frames()
        try:
            forward()
        except Exception as error:
            if guard.is_out_of_memory(error):
                raise
            self._notes.append(f"compiled for this size alone, since dynamic shapes failed: {_brief(error)}")
            return False
        if guard.compiled_frames() != frames:
            if kernels.compiled_now:
                self._notes.append("compiled for each size, since the forward depends on its size")
                return False
            kernels.compiled_now = True
        return True

    def _run_sized(self, key: ShapeKey, forward: CompiledForward) -> None:
        """Run with kernels for this size alone, in pieces where the forward has Python between them."""
        where = (key.family, key.size)
        forward.kernels = self._kernels.get(where)
        if forward.kernels is None:
            forward.kernels = self._make(key, dynamic=False)
        try:
            with forward.kernels.without_limit():
                forward()
        except Exception as error:
            if guard.is_out_of_memory(error) or not forward.kernels.whole:
                raise
            self._notes.append(f"compiled in pieces: {_brief(error)}")
            forward.kernels = self._make(key, dynamic=False, whole=False)
            with forward.kernels.without_limit():
                forward()
        self._kernels[where] = forward.kernels

    def _make(self, key: ShapeKey, **how: bool) -> Kernels:
        """Kernels for the phase of *key*, nothing compiled yet."""
        return Kernels.make(self.context.model_runner.forward, self._config(key).compile_options, **how)

    def _compare(
        self, key: ShapeKey, forward: CompiledForward, probe: ForwardBatch, expected: Mapping[str, Any]
    ) -> None:
        """Note how far compiled results are from *expected*; raises beyond the tolerance."""
        output = forward.run(probe)
        self._returned = storages(output)
        found = Difference.between(expected, _kept(output))
        allowed = self._config(key).tolerance or tolerance(
            [expected, probe.tensors(), dict(self.context.model_runner.model.named_parameters())],
            self.device,
        )
        if found.relative > allowed or found.flipped:
            again = Difference.between(expected, _kept(forward.eager(probe)))
            if again.relative > allowed or again.flipped:
                self._notes.append("not compared with eager, whose results differ from run to run")
                return
        if found.relative > allowed:
            raise CaptureError(
                f"compiled results differ from eager ones by {found.relative:.2g} of the largest value "
                f"in output {found.path or 'of the forward'}; {allowed:.2g} is allowed",
                platform=self.platform.name,
                phase=key.phase,
                bucket=key.size,
                hint='Raise tolerance, use the backend "full", or set on_failure="eager"',
            )
        note = f"differs from eager by {found.relative:.2g} of the largest value, {allowed:.2g} allowed"
        if found.flipped:
            note += f"; {found.flipped} of {found.integers} integer results differ"
        self._notes.append(note)

    def _config(self, key: ShapeKey) -> PhaseConfig:
        return self.context.model_runner.graph_config.phase(key.phase)

    # Recording

    def _record(self, shape_key: ShapeKey, forward_fn: Callable[[], Any]) -> tuple[Any, GraphOutput]:
        assert isinstance(forward_fn, CompiledForward)  # noqa: S101 - capture_one() checked
        if self.platform.capabilities.executes_in_capture:
            output = self.place(shape_key, forward_fn())
            return CompiledCall.make(forward_fn, output.value, self.device), output

        def forward_without_compiler() -> Any:
            frames = guard.compiled_frames()
            output = forward_fn()
            if guard.compiled_frames() != frames:
                raise CaptureError(
                    "the compiler ran inside the capture, though the same tensors were warmed up",
                    hint="Something that the forward depends on changes from call to call",
                )
            return output

        return super()._record(shape_key, forward_without_compiler)

    def _launcher(self, captured: CapturedShape) -> Callable[[ForwardBatch | None], None]:
        if isinstance(captured.recording, CompiledCall):
            return captured.recording.launch
        return super()._launcher(captured)


def _probe(batch: ForwardBatch) -> ForwardBatch:
    """*batch* on tensors of its own, whose real numbers are no zeros.

    Whole numbers stay what padded rows hold: any other might be no valid index. Real ones lie between
    0.5 and 1.5, which suits probabilities, temperatures and activations alike.
    """
    generator = torch.Generator().manual_seed(0)

    def fresh(_: str, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if not leaf.is_floating_point():
            return leaf.clone()
        drawn = torch.rand(leaf.shape, generator=generator, device="cpu") + 0.5
        return drawn.to(leaf.device, leaf.dtype)

    probe = copy.copy(batch)
    probe.inputs = tree.map_leaves(fresh, batch.inputs)
    return probe


def _kept(output: Any) -> dict[str, Any]:
    """The output's leaves by path, safe from the next run."""
    return {
        path: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for path, leaf in tree.walk(output)
    }


def _brief(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
