"""Operators that the device treats by hand: copies, factories without data, attention, resizing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from .hostmem import host_read_of, is_pinned, pin_result
from .memory import POISON
from .runtime import active
from .streams import Work
from .tensor import SimTensor, allocate

aten = torch.ops.aten


def _layout(source: torch.Tensor, dtype: torch.dtype | None, memory_format: Any) -> torch.Tensor:
    like = torch.empty_strided(source.size(), source.stride(), dtype=source.dtype, device="meta")
    result: torch.Tensor = aten._to_copy.default(like, dtype=dtype, memory_format=memory_format)
    return result


def to_copy(
    source: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: Any = None,
) -> torch.Tensor:
    """``aten::_to_copy``: conversion on the device, or a copy between devices."""
    where = torch.device(device) if device is not None else source.device
    shape = _layout(source, dtype, memory_format)
    if where.type == "meta":
        return shape
    if where.type == active().name:
        index = active().index_of(where) if device is not None else source.device.index
        made: torch.Tensor = allocate(shape.size(), shape.stride(), shape.dtype, index)
    else:
        made = torch.empty_strided(shape.size(), shape.stride(), dtype=shape.dtype, device="cpu")
        if non_blocking:
            pin_result(made)
    return copy_(made, source, non_blocking)


def copy_(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """``aten::copy_`` within the device, to it, from it, and between two of them."""
    if isinstance(target, SimTensor) and isinstance(source, SimTensor):
        if target.device != source.device:
            _across(target, source)
        else:
            to, of = target.backing, source.backing
            _give(target.device.index, lambda: to.copy_(of), "aten.copy_")
    elif isinstance(target, SimTensor):
        _upload(target, source, non_blocking)
    elif isinstance(source, SimTensor):
        _download(target, source, non_blocking)
    return target


def _give(index: int, run: Callable[[], Any], label: str) -> None:
    """Run, queue or record on the current stream of a device."""
    from .faults import faults

    runtime = active()
    stream = runtime.stream(index)
    runtime.counters.operators += 1
    faults.hit("op")
    work: Work = _quiet(run)
    if stream.capture is None:
        stream.submit(work, label)
        return
    stream.capture.check()
    faults.hit("forward")
    if not runtime.profile.record_only:
        work()
    stream.capture.record(stream, work, label)


def _quiet(run: Callable[[], Any]) -> Work:
    def work() -> None:
        with torch.no_grad():
            run()

    return work


def _across(target: SimTensor, source: SimTensor) -> None:
    runtime = active()
    ours, theirs = runtime.stream(target.device.index), runtime.stream(source.device.index)
    for stream in (ours, theirs):
        runtime.refuse_while_capturing(stream, "copy between devices")
    ours.wait_for(theirs, theirs.submitted)
    to, of = target.backing, source.backing
    _give(target.device.index, lambda: to.copy_(of), "copy between devices")
    theirs.wait_for(ours, ours.submitted)


def _upload(target: SimTensor, source: torch.Tensor, non_blocking: bool) -> None:
    runtime = active()
    stream = runtime.stream(target.device.index)
    to = target.backing
    pinned = is_pinned(source)
    if stream.capture is not None:
        if not (pinned and non_blocking):
            raise runtime.violated(stream.capture, "copy from pageable host memory, or a blocking copy")
        read = host_read_of(source)
        _give(target.device.index, lambda: _refresh(to, read()), "host to device copy")
        return
    # A driver stages pageable memory before it returns, and reads pinned memory when the copy runs.
    held = source if pinned or not stream.waits else source.detach().clone()
    _give(target.device.index, lambda: to.copy_(held), "host to device copy")
    if not non_blocking:
        stream.synchronize()


def _refresh(target: torch.Tensor, source: torch.Tensor | None) -> None:
    if source is not None:
        target.copy_(source)
    else:  # the host memory is gone: a real copy engine reads whatever is there now
        raw = torch.full((target.numel() * target.element_size() // 2 + 1,), POISON, dtype=torch.int16)
        target.copy_(
            raw.view(torch.uint8)[: target.numel() * target.element_size()]
            .view(target.dtype)
            .view(target.shape)
        )


def _download(target: torch.Tensor, source: SimTensor, non_blocking: bool) -> None:
    runtime = active()
    stream = runtime.stream(source.device.index)
    free = non_blocking and is_pinned(target)
    if stream.capture is not None and not free:
        raise runtime.violated(stream.capture, "host read of a device tensor (copy to the host)")
    of = source.backing
    _give(source.device.index, lambda: target.copy_(of), "device to host copy")
    if not free:
        runtime.counters.host_reads += 1
        stream.synchronize()


def copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """``aten::_copy_from``: `copy_` with its arguments the other way round."""
    return copy_(target, source, non_blocking)


def foreach_copy_(
    targets: list[torch.Tensor], sources: list[torch.Tensor], non_blocking: bool = False
) -> None:
    """``aten::_foreach_copy_``: `copy_` for each pair, sources on any device."""
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking)


def empty(
    size: Any, *, dtype: Any = None, device: Any = None, memory_format: Any = None, **_: Any
) -> torch.Tensor:
    """``aten::empty.memory_format``."""
    shape = torch.empty(size, dtype=dtype, device="meta", memory_format=memory_format)
    return allocate(shape.size(), shape.stride(), shape.dtype, active().index_of(device))


def empty_strided(size: Any, stride: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> torch.Tensor:
    """``aten::empty_strided``."""
    return allocate(size, stride, dtype or torch.get_default_dtype(), active().index_of(device))


def new_empty(like: SimTensor, size: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> torch.Tensor:
    """``aten::new_empty``."""
    where = torch.device(device) if device is not None else like.device
    return torch.empty(size, dtype=dtype or like.dtype, device=where)


def empty_like(
    like: torch.Tensor, *, dtype: Any = None, device: Any = None, memory_format: Any = None, **_: Any
) -> torch.Tensor:
    """``aten::empty_like``."""
    shape = torch.empty_like(
        torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device="meta"),
        dtype=dtype,
        memory_format=memory_format or torch.preserve_format,
    )
    where = torch.device(device) if device is not None else like.device
    return torch.empty_strided(shape.size(), shape.stride(), dtype=shape.dtype, device=where)


def resize_(tensor: SimTensor, size: Any, *, memory_format: Any = None) -> SimTensor:
    """``aten::resize_``: new memory when the old is too small."""
    shape = torch.empty(size, dtype=tensor.dtype, device="meta", memory_format=memory_format)
    if shape.size() == tensor.size():
        return tensor
    new = allocate(shape.size(), shape.stride(), tensor.dtype, tensor.device.index)
    keep = min(new.numel(), tensor.numel())
    if keep and tensor.is_contiguous():
        new.view(-1)[:keep].copy_(tensor.view(-1)[:keep])
    tensor.rebind(new)
    return tensor


def set_(tensor: SimTensor, source: SimTensor) -> SimTensor:
    """``aten::set_.source_Tensor``."""
    tensor.rebind(source)
    return tensor


def attention(  # noqa: PLR0917 - the signature of the operator
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """``scaled_dot_product_attention`` by the kernel that the CPU would choose, so that numbers agree."""
    given: list[Any] = [_memory(t) for t in (query, key, value, attn_mask)]
    choice = aten._fused_sdp_choice.default(*given, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        hidden = attn_mask.logical_not()
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(hidden, float("-inf"))
    if choice == _FLASH:
        result: torch.Tensor = aten._scaled_dot_product_flash_attention_for_cpu.default(
            query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
        )[0]
        return result
    math: torch.Tensor = aten._scaled_dot_product_attention_math.default(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]
    return math


_FLASH: Final = 1


def _memory(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor.backing if isinstance(tensor, SimTensor) else tensor


#: Operators with a kernel of their own here, by overload.
SPECIAL: Final[dict[Any, Callable[..., Any]]] = {
    aten._to_copy.default: to_copy,
    aten.copy_.default: copy_,
    aten._copy_from.default: copy_from,
    aten._foreach_copy_.default: foreach_copy_,
    aten._copy_from_and_resize.default: copy_from,
    aten.empty.memory_format: empty,
    aten.empty_strided.default: empty_strided,
    aten.new_empty.default: new_empty,
    aten.empty_like.default: empty_like,
    aten.resize_.default: resize_,
    aten.set_.source_Tensor: set_,
    aten.scaled_dot_product_attention.default: attention,
}
