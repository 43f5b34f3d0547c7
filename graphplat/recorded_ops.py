"""What the recorder knows about single operators: host reads, composites, writes and ``out=`` variants."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from attrs import frozen
from torch._ops import OpOverload

from graphplat.errors import CaptureError, HostReadError

# is_nonzero carries no tag; the others that read data do.
_HOST_READS = frozenset({"aten::is_nonzero", "aten::item", "aten::_local_scalar_dense"})
_MASKABLE = frozenset(
    {"aten::index", "aten::_unsafe_index", "aten::index_put", "aten::index_put_", "aten::_unsafe_index_put"}
    | {"aten::_index_put_impl_", "aten::_index_put_impl"}
)
# What they give holds no defined values, so that replay has nothing to compute.
_UNINITIALIZED = frozenset(
    {
        "aten::empty",
        "aten::empty_like",
        "aten::empty_strided",
        "aten::empty_permuted",
        "aten::empty_quantized",
    }
    | {"aten::new_empty", "aten::new_empty_strided"}
)
_TORCH_NAMESPACES = frozenset({"aten", "prim", "prims", "profiler", "c10d", "_c10d_functional"})
_WAITS = frozenset({"_c10d_functional::wait_tensor"})
# Reads values only to check that they are in range; its inner operators would look like a host read.
_KEPT_WHOLE = frozenset({"aten::one_hot"})
_FACTORY_OPTIONS = frozenset({"dtype", "layout", "device", "pin_memory", "memory_format"})
_TORCH_DIR = str(Path(torch.__file__).parent)
_CORE_DIR = str(Path(__file__).parent)
_MODEL_DIRS = (str(Path(__file__).parent / "testing"), str(Path(__file__).parent / "integrations"))


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of an operator's argument or result, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


def mapped(value: Any, leaf: type, function: Callable[[Any], Any]) -> Any:
    """Return *value* with *function* applied to every *leaf* inside its lists, tuples and dicts."""
    if isinstance(value, leaf):
        return function(value)
    if isinstance(value, list | tuple):
        return type(value)(mapped(item, leaf, function) for item in value)
    if isinstance(value, dict):
        return {key: mapped(item, leaf, function) for key, item in value.items()}
    return value


def source_line() -> str | None:
    """Return ``file:line`` of the innermost running frame that belongs to neither torch nor this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        own = name.startswith(_CORE_DIR) and not name.startswith(_MODEL_DIRS)
        if not own and not name.startswith((_TORCH_DIR, "<frozen")):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return None


def host_read_error(operator: str, why: str) -> HostReadError:
    """Make the error for a host read by *operator*, with the user's line in a note.

    Whoever captures names that line in its own message, from the traceback.
    """
    error = HostReadError(
        f"operator {operator} {why} during capture",
        hint="Compute it before the capture and pass it in, or keep the decision on the device (torch.where)",
    )
    if (where := source_line()) is not None:
        error.add_note(f"at {where}")
    return error


@functools.cache
def _returns_numbers(func: OpOverload) -> bool:
    """Whether *func*, from outside torch, returns numbers: those can only come from tensor values."""
    numbers = ("int", "float", "bool", "number")
    returns = [str(value.type) for value in func._schema.returns]
    return func.namespace not in _TORCH_NAMESPACES and any(
        kind in text for text in returns for kind in numbers
    )


