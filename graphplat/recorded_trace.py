"""The recorder: sees every operator of one capturing thread and turns what it saw into calls for replay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from graphplat import recorded_ops as ops
from graphplat.errors import CaptureError, HostReadError
from graphplat.recorded_calls import Call, Recording, bind
from graphplat.recorded_memory import RecordedPool, SlotTable


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs operators as usual and records each one that does work on CPU memory.

    Composite operators are taken apart first, since under ``inference_mode`` they arrive whole. The first
    CaptureError spoils the recording even if the forward swallows it; later operators then run unrecorded.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.failure: CaptureError | None = None
        self._failed_at: str | None = None
        self._slots = SlotTable()
        self._calls: list[Call] = []
        self._accepted: dict[Any, bool] = {}
        self._depth = 0
        self._resolved: StorageWeakRef | None = None

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run *func*, and record it unless the recording is spoilt."""
        kwargs = kwargs or {}
        if self.failure is not None or ops.is_ignored(func):
            return func(*args, **kwargs)
        try:
            ops.check_host_read(func, args, kwargs)
            self._check_handover(func, args)
        except CaptureError as error:
            self._spoil(error)
            raise
        if ops.is_composite(func):
            return self._taken_apart(func, args, kwargs)
        result = func(*args, **kwargs)
        try:
            self._record(func, args, kwargs, result)
        except CaptureError as error:
            self._spoil(error)
            raise
        return result

    def _spoil(self, error: CaptureError) -> None:
        self.failure, self._failed_at = error, ops.source_line()

    def _taken_apart(self, func: OpOverload, args: Any, kwargs: dict[str, Any]) -> Any:
        self._depth += 1
        try:
            with self:
                return ops.take_apart(func, args, kwargs)
        finally:
            self._depth -= 1

    def _check_handover(self, func: OpOverload, args: Any) -> None:
        """Raise if the thread is about to read memory that no operator reads: ``tolist`` and ``numpy``.

        Both resolve the conjugate and the negative bit, one after the other, and then read directly.
        """
        if self._depth:
            return
        name, resolved, self._resolved = func._schema.name, self._resolved, None
        if name == "aten::resolve_conj":
            self._resolved = _identity(args[0])
        elif name == "aten::resolve_neg" and resolved is not None and resolved == _identity(args[0]):
            raise ops.host_read_error("tolist or numpy", "hands a tensor's memory to the host")

    def _record(self, func: OpOverload, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        inputs = [*ops.tensors_in(args), *ops.tensors_in(kwargs)]
        outputs = list(ops.tensors_in(result))
        if not ops.check_tensors(func, inputs, outputs):
            return
        if func._schema.name == "aten::lift_fresh" and inputs[0].untyped_storage().resizable():
            self._record_literal(inputs[0])
        for tensor in inputs:
            self._slots.adopt(tensor, external=True)
        fresh = {place: tensor for place, tensor in enumerate(outputs) if self._slots.find(tensor) is None}
        for tensor in fresh.values():
            self._slots.adopt(tensor, external=False)
        if ops.changes_metadata_only(func):
            return
        written = inputs if ops.is_collective(func) else ops.written_tensors(func, args, kwargs)
        works = bool(written or fresh) or not func._schema.returns
        if works:
            call = self._call(func, args, kwargs, fresh)
            call.variant = self._variant(func, args, kwargs, outputs, fresh) if not written else None
            self._append(call, inputs, [*written, *fresh.values()])

    def _record_literal(self, tensor: torch.Tensor) -> None:
        """Record the values of a tensor made from Python numbers: later operators may write over them.

        A tensor over someone else's memory, such as a NumPy array, cannot be resized; it counts as external.
        """
        if self._slots.find(tensor) is None:
            constant = tensor.clone()
            slot = self._slots.adopt(tensor, external=False)
            slot.constant = constant
            target = self._slots.describe(tensor)
            slot.touch(len(self._calls), slot.nbytes)
            self._calls.append(Call(torch.ops.aten.copy_.default, (target, constant), {}, literal=slot))

    def _call(
        self, func: OpOverload, args: Any, kwargs: dict[str, Any], fresh: dict[int, torch.Tensor]
    ) -> Call:
        describe = self._slots.describe
        return Call(
            func=func,
            args=ops.mapped(args, torch.Tensor, describe),
            kwargs=ops.mapped(kwargs, torch.Tensor, describe),
            outputs={place: describe(tensor) for place, tensor in fresh.items()},
        )

    def _append(self, call: Call, inputs: list[torch.Tensor], written: list[torch.Tensor]) -> None:
        for tensor in (*inputs, *written):
            self._slots.adopt(tensor, external=True).touch(
                len(self._calls), tensor.untyped_storage().nbytes()
            )
        for tensor in written:
            self._slots.adopt(tensor, external=True).written = True
        self._calls.append(call)

    def _variant(
        self,
        func: OpOverload,
        args: Any,
        kwargs: dict[str, Any],
        outputs: list[torch.Tensor],
        fresh: dict[int, torch.Tensor],
    ) -> ops.OutVariant | None:
        """Return the ``out=`` variant that may stand for *func*, tried once per signature of arguments."""
        variant = ops.out_variant(func)
        if variant is None or len(fresh) != len(variant.out_names) or len(outputs) != len(fresh):
            return None
        if not ops.may_run_twice(func):
            return None
        signature = repr((str(func), ops.mapped((args, kwargs), torch.Tensor, _geometry)))
        if signature not in self._accepted:
            self._accepted[signature] = ops.accepts(variant, args, kwargs, outputs)
        return variant if self._accepted[signature] else None

    def finish(self, pool: RecordedPool) -> Recording:
        """Plan the memory and bind every call to it. Raises CaptureError if the recording is spoilt."""
        if self.failure is not None:
            kind = HostReadError if isinstance(self.failure, HostReadError) else CaptureError
            where = f" at {self._failed_at}" if self._failed_at else ""
            raise kind(
                f"the forward went on after a capture error{where}: {self.failure.what}"
            ) from self.failure
        return bind(self._calls, self._slots.used(), pool)


def _identity(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.is_conj(), tensor.is_neg()
