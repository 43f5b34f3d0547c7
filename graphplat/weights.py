"""Notice when a tensor whose address a graph has baked in was moved."""

from __future__ import annotations

import gc
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import attrs
import torch

if TYPE_CHECKING:
    from graphplat.model_runner import ModelRunner

Address = int | tuple[Any, ...]
Described = tuple[Address, torch.Size, tuple[int, ...], torch.dtype, tuple[bool, bool]]
_plain: Callable[[torch.Tensor], int] = torch.Tensor.data_ptr
_stride: Callable[[torch.Tensor], Any] = torch.Tensor.stride
_form: Callable[[torch.Tensor], Any] = operator.attrgetter("shape", "dtype")


def _complex_form(tensor: torch.Tensor) -> Any:
    return tensor.shape, tensor.dtype, tensor.is_conj(), tensor.is_neg()


_BY_ROW, _BY_COLUMN = ("crow_indices", "col_indices", "values"), ("ccol_indices", "row_indices", "values")
_PARTS = {
    torch.sparse_csr: _BY_ROW,
    torch.sparse_bsr: _BY_ROW,
    torch.sparse_csc: _BY_COLUMN,
    torch.sparse_bsc: _BY_COLUMN,
    torch.sparse_coo: ("_indices", "_values"),  # indices() and values() refuse an uncoalesced one
}
"""What gives the parts of a sparse tensor, by its layout."""
_AT_ONCE = 8
_FEW = 64


