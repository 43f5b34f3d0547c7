"""Ask the plugins of one platform: who is asked, in which order, and what they may answer."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

import attrs

from graphplat.admission import Plugin
from graphplat.batch import Phase
from graphplat.discovery import cause
from graphplat.errors import PluginError
from graphplat.hookspecs import CaptureProgress
from graphplat.platform import Platform
from graphplat.torch_guard import also_changed, refusal, torch_unchanged

if TYPE_CHECKING:
    from graphplat.model_runner import ModelRunner
    from graphplat.runners.base import BaseRunner
    from graphplat.runners.eager import EagerRunner

T = TypeVar("T")


class GraphplatWarning(UserWarning):
    """Something failed that does not stop the work, but that somebody should know."""


def warn(message: str) -> None:
    """Warn, pointing at the first caller outside graphplat."""
    frame = inspect.currentframe()
    level = 0
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "graphplat":
        frame, level = frame.f_back, level + 1
    warnings.warn(message, GraphplatWarning, stacklevel=level + 1)


@attrs.frozen(eq=False)
class PlatformHooks:
    """The hooks as one platform sees them.

    First-result hooks are asked only of the plugin that brought the platform, so
    that no other can take its place or break it. Every method raises
    :class:`PluginError`, naming plugin, distribution and hook, if a plugin raises,
    answers with something of the wrong type, or changes torch, which is undone.
    """

    own: Plugin | None
    """The plugin that brought the platform; ``None`` for one made by hand."""
    others: Callable[[], list[Plugin]]
    """Add-ons of the platform's device type and plugins registered in this process."""

    def supports_cuda_graph(self, platform: Platform, phase: Phase) -> bool:
        """Whether *phase* may be captured: the hook's answer, or else the platform's own."""
        answer = self._first("supports_cuda_graph", bool, platform=platform, phase=phase)
        if answer is not None:
            return answer
        try:
            own: object = platform.support_cuda_graph()
        except Exception as error:
            raise self._error("support_cuda_graph", f"raised {cause(error)}", platform, phase) from error
        if not isinstance(own, bool):
            raise self._error("support_cuda_graph", f"returned {own!r}, not a bool", platform, phase)
        return own

    def create_eager_runner(self, platform: Platform, model_runner: ModelRunner) -> EagerRunner | None:
        """The plugin's eager runner, or ``None`` for the default one."""
        from graphplat.runners.eager import EagerRunner

        return self._first("create_eager_runner", EagerRunner, platform=platform, model_runner=model_runner)

    def create_decode_runner(
        self, platform: Platform, model_runner: ModelRunner, eager_runner: EagerRunner
    ) -> BaseRunner | None:
        """The plugin's decode runner, or ``None`` for the default one."""
        return self._runner("create_decode_runner", platform, model_runner, eager_runner)

    def create_prefill_runner(
        self, platform: Platform, model_runner: ModelRunner, eager_runner: EagerRunner
    ) -> BaseRunner | None:
        """The plugin's prefill runner, or ``None`` for the default one."""
        return self._runner("create_prefill_runner", platform, model_runner, eager_runner)

    def capture_participants(
        self, platform: Platform, model_runner: ModelRunner, phase: Phase
    ) -> list[AbstractContextManager[Any]]:
        """The context managers to enter around the capture of *phase*, in plugin-name order.

        Asked: the platform's own plugin, and plugins that bring no platform and
        serve its device type or are registered in this process.
        """
        found: list[AbstractContextManager[Any]] = []
        for plugin in self._everyone():
            if plugin is not self.own and plugin.platforms:
                continue  # it answers for another platform
            call = plugin.manager.hook.capture_participants
            arguments = {"platform": platform, "model_runner": model_runner, "phase": phase}
            for answer in _ask(plugin, call, arguments, platform, phase):
                if not isinstance(answer, AbstractContextManager):
                    what = f"returned {answer!r}, not a context manager"
                    raise _error(plugin, "capture_participants", what, platform, phase)
                found.append(answer)
        return found

    def capture_progress(self, event: CaptureProgress) -> None:
        """Tell every observer. One that raises is reported as a warning, and disturbs nobody."""
        for plugin in self._everyone():
            try:
                _, changes = _call(plugin, plugin.manager.hook.capture_progress, {"event": event})
            except Exception as error:  # noqa: BLE001 - an observer must not break a capture
                warn(f"Plugin {plugin.label}: hook capture_progress raised {cause(error)}")
            else:
                if changes:
                    warn(str(refusal(f"Plugin {plugin.label}: hook capture_progress", changes)))

    def _everyone(self) -> list[Plugin]:
        own = [self.own] if self.own is not None else []
        everyone = own + [plugin for plugin in self.others() if plugin is not self.own]
        return sorted(everyone, key=lambda plugin: plugin.label)

    def _runner(
        self, hook: str, platform: Platform, model_runner: ModelRunner, eager_runner: EagerRunner
    ) -> BaseRunner | None:
        from graphplat.runners.base import BaseRunner

        kind: Any = BaseRunner  # abstract, which only matters to whoever makes one
        runner: BaseRunner | None = self._first(
            hook, kind, platform=platform, model_runner=model_runner, eager_runner=eager_runner
        )
        return runner

    def _first(self, hook: str, kind: type[T], platform: Platform, **arguments: Any) -> T | None:
        if self.own is None:
            return None
        phase = arguments.get("phase")
        call = getattr(self.own.manager.hook, hook)
        answer = _ask(self.own, call, {"platform": platform, **arguments}, platform, phase)
        if answer is None or isinstance(answer, kind):
            return answer
        raise self._error(hook, f"returned {answer!r}, not a {kind.__name__}", platform, phase)

    def _error(self, hook: str, what: str, platform: Platform, phase: Phase | None) -> PluginError:
        if self.own is None:
            return PluginError(f"{hook} {what}", platform=platform.name, phase=phase)
        return _error(self.own, hook, what, platform, phase)


def _ask(
    plugin: Plugin, call: Any, arguments: dict[str, Any], platform: Platform, phase: Phase | None
) -> Any:
    try:
        answer, changes = _call(plugin, call, arguments)
    except Exception as error:
        raise _error(plugin, call.name, f"raised {cause(error)}", platform, phase) from error
    if changes:
        raise refusal(
            f"plugin {plugin.label}: hook {call.name}", changes, platform=platform.name, phase=phase
        )
    return answer


def _call(plugin: Plugin, call: Any, arguments: dict[str, Any]) -> tuple[Any, list[str]]:
    """The answer, and what the hook changed in torch, which is undone. Our own hooks change nothing."""
    if plugin.in_tree or not call.get_hookimpls():
        return call(**arguments), []
    changes: list[str] = []
    try:
        with torch_unchanged() as changes:
            answer = call(**arguments)
    except Exception as error:
        if changes:
            error.add_note(also_changed(changes))
        raise
    return answer, changes


def _error(plugin: Plugin, hook: str, what: str, platform: Platform, phase: Phase | None) -> PluginError:
    return PluginError(f"plugin {plugin.label}: hook {hook} {what}", platform=platform.name, phase=phase)
