"""The runtime contract: all that graphplat needs from an engine."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from graphplat.batch import ForwardBatch, Phase
from graphplat.config import GraphConfig
from graphplat.errors import ContractError
from graphplat.inputs import InputSpec
from graphplat.platform import check_contract

ForwardHook = tuple[str, Callable[..., Any]]
"""A submodule's name (``""`` for the model itself) and a ``torch`` forward hook for it."""


_SEVERAL = (Mapping, list, tuple, set)


@runtime_checkable
class CanaryManager(Protocol):
    """What watches an engine's health; told when set-up is over."""

    def mark_init_finished(self) -> None:
        """Start to watch."""


class ModelRunner:
    """Base class of a runtime. Subclass it, set ``device`` and ``model``, define two methods.

    Optional members are class attributes and methods with sensible defaults;
    override what you need. :class:`ContractError` is raised at class definition
    when a required method is missing, misspelt, or takes other arguments.
    """

    device: torch.device
    """Where the model runs."""
    model: torch.nn.Module
    """Its parameters and buffers are watched for moves."""
    graph_config: GraphConfig = GraphConfig()

    is_draft_worker: bool = False
    """A speculative draft worker: no symmetric memory, no canary."""
    forward_hooks: Sequence[ForwardHook] = ()
    """Registered on the model after capture; never traced into a graph."""
    enable_symm_mem: bool = False
    """Preallocate symmetric memory of ``process_group`` after capture."""
    symm_mem_bytes: int = 64 << 20
    """Bytes of symmetric memory on each rank."""
    forward_stream: Any = None
    """The stream that the runtime's forward passes use, if it is not the current one."""
    canary_manager: CanaryManager | None = None
    process_group: Any = None
    """A ``torch.distributed`` group whose ranks must choose the same path."""
    tokens_per_request: int = 1
    """New tokens of each request in a decode step."""
    generators: Sequence[torch.Generator] = ()
    """Random generators other than the default one that the forward draws from."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_contract(cls, ModelRunner)
        for name in ("input_spec", "forward"):
            if getattr(cls, name) is getattr(ModelRunner, name):
                raise ContractError(f"{cls.__qualname__} does not define {name}()", hint="Every runtime must")

    def input_spec(self, phase: Phase) -> InputSpec:
        """Declare the inputs of *phase*. Called once per phase that is used."""
        raise NotImplementedError

    def forward(self, batch: ForwardBatch) -> Any:
        """Run the model; returns tensors or a nested structure of them."""
        raise NotImplementedError

    def prepare_capture_batch(self, batch: ForwardBatch) -> None:
        """Complete the dummy *batch* before it is warmed up and captured.

        Here a runtime installs capture-only tensors: ``batch.global_num_tokens_gpu``,
        or entries of ``batch.capture_only``. They are kept alive as long as the graph. Write inputs
        in place: another tensor or host value in the place of one is a :class:`CaptureError`.
        """

    def post_warmup(self) -> None:
        """Called after each warm-up run, outside capture."""

    def extra_tensors(self) -> Mapping[str, torch.Tensor]:
        """Tensors outside the model's parameters and buffers whose address the forward reads.

        They are watched for moves too: plain attributes, workspaces, KV caches.
        """
        return {}


def check_model_runner(model_runner: ModelRunner) -> None:
    """Raise :class:`ContractError` if the instance lacks what its class promised, or misspells a setting."""
    if not isinstance(model_runner, ModelRunner):
        raise ContractError(
            f"model_runner must be a graphplat.ModelRunner, found {type(model_runner).__name__}",
            hint="Subclass ModelRunner",
        )
    _check_names(model_runner)
    for name, kind in (("device", torch.device), ("model", torch.nn.Module), ("graph_config", GraphConfig)):
        value = getattr(model_runner, name, None)
        if not isinstance(value, kind):
            raise ContractError(
                f"{type(model_runner).__qualname__}.{name} must be a {kind.__name__}, "
                f"found {type(value).__name__}",
                hint=f"Set it to torch.device({value!r})" if isinstance(value, str) else "Set it in __init__",
            )
    _check_members(model_runner)


def _check_members(model_runner: ModelRunner) -> None:
    """Raise for an optional member that cannot be used as such."""
    hooks, generators = model_runner.forward_hooks, model_runner.generators
    canary, group = model_runner.canary_manager, model_runner.process_group
    for name, found, usable, what in (
        ("forward_hooks", hooks, _are_hooks(hooks), "pairs of a submodule's name and a hook"),
        ("generators", generators, _are_generators(generators), "a sequence of torch.Generator"),
        (
            "canary_manager",
            canary,
            canary is None or isinstance(canary, CanaryManager),
            "an object with mark_init_finished(), or None",
        ),
        (
            "process_group",
            group,
            group is None or _is_group(group),
            "a torch.distributed process group, or None",
        ),
    ):
        if not usable:
            raise ContractError(f"{type(model_runner).__qualname__}.{name} must be {what}, found {found!r}")
    known = dict(model_runner.model.named_modules())
    for name, _ in hooks:
        if name not in known:
            raise ContractError(
                f"a forward hook is meant for submodule {name!r}, which the model does not have",
                hint='Name a submodule as named_modules() does, or "" for the model itself',
            )
    if type(model_runner.tokens_per_request) is not int or model_runner.tokens_per_request < 1:
        raise ContractError(
            f"tokens_per_request must be a positive integer, found {model_runner.tokens_per_request!r}"
        )


def _is_group(value: object) -> bool:
    return torch.distributed.is_available() and isinstance(value, torch.distributed.ProcessGroup)


def _are_hooks(value: object) -> bool:
    return isinstance(value, Sequence) and all(
        isinstance(pair, (tuple, list)) and len(pair) == 2 and isinstance(pair[0], str) and callable(pair[1])
        for pair in value
    )


def _are_generators(value: object) -> bool:
    return isinstance(value, Sequence) and all(isinstance(one, torch.Generator) for one in value)


def _check_names(model_runner: ModelRunner) -> None:
    """Raise for an attribute that nearly is an optional member which nobody set, and so would be ignored."""
    cls, own = type(model_runner), vars(model_runner)
    unset = {
        name: default
        for name, default in vars(ModelRunner).items()
        if not name.startswith("_") and not inspect.isroutine(default)
        if name not in own and inspect.getattr_static(cls, name) is default
    }
    for name, value in own.items():
        if name.startswith("_") or hasattr(ModelRunner, name):
            continue
        alike = [member for member in unset if _same_words(name, member)]
        close = difflib.get_close_matches(name, alike, n=1, cutoff=0.88)
        if close and not _differs_in_number(name, value, close[0], unset[close[0]]):
            raise ContractError(
                f"{cls.__qualname__}.{name} is no member of ModelRunner",
                hint=f"Did you mean {close[0]!r}? Start names of your own with an underscore otherwise",
            )


def _same_words(name: str, member: str) -> bool:
    """Whether *name* has as many words and numbers as *member*: ``tp_process_group`` is a name of its own."""
    shapes = [[len(part.split("_")), *filter(str.isdigit, part)] for part in (name, member)]
    return shapes[0] == shapes[1]


def _differs_in_number(name: str, value: object, member: str, default: object) -> bool:
    """Whether *name* rightly is the plural or the singular of *member*: several of one, or one of several."""
    if isinstance(default, _SEVERAL):
        return name == member.removesuffix("s") and not isinstance(value, _SEVERAL)
    return name == f"{member}s" and (default is None or isinstance(value, _SEVERAL))
