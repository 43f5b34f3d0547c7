"""The documents say what the code does: their examples run, and their names and links exist."""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import itertools
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import msgspec
import pytest
import torch

import graphplat
from graphplat import GraphConfig, PhaseConfig, Reason, hookspecs

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RUN_AS_WRITTEN = ["README.md", "docs/runtimes.md"]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@attrs.frozen
class Block:
    """A fenced block of a page."""

    language: str
    text: str
    line: int
    """Of the page, where the text begins."""


def read(name: str) -> str:
    """The text of a page."""
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    return [
        Block(found[1], found[2], text.count("\n", 0, found.start(2)) + 1) for found in FENCE.finditer(text)
    ]


def run(name: str, page: list[Block]) -> Iterator[tuple[Block, str]]:
    """Run the Python blocks of *page* in one namespace; yields each with what it printed."""
    names: dict[str, Any] = {"__name__": f"page_{Path(name).stem}"}
    for block in page:
        if block.language == "python":
            code = compile("\n" * (block.line - 1) + block.text, str(ROOT / name), "exec")
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(code, names)
            yield block, printed.getvalue()


def prose(text: str) -> str:
    """A page without its fenced blocks."""
    return FENCE.sub("", text)


def table(text: str, first_column: str) -> list[list[str]]:
    """The cells of the table whose heading begins with *first_column*, backquotes taken off."""
    lines = iter(text.splitlines())
    for line in lines:
        if line.startswith(f"| {first_column} |"):
            next(lines)
            break
    else:
        raise AssertionError(f"no table headed {first_column!r}")
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split(" | ")])
    return rows


def anchor(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("name", RUN_AS_WRITTEN)
def test_python_blocks_run_and_print_what_the_page_says(name):
    """
    The Python blocks of a page run from top to bottom as one program, and the plain block after
    one is what it prints.
    """
    page = blocks(read(name))
    outputs = {
        block.line: after.text
        for block, after in itertools.pairwise(page)
        if block.language == "python" and after.language == "text"
    }
    ran = 0
    for block, printed in run(name, page):
        assert printed == outputs.get(block.line, ""), f"{name}, the block at line {block.line}"
        ran += 1
    assert ran == sum(block.language == "python" for block in page) > 0


def toy_runtime() -> str:
    """The first Python block of the README."""
    return next(block.text for block in blocks(read("README.md")) if block.language == "python")


def run_toy(device: str) -> dict[str, Any]:
    """Run the README's runtime on *device*, changed in nothing but that."""
    names: dict[str, Any] = {"__name__": "toy"}
    exec(toy_runtime().replace('"cpu"', repr(device)), names)
    return names


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_the_whole_runtime_of_the_readme_replays(device):
    """
    On each device the runtime of the README replays the bucket of 4 for 3 requests, and gives what its
    forward gives.
    """
    names = run_toy(device)
    runner, batch = names["capture"].decode.runner, names["batch"]
    assert runner.explain(batch).key.size == 4
    output = runner.execute(batch)
    assert (output.shape, output.device.type) == ((3, 8), device)
    assert runner.stats.replays == {4: 2}
    expected = runner.model_runner.model(batch.inputs["x"].to(device))
    torch.testing.assert_close(output, expected, check_stride=False)


VENDOR = """
from graphplat.testing.simulated import install_simulated
install_simulated("acme")
import sys, types
plugin = types.ModuleType("graphplat_acme")
exec({plugin!r}, vars(plugin))
from graphplat.registry import register_plugin
register_plugin(plugin, name="acme")
exec({toy!r})
assert capture.report.platform == "acme"
assert capture.decode.runner.explain(batch).key.size == 4
assert dict(capture.decode.runner.stats.replays) == {{4: 1}}
"""


def test_the_vendor_plugin_of_the_readme_captures():
    """
    The README's plugin, as written, serves a simulated device that graphplat does not know, and the
    README's runtime replays on it.
    """
    toy, plugin = (block.text for block in blocks(read("README.md")) if block.language == "python")
    script = VENDOR.format(plugin=plugin, toy=toy.replace('"cpu"', '"acme"'))
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_entry_point_of_the_readme_is_of_the_right_group():
    """
    The TOML beside the plugin declares its device type in the group that is searched.
    """
    declared = next(block.text for block in blocks(read("README.md")) if block.language == "toml")
    assert tomllib.loads(declared)["project"]["entry-points"] == {
        hookspecs.PROJECT: {"acme": "graphplat_acme"}
    }


def test_both_pages_show_the_same_runtime():
    """
    The runtime in the guide is that of the README.
    """

    def source(text: str) -> str:
        tree = ast.parse(text)
        return next(ast.unparse(node) for node in tree.body if isinstance(node, ast.ClassDef))

    assert source(toy_runtime()) == source(blocks(read("docs/runtimes.md"))[0].text)


def hooks() -> dict[str, bool]:
    """Every hook by name, and whether its first result is taken."""
    found = {}
    for name, function in vars(hookspecs).items():
        marked = getattr(function, f"{hookspecs.PROJECT}_spec", None)
        if marked is not None and inspect.isfunction(function):
            found[name] = bool(marked["firstresult"])
    return found


def test_the_page_of_hooks_is_the_hookspecs():
    """
    The table of hooks names every hook with its arguments and kind, and no other.
    """
    told = {}
    for call, kind, _ in table(read("docs/architecture.md"), "hook"):
        name, arguments = re.fullmatch(r"`(\w+)\((.*)\)`", call).groups()
        told[name] = (kind == "first result", arguments)
    expected = {
        name: (first, ", ".join(inspect.signature(getattr(hookspecs, name)).parameters))
        for name, first in hooks().items()
    }
    assert told == expected


def test_hooks_named_anywhere_exist():
    """
    A function that a page marks with ``hookimpl`` is a hook.
    """
    named = {
        name for page in PAGES for name in re.findall(r"@hookimpl\n(?:async )?def (\w+)", page.read_text())
    }
    assert named <= set(hooks())


@pytest.mark.parametrize("name", graphplat.__all__)
def test_every_public_name_is_explained(name):
    """
    Every name that the package exports has a docstring of its own, or is explained by a page.
    """
    value = getattr(graphplat, name)
    own = inspect.isfunction(value) or inspect.isclass(value)
    assert (own and value.__doc__) or any(f"`{name}`" in page.read_text(encoding="utf-8") for page in PAGES)


def settings(config: type[msgspec.Struct]) -> dict[str, Any]:
    """The fields and defaults of a config."""
    blank = config()
    return {field.name: getattr(blank, field.name) for field in msgspec.structs.fields(config)}


def test_the_table_of_settings_is_phase_config():
    """
    The guide gives every setting of a phase with its default and no other, and names those of both.
    """
    guide = read("docs/runtimes.md")
    rows = table(guide, "setting of a phase")
    told = {name.strip("`"): ast.literal_eval(default.strip("`")) for name, default, _ in rows}
    assert told == settings(PhaseConfig)
    assert all(re.search(rf"\b{name}\b", guide) for name in settings(GraphConfig))


def test_the_table_of_reasons_is_the_enumeration():
    """
    The guide explains every reason, and no other.
    """
    told = [reason.strip("`") for reason, _ in table(read("docs/runtimes.md"), "reason")]
    assert told == [reason.value for reason in Reason]


def test_the_table_of_members_is_the_contract():
    """
    The guide gives every optional member of a runtime.
    """
    required = {"device", "model", "graph_config", "input_spec", "forward"}
    cells = [row[0] for row in table(read("docs/runtimes.md"), "member")]
    told = {name for cell in cells for name in re.findall(r"`(\w+)", cell)}
    annotated = set(graphplat.ModelRunner.__annotations__) | {
        name for name, value in vars(graphplat.ModelRunner).items() if inspect.isfunction(value)
    }
    assert told == {name for name in annotated if not name.startswith("_")} - required


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    """
    Every relative link of a page leads to a file, and to a heading where it names one.
    """
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page.read_text(encoding="utf-8"))):
        if "://" in target:
            continue
        path, _, heading = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name}: {target}"
        if heading:
            titles = re.findall(r"^#+ (.+)$", prose(file.read_text(encoding="utf-8")), re.MULTILINE)
            assert heading in {anchor(title) for title in titles}, f"{page.name}: {target}"