def _address(tensor: torch.Tensor) -> Address:
    """Where *tensor* lies; of one made of others, as quantized and sparse ones are, where each of them is."""
    if type(tensor) is not torch.Tensor and hasattr(type(tensor), "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        return tuple(_address(getattr(tensor, name)) for name in names)
    if tensor.layout is not torch.strided:
        return tuple(getattr(tensor, part)().data_ptr() for part in _PARTS.get(tensor.layout, ()))
    return tensor.data_ptr()


def _describe(tensor: torch.Tensor) -> Described:
    strides = tensor.stride() if tensor.layout is torch.strided else ()
    return _address(tensor), tensor.shape, strides, tensor.dtype, (tensor.is_conj(), tensor.is_neg())


def _describe_all(tensors: Mapping[str, torch.Tensor]) -> dict[str, Described]:
    return {name: _describe(tensor) for name, tensor in tensors.items()} if tensors else {}


def _numbers(address: Address) -> Iterator[int]:
    if isinstance(address, int):
        yield address
    else:
        yield from itertools.chain.from_iterable(map(_numbers, address))


@attrs.define(eq=False)
class WeightWatch:
    """Remembers submodules, parameters, buffers and extra tensors: which objects, at which addresses.

    In-place updates keep both and need nothing. A replaced submodule, a rebound parameter, a
    swapped ``.data`` or a replaced extra changes one of them. Comparing runs in C over what the
    modules' dictionaries hold, so that a step can afford it. What was replaced stays alive until a step
    finds it, or until :meth:`forget`.

    Where there are more than 64 tensors, one that got other sizes, strides or another type at its old address
    (``w.data = w.data.t()``) is found when its turn comes: each step looks at eight of them, since
    comparing all at every step would cost five times as much as comparing addresses.
    """

    model_runner: ModelRunner
    _model: torch.nn.Module | None = None
    _holders: tuple[dict[str, Any], ...] = ()
    """Parameters, buffers and submodules of every module; empty ones too, since something may be added."""
    _others: tuple[Any, ...] = ()
    """The same of modules that keep them elsewhere, as TorchScript does."""
    _held: list[Any] = attrs.field(factory=list)
    _live: list[torch.Tensor] = attrs.field(factory=list)
    _pointers: list[Address] = attrs.field(factory=list)
    _locate: Callable[[torch.Tensor], Address] = _plain
    _layouts: list[tuple[list[torch.Tensor], list[Any], list[Any]]] = attrs.field(factory=list)
    """Tensors that are looked at together, their strides, and their sizes and types."""
    _form: Callable[[torch.Tensor], Any] = _form
    _turn: int = 0
    _reshaped: bool = False
    """A layout was found changed; kept until :meth:`remember`, since only some are looked at each time."""
    _extras: dict[str, Described] = attrs.field(factory=dict)
    _named: dict[str, Described] = attrs.field(factory=dict)
    """For saying which of them moved."""
    _moved: str | None = None
    """What had moved when the watch was given up."""

    def remember(self) -> None:
        """Take the present state as what the graphs have baked in."""
        self._model, self._moved = self.model_runner.model, None
        holders: list[Any] = [
            holder
            for module in self._model.modules()
            for holder in (module._parameters, module._buffers, module._modules)
        ]
        self._holders = tuple(holder for holder in holders if isinstance(holder, dict))
        self._others = tuple(holder for holder in holders if not isinstance(holder, dict))
        self._held = self._read()
        self._live = [held for held in self._held if isinstance(held, torch.Tensor)]
        plain = [
            held
            for held in self._live
            if held.layout is torch.strided and not hasattr(type(held), "__tensor_flatten__")
        ]
        usual = all(type(held).data_ptr is torch.Tensor.data_ptr for held in self._live)
        self._locate = _plain if usual and len(plain) == len(self._live) else _address
        self._pointers = list(map(self._locate, self._live))
        turns = -(-len(plain) // _AT_ONCE) if len(plain) > _FEW else 1
        shares = [plain[turn::turns] for turn in range(turns)]
        # A real tensor has such bits as a part of a complex one alone; to ask costs more than all the rest.
        self._form = _complex_form if any(map(torch.is_complex, plain)) else _form
        self._layouts = [(share, list(map(_stride, share)), list(map(self._form, share))) for share in shares]
        self._turn, self._reshaped = 0, False
        self._extras = _describe_all(self.model_runner.extra_tensors())
        self._named = self._describe_named()

    def forget(self) -> None:
        """Hold no tensor, where no graph is left."""
        self._model, self._moved, self._holders, self._others = None, None, (), ()
        self._held, self._live, self._pointers, self._layouts = [], [], [], []
        self._extras, self._named = {}, {}

    def give_up(self, moved: str) -> None:
        """Answer *moved* from now on and hold no tensor: until :meth:`remember` no graph is right."""
        self.forget()
        self._moved = moved

    def moved(self) -> str | None:
        """What moved since :meth:`remember`, by name, or ``None``."""
        if self._moved is not None:
            return self._moved
        held, runner = self._read(), self.model_runner
        if (
            runner.model is self._model
            and len(held) == len(self._held)
            and all(map(operator.is_, held, self._held))
            and list(map(self._locate, self._live)) == self._pointers
            and not (self._reshaped or self._any_reshaped())
            and _describe_all(runner.extra_tensors()) == self._extras
        ):
            return None
        return self._name_moved()

    def _read(self) -> list[Any]:
        # All dictionaries in one call. All that matters of its result is that it stays the same.
        held = gc.get_referents(*self._holders)
        if self._others:
            held += itertools.chain.from_iterable(holder.values() for holder in self._others)
        return held

    def _any_reshaped(self) -> bool:
        """Compare sizes and strides: of all tensors, or of eight others at each call."""
        layouts, turn = self._layouts, self._turn
        looked_at, strides, forms = layouts[turn]
        self._turn = turn - 1 if turn else len(layouts) - 1
        if list(map(_stride, looked_at)) == strides and list(map(self._form, looked_at)) == forms:
            return False
        self._reshaped = True
        return True

    def settle(self) -> str | None:
        """As :meth:`moved`, but tensors that only came in addition are taken as known."""
        moved = self.moved()
        if moved is None or self._any_lost():
            return moved
        self.remember()
        return None

    def _any_lost(self) -> bool:
        """Whether a remembered tensor is no longer there, or lies elsewhere."""
        there = self._describe_now()
        known = self._named | self._extras
        return any(there.get(name) != described for name, described in known.items())

    def pointers(self) -> set[int]:
        """The addresses of all watched tensors."""
        found = [*self._pointers, *(address for address, *_ in self._extras.values())]
        return set(itertools.chain.from_iterable(map(_numbers, found)))

    def _describe_now(self) -> dict[str, Described]:
        return self._describe_named() | _describe_all(self.model_runner.extra_tensors())

    def _describe_named(self) -> dict[str, Described]:
        # Read from the dictionaries: a model may give named_parameters() a meaning of its own.
        found: dict[str, Described] = {}
        for path, module in self.model_runner.model.named_modules():
            for name, tensor in itertools.chain(module._parameters.items(), module._buffers.items()):
                if tensor is not None:
                    found[f"{path}.{name}" if path else name] = _describe(tensor)
        return found

    def _name_moved(self) -> str:
        if self.model_runner.model is not self._model:
            return "the model"
        known = self._named | self._extras
        there = self._describe_now()
        for name, described in there.items():
            if known.get(name) != described:
                return name
        return "a submodule, parameter, buffer or extra tensor that was replaced or is gone"
