"""How the device executes, queues or records one operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .errors import SimulatedDeviceError
from .faults import faults
from .operators import SPECIAL
from .runtime import active
from .schema import METADATA, Traits, traits
from .streams import StreamState, Work
from .tensor import SimTensor, allocate, view_of
from .trees import leaves, tree_map
from .updates import UpdateRecord


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run *func* on the device that its arguments, or its ``device`` keyword, name."""
    special = SPECIAL.get(func)
    if special is not None:
        return special(*args, **kwargs)
    what = traits(func)
    if what.composite:
        return func.decompose(*args, **kwargs)
    return Call(func, args, kwargs, what).execute()


class Call:
    """One operator on its way through the device."""

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], what: Traits) -> None:
        self.func, self.args, self.kwargs, self.what = func, args, dict(kwargs), what
        self.runtime = active()
        self.inputs = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        self.sims = [leaf for leaf in self.inputs if isinstance(leaf, SimTensor)]

    def execute(self) -> Any:
        """View, read on the host, run, queue or record, as operator and stream require."""
        elsewhere = self._leaves_the_device()
        if elsewhere is not None:
            return elsewhere()
        index = self._device_index()
        stream = self.runtime.stream(index)
        self._check_host_tensors(stream)
        if self.func in METADATA:
            return self.func(*_map(self.args, "cpu"), **_map(self.kwargs, "cpu"))
        if self.what.view:
            return self._view()
        if self._reads_on_host():
            return self._read(stream, index)
        return self._submit(stream, index)

    def _submit(self, stream: StreamState, index: int) -> Any:
        if self.what.generator and self.kwargs.get("generator") is None:
            self.kwargs["generator"] = self.runtime.devices[index].generator
        self._check_generator(stream)
        self.runtime.counters.operators += 1
        faults.hit("op")
        recording = stream.capture is not None
        if recording:
            stream.capture.check()  # type: ignore[union-attr]
            faults.hit("forward")
        if self.what.mutates:
            return self._mutate(stream)
        if stream.waits or (recording and self.runtime.profile.record_only):
            return self._plan(stream, index)
        return self._run_now(stream, index)

    # -- where ------------------------------------------------------------------------------------------

    def _leaves_the_device(self) -> Any:
        """A thunk for a factory whose ``device`` is another one, such as ``empty_like(x, device="meta")``."""
        if not self.what.device or self.kwargs.get("device") is None:
            return None
        where = torch.device(self.kwargs["device"])
        if where.type == self.runtime.name:
            return None
        kind = "meta" if where.type == "meta" else "cpu"
        return lambda: self.func(*_map(self.args, kind), **_map(self.kwargs, kind))

    def _device_index(self) -> int:
        places = {t.device for t in self.sims}
        if self.what.device:
            wanted = self.kwargs.pop("device", None)
            self.kwargs.pop("pin_memory", None)
            if wanted is not None:
                return self.runtime.index_of(wanted)
        if len(places) > 1:
            raise self._mixed(places)
        return next(iter(places)).index if places else self.runtime.current_index

    def _mixed(self, places: set[torch.device]) -> RuntimeError:
        found = ", ".join(sorted(map(str, places)))
        return RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices: {found} "
            f"(operator {self.func})"
        )

    def _check_host_tensors(self, stream: StreamState) -> None:
        strangers = [t for t in self.inputs if not isinstance(t, SimTensor)]
        if not strangers or not self.sims:
            return
        for tensor in strangers:
            if tensor.device.type == "cpu" and (tensor.dim() == 0 or self.func in HOST_ARGUMENTS):
                continue
            if tensor.device.type == "cpu" and self.what.indexing:
                self.runtime.refuse_while_capturing(stream, f"copy of a host index tensor ({self.func})")
                continue
            raise self._mixed({tensor.device, self.sims[0].device})

    # -- views and host reads ----------------------------------------------------------------------------

    def _view(self) -> Any:
        base = self.sims[0]
        made = self.func(*_map(self.args, "cpu"), **_map(self.kwargs, "cpu"))
        return tree_map(lambda t: view_of(base, t) if isinstance(t, torch.Tensor) else t, made)

    def _reads_on_host(self) -> bool:
        if self.what.indexing and len(self.args) > 1:
            masks = [t for t in self.args[1] if isinstance(t, torch.Tensor)]
            return any(t.dtype in (torch.bool, torch.uint8) for t in masks) and not self._masks_are_static(
                masks
            )
        if self.func is torch.ops.aten.repeat_interleave.Tensor:
            return self.kwargs.get("output_size") is None
        return self.what.host_read

    def _masks_are_static(self, masks: list[torch.Tensor]) -> bool:
        """``x[mask] = scalar`` is a masked fill: no shape depends on the mask."""
        values = self.args[2] if len(self.args) > 2 else None
        return isinstance(values, torch.Tensor) and values.numel() == 1 and len(masks) == len(self.args[1])

    def _read(self, stream: StreamState, index: int) -> Any:
        self.runtime.refuse_while_capturing(stream, f"host read of a device tensor ({self.func})")
        self.runtime.counters.host_reads += 1
        stream.synchronize()
        if self.what.mutates:
            return self._mutate(stream)
        return self._wrap(self.func(*_map(self.args, "cpu"), **_map(self.kwargs, "cpu")), index)

    # -- execution ---------------------------------------------------------------------------------------

    def _run_now(self, stream: StreamState, index: int) -> Any:
        args, kwargs = _map(self.args, "cpu"), _map(self.kwargs, "cpu")
        box: list[Any] = []
        stream.submit(lambda: box.append(self.func(*args, **kwargs)), str(self.func))
        made = self._wrap(box[0], index)
        if stream.capture is not None:
            self._record(stream, self._thunk(stream, made, args, kwargs))
        return made

    def _wrap(self, made: Any, index: int) -> Any:
        def wrap(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            room = allocate(value.size(), value.stride(), value.dtype, index)
            room.backing.copy_(value)
            return room

        return tree_map(wrap, made)

    def _plan(self, stream: StreamState, index: int) -> Any:
        """Make the outputs from their shapes alone; the values come when the work runs."""
        shapes = self.func(*_map(self.args, "meta"), **_map({**self.kwargs, **self._factory("meta")}, "meta"))

        def room(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            return allocate(value.size(), value.stride(), value.dtype, index)

        made = tree_map(room, shapes)
        args, kwargs = _map(self.args, "frozen"), _map(self.kwargs, "frozen")
        self._give(stream, self._thunk(stream, made, args, kwargs))
        return made

    def _factory(self, kind: str) -> dict[str, Any]:
        return {"device": kind} if self.what.device else {}

    def _thunk(self, stream: StreamState, made: Any, args: Any, kwargs: Any) -> Work:
        outs = [t.backing for t in leaves(made) if isinstance(t, SimTensor)]
        func, current = self.func, self._host_values(stream, kwargs)

        def run() -> None:
            values = [t for t in leaves(func(*args, **current())) if isinstance(t, torch.Tensor)]
            for out, value in zip(outs, values, strict=True):
                out.copy_(value)

        return run

    def _host_values(self, stream: StreamState, kwargs: dict[str, Any]) -> Callable[[], dict[str, Any]]:
        """Where a run takes its keyword arguments from: an update record, if the capture marked *func*."""
        capture = stream.capture
        if capture is None or not capture.marked:
            return lambda: kwargs
        record = UpdateRecord(self.func, kwargs)
        capture.records.append(record)
        return record.take

    def _mutate(self, stream: StreamState) -> Any:
        self._fit_outputs()
        args, kwargs = _map(self.args, "frozen"), _map(self.kwargs, "frozen")
        func = self.func

        def run() -> None:
            func(*args, **kwargs)

        self._give(stream, run)
        targets = [self._argument(name) for name in self.what.mutates]
        returned = [t for t in leaves(targets) if isinstance(t, SimTensor)]
        count = len(func._schema.returns)
        return None if count == 0 else returned[0] if count == 1 else tuple(returned[:count])

    def _argument(self, name: str) -> Any:
        if name in self.kwargs:
            return self.kwargs[name]
        names = [a.name for a in self.func._schema.arguments]
        return self.args[names.index(name)]

    def _fit_outputs(self) -> None:
        """Give ``out=`` tensors of another shape new memory, as resizing does."""
        if not self.what.outs:
            return
        outs = [self._argument(name) for name in self.what.outs]
        metas = tree_map(lambda t: _meta(t) if isinstance(t, torch.Tensor) else t, (self.args, self.kwargs))
        made = leaves(self.func(*metas[0], **metas[1]))
        for out, meta in zip(leaves(outs), made, strict=True):
            if out.shape != meta.shape:
                out.rebind(allocate(meta.size(), meta.stride(), out.dtype, out.device.index))

    def _give(self, stream: StreamState, run: Work) -> None:
        if stream.capture is None:
            stream.submit(run, str(self.func))
            return
        if not self.runtime.profile.record_only:
            run()
        self._record(stream, run)

    def _record(self, stream: StreamState, run: Work) -> None:
        if stream.capture is not None:
            stream.capture.record(stream, run, str(self.func))

    def _check_generator(self, stream: StreamState) -> None:
        if stream.capture is None or not self.what.generator:
            return
        generator = self.kwargs["generator"]
        known = [d.generator for d in self.runtime.devices] + list(stream.capture.graph.generators)
        # The dispatcher hands over a new Python object of the same generator.
        if not any(generator._cdata == known_one._cdata for known_one in known):
            stream.capture.invalidate("unregistered generator")
            raise SimulatedDeviceError(
                "Offset increment outside graph capture encountered unexpectedly: "
                "register the generator with the graph before capture"
            )


#: Operators that read some CPU tensors on the host by contract, such as context lengths.
HOST_ARGUMENTS: set[Any] = set()


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _map(tree: Any, kind: str) -> Any:
    """*tree* with device tensors replaced: ``cpu`` by their memory, ``meta`` by their shape; ``frozen`` is
    ``cpu`` with host scalars as they are now."""

    def change(leaf: Any) -> Any:
        if isinstance(leaf, SimTensor):
            return _meta(leaf) if kind == "meta" else leaf.backing
        if isinstance(leaf, torch.Tensor):
            return leaf.clone() if kind == "frozen" else _meta_scalar(leaf) if kind == "meta" else leaf
        return leaf

    return tree_map(change, tree)


def _meta_scalar(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dim() == 0 else _meta(tensor)
