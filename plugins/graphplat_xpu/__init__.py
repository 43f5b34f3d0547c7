"""The built-in plugin for device type ``xpu``: Intel GPUs.

Driven by the API of torch 2.11 to 2.13 and tested on a simulated device only; real
hardware is unverified.
"""

from __future__ import annotations

import torch

from graphplat import Platform, PlatformCapabilities, hookimpl
from graphplat.streamgraph import StreamGraphApi, StreamGraphPlatform


class XpuPlatform(StreamGraphPlatform):
    """XPU graphs through ``torch.xpu.XPUGraph``, which torch has from 2.11 on.

    Captures have no error mode, so other threads must leave the device alone meanwhile.
    A device-wide synchronize after a replay has crashed on some drivers; streams are
    synchronized instead.
    """

    name = "xpu"
    device_type = "xpu"
    api = StreamGraphApi(module="xpu", graph_class="XPUGraph", raw_stream="_xpu_getCurrentRawStream")
    capabilities = PlatformCapabilities(
        graph_capture=True, shared_pool=True, breakable=True, device_synchronize=False
    )

    def is_out_of_tree(self) -> bool:
        """Ships with graphplat."""
        return False

    def probe(self) -> None:
        """Ask the build first: ``torch.xpu`` exists in every build."""
        if not torch.xpu._is_compiled():
            raise RuntimeError(f"torch {torch.__version__} is built without XPU")
        super().probe()


@hookimpl
def provide_platforms() -> list[type[Platform]]:
    """One platform for the device type."""
    return [XpuPlatform]
