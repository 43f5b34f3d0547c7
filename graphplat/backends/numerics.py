"""How far two results may be apart, and how far they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import attrs
import torch

TOLERANCES = {
    torch.float64: 1e-8,
    torch.float32: 1e-4,
    torch.float16: 2e-2,
    torch.bfloat16: 1.5e-1,
}
"""Largest difference allowed between eager and compiled results, as a part of the largest result.

Fused kernels keep intermediates in higher precision and add in another order. A decoder of thirty layers with
random weights in bfloat16, whose numbers have steps of 0.4 to 0.8 %, was seen to differ by 7 %."""

_COARSEST = 0.25
"""For types of eight bits and less."""


def tolerance(groups: Iterable[Mapping[str, Any]], device: torch.device) -> float:
    """The tolerance of the least precise type that computes: among *groups* of tensors, or autocast's."""
    types = {
        leaf.dtype
        for group in groups
        for leaf in group.values()
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
    }
    if torch.is_autocast_enabled(device.type):
        types.add(torch.get_autocast_dtype(device.type))
    return max((TOLERANCES.get(dtype, _COARSEST) for dtype in types), default=TOLERANCES[torch.float32])


@attrs.frozen
class Difference:
    """How far results are from expected ones."""

    relative: float
    """The largest difference, as a part of the largest expected magnitude of the same output."""
    path: str
    """The output where that is."""
    flipped: int
    """Whole numbers and flags that differ: near ties may turn an argmax."""
    integers: int

    @classmethod
    def between(cls, expected: Mapping[str, Any], found: Mapping[str, Any]) -> Difference:
        """Compare leaves by path; another structure or shape, or a NaN out of place, counts as infinite."""
        worst, where, flipped, integers = 0.0, "", 0, 0
        if expected.keys() != found.keys():
            return cls(float("inf"), min(expected.keys() ^ found.keys()), 0, 0)
        for path, leaf in expected.items():
            other = found[path]
            if not isinstance(leaf, torch.Tensor):
                apart = 0.0 if type(other) is type(leaf) else float("inf")
            elif (
                not isinstance(other, torch.Tensor) or other.shape != leaf.shape or other.dtype != leaf.dtype
            ):
                apart = float("inf")
            elif leaf.is_floating_point() or leaf.is_complex():
                apart = relative_difference(leaf, other)
            else:
                apart = 0.0
                flipped += int((leaf != other).sum())
                integers += leaf.numel()
            if apart > worst:
                worst, where = apart, path
        return cls(worst, where, flipped, integers)


def relative_difference(expected: torch.Tensor, found: torch.Tensor) -> float:
    """The largest difference over the largest finite value expected; infinite where only one is finite."""
    if not expected.numel():
        return 0.0
    wide = torch.complex128 if expected.is_complex() else torch.float32
    wide = torch.float64 if expected.dtype is torch.float64 else wide
    a, b = expected.to(wide), found.to(wide)
    finite = a.isfinite()
    same_rest = torch.equal(finite, b.isfinite()) and torch.equal(
        a[~finite].nan_to_num(), b[~finite].nan_to_num()
    )
    if not same_rest:
        return float("inf")
    if not bool(finite.any()):
        return 0.0
    largest = float(a[finite].abs().max())
    apart = float((a[finite] - b[finite]).abs().max())
    return apart / largest if largest else apart
