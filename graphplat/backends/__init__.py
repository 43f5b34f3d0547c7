"""How a runner records one shape: full, breakable or compiled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphplat.backends.base import CaptureBackend, CapturedShape, Place
from graphplat.backends.breakable import BreakableBackend
from graphplat.backends.compiled import CompiledBackend
from graphplat.backends.full import FullBackend
from graphplat.backends.kernels import check_options
from graphplat.errors import ConfigError, PlatformError

if TYPE_CHECKING:
    from graphplat.config import PhaseConfig
    from graphplat.platform import PlatformCapabilities
    from graphplat.runners.context import RunnerContext

__all__ = [
    "BreakableBackend",
    "CaptureBackend",
    "CapturedShape",
    "CompiledBackend",
    "FullBackend",
    "lacking_capability",
    "make_backend",
]

_BACKENDS: dict[str, type[CaptureBackend]] = {
    "full": FullBackend,
    "breakable": BreakableBackend,
    "compiled": CompiledBackend,
}


def lacking_capability(backend: str, capabilities: PlatformCapabilities) -> str | None:
    """The first capability that *backend* needs and that is not declared.

    Raises :class:`ConfigError` for a backend that records nothing.
    """
    if backend not in _BACKENDS:
        raise ConfigError(f"backend {backend!r} records nothing", hint=f"Use one of {sorted(_BACKENDS)}")
    return _BACKENDS[backend].lacking(capabilities)


def make_backend(
    config: PhaseConfig, context: RunnerContext, place: Place, *, updatable: bool = False
) -> CaptureBackend:
    """The backend that *config* names; allocates nothing.

    *updatable*: host values of its graphs will be rewritten.

    Raises :class:`PlatformError` when the platform lacks what that needs, and :class:`ConfigError` for
    options that the compiler does not know.
    """
    lacking = lacking_capability(config.backend, context.platform.capabilities)
    if lacking is None and updatable and context.platform.capabilities.update_after_capture == "none":
        lacking = "update_after_capture"
    if lacking is not None:
        raise PlatformError(
            f"the {config.backend} backend needs the capability {lacking!r}",
            platform=context.platform.name,
            hint='Use another backend, or "disabled"',
        )
    if config.backend == "compiled":
        check_options(config.compile_options)
    backend = _BACKENDS[config.backend](
        platform=context.platform,
        device=context.device,
        context=context,
        place=place,
        warmup=config.warmup,
        updatable=updatable,
        generators=context.model_runner.generators,
    )
    context.backends.append(backend)
    return backend
