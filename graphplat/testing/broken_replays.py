"""Platforms that declare, tell or replay something wrong; one fault each."""

from __future__ import annotations

import functools
from typing import Any

import msgspec
import torch

from graphplat.platform import MemoryInfo
from graphplat.testing.broken import Base, fault

# What a platform declares and tells


@fault(test_it_serves_its_device_type="AssertionError: assert True is False")
def always_capturing(base: Base) -> Base:
    """Says that it captures when it does not."""

    class Broken(base, abstract=True):  # type: ignore[valid-type, misc, call-arg]
        def is_capturing(self) -> bool:
            return True

    return Broken


@fault(test_capabilities_do_not_contradict_each_other="AssertionError: needs graph_capture")
def breakable_without_graphs(base: Base) -> Base:
    """Declares what needs graphs without declaring graphs."""

    class Broken(base, abstract=True):  # type: ignore[valid-type, misc, call-arg]
        capabilities = msgspec.structs.replace(base.capabilities, graph_capture=False, breakable=True)

    return Broken


@fault(test_memory_figures_make_sense="AssertionError: assert 2 <= 1")
def more_free_than_there_is(base: Base) -> Base:
    """Mixes up free and total bytes."""

    class Broken(base, abstract=True):  # type: ignore[valid-type, misc, call-arg]
        def memory_info(self, device: torch.device) -> MemoryInfo:
            return MemoryInfo(free=2, total=1)

    return Broken


@fault(
    test_the_random_state_can_be_put_back="AssertionError: assert False",
    test_random_numbers_are_drawn_anew="AssertionError: the state was not honoured",
)
def lost_random_state(base: Base) -> Base:
    """Does not put random state back."""

    class Broken(base, abstract=True):  # type: ignore[valid-type, misc, call-arg]
        def set_rng_state(self, device: torch.device, state: torch.Tensor) -> None:
            pass

    return Broken


@fault(test_a_capture_leaves_things_as_they_were="AssertionError: changed torch .*: torch.Tensor.cpu")
def patches_torch(base: Base) -> Base:
    """Replaces a function of torch while it captures, and leaves it replaced."""

    class Broken(base, abstract=True):  # type: ignore[valid-type, misc, call-arg]
        def capture_begin(self, graph: Any, *, pool: Any, stream: Any) -> None:
            torch.Tensor.cpu = functools.partialmethod(torch.Tensor.cpu)  # type: ignore[method-assign, assignment]
            super().capture_begin(graph, pool=pool, stream=stream)

    return Broken


# Replays


@fault(
    test_every_size_equals_the_reference="AssertionError: for 1 rows",
    test_replays_read_fresh_inputs="AssertionError: step 0",
    test_inputs_may_come_from_the_host="AssertionError: from the host, step 0",
    test_weights_updated_in_place_are_seen="AssertionError: after an update in place",
    test_random_numbers_are_drawn_anew="AssertionError: (two replays drew the same|the state was not)",
    test_eager_parts_run_between_segments="AssertionError: 8 rows",
    test_fifty_cycles_leave_counts_constant="AssertionError: the 51st capture",
    test_a_platforms_graph_replays_on_its_own="AssertionError: the captured in-place operator ran once more",
    test_nested_and_keyword_inputs_are_refreshed="AssertionError: step 0",
    test_every_output_comes_back_cut="AssertionError: field y",
)
def stale_replay(base: Base) -> Base:
    """Never launches a graph: results are those of the capture."""

    class Broken(base, abstract=True):  # type: ignore[valid-type, misc, call-arg]
        def replay(self, graph: Any) -> None:
            pass

    return Broken


@fault(
    test_interleaved_buckets_do_not_disturb_each_other="AssertionError: step 1 of 8 rows",
    test_memory_that_crosses_a_break_is_not_reused="AssertionError: 8 rows",
)
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


@fault(test_random_numbers_are_drawn_anew="AssertionError: two replays drew the same numbers")
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


@fault(
    test_private_generators_can_be_captured="AssertionError: two replays drew the same numbers",
    needs="generators",
)
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
