"""The xpu plugin's own API data under a device name that torch does not own."""

import msgspec

from graphplat import Platform, hookimpl
from graphplat.streamgraph import StreamGraphPlatform
from graphplat_xpu import XpuPlatform


class SimXpuPlatform(XpuPlatform):
    """XPU graphs on the simulated device ``simxpu``."""

    name = "simxpu"
    device_type = "simxpu"
    api = msgspec.structs.replace(XpuPlatform.api, module="simxpu", raw_stream=None)

    def is_out_of_tree(self) -> bool:
        """No built-in platform has this device type."""
        return True

    def probe(self) -> None:
        """Skip the question whether torch was built for the real device."""
        StreamGraphPlatform.probe(self)


@hookimpl
def provide_platforms() -> list[type[Platform]]:
    """One platform for the device type."""
    return [SimXpuPlatform]
