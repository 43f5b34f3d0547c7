"""Compiled forwards, and the recording that calls one where kernels cannot be recorded."""

from __future__ import annotations

import contextlib
import types
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import attrs
import torch

from graphplat import guard, tree
from graphplat.errors import ConfigError

if TYPE_CHECKING:
    from graphplat.backends.compiled import CompiledForward
    from graphplat.batch import ForwardBatch


_ANY_NUMBER = 1 << 16
_TREES = "triton.cudagraphs"


def check_options(options: Mapping[str, Any]) -> None:
    """Raise :class:`ConfigError` for options that torch's compiler does not know, or that ask for its graphs.

    Loads the compiler, if there are any.
    """
    if options.get(_TREES):
        raise ConfigError(
            f"{_TREES!r} asks for the compiler's own graphs",
            field="compile_options",
            hint="Leave it out: graphs of this library hold the kernels",
        )
    if not options:
        return
    try:
        torch.compile(lambda: None, options=dict(options))
    except RuntimeError as error:
        what = str(error).partition(", known options")[0]  # hundreds of names follow
        hint = "torch._inductor.list_options() names them all"
        raise ConfigError(f"the compiler refuses: {what}", field="compile_options", hint=hint) from error


@attrs.define(eq=False)
class Kernels:
    """A forward under ``torch.compile``; compiles when it meets a batch that it has no kernels for."""

    function: Callable[[ForwardBatch], Any]
    dynamic: bool
    whole: bool
    """Compiled as one graph; otherwise Python may run between pieces of it."""
    compiled_now: bool = False
    """Whether the compiler ran since graphs were last destroyed."""

    @classmethod
    def make(
        cls,
        forward: Callable[[ForwardBatch], Any],
        options: Mapping[str, Any],
        *,
        dynamic: bool,
        whole: bool = True,
    ) -> Kernels:
        """Kernels of *forward* with *options* of the compiler, nothing compiled yet.

        The compiler's own graph trees are off: a graph of ours must hold the kernels.
        Its caches on disk are as the process has them, on by default.
        """

        def step(batch: ForwardBatch) -> Any:
            return forward(batch)

        compiled = torch.compile(
            own_code(step),
            fullgraph=whole,
            dynamic=None if dynamic else False,
            options={**options, _TREES: False},
        )
        return cls(compiled, dynamic, whole)

    def __call__(self, batch: ForwardBatch) -> Any:
        """Run *batch*."""
        if self.dynamic:
            self._mark(batch)
        return self.function(batch)

    def without_limit(self) -> contextlib.AbstractContextManager[Any]:
        """Where it compiles pieces, let the compiler run for any number of sizes, and fail, not give up.

        It counts by code object, and the pieces of all sizes share those of the forward. Past its limit it
        would run them as they are without a word.
        """
        if self.whole:
            return contextlib.nullcontext()
        limits = dict.fromkeys(("recompile_limit", "accumulated_recompile_limit"), _ANY_NUMBER)
        context: contextlib.AbstractContextManager[Any] = torch._dynamo.config.patch(
            {**limits, "fail_on_recompile_limit_hit": True}
        )
        return context

    def _mark(self, batch: ForwardBatch) -> None:
        """Let the first dimension of every input vary; nothing is promised, so nothing is violated."""
        counts = {batch.num_requests, batch.num_requests + 1, batch.num_tokens}
        for _, leaf in tree.walk(batch.inputs):
            if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] in counts:
                torch._dynamo.maybe_mark_dynamic(leaf, 0)


def own_code(function: Any) -> types.FunctionType:
    """A twin of *function* that the compiler takes for another one.

    It counts and keeps its results by code object, which all closures of one definition share.
    """
    return types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )


@attrs.frozen
class _Modes:
    """What torch's compiler guards on beside the tensors."""

    inference: bool
    grad: bool
    autocast: torch.dtype | None

    @classmethod
    def now(cls, device: torch.device) -> _Modes:
        autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
        return cls(torch.is_inference_mode_enabled(), torch.is_grad_enabled(), autocast)

    def enter(self, device: torch.device, stack: contextlib.ExitStack) -> None:
        stack.enter_context(torch.inference_mode(self.inference))
        stack.enter_context(torch.set_grad_enabled(self.grad))
        stack.enter_context(
            torch.autocast(device.type, enabled=self.autocast is not None, dtype=self.autocast)
        )


@attrs.define(eq=False)
class CompiledCall:
    """A compiled forward as a recording: a replay calls it on the static inputs.

    Results move into the memory that the capture placed them in. It runs in the modes
    of the capture (inference, autocast), whatever the caller's are.
    """

    forward: CompiledForward | None
    targets: tuple[tuple[str, torch.Tensor], ...]
    device: torch.device
    modes: _Modes

    @classmethod
    def make(cls, forward: CompiledForward, placed: Any, device: torch.device) -> CompiledCall:
        """The recording of *forward*, whose results lie in *placed*."""
        targets = ((path, leaf) for path, leaf in tree.walk(placed) if isinstance(leaf, torch.Tensor))
        return cls(forward, tuple(targets), device, _Modes.now(device))

    @property
    def memory_bytes(self) -> int:
        """Nothing is held between replays but the outputs."""
        return 0

    def replay(self) -> None:
        """Run once more."""
        forward = self.forward
        if forward is None:
            raise RuntimeError("this recording was reset")
        frames = guard.compiled_frames()
        if _Modes.now(self.device) == self.modes:
            fresh = forward.again()
        else:
            with contextlib.ExitStack() as stack:
                self.modes.enter(self.device, stack)
                fresh = forward.again()
        found = {"": fresh} if isinstance(fresh, torch.Tensor) else dict(tree.walk(fresh))
        with torch.inference_mode():  # the one mode that may write to either kind of tensor
            for path, target in self.targets:
                if found[path].data_ptr() != target.data_ptr():
                    target.copy_(found[path])
        if guard.compiled_frames() != frames:
            warnings.warn(
                "the compiler ran during a replay: what the forward depends on has changed since capture, "
                "the number of threads for example",
                RuntimeWarning,
                stacklevel=2,
            )

    def launch(self, batch: ForwardBatch | None) -> None:
        """Replay for a live batch, which was copied into the static inputs."""
        del batch
        self.replay()

    def reset(self) -> None:
        """Let go of everything."""
        self.forward, self.targets = None, ()
