"""Device graphs on Acme accelerators: a whole out-of-tree vendor in one module."""

from __future__ import annotations

import os

from graphplat import Phase, Platform, PlatformCapabilities, hookimpl
from graphplat.streamgraph import StreamGraphApi, StreamGraphPlatform


class AcmePlatform(StreamGraphPlatform):
    """Graphs through ``torch.acme.AcmeGraph``."""

    name = "acme"
    device_type = "acme"
    api = StreamGraphApi(
        module="acme",
        graph_class="AcmeGraph",
        begin_keywords={"capture_error_mode": "thread_local"},
    )
    capabilities = PlatformCapabilities(
        graph_capture=True,
        shared_pool=True,
        thread_local_capture=True,
        breakable=True,
        trusted_free_memory=True,
        memory_counters=True,
        generators_in_capture=True,
        pinned_memory=True,
    )


@hookimpl
def provide_platforms() -> list[type[Platform]]:
    """One platform for the device type."""
    return [AcmePlatform]


@hookimpl
def supports_cuda_graph(platform: Platform, phase: Phase) -> bool | None:
    """Run eagerly where ``ACME_GRAPHS=0`` says so; otherwise as the capabilities say."""
    return False if os.environ.get("ACME_GRAPHS") == "0" else None
