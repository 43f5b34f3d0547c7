"""The short way through a step: what one exact size needs, worked out once.

A step whose batch matches a plan costs one pass over its fields and at most one
grouped copy. Anything unusual falls back to the runner's full check, which also
words the errors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import attrs
import torch

from graphplat.staging import Staging

if TYPE_CHECKING:
    from graphplat.batch import ForwardBatch
    from graphplat.buffers import BoundInputs
    from graphplat.report import Decision
    from graphplat.runners.graph import Entry

_UNITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WHOLE = (*_UNITS.values(), torch.int8)


@attrs.define(eq=False)
class StepPlan:
    """One graph, one exact number of requests and tokens."""

    entry: Entry
    launch: Callable[[Any], None]
    decision: Decision
    requests: int
    tokens: int
    size: int
    inputs: BoundInputs
    output: Any
    fields: tuple[tuple[str, torch.Tensor, torch.Size, torch.dtype, int, bool], ...]
    """Path, target, shape, type, index, and whether such tensors may hold values that their bytes are not."""
    unit: torch.dtype | None
    units: tuple[torch.Tensor, ...]
    """The targets as tensors of one integer type, so that mixed types share a launch."""
    device: torch.device
    on_host: bool
    staging: Staging | None

    @classmethod
    def make(
        cls,
        entry: Entry,
        launch: Callable[[Any], None],
        decision: Decision,
        batch: ForwardBatch,
        size: int,
    ) -> StepPlan | None:
        """The plan for *batch*'s size on *entry*, or ``None`` where its inputs need the full way."""
        bound, requests, tokens = entry.inputs, batch.num_requests, batch.num_tokens
        if any(f.fill == "last" or f.spec.varies or f.spec.optional for f in bound.fields):
            return None
        heads = bound.head(requests, tokens)
        fields = tuple(
            (path, view, view.shape, view.dtype, index, view.is_floating_point() or view.is_complex())
            for index, (path, view) in enumerate(heads.items())
        )
        unit, units = _units(list(heads.values()))
        device = bound.arena.device
        return cls(
            entry,
            launch,
            decision,
            requests,
            tokens,
            size,
            bound,
            entry.output.head(requests, tokens),
            fields,
            unit,
            units,
            device,
            device.type == "cpu",
            Staging.of(bound),
        )

    def load(self, inputs: Mapping[str, Any]) -> bool:
        """Bring *inputs* in and reset padded rows; ``False``, with nothing changed, for the full way."""
        try:
            found = self._fresh(inputs)
        except RuntimeError:  # a tensor without dense memory: the full way names it
            return False
        if found is None:
            return False
        fresh, addresses, hosts = found
        if hosts and not self.on_host:
            if self.staging is None or hosts != len(self.fields):
                return False
            self.staging.send(fresh, addresses, self.requests, self.tokens)
            return True
        self.inputs.reset_outside(self.requests, self.tokens)
        if fresh:
            self._copy(fresh)
        return True

    def _fresh(
        self, inputs: Mapping[str, Any]
    ) -> tuple[list[tuple[int, torch.Tensor]], list[int], int] | None:
        """What must be copied, where it lies, and how many lie on the host; ``None``: not as planned."""
        if len(inputs) != len(self.fields):
            return None
        fresh: list[tuple[int, torch.Tensor]] = []
        addresses: list[int] = []
        hosts = 0
        arena = self.inputs.arena
        for path, view, shape, dtype, index, tagged in self.fields:
            value = inputs.get(path)
            if value is view:
                continue
            if (
                type(value) is not torch.Tensor
                or value.dtype is not dtype
                or value.shape != shape
                or value.requires_grad
                or (tagged and (value.is_neg() or value.is_conj()))
            ):
                return None
            if value.is_cpu:
                hosts += 1
            elif value.device != self.device:
                return None
            address = value.data_ptr()
            if arena.start <= address < arena.stop:
                return None
            fresh.append((index, value))
            addresses.append(address)
        return fresh, addresses, hosts

    def _copy(self, fresh: list[tuple[int, torch.Tensor]]) -> None:
        if len(fresh) == 1:
            index, value = fresh[0]
            self.fields[index][1].copy_(value)
            return
        unit = self.unit
        if unit is None or self.on_host:
            torch._foreach_copy_([self.fields[i][1] for i, _ in fresh], [value for _, value in fresh])
            return
        targets, sources = [], []
        for index, value in fresh:
            if not value.is_contiguous():
                torch._foreach_copy_([self.fields[i][1] for i, _ in fresh], [v for _, v in fresh])
                return
            targets.append(self.units[index])
            sources.append(value if value.dtype is unit else value.view(unit))
        torch._foreach_copy_(targets, sources)


def _units(views: list[torch.Tensor]) -> tuple[torch.dtype | None, tuple[torch.Tensor, ...]]:
    """The widest whole-number type that every view can be read as, the commonest one of that width.

    Flags and real numbers are no such types: a kernel may change bytes that mean neither to them.
    """
    if not views or any(view.dim() == 0 or view.shape[-1] == 0 or not view.is_contiguous() for view in views):
        return None, ()
    width = min(view.element_size() for view in views)
    if width not in _UNITS:
        return None, ()
    narrow = [view.dtype for view in views if view.element_size() == width and view.dtype in _WHOLE]
    unit = max(narrow, key=narrow.count, default=_UNITS[width])
    with torch.inference_mode(False):
        return unit, tuple(view if view.dtype is unit else view.view(unit) for view in views)
