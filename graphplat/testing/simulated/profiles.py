"""What each vendor's device looks like from Python, as data.

Class names, keywords, defaults and abilities follow the vendors' Python sources: torch 2.13 for the cuda and
xpu shapes, torch_npu 2.11 to 2.13 for npu, torch_musa 2.7.1 for musa.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from attrs import evolve, frozen

#: Defaults of every keyword a vendor's graph API knows; ``capture_error_mode`` comes from the profile.
KEYWORD_DEFAULTS: Final = MappingProxyType(
    {
        "pool": None,
        "stream": None,
        "keep_graph": False,
        "auto_dispatch_capture": False,
        "check_input_liveness": False,
        "enable_annotations": False,
        "enable_timing": False,
        "blocking": False,
        "interprocess": False,
        "external": False,
    }
)

ERROR_MODES: Final = ("global", "thread_local", "relaxed")


@frozen(kw_only=True)
class SimProfile:
    """How a simulated device poses: the names it exposes, and the rules it enforces.

    The first group shapes the Python API; a keyword or method that is not listed does not exist, nor does a
    module member named in ``absent`` (``{"empty_cache", "mem_get_info"}``, say).

    The second group sets behaviour: ``record_only`` executes nothing during capture; ``deferred`` queues all
    work until a stream or device synchronize, or a host read; ``poison_freed`` overwrites memory when its
    tensor dies; ``default_error_mode`` is what a capture uses that names no mode; ``update_list_check``
    raises for a list of another length than the captured one; ``memory_bytes`` is the size of each device.
    """

    graph_class: str = "Graph"
    graph_argument: str = "graph"
    init_keywords: tuple[str, ...] = ()
    begin_keywords: tuple[str, ...] = ("pool", "capture_error_mode")
    context_keywords: tuple[str, ...] = ("pool", "stream", "capture_error_mode")
    event_keywords: tuple[str, ...] = ("enable_timing", "blocking", "interprocess")
    graph_methods: frozenset[str] = frozenset({"debug_dump"})
    graphs: bool = True
    external_event: bool = False
    mem_pool: bool = True
    dump_suffix: str | None = None
    absent: frozenset[str] = frozenset()

    record_only: bool = True
    deferred: bool = False
    poison_freed: bool = True
    default_error_mode: str = "global"
    refuses_default_stream: bool = True
    single_capture: bool = True
    side_streams_use_pool: bool = True
    finalizer_invalidates: bool = True
    collects_garbage: bool = False
    reset_releases_pool: bool = True
    warns_when_empty: bool = True
    update_list_check: bool = True
    max_graphs: int | None = None
    memory_bytes: int = 8 << 30
    segment_bytes: int = 64 << 10


_CUDA_METHODS: Final = frozenset(
    {"instantiate", "register_generator_state", "enable_debug_mode", "debug_dump", "raw_graph"}
)

CUDA_LIKE: Final = SimProfile(
    graph_class="CUDAGraph",
    graph_argument="cuda_graph",
    init_keywords=("keep_graph",),
    begin_keywords=("pool", "capture_error_mode", "check_input_liveness"),
    context_keywords=("pool", "stream", "capture_error_mode", "enable_annotations", "check_input_liveness"),
    event_keywords=("enable_timing", "blocking", "interprocess", "external"),
    graph_methods=_CUDA_METHODS,
)

XPU_LIKE: Final = SimProfile(
    graph_class="XPUGraph",
    graph_argument="xpu_graph",
    init_keywords=("keep_graph",),
    begin_keywords=("pool",),
    context_keywords=("pool", "stream"),
    event_keywords=("enable_timing",),
    graph_methods=_CUDA_METHODS,
    dump_suffix=".dot",
    default_error_mode="relaxed",
    refuses_default_stream=False,
    side_streams_use_pool=False,
)

NPU: Final = SimProfile(
    graph_class="NPUGraph",
    graph_argument="npu_graph",
    context_keywords=("pool", "stream", "auto_dispatch_capture", "capture_error_mode"),
    graph_methods=frozenset({"update", "debug_dump"}),
    external_event=True,
    max_graphs=1800,
)

MUSA: Final = SimProfile(
    graph_class="MUSAGraph",
    graph_argument="musa_graph",
    graph_methods=frozenset({"enable_debug_mode", "debug_dump", "reinstantiate_graph"}),
    collects_garbage=True,
    reset_releases_pool=False,
    max_graphs=2043,
)

ACME: Final = evolve(CUDA_LIKE, graph_class="AcmeGraph", graph_argument="acme_graph")

#: Profiles by the vendor they pose as. ``xpu`` and ``cuda`` cannot be device names of a simulated device,
#: since torch owns them: run these two shapes under names such as ``simxpu`` and ``simcuda``.
PROFILES: Final = MappingProxyType(
    {
        "npu": NPU,
        "musa": MUSA,
        "xpu": XPU_LIKE,
        "simxpu": XPU_LIKE,
        "cuda": CUDA_LIKE,
        "simcuda": CUDA_LIKE,
        "acme": ACME,
    }
)
