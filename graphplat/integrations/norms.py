"""RMS norms by torch's own operator: one kernel on devices that fuse it, where a model's own takes several.

Norms of different model libraries differ in detail, such as whether they scale by
``weight`` or by ``1 + weight``. So each is compared with its replacement before any is replaced.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.func import functional_call

from graphplat.errors import ConfigError

_ROWS = 8


def find_fused_norms(model: torch.nn.Module) -> dict[str, torch.nn.RMSNorm]:
    """A ``torch.nn.RMSNorm`` for each norm of *model* by its name; *model* stays as it is.

    Norms are modules whose class name ends with ``RMSNorm`` and that have a one-dimensional ``weight`` and
    a ``variance_epsilon`` or ``eps``. The replacement shares the very weight. Those that are torch's
    already are left out. Raises :class:`ConfigError` for a norm that computes something else, by more than
    rounding, or that keeps more than its weight, and for a model without norms.
    """
    found: dict[str, torch.nn.RMSNorm] = {}
    made: dict[int, torch.nn.RMSNorm] = {}  # a module may be used under several names
    known = False
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, torch.nn.RMSNorm):
            known = True
        elif _is_norm(module):
            if id(module) not in made:
                made[id(module)] = _replacement(model, name, module)
            found[name] = made[id(module)]
    if not found and not known:
        raise ConfigError(f"{type(model).__name__} has no RMSNorm", field="fused_norms", hint=_LEAVE_OFF)
    return found


def replace_modules(model: torch.nn.Module, modules: dict[str, torch.nn.RMSNorm]) -> None:
    """Put *modules* in the place of those of the same names."""
    for name, module in modules.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, module)


_LEAVE_OFF = "Leave fused_norms off"


def _is_norm(module: torch.nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    named = type(module).__name__.endswith("RMSNorm")
    return named and isinstance(weight, torch.Tensor) and weight.dim() == 1 and _epsilon(module) is not None


def _epsilon(module: torch.nn.Module) -> float | None:
    value = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return value if isinstance(value, float) else None


def _replacement(model: torch.nn.Module, name: str, module: torch.nn.Module) -> torch.nn.RMSNorm:
    if [key for key, _ in module.named_parameters()] != ["weight"] or list(module.state_dict()) != ["weight"]:
        raise _refusal(name, module, "keeps more than its weight")
    weight: Any = module.weight
    fused = torch.nn.RMSNorm(weight.shape[0], eps=_epsilon(module), device="meta")
    fused.weight = weight
    fused.train(module.training)
    dtype = getattr(model, "dtype", weight.dtype)
    if (difference := _difference(module, fused, dtype)) is not None:
        raise _refusal(name, module, difference)
    return fused


@torch.no_grad()
def _difference(module: torch.nn.Module, fused: torch.nn.RMSNorm, dtype: torch.dtype) -> str | None:
    """How the two differ on a random input of *dtype* by more than rounding, or ``None``."""
    weight = fused.weight
    generator = torch.Generator().manual_seed(0)  # not the default one, which others draw from
    width = weight.shape[0]
    rows = torch.randn(_ROWS, width, generator=generator)
    # Half of the rows so small that the epsilon counts.
    rows[::2] *= float(fused.eps or 0.0) ** 0.5
    # Weights of their own: those of a fresh model are all one, or all zero.
    other = {"weight": (torch.rand(width, generator=generator) + 0.5).to(weight.device, weight.dtype)}
    rows = rows.to(weight.device, dtype)
    try:
        wanted, found = (functional_call(norm, other, (rows,)) for norm in (module, fused))
    except TypeError as error:
        return f"takes more than hidden states: {error}"
    if wanted.dtype != found.dtype:
        return f"gives {wanted.dtype} where torch's gives {found.dtype}"
    # A few roundings of the dtype; some norms compute in single precision whatever it is.
    tolerance = max(4 * torch.finfo(dtype).eps, 1e-5)
    # Results are about one; much smaller ones have fewer digits in half precision.
    wanted, found = wanted.double(), found.double()
    relative = ((found - wanted).abs() / wanted.abs().clamp_min(0.01)).max().item()
    # Not the other way round, since a NaN is neither.
    return None if relative <= tolerance else f"differs from torch's by {relative:.2g} of its result"


def _refusal(name: str, module: torch.nn.Module, why: str) -> ConfigError:
    return ConfigError(f"{name}, a {type(module).__name__}, {why}", field="fused_norms", hint=_LEAVE_OFF)
