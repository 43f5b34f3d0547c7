"""The ``torch.<name>`` module of a simulated device."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from .contexts import DeviceContext, StreamContext, graph_context
from .errors import SimulatedDeviceError
from .faults import faults
from .graph import graph_class
from .handles import ExternalEvent, MemPool, Stream, event_class
from .runtime import Runtime, active


def device_count() -> int:
    """How many devices there are."""
    return len(active().devices)


def is_available() -> bool:
    """Whether there is a device."""
    return device_count() > 0


def current_device() -> int:
    """This thread's device."""
    return active().current_index


def set_device(device: Any) -> None:
    """Change this thread's device."""
    runtime = active()
    runtime.set_index(runtime.index_of(device))


def synchronize(device: Any = None) -> None:
    """Wait for everything on a device; illegal during a capture."""
    runtime = active()
    faults.hit("synchronize")
    runtime.refuse_device_wide("device synchronization")
    runtime.counters.device_synchronizations += 1
    runtime.synchronize(runtime.index_of(device))


def current_stream(device: Any = None) -> Stream:
    """This thread's stream on a device."""
    runtime = active()
    return Stream.over(runtime.stream(runtime.index_of(device)))


def default_stream(device: Any = None) -> Stream:
    """The stream that cannot be captured."""
    return Stream.over(active().device(device).default_stream)


def set_stream(stream: Stream | None) -> None:
    """Make *stream* current."""
    if stream is not None:
        active().set_stream(stream.state)


def is_current_stream_capturing() -> bool:
    """Whether the current stream records instead of executing."""
    return active().stream().capture is not None


def graph_pool_handle() -> tuple[int, int]:
    """A handle for several captures to share one pool."""
    return 0, active().new_id()


def empty_cache() -> None:
    """Give unused memory back to the device; illegal during another thread's capture in global mode."""
    runtime = active()
    faults.hit("empty_cache")
    runtime.unsafe_call("empty_cache")
    runtime.counters.empty_caches += 1
    for device in runtime.devices:
        with runtime.lock:
            device.memory.release_cached()


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Free and total bytes."""
    faults.hit("mem_get_info")
    memory = active().device(device).memory
    memory.collect()
    return memory.total - memory.reserved, memory.total


def memory_allocated(device: Any = None) -> int:
    """Bytes under live tensors."""
    memory = active().device(device).memory
    memory.collect()
    return memory.allocated


def memory_reserved(device: Any = None) -> int:
    """Bytes taken from the device."""
    return active().device(device).memory.reserved


def max_memory_allocated(device: Any = None) -> int:
    """Highest `memory_allocated` since the last reset."""
    return active().device(device).memory.peak_allocated


def max_memory_reserved(device: Any = None) -> int:
    """Highest `memory_reserved` since the last reset."""
    return active().device(device).memory.peak_reserved


def reset_peak_memory_stats(device: Any = None) -> None:
    """Start the peaks from what is in use now."""
    memory = active().device(device).memory
    memory.collect()
    memory.peak_allocated, memory.peak_reserved = memory.allocated, memory.reserved


def memory_stats(device: Any = None) -> dict[str, Any]:
    """Figures under the keys that torch's caching allocators use."""
    memory = active().device(device).memory
    memory.collect()
    stats: dict[str, Any] = {
        "allocated_bytes.all.current": memory.allocated,
        "allocated_bytes.all.peak": memory.peak_allocated,
        "reserved_bytes.all.current": memory.reserved,
        "reserved_bytes.all.peak": memory.peak_reserved,
        "num_ooms": memory.oom_count,
    }
    for (first, second), pool in memory.pools.items():
        if (first, second) != (0, 0):
            stats[f"reserved_bytes_by_private_pools.{first}_{second}"] = pool.reserved
    return stats


def manual_seed(seed: int) -> None:
    """Seed the current device's generator."""
    runtime = active()
    if runtime.stream().capture is not None:
        raise runtime.violated(runtime.stream().capture, "seeding a generator")  # type: ignore[arg-type]
    runtime.device().generator.manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    """Seed every device's generator."""
    for device in active().devices:
        device.generator.manual_seed(int(seed))


def get_rng_state(device: Any = None) -> torch.Tensor:
    """State of a device's generator."""
    return active().device(device).generator.get_state()


def set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
    """Restore the state of a device's generator."""
    active().device(device).generator.set_state(new_state)


def initial_seed() -> int:
    """Seed of the current device's generator."""
    return active().device().generator.initial_seed()


def get_device_name(device: Any = None) -> str:
    """A name that nobody takes for real hardware."""
    return f"Simulated {active().name.upper()} {active().index_of(device)}"


def get_device_properties(device: Any = None) -> SimpleNamespace:
    """Name and memory size."""
    runtime = active()
    return SimpleNamespace(name=get_device_name(device), total_memory=runtime.device(device).memory.total)


def get_amp_supported_dtype() -> list[torch.dtype]:
    """What autocast may use."""
    return [torch.float16, torch.bfloat16]


def _use_mem_pool(pool: MemPool, device: Any = None) -> Any:
    """Let the current thread's tensors come from *pool*."""
    del device
    return active().routed_to(pool._pool)


_FUNCTIONS = (
    device_count,
    is_available,
    current_device,
    set_device,
    synchronize,
    current_stream,
    default_stream,
    set_stream,
    empty_cache,
    mem_get_info,
    memory_allocated,
    memory_reserved,
    max_memory_allocated,
    max_memory_reserved,
    reset_peak_memory_stats,
    memory_stats,
    manual_seed,
    manual_seed_all,
    get_rng_state,
    set_rng_state,
    initial_seed,
    get_device_name,
    get_device_properties,
    get_amp_supported_dtype,
)


def device_module(runtime: Runtime) -> ModuleType:
    """Everything that ``torch.<name>`` has under this profile, and nothing else."""
    profile = runtime.profile
    module = ModuleType(f"torch.{runtime.name}", f"The simulated device {runtime.name!r}.")
    members: dict[str, Any] = {function.__name__: function for function in _FUNCTIONS}
    members |= {
        "Stream": Stream,
        "Event": event_class(profile),
        "stream": StreamContext,
        "device": DeviceContext,
        "StreamContext": StreamContext,
        "default_generators": tuple(device.generator for device in runtime.devices),
        "is_initialized": lambda: True,
        "init": lambda: None,
        "is_bf16_supported": lambda: True,
        "_is_in_bad_fork": lambda: False,
    }
    if profile.graphs:
        members |= {
            profile.graph_class: graph_class(profile),
            "graph": graph_context(profile),
            "graph_pool_handle": graph_pool_handle,
            "is_current_stream_capturing": is_current_stream_capturing,
        }
    if profile.mem_pool:
        members |= {"MemPool": MemPool, "use_mem_pool": _use_mem_pool}
    if profile.external_event:
        members["ExternalEvent"] = ExternalEvent
    for name in members.keys() - profile.absent:
        setattr(module, name, members[name])
    return module


__all__ = ["SimulatedDeviceError", "device_module"]
