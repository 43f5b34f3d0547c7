"""Deliberately broken platforms: one fault each, to prove that the conformance suite catches it.

A fault is a function from a sound platform class to a broken one, with the names of the tests
that must fail on it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Literal

import attrs
import msgspec
import torch

from graphplat import EagerRunner, ModelRunner, Platform, hookimpl
from graphplat.platform import MemoryInfo
from graphplat.registry import platform_for, register_plugin, unregister_plugin
from graphplat.runners import BaseRunner

Base = type[Platform]
Needs = Literal["", "streams", "updates", "no_updates", "counters", "generators", "api"]


@attrs.frozen
class Fault:
    """One way to be wrong, and the tests that notice."""

    name: str
    caught_by: tuple[str, ...]
    platform: Callable[[Base], Base]
    decode_runner: Callable[..., BaseRunner] | None = None
    eager_runner: Callable[..., EagerRunner] | None = None
    needs: Needs = ""
    deferred: bool = False
    """Visible only on a device whose work queues."""


FAULTS: dict[str, Fault] = {}
"""Every fault by name."""


def fault(*caught_by: str, needs: Needs = "", deferred: bool = False) -> Callable[[Any], Any]:
    """Register a function that derives a broken platform class from a sound one."""

    def add(make: Callable[[Base], Base]) -> Callable[[Base], Base]:
        FAULTS[make.__name__] = Fault(make.__name__, caught_by, make, needs=needs, deferred=deferred)
        return make

    return add


def runner_fault(*caught_by: str) -> Callable[[Any], Any]:
    """Register a decode runner that is broken, as a vendor's own one may be."""

    def add(runner: Any) -> Any:
        name = runner.__name__
        FAULTS[name] = Fault(name, caught_by, lambda base: base, decode_runner=runner)
        return runner

    return add


def applies(one: Fault, platform: Platform) -> bool:
    """Whether *platform* has what this fault breaks."""
    can = platform.capabilities
    has = {
        "": True,
        "streams": platform.new_stream(torch.zeros(1, device=platform.device_type).device) is not None,
        "updates": can.update_after_capture != "none",
        "no_updates": can.update_after_capture == "none",
        "counters": can.memory_counters,
        "generators": can.generators_in_capture,
        "api": hasattr(platform, "api"),
    }
    return has[one.needs]


@contextlib.contextmanager
def broken(one: Fault, sound: Platform) -> Iterator[Platform]:
    """A platform like *sound* with one fault, served by a plugin of its own inside the body."""
    base = one.platform(type(sound))
    cls: Base = type(
        "Broken", (base,), {"name": f"{sound.name}_{one.name}", "is_out_of_tree": lambda self: True}
    )
    plugin = _Plugin(cls, one.decode_runner, one.eager_runner)
    register_plugin(plugin, one.name)
    try:
        yield platform_for(sound.device_type, name=cls.name)
    finally:
        unregister_plugin(one.name)


@attrs.frozen(eq=False)
class _Plugin:
    """Brings one broken platform and, if they are what is broken, its runners."""

    cls: Base
    decode_runner: Callable[..., BaseRunner] | None
    eager_runner: Callable[..., EagerRunner] | None

    @hookimpl
    def provide_platforms(self) -> list[Base]:
        """The broken one."""
        return [self.cls]

    @hookimpl
    def create_decode_runner(
        self, platform: Platform, model_runner: ModelRunner, eager_runner: EagerRunner
    ) -> BaseRunner | None:
        """The broken one, if it is the runner."""
        make = self.decode_runner
        return None if make is None else make(platform, model_runner, eager_runner)

    @hookimpl
    def create_eager_runner(self, platform: Platform, model_runner: ModelRunner) -> EagerRunner | None:
        """The broken one, if it is the runner."""
        return None if self.eager_runner is None else self.eager_runner(platform, model_runner)


# What a platform declares and tells


@fault("test_it_serves_its_device_type")
def always_capturing(base: Base) -> Base:
    """Says that it captures when it does not."""

    class Broken(base, abstract=True):  # type: ignore[valid-type, misc, call-arg]
        def is_capturing(self) -> bool:
            return True

    return Broken


