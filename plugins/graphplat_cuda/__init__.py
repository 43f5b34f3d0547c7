"""The built-in plugin for device type ``cuda``: NVIDIA GPUs, and AMD GPUs under the same name."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from graphplat import Platform, PlatformCapabilities, PlatformError, hookimpl
from graphplat.streamgraph import StreamGraphApi, StreamGraphPlatform


class CudaPlatform(StreamGraphPlatform):
    """CUDA graphs through ``torch.cuda.CUDAGraph``, begun and ended by hand.

    ``torch.cuda.graph`` synchronizes the device and empties the cache at every entry, which
    nearly doubles the capture time of a ladder; it also records in a mode that other
    threads' device calls break.
    """

    name = "cuda"
    device_type = "cuda"
    api = StreamGraphApi(
        module="cuda",
        graph_class="CUDAGraph",
        begin_keywords={"capture_error_mode": "thread_local"},
        raw_stream="_cuda_getCurrentRawStream",
        # Private, and what torch's own graph trees call before and after they record.
        clear_workspaces="torch._C._cuda_clearCublasWorkspaces",
    )
    capabilities = PlatformCapabilities(
        graph_capture=True,
        shared_pool=True,
        thread_local_capture=True,
        breakable=True,
        compiled=True,
        trusted_free_memory=True,
        memory_counters=True,
        collectives_in_capture=True,
        generators_in_capture=True,
        pinned_memory=True,
        memory_aliases=True,
        symmetric_memory=True,
    )

    def is_out_of_tree(self) -> bool:
        """Ships with graphplat."""
        return False

    def probe(self) -> None:
        """Ask the build and the management library, neither of which creates a context."""
        if torch.version.cuda is None and torch.version.hip is None:
            raise RuntimeError(f"torch {torch.__version__} is built without CUDA or ROCm")
        if torch.cuda.device_count() == 0:
            raise RuntimeError("no CUDA device is visible")

    def alias(self, tensor: torch.Tensor, owner: object) -> torch.Tensor:
        """Through ``__cuda_array_interface__``: torch keeps the object that has it, and owns nothing."""
        with torch.inference_mode(False):
            raw = torch.as_tensor(_Memory(tensor.data_ptr(), tensor.nbytes, owner))
            return raw.view(tensor.dtype).view(tensor.shape)

    def preallocate_symmetric_memory(
        self, *, device: torch.device, stream: Any, group: Any, nbytes: int
    ) -> Any:
        """Allocate *nbytes* that every rank of *group* maps, and exchange the mappings.

        Collective: all ranks must call it. Returns the tensor and its handle, which own the memory.
        """
        if group is None:
            raise PlatformError(
                "symmetric memory needs a process group", platform=self.name, hint="Set process_group"
            )
        with self.use_stream(stream if stream is not None else self.current_stream(device)):
            # torch documents this module by its underscored name; there is no other.
            from torch.distributed import _symmetric_memory as symmetric_memory

            buffer = symmetric_memory.empty(nbytes, dtype=torch.uint8, device=device)
            return buffer, symmetric_memory.rendezvous(buffer, group)

    def _after_invalid(self, graph: Any, pool: Any, stream: Any) -> None:
        """Repair what ``CUDAGraph`` leaves when it raises at begin or end (torch 2.11 to 2.13).

        It raises before it stops routing allocations to the pool and before the random
        generators leave capture mode. The first has a private call; the second happens at
        the end of any sound capture, so a tiny one is made. The pinned-memory
        allocator keeps the pool marked as recording, and nothing undoes that, so the pool
        is not captured into again.
        """
        if pool is not None and (end := getattr(torch._C, "_cuda_endAllocateToPool", None)) is not None:
            with contextlib.suppress(RuntimeError):  # it was not being routed to: begin failed early
                end(stream.device_index, pool)
                torch._C._cuda_releasePool(stream.device_index, pool)
        healing = torch.cuda.CUDAGraph()
        for generator in self._generators.get(id(graph), ()):
            healing.register_generator_state(generator)
        healing.capture_begin(capture_error_mode="thread_local")
        torch.zeros(1, device=stream.device)
        healing.capture_end()
        healing.reset()


class _Memory:
    """Device memory at an address, for torch to wrap."""

    def __init__(self, address: int, nbytes: int, owner: object) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


@hookimpl
def provide_platforms() -> list[type[Platform]]:
    """One platform for the device type."""
    return [CudaPlatform]
