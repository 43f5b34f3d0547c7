"""Putting the simulated device into torch: one name per process, as torch rules."""

from __future__ import annotations

import os
import re
from typing import Any

import torch
from attrs import define, evolve, frozen
from torch.utils import backend_registration

from graphplat.errors import ConfigError

from .dispatch import dispatch
from .errors import SimulatedDeviceError
from .faults import faults
from .hostargs import define_operators
from .hostmem import is_pinned, pin
from .ledger import Ledger, ledger
from .module import device_module
from .operators import attention
from .profiles import ACME, PROFILES, SimProfile
from .runtime import Runtime, adopt

#: Operators registered by name and not left to the fallback: torch calls them on wrapped tensors with their
#: Python dispatch switched off (``torch.tensor(data, device=...)``), where a fallback cannot be reached, or
#: has a composite kernel for them that resizes its result (``arange``).
_BY_NAME = (
    "copy_",
    "_to_copy",
    "_copy_from",
    "empty.memory_format",
    "empty_strided",
    "arange",
    "arange.start",
    "arange.start_step",
)


@frozen
class _Request:
    name: str
    profile: SimProfile
    devices: int


@define(eq=False)
class SimulatedDevice:
    """The installed device: its name, profile, module and driver state."""

    name: str
    profile: SimProfile
    devices: int
    module: Any
    runtime: Runtime
    _libraries: list[Any]

    def ledger(self) -> Ledger:
        """As `ledger`."""
        return ledger()

    @property
    def journal(self) -> list[tuple[str, dict[str, Any]]]:
        """The latest driver calls, oldest first."""
        return list(self.runtime.journal)

    def recover(self) -> None:
        """Put the driver back to rest after a test that broke it: captures, queues, streams, faults.

        Nothing a platform may use: with a real device only a new process does this.
        """
        faults.clear()
        self.runtime.recover()

    def set_deferred(self, deferred: bool) -> None:
        """Queue work until a synchronize, on every stream, or run it at once; queued work runs first."""
        for device in self.runtime.devices:
            self.runtime.synchronize(device.index)
            for stream in device.all_streams():
                stream.deferred = deferred
        self._change(deferred=deferred)

    def set_record_only(self, record_only: bool) -> None:
        """Whether captures from now on execute nothing."""
        self._change(record_only=record_only)

    def set_memory(self, total_bytes: int) -> None:
        """Make every device that big."""
        for device in self.runtime.devices:
            device.memory.total = total_bytes

    def set_max_graphs(self, limit: int | None) -> None:
        """Change the limit on live executables."""
        self._change(max_graphs=limit)

    def _change(self, **settings: Any) -> None:
        self.profile = self.runtime.profile = evolve(self.profile, **settings)


_installed: tuple[_Request, SimulatedDevice] | None = None


def install_simulated(name: str, *, profile: SimProfile | None = None, devices: int = 1) -> SimulatedDevice:
    """Give this process *devices* simulated accelerators under the torch device name *name*.

    *profile* defaults to ``PROFILES[name]``, or to the profile of an unnamed vendor. The same call again
    returns the same object; another name, profile or count raises `SimulatedDeviceError`, since torch takes
    one such device per process. So does a name that torch owns, such as ``cuda`` or ``xpu``, or that another
    module has already taken.
    """
    global _installed  # noqa: PLW0603 - torch keeps one such device per process, and so do we
    request = _Request(name, profile or PROFILES.get(name, ACME), devices)
    if _installed is not None:
        if _installed[0] != request:
            raise SimulatedDeviceError(
                f"this process already has the simulated device {_installed[0].name!r} with "
                f"{_installed[0].devices} devices; run another one in another process"
            )
        return _installed[1]
    if hasattr(torch, name):
        raise SimulatedDeviceError(f"torch.{name} exists already: a simulated device needs a name of its own")
    device = _install(request)
    _installed = (request, device)
    return device


def _install(request: _Request) -> SimulatedDevice:
    runtime = Runtime(request.name, request.profile)
    adopt(runtime)
    backend_registration.rename_privateuse1_backend(request.name)
    for _ in range(request.devices):
        runtime.add_device()
    module = device_module(runtime)
    _register(request.name, module)
    define_operators()
    libraries = [_fallback(), _kernels()]
    return SimulatedDevice(request.name, request.profile, request.devices, module, runtime, libraries)


def _register(name: str, module: Any) -> None:
    """Hand torch the module, hooks and device guard.

    The parts of ``_setup_privateuseone_for_python_backend``, called one by one since the module needs device
    objects of the new name. torch offers no public way to register a device from Python.
    """
    backend_registration.generate_methods_for_privateuse1_backend()
    torch._register_device_module(name, module)  # type: ignore[no-untyped-call]
    accelerator = torch._C._acc
    accelerator.register_python_privateuseone_hook(backend_registration._DummyPrivateUse1Hook())
    accelerator.register_python_privateuseone_device_guard(backend_registration._DummyDeviceGuard())


def _fallback() -> Any:
    library: Any = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
    library.fallback(lambda op, *args, **kwargs: dispatch(op, args, kwargs), "PrivateUse1")
    return library


def _kernels() -> Any:
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for name in _BY_NAME:
        packet, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, packet), overload or "default")
        library.impl(name, _kernel(op), "PrivateUse1")
    library.impl("scaled_dot_product_attention", attention, "AutogradPrivateUse1")
    library.impl("_pin_memory", pin, "CPU")
    library.impl("is_pinned", is_pinned, "CPU")
    return library


def _kernel(op: Any) -> Any:
    return lambda *args, **kwargs: dispatch(op, args, kwargs)


def install_from_environment(variable: str = "GRAPHPLAT_SIMULATED") -> SimulatedDevice | None:
    """Install what *variable* names, as ``NAME`` or ``NAME:COUNT``; ``None`` when it is unset or empty.

    Raises :class:`ConfigError` if it names no device, or one that this process cannot have.
    """
    text = os.environ.get(variable, "")
    if not text:
        return None
    given = re.fullmatch(r"([a-z_]+)(?::([1-9][0-9]*))?", text)  # of these torch makes names of devices
    if given is None:
        raise ConfigError(
            f"{variable}={text!r} names no simulated device",
            hint="Give NAME or NAME:COUNT, such as acme:2: lower-case letters, and one device or more",
        )
    try:
        return install_simulated(given[1], devices=int(given[2] or 2))
    except RuntimeError as error:  # ours or torch's: the name is taken
        raise ConfigError(f"{variable}={text!r} cannot be installed: {error}") from error