@fault("test_capabilities_do_not_contradict_each_other")
def breakable_without_graphs(base: Base) -> Base:
    """Declares what needs graphs without declaring graphs."""

    class Broken(base, abstract=True):  # type: ignore[valid-type, misc, call-arg]
        capabilities = msgspec.structs.replace(base.capabilities, graph_capture=False, breakable=True)

    return Broken


@fault("test_memory_figures_make_sense")
def more_free_than_there_is(base: Base) -> Base:
    """Mixes up free and total bytes."""

    class Broken(base, abstract=True):  # type: ignore[valid-type, misc, call-arg]
        def memory_info(self, device: torch.device) -> MemoryInfo:
            return MemoryInfo(free=2, total=1)

    return Broken


@fault("test_the_random_state_can_be_put_back", "test_random_numbers_are_drawn_anew")
def lost_random_state(base: Base) -> Base:
    """Does not put random state back."""

    class Broken(base, abstract=True):  # type: ignore[valid-type, misc, call-arg]
        def set_rng_state(self, device: torch.device, state: torch.Tensor) -> None:
            pass

    return Broken


@fault("test_a_capture_leaves_things_as_they_were")
def patches_torch(base: Base) -> Base:
    """Replaces a function of torch while it captures, and leaves it replaced."""

    class Broken(base, abstract=True):  # type: ignore[valid-type, misc, call-arg]
        def capture_begin(self, graph: Any, *, pool: Any, stream: Any) -> None:
            torch.Tensor.cpu = functools.partialmethod(torch.Tensor.cpu)  # type: ignore[method-assign, assignment]
            super().capture_begin(graph, pool=pool, stream=stream)

    return Broken


# Replays


@fault(
    "test_every_size_equals_the_reference",
    "test_replays_read_fresh_inputs",
    "test_inputs_may_come_from_the_host",
    "test_weights_updated_in_place_are_seen",
    "test_random_numbers_are_drawn_anew",
    "test_eager_parts_run_between_segments",
    "test_fifty_cycles_leave_counts_constant",
    "test_a_platforms_graph_replays_on_its_own",
    "test_nested_and_keyword_inputs_are_refreshed",
    "test_every_output_comes_back_cut",
)
def stale_replay(base: Base) -> Base:
    """Never launches a graph: results are those of the capture."""

    class Broken(base, abstract=True):  # type: ignore[valid-type, misc, call-arg]
        def replay(self, graph: Any) -> None:
            pass

    return Broken


@fault("test_interleaved_buckets_do_not_disturb_each_other", "test_memory_that_crosses_a_break_is_not_reused")
def wrong_graph(base: Base) -> Base:
    """Launches the graph that was captured last, whichever is asked for."""

    class Broken(base, abstract=True):  # type: ignore[valid-type, misc, call-arg]
        _last: Any = None

        def capture_end(self, graph: Any) -> None:
            super().capture_end(graph)
            self._last = graph

        def replay(self, graph: Any) -> None:
            self._last.replay()

    return Broken


@fault("test_random_numbers_are_drawn_anew")
def frozen_noise(base: Base) -> Base:
    """Draws the same numbers at every replay."""

    class Broken(base, abstract=True):  # type: ignore[valid-type, misc, call-arg]
        _noise: torch.Tensor | None = None

        def replay(self, graph: Any) -> None:
            device = torch.zeros(1, device=self.device_type).device
            if self._noise is None:
                state = self.rng_state(device)
                self._noise = None if state is None else state.clone()
            elif self._noise is not None:
                self.set_rng_state(device, self._noise)
            graph.replay()

    return Broken


@fault("test_private_generators_can_be_captured", needs="generators")
def frozen_generators(base: Base) -> Base:
    """Draws the same numbers from registered generators at every replay."""

    class Broken(base, abstract=True):  # type: ignore[valid-type, misc, call-arg]
        _sources: list[torch.Generator]

        def register_generator(self, graph: Any, generator: torch.Generator) -> None:
            super().register_generator(graph, generator)
            self._sources = [generator]

        def replay(self, graph: Any) -> None:
            for generator in getattr(self, "_sources", ()):
                generator.manual_seed(1)
            graph.replay()

    return Broken


# Captures that fail


