"""The built-in plugin for device type ``npu``: Ascend NPUs through ``torch_npu``.

Driven by the API of torch_npu 2.6 to 2.14 and tested on a simulated device only; real
hardware is unverified.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch.utils import _python_dispatch

from graphplat import (
    BaseRunner,
    CaptureError,
    DecodeGraphRunner,
    EagerRunner,
    ModelRunner,
    Platform,
    PlatformCapabilities,
    PlatformError,
    PrefillGraphRunner,
    hookimpl,
)
from graphplat.platform import DeviceGraph
from graphplat.streamgraph import StreamGraphApi, StreamGraphPlatform


class NpuPlatform(StreamGraphPlatform):
    """NPU graphs, recorded inside ``torch.npu.graph``.

    The context manager, not ``capture_begin``, pushes the dispatch mode by which operators
    with host arguments become updatable. A graph with such records blocks at a replay
    without an update, so only graphs whose runtime declares updates are captured that way.
    """

    name = "npu"
    device_type = "npu"
    api = StreamGraphApi(
        module="npu",
        package="torch_npu",
        graph_class="NPUGraph",
        context="graph",
        context_keywords={"capture_error_mode": "thread_local"},
    )
    capabilities = PlatformCapabilities(
        graph_capture=True,
        shared_pool=True,
        thread_local_capture=True,
        breakable=True,
        # Update first is the order that every release accepts; see NPUGraph.update.
        update_after_capture="before_replay",
        # Each graph takes streams from a fixed budget of 2,048, of which engines hold 248 back.
        max_graphs=1800,
        collectives_in_capture=True,
    )

    def __init__(self) -> None:
        super().__init__()
        self._updatable: weakref.WeakSet[Any] = weakref.WeakSet()

    def is_out_of_tree(self) -> bool:
        """Ships with graphplat."""
        return False

    def create_graph(self, *, updatable: bool = False) -> DeviceGraph:
        """An ``NPUGraph``; *updatable* ones record their operators' host arguments."""
        graph = super().create_graph()
        if updatable:
            self._updatable.add(graph)
        return graph

    def context_keywords(self, graph: Any) -> dict[str, Any]:
        """Turn the dispatch mode on for updatable graphs."""
        keywords = super().context_keywords(graph)
        return keywords | {"auto_dispatch_capture": True} if graph in self._updatable else keywords

    def abort_capture(self, graph: Any, *, pool: Any, stream: Any) -> bool:
        """Take the dispatch mode off too, which ``torch.npu.graph`` leaves on when begin or end raises."""
        try:
            return super().abort_capture(graph, pool=pool, stream=stream)
        finally:
            mode = getattr(graph, "graph_dispatch_mode", None)
            # No public call tells which modes are on.
            if mode is not None and mode in _python_dispatch._get_current_dispatch_mode_stack():
                mode.__exit__(None, None, None)

    def update_graph(self, graph: Any, values: Mapping[str, Sequence[int]]) -> None:
        """Rewrite host arguments by keyword: one entry for each record, with what it captured.

        ``NPUGraph.update`` ignores a key that no operator captured, and a list of another
        length in old releases, and would replay stale values; here both raise
        :class:`PlatformError`. A segment that recorded no such operator has nothing to update.
        """
        records = dispatch_records(graph)
        if not records:
            return
        for key, numbers in values.items():
            captured = [record.kwargs[key] for record in records if key in record.kwargs]
            if not captured:
                raise PlatformError(
                    f"none of {len(records)} recorded operators takes {key!r} by keyword",
                    platform=self.name,
                    field=key,
                    hint="Pass the host value to the operator as a keyword argument of that name",
                )
            if any(len(old) != len(numbers) for old in captured):
                raise PlatformError(
                    f"{len(numbers)} values given, {[len(old) for old in captured]} captured",
                    platform=self.name,
                    field=key,
                )
        graph.update(cpu_update_input=[_fresh(record.kwargs, values) for record in records])


def _fresh(captured: Mapping[str, Any], values: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """*values* for one record, of the type that each was captured with."""
    return {
        key: torch.tensor(numbers, dtype=torch.int32)
        if isinstance(captured[key], torch.Tensor)
        else list(numbers)
        for key, numbers in values.items()
        if key in captured
    }


def dispatch_records(graph: Any) -> list[Any]:
    """The updatable operators that *graph* recorded, in order."""
    mode = getattr(graph, "graph_dispatch_mode", None)
    return cast("list[Any]", getattr(mode, "graph_dispatch_records", []))


class NPUGraphRunner(DecodeGraphRunner):
    """Decode through NPU graphs whose host lengths are rewritten at every replay.

    The update comes before its replay and waits for the one before to have read its
    values. After capture it is checked that every declared value reached an operator.
    """

    def capture(self) -> None:
        """Capture, then refuse graphs that would ignore a declared host value."""
        super().capture()
        check_updates(self)


class NPUPrefillRunner(PrefillGraphRunner):
    """Prefill with the same rule for host lengths."""

    def capture(self) -> None:
        """Capture, then refuse graphs that would ignore a declared host value."""
        super().capture()
        check_updates(self)


def check_updates(runner: DecodeGraphRunner | PrefillGraphRunner) -> None:
    """Raise :class:`CaptureError` if a declared host value is in none of a shape's records."""
    paths = runner.update_paths
    for key, graphs in runner.device_graphs().items():
        recorded = {name for graph in graphs for record in dispatch_records(graph) for name in record.kwargs}
        if missing := [path for path in paths if path not in recorded]:
            runner.release()
            raise CaptureError(
                f"host values {missing} reached no operator that can be updated",
                platform="npu",
                phase=key.phase,
                bucket=key.size,
                hint="Pass them to a fused attention operator as keyword arguments of those names",
            )


@hookimpl
def provide_platforms() -> list[type[Platform]]:
    """One platform for the device type."""
    return [NpuPlatform]


@hookimpl
def create_decode_runner(
    platform: Platform, model_runner: ModelRunner, eager_runner: EagerRunner
) -> BaseRunner:
    """Decode with host-value updates."""
    return NPUGraphRunner(platform, model_runner, eager_runner)


@hookimpl
def create_prefill_runner(
    platform: Platform, model_runner: ModelRunner, eager_runner: EagerRunner
) -> BaseRunner:
    """Prefill with host-value updates."""
    return NPUPrefillRunner(platform, model_runner, eager_runner)
