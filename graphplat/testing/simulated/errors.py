"""What the simulated driver raises: ``RuntimeError`` subclasses, as torch raises for a real one."""

from __future__ import annotations


class SimulatedDeviceError(RuntimeError):
    """The simulated device refused a call."""


class CaptureViolationError(SimulatedDeviceError):
    """A call that a capturing stream does not permit; the capture it met is invalid from then on."""


class DeviceHangError(SimulatedDeviceError):
    """The host waits for work that the device can never finish, where a real device would block for ever."""


class Stall(Exception):  # noqa: N818
    """Internal signal: a queued item has to wait for something that has not happened yet."""
