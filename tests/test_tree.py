"""Walking and rebuilding nested structures."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import attrs
import msgspec
import pytest
import torch

from graphplat import InputError, tree


class Pair(NamedTuple):
    a: Any
    b: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    a: Any
    b: Any


@dataclasses.dataclass
class Derived(dict):
    """A mapping with attributes, as some libraries return."""

    note: str = "kept"


@attrs.frozen
class Attrs:
    a: Any
    b: Any


class Struct(msgspec.Struct, frozen=True):
    a: Any
    b: Any


class Stack(list):
    pass


CONTAINERS = [
    ({"a": 1, "b": 2}, ["a", "b"]),
    (collections.OrderedDict(a=1, b=2), ["a", "b"]),
    (collections.defaultdict(int, a=1, b=2), ["a", "b"]),
    ([1, 2], ["[0]", "[1]"]),
    (Stack([1, 2]), ["[0]", "[1]"]),
    ((1, 2), ["[0]", "[1]"]),
    (Pair(1, 2), ["a", "b"]),
    (Frozen(1, 2), ["a", "b"]),
    (Attrs(1, 2), ["a", "b"]),
    (Struct(1, 2), ["a", "b"]),
]


@pytest.mark.parametrize(("value", "paths"), CONTAINERS, ids=lambda value: type(value).__name__)
def test_every_kind_of_container_is_walked_and_rebuilt(value: Any, paths: list[str]) -> None:
    """Leaves have the paths that Python would write, and a rebuilt structure is of the same types."""
    assert list(tree.walk(value)) == list(zip(paths, [1, 2], strict=True))
    doubled = tree.map_leaves(lambda _, leaf: leaf * 2, value)
    assert type(doubled) is type(value)
    assert [leaf for _, leaf in tree.walk(doubled)] == [2, 4]
    assert [leaf for _, leaf in tree.walk(value)] == [1, 2]


def test_paths_read_like_the_python_that_reaches_the_leaf() -> None:
    """Attributes and keys join with dots, positions with brackets, at any depth."""
    value = {"meta": Frozen([1, {"deep": 2}], Pair(3, None))}
    assert dict(tree.walk(value)) == {
        "meta.a[0]": 1,
        "meta.a[1].deep": 2,
        "meta.b.a": 3,
        "meta.b.b": None,
    }


def test_leaves_of_one_path_are_an_error() -> None:
    """Leaves by path are complete, or the error of the caller's choice is raised."""
    assert tree.leaves({"a": [1, 2]}, "inputs", InputError) == {"a[0]": 1, "a[1]": 2}
    with pytest.raises(InputError, match=r"two inputs have the path 'a\[0\]'"):
        tree.leaves({"a": [1], "a[0]": 2}, "inputs", InputError)


def test_steps_lead_back_to_what_lies_there() -> None:
    """Taking each step of a container reaches its child."""
    for value, _ in CONTAINERS:
        for step, item in tree.children(value) or []:
            assert tree.enter(value, step) is item


def test_a_structure_without_leaves_stays_as_it_is() -> None:
    """Empty containers are kept."""
    assert tree.map_leaves(lambda _, leaf: leaf, {"a": [], "b": (), "c": {}}) == {"a": [], "b": (), "c": {}}


def test_what_is_no_part_of_the_structure_is_carried_over() -> None:
    """A mapping's own attributes survive the rebuilding."""
    value = Derived("mine")
    value["x"] = 1
    doubled = tree.map_leaves(lambda _, leaf: leaf * 2, value)
    assert doubled["x"] == 2
    assert doubled.note == "mine"


def test_results_of_torch_operators_are_structures() -> None:
    """A value-and-indices result is rebuilt with its names."""
    found = torch.tensor([[1, 5], [4, 2]]).max(dim=1)
    rebuilt = tree.map_leaves(lambda _, leaf: leaf + 1, found)
    assert rebuilt.values.tolist() == [6, 5]
    assert type(rebuilt) is type(found)


def test_a_class_is_a_leaf() -> None:
    """A dataclass type, unlike its instances, has no leaves."""
    assert list(tree.walk({"kind": Frozen})) == [("kind", Frozen)]
