"""The built-in plugin for device type ``musa``: Moore Threads GPUs through ``torch_musa``.

Driven by the API of torch_musa 2.7.1 and tested on a simulated device only; real
hardware is unverified.
"""

from __future__ import annotations

from graphplat import Platform, PlatformCapabilities, hookimpl
from graphplat.streamgraph import StreamGraphApi, StreamGraphPlatform


class MusaPlatform(StreamGraphPlatform):
    """MUSA graphs through ``torch.musa.MUSAGraph``, begun and ended by hand.

    Not through ``torch.musa.graph``: its name for the graph argument changes under
    torchada, and it collects garbage at every entry.
    """

    name = "musa"
    device_type = "musa"
    api = StreamGraphApi(
        module="musa",
        package="torch_musa",
        graph_class="MUSAGraph",
        begin_keywords={"capture_error_mode": "thread_local"},
        # Private, and what torch_musa's own graph trees call before and after they record.
        clear_workspaces="torch_musa._MUSAC._musa_clearMublasWorkspaces",
    )
    capabilities = PlatformCapabilities(
        graph_capture=True,
        shared_pool=True,
        thread_local_capture=True,
        breakable=True,
        # A process holds about 2,043 live executables; the next one fails at capture_end
        # and corrupts random state (S5000, driver 3.3.5), so stay clear of it.
        max_graphs=1900,
        collectives_in_capture=True,
    )

    def is_out_of_tree(self) -> bool:
        """Ships with graphplat."""
        return False


@hookimpl
def provide_platforms() -> list[type[Platform]]:
    """One platform for the device type."""
    return [MusaPlatform]