@fault(
    "test_a_failed_bucket_runs_eagerly",
    "test_a_failed_capture_leaves_the_device_usable",
    "test_a_host_read_in_a_capture_is_refused",
)
def forgotten_abort(base: Base) -> Base:
    """Leaves a failed capture open."""

    class Broken(base, abstract=True):  # type: ignore[valid-type, misc, call-arg]
        def abort_capture(self, graph: Any, *, pool: Any, stream: Any) -> bool:
            return True

    return Broken


@fault("test_graphs_captured_before_a_failure_stay_usable")
def abort_destroys_all(base: Base) -> Base:
    """Destroys every graph when one capture fails."""

    class Broken(base, abstract=True):  # type: ignore[valid-type, misc, call-arg]
        def create_graph(self, *, updatable: bool = False) -> Any:
            graph = super().create_graph(updatable=updatable)
            self.__dict__.setdefault("_all", []).append(graph)
            return graph

        def abort_capture(self, graph: Any, *, pool: Any, stream: Any) -> bool:
            reusable: bool = super().abort_capture(graph, pool=pool, stream=stream)
            for other in self.__dict__.pop("_all"):
                other.reset()
            return reusable

    return Broken


class _Suppressing:
    """A context that swallows what its body raises."""

    def __init__(self, inner: AbstractContextManager[Any]) -> None:
        self.inner = inner

    def __enter__(self) -> Any:
        return self.inner.__enter__()

    def __exit__(self, *error: Any) -> bool:
        self.inner.__exit__(*error)
        return True


@fault("test_a_failed_capture_leaves_the_device_usable")
def swallowed_failure(base: Base) -> Base:
    """Swallows errors on its capture stream."""

    class Broken(base, abstract=True):  # type: ignore[valid-type, misc, call-arg]
        def use_stream(self, stream: Any) -> Any:
            return _Suppressing(super().use_stream(stream))

    return Broken


@fault("test_a_host_read_in_a_capture_is_refused", "test_replays_read_fresh_inputs")
def records_nothing(base: Base) -> Base:
    """Runs the forward instead of recording it."""

    class Broken(base, abstract=True):  # type: ignore[valid-type, misc, call-arg]
        def capture_begin(self, graph: Any, *, pool: Any, stream: Any) -> None:
            pass

        def capture_end(self, graph: Any) -> None:
            pass

        def abort_capture(self, graph: Any, *, pool: Any, stream: Any) -> bool:
            return True

        def replay(self, graph: Any) -> None:
            pass

    return Broken


@fault("test_two_runners_capture_one_after_the_other")
def only_one_thread_captures(base: Base) -> Base:
    """Captures in the first thread that does, and in no other."""
    import threading

    class Broken(base, abstract=True):  # type: ignore[valid-type, misc, call-arg]
        def capture_begin(self, graph: Any, *, pool: Any, stream: Any) -> None:
            first = self.__dict__.setdefault("_thread", threading.get_ident())
            if first != threading.get_ident():
                raise RuntimeError("capture belongs to another thread")
            super().capture_begin(graph, pool=pool, stream=stream)

    return Broken


# Lifetimes


@fault("test_release_and_recapture", "test_fifty_cycles_leave_counts_constant")
def leaked_graphs(base: Base) -> Base:
    """Keeps every graph that it ever made."""

    class Broken(base, abstract=True):  # type: ignore[valid-type, misc, call-arg]
        def create_graph(self, *, updatable: bool = False) -> Any:
            graph = super().create_graph(updatable=updatable)
            self.__dict__.setdefault("_kept", []).append(graph)
            return graph

    return Broken


@fault("test_fifty_cycles_leave_counts_constant", "test_the_memory_ledger_balances", needs="counters")
def leaked_bytes(base: Base) -> Base:
    """Allocates scratch memory at each capture and never frees it."""

    class Broken(base, abstract=True):  # type: ignore[valid-type, misc, call-arg]
        def capture_begin(self, graph: Any, *, pool: Any, stream: Any) -> None:
            scratch = torch.zeros(1 << 16, device=stream.device)
            self.__dict__.setdefault("_scratch", []).append(scratch)
            super().capture_begin(graph, pool=pool, stream=stream)

    return Broken


@fault("test_small_buckets_share_the_pool", needs="counters")
def pool_for_each_graph(base: Base) -> Base:
    """Ignores the pool that graphs should share."""

    class Broken(base, abstract=True):  # type: ignore[valid-type, misc, call-arg]
        def capture_begin(self, graph: Any, *, pool: Any, stream: Any) -> None:
            super().capture_begin(graph, pool=self.graph_pool(), stream=stream)

    return Broken


