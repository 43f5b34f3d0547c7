"""Deliberately broken platforms: one fault each, to prove that the conformance suite catches it.

A fault is a function from a sound platform class to a broken one, with the names of the tests
that must fail on it. Importing ``broken_replays``, ``broken_captures``, ``broken_devices`` and
``broken_runners`` fills :data:`FAULTS`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import attrs
import torch

from graphplat import EagerRunner, ModelRunner, Platform, hookimpl
from graphplat.registry import platform_for, register_plugin, unregister_plugin
from graphplat.runners import BaseRunner

Base = type[Platform]
Needs = Literal["", "streams", "updates", "no_updates", "counters", "generators", "api"]


@attrs.frozen
class Fault:
    """One way to be wrong, and the tests that notice."""

    name: str
    caught_by: Mapping[str, str]
    """The tests, each with a pattern of the ``TypeName: message`` that it fails with."""
    platform: Callable[[Base], Base]
    decode_runner: Callable[..., BaseRunner] | None = None
    eager_runner: Callable[..., EagerRunner] | None = None
    needs: Needs = ""
    deferred: bool = False
    """Visible only on a device whose work queues."""


FAULTS: dict[str, Fault] = {}
"""Every fault by name."""


def fault(*, needs: Needs = "", deferred: bool = False, **caught_by: str) -> Callable[[Any], Any]:
    """Register a function that derives a broken platform class from a sound one.

    *caught_by* are the tests that must fail on it, as in :class:`Fault`.
    """

    def add(make: Callable[[Base], Base]) -> Callable[[Base], Base]:
        FAULTS[make.__name__] = Fault(make.__name__, caught_by, make, needs=needs, deferred=deferred)
        return make

    return add


def runner_fault(**caught_by: str) -> Callable[[Any], Any]:
    """Register a decode runner that is broken, as a vendor's own one may be."""

    def add(runner: Any) -> Any:
        name = runner.__name__
        FAULTS[name] = Fault(name, caught_by, lambda base: base, decode_runner=runner)
        return runner

    return add


def applies(one: Fault, platform: Platform) -> bool:
    """Whether *platform* has what this fault breaks."""
    can = platform.capabilities
    has = {
        "": True,
        "streams": platform.new_stream(torch.zeros(1, device=platform.device_type).device) is not None,
        "updates": can.update_after_capture != "none",
        "no_updates": can.update_after_capture == "none",
        "counters": can.memory_counters,
        "generators": can.generators_in_capture,
        "api": hasattr(platform, "api"),
    }
    return has[one.needs]


@contextlib.contextmanager
def broken(one: Fault, sound: Platform) -> Iterator[Platform]:
    """A platform like *sound* with one fault, served by a plugin of its own inside the body."""
    base = one.platform(type(sound))
    cls: Base = type(
        "Broken", (base,), {"name": f"{sound.name}_{one.name}", "is_out_of_tree": lambda self: True}
    )
    plugin = _Plugin(cls, one.decode_runner, one.eager_runner)
    register_plugin(plugin, one.name)
    try:
        yield platform_for(sound.device_type, name=cls.name)
    finally:
        unregister_plugin(one.name)


@attrs.frozen(eq=False)
class _Plugin:
    """Brings one broken platform and, if they are what is broken, its runners."""

    cls: Base
    decode_runner: Callable[..., BaseRunner] | None
    eager_runner: Callable[..., EagerRunner] | None

    @hookimpl
    def provide_platforms(self) -> list[Base]:
        """The broken one."""
        return [self.cls]

    @hookimpl
    def create_decode_runner(
        self, platform: Platform, model_runner: ModelRunner, eager_runner: EagerRunner
    ) -> BaseRunner | None:
        """The broken one, if it is the runner."""
        make = self.decode_runner
        return None if make is None else make(platform, model_runner, eager_runner)

    @hookimpl
    def create_eager_runner(self, platform: Platform, model_runner: ModelRunner) -> EagerRunner | None:
        """The broken one, if it is the runner."""
        return None if self.eager_runner is None else self.eager_runner(platform, model_runner)
