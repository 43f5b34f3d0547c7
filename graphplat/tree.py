"""Nested structures of tensors: walk them, rebuild them, read them by path.

Knows dicts, lists, tuples, named tuples, dataclasses, attrs classes and msgspec
Structs, and their subclasses, at any depth. Anything else is a leaf. Paths read like the
Python that reaches the leaf: ``meta.tables[0]``.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import msgspec

from graphplat.errors import GraphplatError

Step = tuple[str, Any]
"""One step into a structure: ``("key", k)``, ``("index", i)`` or ``("attr", name)``."""


def children(value: Any) -> list[tuple[Step, Any]] | None:
    """The steps into *value* and what lies there, or ``None`` for a leaf."""
    if isinstance(value, Mapping):
        return [(("key", key), item) for key, item in value.items()]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [(("attr", name), getattr(value, name)) for name in value._fields]
    if isinstance(value, (list, tuple)):
        return [(("index", index), item) for index, item in enumerate(value)]
    names = _field_names(value)
    if names is None:
        return None
    return [(("attr", name), getattr(value, name)) for name in names]


def walk(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ``(path, leaf)`` in a fixed order; ``None`` counts as a leaf."""
    inner = children(value)
    if inner is None:
        yield path, value
        return
    for step, item in inner:
        yield from walk(item, join(path, step))


def leaves(value: Any, what: str, error: type[GraphplatError]) -> dict[str, Any]:
    """The leaves of *value* by path; raises *error* if two of its *what* ("inputs", say) have one path."""
    found: dict[str, Any] = {}
    for path, leaf in walk(value):
        if path in found:
            raise error(
                f"two {what} have the path {path!r}",
                field=path,
                hint="Name them apart: a dict's keys count as text, and a dot in one as a step",
            )
        found[path] = leaf
    return found


def map_leaves(function: Callable[[str, Any], Any], value: Any, path: str = "") -> Any:
    """A structure like *value* whose leaves are ``function(path, leaf)``.

    Containers are new objects of the same types (frozen ones included);
    fields that are no part of the structure are carried over, cached properties computed anew.
    """
    inner = children(value)
    if inner is None:
        return function(path, value)
    items = [(step, map_leaves(function, item, join(path, step))) for step, item in inner]
    return _rebuild(value, items)


def carried(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the attributes that containers in *value* have beside the structure; no cached properties."""
    inner = children(value)
    for step, item in inner or ():
        yield from carried(item, join(path, step))
    held = getattr(value, "__dict__", None) if inner is not None else None
    if held:
        known = {id(item) for _, item in inner or ()}
        for name, item in held.items():
            if id(item) not in known and not _is_cached(value, name):
                yield join(path, ("attr", name)), item


def join(path: str, step: Step) -> str:
    """Append *step* to *path*."""
    kind, name = step
    if kind == "index":
        return f"{path}[{name}]"
    return f"{path}.{name}" if path else str(name)


def enter(value: Any, step: Step) -> Any:
    """Take one step; raises ``KeyError``, ``IndexError`` or ``AttributeError``."""
    kind, name = step
    if kind == "attr":
        return getattr(value, name)
    return value[name]


def _field_names(value: Any) -> list[str] | None:
    if isinstance(value, type) or getattr(type(value), "is_tree_leaf", False):
        return None
    if isinstance(value, msgspec.Struct):
        return list(value.__struct_fields__)
    if dataclasses.is_dataclass(value):
        return [field.name for field in dataclasses.fields(value)]
    if attrs.has(type(value)):
        return [field.name for field in attrs.fields(type(value))]
    return None


def _is_cached(value: Any, name: str) -> bool:
    return isinstance(getattr(type(value), name, None), functools.cached_property)


def _rebuild(value: Any, items: list[tuple[Step, Any]]) -> Any:
    if isinstance(value, Mapping):
        if type(value) is dict:
            return {name: item for (_, name), item in items}
        clone: Any = copy.copy(value)
        for (_, name), item in items:
            clone[name] = item
        return clone
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(item for _, item in items))
    if isinstance(value, (list, tuple)):
        return type(value)(item for _, item in items)
    clone = copy.copy(value)
    for name in [name for name in getattr(clone, "__dict__", ()) if _is_cached(value, name)]:
        del clone.__dict__[name]  # what was computed from other leaves
    for (_, name), item in items:
        # Frozen dataclasses, attrs classes and Structs refuse plain assignment.
        if isinstance(clone, msgspec.Struct):
            msgspec.structs.force_setattr(clone, name, item)
        else:
            object.__setattr__(clone, name, item)
    return clone
