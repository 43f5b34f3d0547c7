"""Operator arguments and results as trees: lists, tuples and dicts, and nothing else.

torch's pytree handles more and costs more than the operators themselves here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def tree_map(change: Callable[[Any], Any], tree: Any) -> Any:
    """*tree* with every leaf changed."""
    if isinstance(tree, (list, tuple)):
        return type(tree)([tree_map(change, item) for item in tree])
    if isinstance(tree, dict):
        return {key: tree_map(change, item) for key, item in tree.items()}
    return change(tree)


def leaves(tree: Any) -> list[Any]:
    """Every leaf of *tree*, in order."""
    found: list[Any] = []
    tree_map(found.append, tree)
    return found
