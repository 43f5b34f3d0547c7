"""The one error tree of graphplat.

Every message says what happened, where (platform, phase, bucket, field) and
what to do next. The original exception is always chained as ``__cause__``.
"""

from __future__ import annotations


class GraphplatError(Exception):
    """Root of every error that graphplat raises.

    ``platform``, ``phase``, ``bucket`` and ``field`` locate the fault as far as
    it is known; ``hint`` is the next step for the reader.
    """

    def __init__(
        self,
        what: str,
        *,
        platform: str | None = None,
        phase: str | None = None,
        bucket: int | None = None,
        field: str | None = None,
        hint: str | None = None,
    ) -> None:
        self.what = what
        self.platform = platform
        self.phase = phase
        self.bucket = bucket
        self.field = field
        self.hint = hint
        super().__init__(self._compose())

    def _compose(self) -> str:
        where = [
            f"{label} '{value}'" if isinstance(value, str) else f"{label} {value}"
            for label, value in (
                ("platform", self.platform),
                ("phase", self.phase),
                ("bucket", self.bucket),
                ("field", self.field),
            )
            if value is not None
        ]
        text = self.what
        if where:
            text += f" [{', '.join(where)}]"
        if self.hint:
            text += f". {self.hint}"
        return text


class InputError(GraphplatError, ValueError):
    """A batch, an input spec or an argument is not what was declared.

    Raised before any static buffer is touched.
    """


class ConfigError(GraphplatError, ValueError):
    """A setting is unknown, ill-typed or contradicts another one."""


class ContractError(GraphplatError, TypeError):
    """A subclass of a contract class lacks a required member, misspells one, or gives what cannot be used.

    Raised when the subclass is defined, or when what is wrong is first handed over.
    """


class PlatformError(GraphplatError):
    """A platform cannot be resolved, is unavailable, or lacks a capability."""


class PluginError(PlatformError):
    """A plugin could not be loaded, or broke a hook's promise."""


class AmbiguousPlatformError(PlatformError):
    """Two available out-of-tree platforms claim one device type."""


class CaptureError(GraphplatError):
    """A graph could not be captured; device state is as it was before."""


class HostReadError(CaptureError):
    """A captured forward asked for a tensor's value on the host, or synchronized."""


class ReplayError(GraphplatError):
    """A captured graph could not be replayed."""


class WeightsMovedError(ReplayError):
    """A tensor whose address a graph has baked in was moved since capture."""
