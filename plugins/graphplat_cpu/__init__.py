"""The built-in plugin for device type ``cpu``: recorded operator graphs."""

from __future__ import annotations

from typing import Any

import torch

from graphplat import Platform, PlatformCapabilities, hookimpl
from graphplat.platform import DeviceGraph
from graphplat.recorded import RecordedGraph, RecordedPool, is_recording


class CpuPlatform(Platform):
    """Graphs are recorded operators, replayed into the same memory without the model's Python.

    Correct wherever torch runs, and the way to test runner logic without an accelerator.
    """

    name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities(
        graph_capture=True,
        executes_in_capture=True,
        shared_pool=True,
        thread_local_capture=True,
        breakable=True,
        compiled=True,
        collectives_in_capture=True,
        generators_in_capture=True,
    )

    def is_out_of_tree(self) -> bool:
        """Ships with graphplat."""
        return False

    def rng_state(self, device: torch.device) -> torch.Tensor:
        """The state of the default generator."""
        return torch.get_rng_state()

    def set_rng_state(self, device: torch.device, state: torch.Tensor) -> None:
        """Put the state of the default generator back."""
        torch.set_rng_state(state)

    def graph_pool(self) -> RecordedPool:
        """Memory that recorded graphs share."""
        return RecordedPool()

    def create_graph(self, *, updatable: bool = False) -> DeviceGraph:
        """A recorded graph."""
        return RecordedGraph()

    def capture_begin(self, graph: Any, *, pool: Any, stream: Any) -> None:
        """Record the operators of this thread."""
        graph.capture_begin(pool)

    def capture_end(self, graph: Any) -> None:
        """Plan the memory and bind the operators."""
        graph.capture_end()

    def abort_capture(self, graph: Any, *, pool: Any, stream: Any) -> bool:
        """Stop recording and keep nothing."""
        graph.abort()
        return True

    def is_capturing(self) -> bool:
        """Whether this thread records."""
        return is_recording()

    def register_generator(self, graph: Any, generator: torch.Generator) -> None:
        """Nothing to do: a recorded operator holds its generator and draws from it anew."""


@hookimpl
def provide_platforms() -> list[type[Platform]]:
    """One platform for the device type."""
    return [CpuPlatform]