def test_sessions_and_commands_named_by_the_readme_exist():
    """
    The README's nox sessions are defined, and its table of commands is that of the command line.
    """
    main = pytest.importorskip("graphplat.cli.main", reason="the command line is not installed")
    defined = {node.name for node in ast.parse(read("noxfile.py")).body if isinstance(node, ast.FunctionDef)}
    named = set(re.findall(r"nox -s \"?(\w+)", read("README.md")))
    assert {"demo", "tests"} <= named <= defined
    told = [re.match(r"`graphplat (\w+)", row[0])[1] for row in table(read("README.md"), "command")]
    assert told == list(main.SUMMARIES)


def test_environment_variables_named_by_pages_are_read():
    """
    A variable of the environment that a page names is known to the code.
    """
    named = {name for page in PAGES for name in re.findall(r"GRAPHPLAT_[A-Z_]+", page.read_text())}
    code = "".join(file.read_text() for file in Path(graphplat.__file__).parent.rglob("*.py"))
    assert {name for name in named if f'"{name}"' not in code} == set()


def test_decisions_are_numbered_and_listed():
    """
    Every decision has a number of its own, and a status, and the index lists all.
    """
    pages = sorted((ROOT / "docs" / "adr").glob("[0-9]*.md"))
    assert [int(page.name[:4]) for page in pages] == list(range(1, len(pages) + 1))
    index = read("docs/adr/README.md")
    for page in pages:
        title, _, status, *_ = page.read_text(encoding="utf-8").splitlines()
        assert re.fullmatch(rf"# {page.name[:4]}\. .+", title), page.name
        assert re.fullmatch(r"Status: (accepted|superseded by \d{4})\.", status), page.name
        assert f"({page.name})" in index, page.name
