"""A simulated accelerator: a torch device of any name, in pure Python, with the rules of real graphs.

.. code-block:: python

    sim = install_simulated("npu", profile=PROFILES["npu"], devices=2)
    model.to("npu:1")

It keeps the rules louder than hardware does: nothing executes during a capture, memory that nobody has
written reads as NaN or as a huge integer, dead memory is handed to the next tensor, host reads and device
synchronization during a capture raise. `ledger` counts what is alive; `faults` makes chosen calls fail.
"""

from __future__ import annotations

from .errors import CaptureViolationError, DeviceHangError, SimulatedDeviceError
from .faults import Fault, faults
from .install import SimulatedDevice, install_from_environment, install_simulated
from .ledger import Ledger, ledger
from .memory import POISON
from .profiles import PROFILES, SimProfile
from .runtime import installed
from .tensor import SimTensor
from .updates import register_update_handler

__all__ = [
    "POISON",
    "PROFILES",
    "CaptureViolationError",
    "DeviceHangError",
    "Fault",
    "Ledger",
    "SimProfile",
    "SimTensor",
    "SimulatedDevice",
    "SimulatedDeviceError",
    "faults",
    "install_from_environment",
    "install_simulated",
    "installed",
    "ledger",
    "register_update_handler",
]
