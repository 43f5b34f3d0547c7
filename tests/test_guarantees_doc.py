"""The page of guarantees: every test it names exists, and guards against the reports beside it."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "guarantees.md").read_text()
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)))
ROWS = [line.strip("|").split("|") for line in PAGE.splitlines() if re.match(r"\| \S+/\S+#\d", line)]

UNREPORTED = {
    ("test_host_batches.py", "test_memory_is_pinned_for_the_first_host_batch"),
    ("test_lifetime.py", "test_what_libraries_let_go_of_hides_nothing_that_a_forward_keeps"),
}
"""Tests of the cases that name no public report."""


@functools.cache
def docstrings(path):
    """The docstrings of the test functions of one module, by name."""
    found = [node for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, ast.FunctionDef)]
    return {node.name: ast.get_docstring(node) or "" for node in found if node.name.startswith("test_")}


def reports(text):
    """Public ids in *text* as owner/repository and number; a bare number is of the repository before it."""
    found, repository = set(), None
    for name, number in re.findall(r"([\w.-]+(?:/[\w.-]+)?)?#(\d+)", text):
        repository = name or repository
        found.add((repository, number))
    return found


def test_reports_of_one_number_are_told_apart_by_repository():
    """
    A bare number belongs to the repository named before it, and the same number elsewhere is another report.
    """
    listed = reports("Guards against one/graphs#7, #8 and two/graphs#7,\n    #9: what they say.")
    assert listed == {("one/graphs", "7"), ("one/graphs", "8"), ("two/graphs", "7"), ("two/graphs", "9")}
    assert not reports("three/graphs#7") <= listed


@pytest.mark.parametrize(("path", "name"), NAMED)
def test_every_test_that_is_named_exists(path, name):
    """
    A promise without its test is none.
    """
    assert name in docstrings(path)


@pytest.mark.parametrize("row", ROWS, ids=[row[1].strip() for row in ROWS])
def test_every_report_is_guarded_by_a_test_of_its_row(row):
    """
    Each public id of the table stands in the docstring of a test that its row names.
    """
    guarded = set()
    for path, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row[2]):
        guarded |= reports(docstrings(path)[name])
    assert reports(row[0])
    assert reports(row[0]) <= guarded


def test_the_table_holds_every_kind():
    """
    Forty-two kinds of fault, each once.
    """
    assert len(ROWS) == 42
    assert len({row[1] for row in ROWS}) == 42


def test_every_guard_of_the_cases_is_in_the_table():
    """
    A report that a test of the cases names is one that a reader finds on the page.
    """
    told = {report for row in ROWS for report in reports(row[0])}
    for path in sorted((ROOT / "tests" / "cases").glob("test_*.py")):
        for name, text in docstrings(path.relative_to(ROOT)).items():
            assert reports(text) <= told, f"{path.name}::{name}"


def test_every_test_of_the_cases_names_a_report():
    """
    A test of the cases says in full, as owner/repository#number, which report it would have caught.
    """
    silent = set()
    for path in sorted((ROOT / "tests" / "cases").glob("test_*.py")):
        for name, text in docstrings(path.relative_to(ROOT)).items():
            if not re.search(r"[\w.-]+/[\w.-]+#\d+", text):
                silent.add((path.name, name))
    assert silent == UNREPORTED
