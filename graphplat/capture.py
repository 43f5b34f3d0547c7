"""The three functions a runtime calls once, and what they return."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, cast

import msgspec

from graphplat import registry
from graphplat.backends import lacking_capability
from graphplat.batch import Phase
from graphplat.errors import ContractError, PlatformError, PluginError
from graphplat.model_runner import ModelRunner, check_model_runner
from graphplat.outputs import GraphSharedOutput
from graphplat.platform import IN_TREE_DEVICE_TYPES, Platform
from graphplat.report import CaptureReport, Decision, Reason, total_bytes
from graphplat.runners.base import BaseRunner
from graphplat.runners.context import RunnerContext
from graphplat.runners.decode import DecodeGraphRunner
from graphplat.runners.eager import EagerRunner
from graphplat.runners.graph import GraphRunner
from graphplat.runners.prefill import PrefillGraphRunner

if TYPE_CHECKING:
    from graphplat.peers import PeerAgreement


class DecodeGraphCapture(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of decode set-up."""

    runner: BaseRunner | None
    """Runs decode steps; ``None`` where there can be no decode graphs, the eager runner for a draft's."""
    graph_mem_usage: float | None
    """GiB of device memory that the decode graphs took: 0 where there are none, ``None`` where the platform
    cannot say."""


class CudaGraphsCapture(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of :func:`capture_cuda_graphs`."""

    eager_runner: EagerRunner
    prefill_runner: BaseRunner
    decode: DecodeGraphCapture
    report: CaptureReport

    @property
    def decode_runner(self) -> BaseRunner:
        """What a runtime calls for decode: the graph runner, or the eager one."""
        return self.eager_runner if self.decode.runner is None else self.decode.runner


def capture_cuda_graphs(
    *, model_runner: ModelRunner, capture_decode_cuda_graph: bool = True
) -> CudaGraphsCapture:
    """Set up every runner of *model_runner* and capture its graphs, in a fixed order.

    Platform, shared output, eager runner, prefill, decode, forward hooks, symmetric
    memory, canary. With *capture_decode_cuda_graph* false (a speculative draft runner,
    which captures its own decode graphs later) decode runs eagerly.

    Raises :class:`ContractError` for an incomplete runtime, :class:`PlatformError` when
    the device has no usable platform or not the symmetric memory asked for,
    :class:`CaptureError` when a capture fails under ``on_failure="raise"``.
    """
    check_model_runner(model_runner)
    started = time.perf_counter()
    resolution = registry.resolve(model_runner.device.type)
    _check_symmetric_memory(model_runner, resolution.platform)
    hooks = registry.hooks_for(resolution.platform)
    shared_output = GraphSharedOutput.create_for_model_runner(model_runner)
    eager_runner = hooks.create_eager_runner(resolution.platform, model_runner) or EagerRunner(
        resolution.platform, model_runner
    )
    context = eager_runner.context
    context.hooks, context.shared_output = hooks, shared_output
    were_on = context.forward_hooks.registered
    try:
        prefill_runner, decode = _set_up(eager_runner, model_runner, decode=capture_decode_cuda_graph)
    except BaseException as error:
        if not were_on:  # by an earlier set-up, which goes on
            context.forward_hooks.remove()
        context.release_all(error)
        raise
    report = CaptureReport(
        platform=resolution.platform.name,
        device=str(model_runner.device),
        chosen_because=resolution.because,
        shapes=tuple(context.shapes),
        skipped=tuple(context.skipped),
        seconds=time.perf_counter() - started,
        static_buffer_bytes=context.arena.nbytes,
        output_buffer_bytes=context.shared_output.nbytes,
        memory_estimate_bytes=sum(context.estimates.values()) if context.estimates else None,
    )
    return CudaGraphsCapture(
        eager_runner=eager_runner, prefill_runner=prefill_runner, decode=decode, report=report
    )


def _set_up(
    eager_runner: EagerRunner, model_runner: ModelRunner, *, decode: bool
) -> tuple[BaseRunner, DecodeGraphCapture]:
    """Every step after the eager runner, in order."""
    context = eager_runner.context
    with context.together("the set-up"):
        # Refused before anything is allocated, and nothing is allocated for what was refused.
        refused = {phase: _refusal(context, phase) for phase in Phase}
        if context.peers is not None:
            _compare_ranks(context, refused, decode)
        eager_runner.warm_up([phase for phase in Phase if refused[phase] is None])
        prefill_runner = capture_prefill_graph(model_runner=model_runner, eager_runner=eager_runner)
        if decode:
            captured = capture_decode_graph(model_runner=model_runner, eager_runner=eager_runner)
        else:
            why = "the draft runner captures its own decode graphs"
            _leave_eager(context, Phase.DECODE, Reason.DRAFT_RUNNER, why)
            captured = DecodeGraphCapture(runner=eager_runner, graph_mem_usage=0)
        context.forward_hooks.register()
        _preallocate_symmetric_memory(context)
    if model_runner.canary_manager is not None and not model_runner.is_draft_worker:
        model_runner.canary_manager.mark_init_finished()
    return prefill_runner, captured


def capture_prefill_graph(*, model_runner: ModelRunner, eager_runner: EagerRunner) -> BaseRunner:
    """Capture prefill graphs; returns *eager_runner* when prefill is off or no bucket fits.

    *eager_runner* is that of *model_runner*. Raises as :func:`capture_cuda_graphs`.
    """
    context = _context_of(eager_runner, model_runner)
    refusal = _refusal(context, Phase.PREFILL)
    if refusal is not None:
        _leave_eager(context, Phase.PREFILL, *refusal)
        return eager_runner
    runner = None
    if context.hooks is not None:
        runner = context.hooks.create_prefill_runner(context.platform, model_runner, eager_runner)
    runner = runner or PrefillGraphRunner(context.platform, model_runner, eager_runner)
    runner.capture()
    context.without_graphs.pop(Phase.PREFILL, None)
    return eager_runner if _has_no_room(runner) else runner


def capture_decode_graph(*, model_runner: ModelRunner, eager_runner: EagerRunner) -> DecodeGraphCapture:
    """Capture decode graphs, or say in the report why there are none.

    In-tree device types capture when their platform can. Any other captures only if
    its platform is out of tree and supports graphs. *eager_runner* is that of *model_runner*.
    Raises as :func:`capture_cuda_graphs`.
    """
    context = _context_of(eager_runner, model_runner)
    refusal = _refusal(context, Phase.DECODE)
    if refusal is not None:
        _leave_eager(context, Phase.DECODE, *refusal)
        return DecodeGraphCapture(runner=None, graph_mem_usage=0)
    before = _driver_bytes(context)
    runner = None
    if context.hooks is not None:
        runner = context.hooks.create_decode_runner(context.platform, model_runner, eager_runner)
    runner = runner or DecodeGraphRunner(context.platform, model_runner, eager_runner)
    runner.capture()
    context.without_graphs.pop(Phase.DECODE, None)
    if _has_no_room(runner):
        return DecodeGraphCapture(runner=None, graph_mem_usage=0)
    return DecodeGraphCapture(runner=runner, graph_mem_usage=_decode_gib(context, before))


def _has_no_room(runner: BaseRunner) -> bool:
    """Whether limits leave *runner* no graph, now or later; notes why for the eager runner's answers."""
    if not isinstance(runner, GraphRunner) or runner.has_room():
        return False
    reason, detail = next(iter(runner.missing.values()))
    runner.context.without_graphs[runner.phase] = Decision(reason=reason, detail=detail)
    return True


def _context_of(eager_runner: EagerRunner, model_runner: ModelRunner) -> RunnerContext:
    context = eager_runner.context
    if context.model_runner is not model_runner:
        raise ContractError(
            "the eager runner was made for another model runner",
            platform=context.platform.name,
            hint="Pass the one that capture_cuda_graphs returned for this model runner",
        )
    return context


def _refusal(context: RunnerContext, phase: Phase) -> tuple[Reason, str] | None:
    """Why *phase* gets no graphs, or ``None``; raises where the settings demand them."""
    if phase not in context.refusals:
        context.refusals[phase] = _find_refusal(context, phase)
    return context.refusals[phase]


def _leave_eager(context: RunnerContext, phase: Phase, reason: Reason, detail: str) -> None:
    """Note in the report, and for the eager runner's answers, why *phase* runs eagerly."""
    context.skip(phase, reason, detail)
    context.without_graphs[phase] = Decision(reason=reason, detail=detail)


def _find_refusal(context: RunnerContext, phase: Phase) -> tuple[Reason, str] | None:
    config, platform = context.model_runner.graph_config, context.platform
    if not config.phase(phase).ladder(phase):
        return Reason.PHASE_DISABLED, "disabled by the settings"
    supported = context.hooks.supports_cuda_graph(platform, phase) if context.hooks else None
    if supported is None:
        supported = platform.support_cuda_graph()
    if supported and not platform.capabilities.graph_capture:
        raise PluginError(
            "graphs are said to be supported, but the capability graph_capture is not declared",
            platform=platform.name,
            phase=phase,
        )
    backend, reason = config.phase(phase).backend, Reason.UNSUPPORTED
    lacking = lacking_capability(backend, platform.capabilities)
    if not supported:
        detail = f"platform {platform.name!r} does not support {phase} graphs"
    elif platform.device_type not in IN_TREE_DEVICE_TYPES and not platform.is_out_of_tree():
        detail = f"device type {platform.device_type!r} is not in tree and its platform is not out of tree"
    elif lacking is not None:
        detail = f"the {backend} backend needs the capability {lacking!r}"
    elif context.model_runner.process_group is not None and not platform.capabilities.collectives_in_capture:
        detail = "a process group needs the capability 'collectives_in_capture'"
    elif updated := _cannot_update(context, phase):
        reason, detail = Reason.HOST_VALUE, f"{platform.name} cannot rewrite {updated} in a graph"
    else:
        return None
    if config.on_unsupported == "raise":
        raise PlatformError(detail, platform=platform.name, phase=phase, hint='Set on_unsupported="eager"')
    return reason, detail


def _cannot_update(context: RunnerContext, phase: Phase) -> str:
    """The host values of *phase* that its graphs would have to rewrite, where they cannot; else empty."""
    if context.platform.capabilities.update_after_capture != "none":
        return ""
    return ", ".join(path for path, rule in context.spec(phase).hosts.items() if rule.update)


def _compare_ranks(context: RunnerContext, refused: dict[Phase, Any], decode: bool) -> None:
    """Raise on every rank unless all will take the same steps of the set-up."""
    runner, name = context.model_runner, context.platform.name
    wanted = [str(phase) for phase, refusal in refused.items() if refusal is None]
    settings = [name, runner.graph_config, runner.tokens_per_request, wanted, decode]
    described = f"platform {name!r}, graphs for {' and '.join(wanted) or 'no phase'}, {runner.graph_config}"
    cast("PeerAgreement", context.peers).same("the start of the set-up", settings, described)


def _driver_bytes(context: RunnerContext) -> int | None:
    """Bytes in use on the device, by the driver; ``None`` where it cannot be trusted."""
    platform = context.platform
    info = platform.memory_info(context.device) if platform.capabilities.trusted_free_memory else None
    return None if info is None else info.total - info.free


def _decode_gib(context: RunnerContext, before: int | None) -> float | None:
    """GiB that decode graphs took: what the driver counts since *before*, else the graphs' own count."""
    after = _driver_bytes(context)
    own = total_bytes(context.shapes_of(Phase.DECODE))
    taken = own if after is None or before is None else after - before
    return None if taken is None else taken / 2**30


def _wants_symmetric_memory(runner: ModelRunner) -> bool:
    return runner.enable_symm_mem and not runner.is_draft_worker


def _check_symmetric_memory(runner: ModelRunner, platform: Platform) -> None:
    if _wants_symmetric_memory(runner) and not platform.capabilities.symmetric_memory:
        raise PlatformError(
            "enable_symm_mem needs the capability 'symmetric_memory'",
            platform=platform.name,
            hint="Set enable_symm_mem=False",
        )


def _preallocate_symmetric_memory(context: RunnerContext) -> None:
    runner = context.model_runner
    if not _wants_symmetric_memory(runner):
        return
    context.symmetric_memory = context.platform.preallocate_symmetric_memory(
        device=runner.device,
        stream=runner.forward_stream,
        group=runner.process_group,
        nbytes=runner.symm_mem_bytes,
    )
