"""Capture and replay device graphs for any inference runtime on any accelerator.

A runtime calls :func:`capture_cuda_graphs` once and ``runner.execute(batch)`` every
step. A hardware vendor ships one plugin. Neither patches the other.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphplat.batch import ForwardBatch, Phase
    from graphplat.breaks import break_graph, eager_on_graph, fork_stream, live_batch
    from graphplat.capture import (
        CudaGraphsCapture,
        DecodeGraphCapture,
        capture_cuda_graphs,
        capture_decode_graph,
        capture_prefill_graph,
    )
    from graphplat.config import GraphConfig, PhaseConfig
    from graphplat.errors import (
        AmbiguousPlatformError,
        CaptureError,
        ConfigError,
        ContractError,
        GraphplatError,
        HostReadError,
        InputError,
        PlatformError,
        PluginError,
        ReplayError,
        WeightsMovedError,
    )
    from graphplat.function_runner import graphed
    from graphplat.hookspecs import hookimpl, hookspec
    from graphplat.inputs import HostSpec, InputSpec, TensorSpec, UpTo
    from graphplat.keys import ShapeKey
    from graphplat.model_runner import ModelRunner
    from graphplat.planner import BucketLimit, BucketPlan, plan_buckets
    from graphplat.platform import Platform, PlatformCapabilities
    from graphplat.plugin_hooks import GraphplatWarning
    from graphplat.registry import current_platform, platform_for
    from graphplat.report import CaptureReport, Decision, Reason
    from graphplat.runners import BaseRunner, DecodeGraphRunner, EagerRunner, PrefillGraphRunner

__version__ = "0.1.0"

__all__ = [
    "AmbiguousPlatformError",
    "BaseRunner",
    "BucketLimit",
    "BucketPlan",
    "CaptureError",
    "CaptureReport",
    "ConfigError",
    "ContractError",
    "CudaGraphsCapture",
    "Decision",
    "DecodeGraphCapture",
    "DecodeGraphRunner",
    "EagerRunner",
    "ForwardBatch",
    "GraphConfig",
    "GraphplatError",
    "GraphplatWarning",
    "HostReadError",
    "HostSpec",
    "InputError",
    "InputSpec",
    "ModelRunner",
    "Phase",
    "PhaseConfig",
    "Platform",
    "PlatformCapabilities",
    "PlatformError",
    "PluginError",
    "PrefillGraphRunner",
    "Reason",
    "ReplayError",
    "ShapeKey",
    "TensorSpec",
    "UpTo",
    "WeightsMovedError",
    "break_graph",
    "capture_cuda_graphs",
    "capture_decode_graph",
    "capture_prefill_graph",
    "current_platform",
    "eager_on_graph",
    "fork_stream",
    "graphed",
    "hookimpl",
    "hookspec",
    "live_batch",
    "plan_buckets",
    "platform_for",
]

_HOME = {
    "graphplat.batch": (
        "ForwardBatch",
        "Phase",
    ),
    "graphplat.breaks": (
        "break_graph",
        "eager_on_graph",
        "fork_stream",
        "live_batch",
    ),
    "graphplat.capture": (
        "CudaGraphsCapture",
        "DecodeGraphCapture",
        "capture_cuda_graphs",
        "capture_decode_graph",
        "capture_prefill_graph",
    ),
    "graphplat.config": (
        "GraphConfig",
        "PhaseConfig",
    ),
    "graphplat.errors": (
        "AmbiguousPlatformError",
        "CaptureError",
        "ConfigError",
        "ContractError",
        "GraphplatError",
        "HostReadError",
        "InputError",
        "PlatformError",
        "PluginError",
        "ReplayError",
        "WeightsMovedError",
    ),
    "graphplat.function_runner": ("graphed",),
    "graphplat.hookspecs": (
        "hookimpl",
        "hookspec",
    ),
    "graphplat.inputs": (
        "HostSpec",
        "InputSpec",
        "TensorSpec",
        "UpTo",
    ),
    "graphplat.keys": ("ShapeKey",),
    "graphplat.model_runner": ("ModelRunner",),
    "graphplat.planner": (
        "BucketLimit",
        "BucketPlan",
        "plan_buckets",
    ),
    "graphplat.platform": (
        "Platform",
        "PlatformCapabilities",
    ),
    "graphplat.plugin_hooks": ("GraphplatWarning",),
    "graphplat.registry": (
        "current_platform",
        "platform_for",
    ),
    "graphplat.report": (
        "CaptureReport",
        "Decision",
        "Reason",
    ),
    "graphplat.runners": (
        "BaseRunner",
        "DecodeGraphRunner",
        "EagerRunner",
        "PrefillGraphRunner",
    ),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name's module when the name is first used, which keeps ``import graphplat`` quick."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_MODULE_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
