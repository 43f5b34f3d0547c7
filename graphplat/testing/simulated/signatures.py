"""Exact signatures from data, so that an unknown keyword is a ``TypeError`` as in the real module."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from inspect import Parameter, Signature
from typing import Any

from .profiles import KEYWORD_DEFAULTS, SimProfile


def parameters(
    keywords: Iterable[str], profile: SimProfile, *, required: str | None = None
) -> list[Parameter]:
    """Parameters of a vendor's function, in order; *required* comes first and has no default."""
    kind = Parameter.POSITIONAL_OR_KEYWORD
    made = [Parameter(required, kind)] if required else []
    for name in keywords:
        default = profile.default_error_mode if name == "capture_error_mode" else KEYWORD_DEFAULTS[name]
        made.append(Parameter(name, kind, default=default))
    return made


def signed(function: Callable[..., None], name: str, wanted: list[Parameter]) -> Callable[..., None]:
    """*function* as a method that takes exactly *wanted*."""
    signature = Signature([Parameter("self", Parameter.POSITIONAL_OR_KEYWORD), *wanted])

    def method(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        owner, *_ = bound.args
        given = dict(bound.arguments)
        del given["self"]
        function(owner, **given)

    method.__name__ = name
    method.__qualname__ = name
    method.__doc__ = function.__doc__
    method.__signature__ = signature  # type: ignore[attr-defined]
    return method
