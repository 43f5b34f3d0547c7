"""Operators whose host arguments a graph bakes in: small stand-ins for an NPU's fused attention.

``torch.ops.sim.fused_infer_attention`` takes its lengths as a list, ``torch.ops.sim.paged_attention`` as a
CPU tensor. Both attend, per request, to as many keys as its length says.
"""

from __future__ import annotations

from typing import Any

import torch

from .dispatch import HOST_ARGUMENTS
from .updates import register_update_handler

_LIBRARY: Any = torch.library.Library("sim", "DEF")  # type: ignore[no-untyped-call]


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    out = torch.empty_like(query)
    for row, length in enumerate(lengths):
        scores = torch.einsum("hd,shd->hs", query[row], key[row, :length]) * query.shape[-1] ** -0.5
        out[row] = torch.einsum("hs,shd->hd", scores.softmax(-1), value[row, :length])
    return out


def _fused(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, actual_seq_lengths_kv: list[int]
) -> torch.Tensor:
    return _attend(query, key, value, actual_seq_lengths_kv)


def _paged(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, context_lens: torch.Tensor
) -> torch.Tensor:
    return _attend(query, key, value, context_lens.tolist())


def _shape(query: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
    return torch.empty_like(query)


def define_operators() -> None:
    """Define the ``sim`` operators; once per process."""
    inputs = "Tensor query, Tensor key, Tensor value"
    _LIBRARY.define(f"fused_infer_attention({inputs}, *, int[] actual_seq_lengths_kv) -> Tensor")
    _LIBRARY.define(f"paged_attention({inputs}, *, Tensor context_lens) -> Tensor")
    for name, kernel in (("fused_infer_attention", _fused), ("paged_attention", _paged)):
        _LIBRARY.impl(name, kernel, "CPU")
        _LIBRARY.impl(name, _shape, "Meta")
    fused, paged = torch.ops.sim.fused_infer_attention.default, torch.ops.sim.paged_attention.default
    HOST_ARGUMENTS.add(paged)
    register_update_handler(fused, ["actual_seq_lengths_kv"])
    register_update_handler(paged, ["context_lens"])