# Streams, on devices that have them


@fault(
    "test_a_stream_is_restored_however_the_body_ends",
    "test_a_capture_leaves_things_as_they_were",
    needs="streams",
)
def unrestored_stream(base: Base) -> Base:
    """Leaves its stream current."""

    class Broken(base, abstract=True):  # type: ignore[valid-type, misc, call-arg]
        @contextlib.contextmanager
        def use_stream(self, stream: Any) -> Iterator[Any]:
            super().use_stream(stream).__enter__()
            yield stream

    return Broken


@fault(
    "test_streams_can_be_ordered",
    "test_a_side_stream_that_joins_is_captured",
    "test_side_streams_are_joined_before_a_segment_ends",
    needs="streams",
    deferred=True,
)
def lost_order(base: Base) -> Base:
    """Does not order one stream after another."""

    class Broken(base, abstract=True):  # type: ignore[valid-type, misc, call-arg]
        def wait_stream(self, waiting: Any, awaited: Any) -> None:
            pass

    return Broken


@fault("test_a_side_stream_that_never_joins_is_refused", needs="streams")
def swallowed_end(base: Base) -> Base:
    """Swallows the error that ends an invalid capture."""

    class Broken(base, abstract=True):  # type: ignore[valid-type, misc, call-arg]
        def capture_end(self, graph: Any) -> None:
            with contextlib.suppress(Exception):
                super().capture_end(graph)

    return Broken


@fault("test_synchronize_waits_for_asynchronous_copies", needs="counters", deferred=True)
def no_synchronize(base: Base) -> Base:
    """Returns from a synchronize at once."""

    class Broken(base, abstract=True):  # type: ignore[valid-type, misc, call-arg]
        def synchronize(self, device: torch.device) -> None:
            pass

    return Broken


@fault("test_every_size_equals_the_reference", needs="api")
def wrong_device_sync(base: Base) -> Base:
    """Synchronizes the device inside a capture."""

    class Broken(base, abstract=True):  # type: ignore[valid-type, misc, call-arg]
        def capture_begin(self, graph: Any, *, pool: Any, stream: Any) -> None:
            super().capture_begin(graph, pool=pool, stream=stream)
            getattr(torch, self.device_type).synchronize()

    return Broken


@fault("test_every_size_equals_the_reference", needs="api")
def wrong_keyword(base: Base) -> Base:
    """Gives the device's graph a keyword that it does not know."""

    class Broken(base, abstract=True):  # type: ignore[valid-type, misc, call-arg]
        def capture_begin(self, graph: Any, *, pool: Any, stream: Any) -> None:
            graph.capture_begin(pool=pool, error_mode="thread_local")

    return Broken


@fault("test_other_threads_may_use_the_device_during_a_capture", needs="api")
def process_wide_capture(base: Base) -> Base:
    """Declares thread-local captures and begins one that forbids other threads the device."""

    class Broken(base, abstract=True):  # type: ignore[valid-type, misc, call-arg]
        def capture_begin(self, graph: Any, *, pool: Any, stream: Any) -> None:
            graph.capture_begin(pool=pool, capture_error_mode="global")

    return Broken


# Updates, on devices that have them


@fault(
    "test_updated_host_values_count_at_each_replay",
    "test_an_update_that_reaches_nothing_is_an_error",
    "test_a_failing_update_reaches_the_caller",
    needs="updates",
)
def stale_update(base: Base) -> Base:
    """Updates a graph with the values that it was captured with, whatever is asked for."""

    class Broken(base, abstract=True):  # type: ignore[valid-type, misc, call-arg]
        def update_graph(self, graph: Any, values: Any) -> None:
            records = graph.graph_dispatch_mode.graph_dispatch_records
            if records:
                graph.update(cpu_update_input=[{}] * len(records))

    return Broken


@fault("test_without_updates_such_batches_run_eagerly", needs="no_updates")
def ignored_update(base: Base) -> Base:
    """Accepts updates that it cannot do."""

    class Broken(base, abstract=True):  # type: ignore[valid-type, misc, call-arg]
        def update_graph(self, graph: Any, values: Any) -> None:
            pass

    return Broken
