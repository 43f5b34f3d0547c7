"""The hooks a plugin may implement. Hooks hand over objects; objects do the work.

None is called while a graph replays. A plugin implements only what it needs,
with ``@graphplat.hookimpl`` functions in one module that an entry point of the
group ``graphplat`` names.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import msgspec
import pluggy

from graphplat.batch import Phase
from graphplat.keys import ShapeKey

if TYPE_CHECKING:
    from graphplat.model_runner import ModelRunner
    from graphplat.platform import Platform
    from graphplat.runners.base import BaseRunner
    from graphplat.runners.eager import EagerRunner

PROJECT = "graphplat"
"""The pluggy project name and the entry-point group."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class CaptureProgress(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a capture: ``start``, ``compiling``, ``captured``, ``skipped`` or ``end`` of a phase.

    ``compiling`` comes before a shape of the ``compiled`` backend, which may take long.
    """

    kind: str
    phase: Phase
    total: int
    """Shapes to capture in this phase."""
    done: int
    key: ShapeKey | None = None
    seconds: float | None = None
    detail: str = ""


@hookspec
def provide_platforms() -> Iterable[type[Platform]]:  # type: ignore[empty-body]
    """Name the platform classes this plugin brings.

    Called once, at discovery. Leave the device alone here:
    ``Platform.probe()`` is the first place that may touch it.

    .. versionadded:: 0.1
    """


@hookspec(firstresult=True)
def supports_cuda_graph(platform: Platform, phase: Phase) -> bool | None:
    """Say whether *phase* may be captured on *platform*; ``None``: as its capabilities say.

    Called once per phase at set-up. Only the plugin that brought *platform* is asked.

    .. versionadded:: 0.1
    """


@hookspec(firstresult=True)
def create_decode_runner(
    platform: Platform, model_runner: ModelRunner, eager_runner: EagerRunner
) -> BaseRunner | None:
    """Make the runner of decode steps, not yet captured; ``None``: the default one.

    Only the plugin that brought *platform* is asked.

    .. versionadded:: 0.1
    """


@hookspec(firstresult=True)
def create_prefill_runner(
    platform: Platform, model_runner: ModelRunner, eager_runner: EagerRunner
) -> BaseRunner | None:
    """Make the runner of prefill steps, not yet captured; ``None``: the default one.

    Only the plugin that brought *platform* is asked.

    .. versionadded:: 0.1
    """


@hookspec(firstresult=True)
def create_eager_runner(platform: Platform, model_runner: ModelRunner) -> EagerRunner | None:
    """Make the runner of everything that has no graph; ``None``: the default one.

    Only the plugin that brought *platform* is asked.

    .. versionadded:: 0.1
    """


@hookspec
def capture_participants(
    platform: Platform, model_runner: ModelRunner, phase: Phase
) -> AbstractContextManager[Any] | None:
    """Give a context manager to hold around a capture of *phase*.

    Entered around each capture in plugin order, left in reverse: one of all shapes at set-up,
    one of each shape under ``capture="lazy"``. Its ``__exit__`` sees the exception if the
    capture failed. Allocators, offloaders and collectives belong here.
    The platform's own plugin is asked, those of its device type that bring no platform, and
    those registered by hand.

    .. versionadded:: 0.1
    """


@hookspec
def capture_progress(event: CaptureProgress) -> None:
    """Observe a capture: progress bar, log, profiler. Never called during a recording.

    .. versionadded:: 0.1
    """
