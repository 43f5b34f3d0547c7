"""The plugins' context managers around a capture."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any

import attrs

from graphplat.errors import PluginError

if TYPE_CHECKING:
    from graphplat.batch import Phase


@attrs.frozen
class Participant:
    """A plugin's context manager around a capture, which can neither hide nor replace its error."""

    manager: AbstractContextManager[Any]
    platform: str
    phase: Phase

    def __enter__(self) -> None:
        try:
            self.manager.__enter__()
        except Exception as error:
            raise self._error("entered", error) from error

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            hidden = self.manager.__exit__(kind, error, trace)
        except Exception as failed:
            if error is None:
                raise self._error("left", failed) from failed
            if failed is not error:
                error.add_note(str(self._error("left", failed)))
        else:
            if hidden and error is not None:
                error.add_note(f"capture participant {self.manager!r} tried to suppress this error")

    def _error(self, what: str, error: Exception) -> PluginError:
        return PluginError(
            f"capture participant {self.manager!r} could not be {what}: {type(error).__name__}: {error}",
            platform=self.platform,
            phase=self.phase,
        )
