"""One platform class of a plugin: made and probed once, under a time limit."""

from __future__ import annotations

import math
import os
import threading
import time

import attrs

from graphplat.errors import ConfigError, PluginError
from graphplat.platform import Platform, PlatformCapabilities
from graphplat.torch_guard import TorchState, also_changed, refusal

TIMEOUT_VARIABLE = "GRAPHPLAT_PROBE_TIMEOUT"
_DEFAULT_TIMEOUT = 30.0

_probing = threading.local()


def probed_here() -> str | None:
    """The platform whose probe the calling thread runs, if any."""
    return getattr(_probing, "name", None)


def probe_timeout() -> float:
    """Seconds a probe may take. Raises :class:`ConfigError` if the variable is no positive number."""
    text = os.environ.get(TIMEOUT_VARIABLE, "").strip()
    if not text:
        return _DEFAULT_TIMEOUT
    try:
        seconds = float(text)
    except ValueError as error:
        raise ConfigError(f"{TIMEOUT_VARIABLE}={text!r} is no number of seconds") from error
    if not (seconds > 0 and math.isfinite(seconds)):
        raise ConfigError(f"{TIMEOUT_VARIABLE}={text!r} must be a positive number of seconds")
    return seconds


@attrs.define(eq=False)
class _Probe:
    """A probe under way in its own thread, so that one that hangs can be given up.

    What it changes in torch is put back once: when it ends, or when it is given up.
    """

    cls: type[Platform]
    started: float
    guarded: bool
    done: threading.Event = attrs.field(factory=threading.Event)
    instance: Platform | None = None
    error: BaseException | None = None
    changes: list[str] = attrs.field(factory=list)
    _before: TorchState | None = None
    _lock: threading.Lock = attrs.field(factory=threading.Lock)

    def start(self) -> None:
        threading.Thread(target=self._run, name=f"graphplat-probe-{self.cls.name}", daemon=True).start()

    def _run(self) -> None:
        _probing.name = self.cls.name
        try:
            self._before = TorchState.take() if self.guarded else None
            try:
                platform = _probed(self.cls)
            finally:
                self._put_back(of_thread=True)
            self.instance = platform
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits
            self.error = error
        finally:
            self.done.set()

    def give_up(self) -> None:
        """Put back what it changed so far. Later changes cannot be told from those of others."""
        self._put_back(of_thread=False)

    def _put_back(self, *, of_thread: bool) -> None:
        with self._lock:
            before, self._before = self._before, None
            if before is not None:
                self.changes = before.put_back(of_thread=of_thread)


def _probed(cls: type[Platform]) -> Platform:
    platform = cls()
    answer: object = platform.probe()  # type: ignore[func-returns-value]
    if answer is not None:
        raise PluginError(
            f"probe() returned {answer!r}",
            platform=cls.name,
            hint="It must raise the reason why the platform cannot be used, or return nothing",
        )
    if not isinstance(platform.capabilities, PlatformCapabilities):
        raise PluginError(
            f"capabilities are a {type(platform.capabilities).__name__}",
            platform=cls.name,
            hint="They must be a PlatformCapabilities",
        )
    return platform


@attrs.define(eq=False)
class PlatformSlot:
    """Holds the one instance of a platform class, or the reason why there is none."""

    cls: type[Platform]
    guarded: bool = True
    """Whether a probe that changes torch is refused: all but those of graphplat itself."""
    instance: Platform | None = None
    error: BaseException | None = None
    broken: bool = False
    """Whether it failed in a way that says nothing of the device: it hung, or changed torch."""
    _probe: _Probe | None = None

    @property
    def probed(self) -> bool:
        """Whether the answer is known."""
        return self.instance is not None or self.error is not None

    def probe(self) -> None:
        """Find out, once, whether the platform can be used here.

        The answer is final for this process. An interrupt while waiting leaves
        the probe running, and the next call waits for the same one.
        """
        if self.probed:
            return
        limit = probe_timeout()
        if self._probe is None:
            self._probe = _Probe(self.cls, time.monotonic(), self.guarded)
            self._probe.start()
        probe = self._probe
        finished = probe.done.wait(max(0.0, probe.started + limit - time.monotonic()))
        self._probe = None if finished else probe
        if not finished:
            probe.give_up()
            self.broken = True
            self.error = PluginError(
                f"probe() did not return within {limit:g} s",
                platform=self.cls.name,
                hint=f"Set {TIMEOUT_VARIABLE} to wait longer",
            )
        elif isinstance(probe.error, KeyboardInterrupt):
            raise probe.error
        else:
            self.instance, self.error = probe.instance, probe.error
        if probe.changes:
            self._refuse(probe.changes)

    def _refuse(self, changes: list[str]) -> None:
        self.broken = True
        if self.error is not None:
            self.error.add_note(also_changed(changes))
        else:
            self.instance, self.error = None, refusal("probe()", changes, platform=self.cls.name)