def check_host_read(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raise HostReadError if *func* needs tensor values on the host: to return them or to size its output."""
    name = func._schema.name
    if name in _MASKABLE:
        _check_mask(func, args)
    elif name in _HOST_READS or torch.Tag.data_dependent_output in func.tags or _returns_numbers(func):
        raise host_read_error(str(func), "reads a tensor's value on the host")
    elif torch.Tag.dynamic_output_shape in func.tags and not _size_is_given(name, args, kwargs):
        raise host_read_error(str(func), "has an output shape that depends on tensor values")


def _size_is_given(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    if name == "aten::one_hot":
        return len(args) > 1 and bool(args[1] >= 0)
    return name == "aten::repeat_interleave" and kwargs.get("output_size") is not None


def _check_mask(func: OpOverload, args: Sequence[Any]) -> None:
    indices = [index for index in args[1] if index is not None]
    if not any(index.dtype in (torch.bool, torch.uint8) for index in indices):
        return
    # Torch turns the write of one value through one mask into masked_fill, whose shapes are fixed.
    fills = len(args) > 2 and len(indices) == 1 and args[2].numel() == 1 and not (len(args) > 3 and args[3])
    if not fills:
        raise host_read_error(str(func), "indexes with a boolean mask, whose count depends on tensor values,")


def check_tensors(func: OpOverload, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> bool:
    """Return whether *func* worked on CPU memory at all.

    Raises HostReadError for a copy between devices, CaptureError for a tensor that is no plain strided one.
    """
    tensors = [*inputs, *outputs]
    devices = {tensor.device.type for tensor in tensors}
    if devices == {"meta"} or not devices:
        return False
    if devices != {"cpu"}:
        raise host_read_error(str(func), f"moves data between devices ({', '.join(sorted(devices))})")
    for tensor in tensors:
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
        if not plain or tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
            raise CaptureError(
                f"operator {func} works on a {type(tensor).__name__} of layout {tensor.layout}, which a "
                "recorded graph cannot place in memory",
                hint="Use plain strided tensors inside the captured forward",
            )
    return True


@functools.cache
def is_composite(func: OpOverload) -> bool:
    """Whether *func* only calls other operators and has no kernel of its own for the CPU."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    implicit = torch._C.DispatchKey.CompositeImplicitAutograd
    name: str = func.name()  # type: ignore[no-untyped-call]
    composite = implicit in func.py_kernels or has_kernel(name, implicit)
    whole = func._schema.name in _KEPT_WHOLE or has_kernel(name, torch._C.DispatchKey.CPU)
    return bool(composite) and not whole


def take_apart(func: OpOverload, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run the composite *func* as eager does, its inner operators being dispatched one by one.

    ``OpOverload.decompose`` prefers decompositions written for tracing, which round differently.
    """
    implicit = torch._C.DispatchKey.CompositeImplicitAutograd
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), implicit):  # type: ignore[no-untyped-call]
        return func._op_dk(implicit, *args, **kwargs)
    return func.decompose(*args, **kwargs)


@functools.cache
def changes_metadata_only(func: OpOverload) -> bool:
    """Whether *func* changes a tensor's geometry in place, or gives memory without values."""
    return torch.Tag.inplace_view in func.tags or func._schema.name in _UNINITIALIZED


@functools.cache
def is_ignored(func: OpOverload) -> bool:
    """Whether *func* only marks a range for the profiler."""
    return func.namespace == "profiler"


@functools.cache
def is_collective(func: OpOverload) -> bool:
    """Whether *func* is a collective; the schemas of these do not say which tensors they write."""
    return func.namespace in {"c10d", "_c10d_functional"} and func._schema.name not in _WAITS


@functools.cache
def may_run_twice(func: OpOverload) -> bool:
    """Whether a second run of the functional *func* on the same inputs changes nothing.

    Random operators advance a generator, batch norm's schema hides its running statistics, and of operators
    from outside torch nothing is known.
    """
    hidden = func._schema.name == "aten::native_batch_norm"
    return func.namespace == "aten" and not hidden and torch.Tag.nondeterministic_seeded not in func.tags


def written_tensors(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the argument tensors that the schema of *func* says it writes."""
    found: list[torch.Tensor] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            found.extend(tensors_in(value))
    return found


@frozen
class OutVariant:
    """The overload of an operator that writes into given tensors."""

    overload: OpOverload
    out_names: tuple[str, ...]
    options: frozenset[str]

    def kwargs(self, kwargs: dict[str, Any], outputs: Sequence[Any]) -> dict[str, Any]:
        """Return *kwargs* with *outputs* added and the factory options that the outputs decide left out."""
        kept = {name: value for name, value in kwargs.items() if name in self.options}
        return kept | dict(zip(self.out_names, outputs, strict=True))


@functools.cache
def out_variant(func: OpOverload) -> OutVariant | None:
    """Find the ``out=`` overload whose other arguments are those of *func*."""
    wanted = [(arg.name, str(arg.type)) for arg in func._schema.arguments]
    packet = func.overloadpacket
    for name in packet.overloads():
        candidate = getattr(packet, name)
        outs = tuple(arg.name for arg in candidate._schema.arguments if arg.is_out)
        given = [(arg.name, str(arg.type)) for arg in candidate._schema.arguments if not arg.is_out]
        dropped = {arg for arg, _ in wanted} - {arg for arg, _ in given}
        remaining = [pair for pair in wanted if pair[0] not in dropped]
        if (
            len(outs) == len(func._schema.returns)
            and given == remaining
            and dropped <= _FACTORY_OPTIONS
            and outs
        ):
            return OutVariant(candidate, outs, frozenset(arg for arg, _ in given))
    return None


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors hold the same values, NaN being equal to NaN."""
    if torch.equal(left, right):
        return True
    floating = left.is_floating_point() or left.is_complex()
    return (
        floating
        and torch.equal(left.isnan(), right.isnan())
        and torch.equal(torch.nan_to_num(left), torch.nan_to_num(right))
    )


def accepts(
    variant: OutVariant, args: Sequence[Any], kwargs: dict[str, Any], outputs: list[torch.Tensor]
) -> bool:
    """Try *variant* on scratch memory: whether it gives *outputs* again, bit by bit and in their layout."""
    scratch = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for t in outputs]
    addresses = [t.data_ptr() for t in scratch]
    try:
        variant.overload(*args, **variant.kwargs(kwargs, scratch))
        kept = addresses == [t.data_ptr() for t in scratch]
        return kept and all(
            made.shape == want.shape and made.stride() == want.stride() and same_bits(made, want)
            for made, want in zip(scratch, outputs, strict=True)
        )
    except (RuntimeError, TypeError, ValueError, UserWarning):
        return False  # the recorder then runs the functional form and copies, which always works
