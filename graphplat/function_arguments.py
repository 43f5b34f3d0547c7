"""How the arguments of a call compare with those of the example that a function was captured with."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, cast

import torch

from graphplat import tree
from graphplat.errors import InputError
from graphplat.report import Decision, Reason
from graphplat.runners.entry import same_constant

_Parameter = inspect.Parameter


class FunctionArguments:
    """The arguments of *function* by name, with those of the example at hand.

    An argument left out counts as its default where that is a constant, and one that the example has at
    its default is no input: graphs have it baked in. Other defaults (tensors, lists and the like) are the
    function's own affair.
    """

    def __init__(self, function: Callable[..., Any], example: Any) -> None:
        self.parameters = _parameters(function)
        self.signature = inspect.Signature(list(self.parameters.values()))
        given = self._bind(*_as_call(example))
        defaults = {
            name: parameter.default
            for name, parameter in self.parameters.items()
            if parameter.default is not _Parameter.empty and _is_constant(parameter.default)
        }
        self.baked = {n: v for n, v in defaults.items() if n not in given or same_constant(given[n], v)}
        self.defaults = {name: value for name, value in defaults.items() if name not in self.baked}
        self.example = {name: value for name, value in given.items() if name not in self.baked}
        # A value of the same class is like the example's, but for what is inside a container.
        self._classes = [(name, _leaf_class(value)) for name, value in self.example.items()]

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The inputs of a call by name; raises ``TypeError`` where the function does not take them."""
        bound = self._bind(args, kwargs)
        if bound.keys() != self.example.keys():
            for name, value in self.baked.items():
                if name in bound and same_constant(bound[name], value):
                    del bound[name]
            for name, value in self.defaults.items():
                bound.setdefault(name, value)
        return bound

    def complete(self, inputs: dict[str, Any]) -> inspect.BoundArguments:
        """*inputs* as the function takes them, with the defaults that stand before a positional one."""
        positional = (_Parameter.POSITIONAL_ONLY, _Parameter.VAR_POSITIONAL)
        before: dict[str, Any] = {}
        passed: dict[str, Any] = {}
        for name, parameter in self.parameters.items():
            if name in inputs and parameter.kind in positional:
                passed = dict(before)
            before[name] = parameter.default
        return inspect.BoundArguments(self.signature, cast("Any", passed | inputs))

    def unlike(self, inputs: dict[str, Any]) -> Decision | None:
        """Why *inputs* have no graph, if they are others than the example's or not the defaults baked in.

        ``None`` also where they hold no tensor but something in the place of one, which the runner refuses.
        """
        example = self.example
        if inputs.keys() == example.keys() and all(
            inputs[name].__class__ is kind or _is_like(example[name], inputs[name])
            for name, kind in self._classes
        ):
            return None
        detail = _difference(self.baked | example, self.baked | inputs, "")
        if detail:
            return (
                None if self._is_no_call(inputs) else Decision(reason=Reason.OPTIONAL_INPUTS, detail=detail)
            )
        name = next(name for name in inputs if name not in example)
        return Decision(reason=Reason.HOST_VALUE, detail=f"{name}={inputs[name]!r} was not captured")

    def _is_no_call(self, inputs: dict[str, Any]) -> bool:
        leaves = dict(tree.walk(inputs))
        if any(isinstance(leaf, torch.Tensor) for leaf in leaves.values()):
            return False
        tensors = (path for path, leaf in tree.walk(self.example) if isinstance(leaf, torch.Tensor))
        return any(leaves.get(path) is not None for path in tensors)

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        return dict(self.signature.bind(*args, **kwargs).arguments)


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    called = function.forward if isinstance(function, torch.nn.Module) else function
    try:
        return dict(inspect.signature(called).parameters)
    except (TypeError, ValueError) as error:  # no callable, or one that is not written in Python
        name = getattr(function, "__name__", repr(function))
        raise InputError(
            f"graphed() needs a function whose arguments have names: {error}",
            hint=f"Wrap it in one of yours: lambda x: {name}(x)",
        ) from error


def _as_call(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example, dict):
        return (), example
    return (example if isinstance(example, tuple) else (example,)), {}


def _is_constant(default: Any) -> bool:
    """Whether a graph may bake *default* in as it can a constant of the example."""
    if type(default) is tuple:
        return all(map(_is_constant, default))
    if isinstance(default, torch.Tensor) or tree.children(default) is not None:
        return False
    try:
        hash(default)
    except TypeError:
        return False
    return True


def _leaf_class(value: Any) -> type | None:
    return type(value) if tree.children(value) is None else None


def _is_like(example: Any, value: Any) -> bool:
    """Whether there is no :func:`_difference`; soon known of what calls mostly hold."""
    kind = value.__class__
    if kind is example.__class__:
        if kind is torch.Tensor:
            return True
        if kind is dict and example.keys() == value.keys():
            return all(_is_like(inner, value[key]) for key, inner in example.items())
        if kind in (list, tuple) and len(example) == len(value):
            return all(map(_is_like, example, value))
    return not _difference(example, value, "")


def _difference(example: Any, value: Any, path: str) -> str:
    """How *value* differs from *example* in structure or in which leaves are tensors, if it does."""
    if value.__class__ is torch.Tensor is example.__class__:
        return ""
    mine, its = tree.children(example), tree.children(value)
    if mine is None or its is None or type(example) is not type(value):
        one, other = _kind(example, mine), _kind(value, its)
        alike = mine is its is None and one == other
        return "" if alike else f"{path} is {other}, in the example {one}"
    given = dict(its)
    for step, inner in mine:
        where = tree.join(path, step)
        if step not in given:
            return f"{where} is not given, in the example it is"
        if found := _difference(inner, given.pop(step), where):
            return found
    return f"{tree.join(path, next(iter(given)))} is given, in the example it is not" if given else ""


def _kind(value: Any, inner: list[Any] | None) -> str:
    if inner is not None:
        return f"a {type(value).__name__}"
    return "a tensor" if isinstance(value, torch.Tensor) else "a constant"
