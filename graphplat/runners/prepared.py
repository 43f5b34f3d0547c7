"""What a capture starts from: static inputs that hold their fill values, and the batch made of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import attrs
import torch

from graphplat import tree
from graphplat.errors import CaptureError
from graphplat.runners.entry import check_inputs_kept, installed_tensors

if TYPE_CHECKING:
    from graphplat.batch import ForwardBatch
    from graphplat.buffers import BoundInputs
    from graphplat.keys import ShapeKey
    from graphplat.runners.graph import GraphRunner


@attrs.define(eq=False)
class Prepared:
    """The static inputs of one shape, and the dummy batch of them that is to be recorded."""

    runner: GraphRunner
    key: ShapeKey
    inputs: BoundInputs
    batch: ForwardBatch
    installed: dict[str, torch.Tensor]
    """The tensors that ``prepare_capture_batch`` put on the batch, by path."""
    _bytes: torch.Tensor
    """Of the inputs, as they were."""
    _writes: int

    @classmethod
    def make(cls, runner: GraphRunner, key: ShapeKey) -> Self:
        """Lay the inputs of *key* out, and let the runtime complete the batch.

        Raises :class:`CaptureError`, chained.
        """
        try:
            runner.eager_runner.row_axes(key)  # small eager runs; not possible inside a recording
            inputs = runner.bind(key)
            batch = runner.context.dummy_batch(key, inputs.views())
            before, given = batch.tensors(), dict(tree.walk(batch.inputs))
            runner.model_runner.prepare_capture_batch(batch)
            held, writes = inputs.packed.clone(), runner.context.arena.writes
        except Exception as error:
            raise runner.backend.error_for(
                CaptureError, "the capture could not be prepared", key, error
            ) from error
        check_inputs_kept(runner, key, given, batch)
        return cls(runner, key, inputs, batch, installed_tensors(before, batch), held, writes)

    def were_written(self) -> bool:
        """Whether the forward writes to its inputs; ask when it has run. Raises :class:`CaptureError`.

        Torch counts the writes of its own operators, which shows one that changed nothing; kernels of
        others need not count theirs.
        """
        now, before = self.inputs.packed, self._bytes
        if self.runner.context.arena.writes != self._writes or now.is_meta:  # of which nothing can be read
            return True
        try:
            return not torch.equal(now, before)
        except Exception as error:
            what = "the inputs could not be compared with what they were"
            raise self.runner.backend.error_for(CaptureError, what, self.key, error) from error
