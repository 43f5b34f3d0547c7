"""Whether padded rows change the results of a function, found on its example before anybody relies on it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import nn

from graphplat import tree
from graphplat.backends.numerics import TOLERANCES, Difference, tolerance
from graphplat.batch import Phase
from graphplat.buffers import bind_inputs
from graphplat.errors import CaptureError, GraphplatError
from graphplat.outputs import GraphOutput, copy_output

if TYPE_CHECKING:
    from graphplat.function_runner import FunctionRunner
    from graphplat.runners.eager import EagerRunner

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def in_training(model: nn.Module) -> list[str]:
    """The submodules of *model* that do in training mode what no inference wants, and what that is."""
    told = []
    for name, module in model.named_modules():
        described = f"{type(module).__name__} {name!r}" if name else type(module).__name__
        if module.training and isinstance(getattr(module, "running_mean", None), torch.Tensor):
            told.append(f"{described} normalises by its batch")
        elif module.training and isinstance(module, _DROPOUTS) and module.p > 0:
            told.append(f"{described} drops values at random")
    return told


@contextlib.contextmanager
def restored(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Put the contents of *tensors* back at the end."""
    copies = [tensor.detach().clone() for tensor in tensors]
    try:
        yield
    finally:
        with torch.inference_mode():  # the one mode that may write to either kind of tensor
            for tensor, copy in zip(tensors, copies, strict=True):
                if not torch.equal(tensor, copy):  # an expanded one is nowhere to be written
                    tensor.copy_(copy)


@attrs.define(eq=False)
class RowCheck:
    """Runs a captured function on a few rows of its example, alone and among padded rows.

    Both runs are eager, so that a difference can come from nothing else, and are not counted. Random
    states are as before afterwards.
    """

    runner: FunctionRunner
    eager: EagerRunner

    def run(self) -> None:
        """Raise :class:`CaptureError` where padded rows change the results of real ones."""
        sizes = self._sizes()
        if sizes is None:
            return
        try:
            context = self.eager.context
            with context.arena.lock, context.random_state_kept(), torch.random.fork_rng(devices=()):
                self._compare(*sizes)
        except GraphplatError:
            raise
        except Exception as error:
            raise self._error(
                f"the function failed on {sizes[0]} rows of its example: {type(error).__name__}: {error}",
                sizes[1],
                "Give an example that it can run, or check=False",
            ) from error

    def _sizes(self) -> tuple[int, int] | None:
        """Rows to take from the example, and the bucket to pad them to; ``None`` where none are padded.

        The fewer rows are real, the more the padded ones weigh. Set-up has run three and two rows, or fewer
        where the largest bucket is less, so that the function can do with these.
        """
        settings = self.runner.graph_config.decode
        ladder = settings.ladder(Phase.DECODE)
        thinned = settings.max_graphs is not None or settings.memory_budget_gb is not None
        if ladder == tuple(range(1, len(ladder) + 1)) and not (thinned and len(ladder) > 1):
            return None
        rows = min(self.runner.rows, 2 if ladder[-1] > 2 else 1)
        bucket = next((size for size in ladder if size >= 2 * rows), ladder[-1])
        return (rows, bucket) if rows else None

    def _compare(self, rows: int, bucket: int) -> None:
        limit = self._tolerance()
        exact = self._is_precise()
        before = self._random_states()
        alone, padded = self._run(rows, rows), self._run(rows, bucket)
        drew = not all(map(torch.equal, before, self._random_states()))
        if drew:
            return  # a draw for more rows gives other numbers to each
        for path in alone:
            found = self._apart(alone, padded, path, limit, exact=exact)
            # What differs between two runs of the same rows says nothing.
            if found and not self._apart(alone, self._run(rows, rows), path, limit, exact=exact):
                raise self._influence(path, rows, bucket, f"{found}, {limit:.2g} allowed")

    @staticmethod
    def _apart(
        expected: dict[str, Any], found: dict[str, Any], path: str, limit: float, *, exact: bool
    ) -> str:
        """How far the output at *path* is from what is expected, if it is further than rounding explains.

        Whole numbers count where they are *exact*: with few bits near ties turn, and they with them.
        """
        apart = Difference.between({path: expected[path]}, {path: found[path]})
        if apart.relative > limit:
            return f"by {apart.relative:.2g} of the largest value"
        return "in whole numbers" if apart.flipped and exact else ""

    def _run(self, rows: int, size: int) -> dict[str, Any]:
        """The results of the example's first *rows*, run among as many padded rows as make *size*."""
        context = self.eager.context
        spec = context.spec(Phase.DECODE)
        host = tuple((path, rule.capture_values[0]) for path, rule in spec.hosts.items())
        key = self.eager.make_key(Phase.DECODE, size, None, frozenset(), host)
        axes = self.eager.row_axes(key)  # first: small runs in the same memory may find them
        bound = bind_inputs(spec, key, context.arena)
        leaves: dict[str, Any] = {}
        for path, leaf in tree.walk(self.runner.example):
            if path in spec.tensors:
                held = spec.tensors[path].shape(rows, rows)
                leaves[path] = leaf.detach()[tuple(slice(0, most) for most in held)]
        with torch.no_grad():
            bound.load(leaves, rows, rows)
            output = self.eager.forward(context.dummy_batch(key, bound.views()))
            real = GraphOutput(output, axes, key).head(rows, rows)
            return dict(tree.walk(copy_output(real)))

    def _tolerance(self) -> float:
        """What rounding may do: kernels for another number of rows add in another order."""
        device = self.runner.device
        relative = tolerance(self._tensors(), device)
        if device.type == "cpu" and torch.get_float32_matmul_precision() == "highest":
            return relative
        # Devices may multiply in fewer bits, and do so for some sizes and not for others.
        return max(relative, TOLERANCES[torch.float16])

    def _is_precise(self) -> bool:
        """Whether near ties are so rare that whole numbers which differ are taken for an influence.

        Not bound to the device, as rounding is: where single precision was asked for, a wrong refusal, which
        names its remedy, is less than rows that influence each other unseen.
        """
        few = tolerance(self._tensors(), self.runner.device) >= TOLERANCES[torch.float16]
        return not few and torch.get_float32_matmul_precision() == "highest"

    def _tensors(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return dict(tree.walk(self.runner.example)), dict(self.runner.model.named_parameters())

    def _random_states(self) -> list[torch.Tensor]:
        own = self.eager.context.platform.rng_state(self.runner.device)
        return [torch.get_rng_state()] + ([] if own is None else [own])

    def _influence(self, path: str, rows: int, bucket: int, apart: str) -> CaptureError:
        where = f"output {path!r}" if path else "the output"
        training = "; ".join(in_training(self.runner.model))
        return self._error(
            f"rows influence each other: {rows} of the example's give other results alone than padded "
            f"to {bucket}; {where} differs {apart}",
            bucket,
            (f"In training mode {training}: call eval(). " if training else "")
            + "Mask padded rows, which hold the fill values; or give each size from 1 on a bucket "
            "of its own; or set check=False, if such results will do",
            field=path or None,
        )

    def _error(self, what: str, bucket: int, hint: str, field: str | None = None) -> CaptureError:
        name = self.eager.context.platform.name
        return CaptureError(what, platform=name, phase=Phase.DECODE, bucket=bucket, field=field, hint=hint)
