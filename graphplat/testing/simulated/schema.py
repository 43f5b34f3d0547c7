"""What an operator's schema says about running it."""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import torch
from attrs import frozen

aten = torch.ops.aten

#: Functional by schema, a view in fact.
VIEWS: Final = frozenset({aten._unsafe_view.default, aten._reshape_alias.default})

#: Answers about geometry: numbers that need no reading of the device.
METADATA: Final = frozenset(
    {
        aten._fused_sdp_choice.default,
        aten.is_set_to.default,
        aten.is_same_size.default,
        aten._has_compatible_shallow_copy_type.default,
        aten.is_pinned.default,
        aten._has_same_storage_numel.default,
    }
)

_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_INDEXING = (
    "aten::index",
    "aten::index_put",
    "aten::index_put_",
    "aten::_index_put_impl_",
    "aten::_unsafe_index",
)


@frozen
class Traits:
    """What the schema of an operator says about running it."""

    composite: bool
    view: bool
    mutates: tuple[str, ...]
    outs: tuple[str, ...]
    host_read: bool
    generator: bool
    indexing: bool
    device: bool


@cache
def traits(func: Any) -> Traits:
    """The traits of *func*, from its schema, tags and kernels."""
    schema = func._schema
    names = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    returns = schema.returns
    aliased = bool(returns) and returns[0].alias_info is not None and not returns[0].alias_info.is_write
    # What comes back as a number has been read from the device, unless it is geometry.
    numbers = bool(returns) and not any("Tensor" in str(r.type) for r in returns)
    return Traits(
        composite=torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"),
        view=(aliased and not names) or func in VIEWS,
        mutates=tuple(names),
        outs=tuple(a.name for a in schema.arguments if a.is_out),
        host_read=any(tag in func.tags for tag in _TAGS) or (numbers and func not in METADATA),
        generator=any(a.name == "generator" for a in schema.arguments),
        indexing=schema.name in _INDEXING,
        device=any(a.name == "device" for a in schema.arguments),
    )
