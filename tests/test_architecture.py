"""What keeps the code as it is meant to be: who may name whom, and how large things get."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import graphplat

CORE = Path(graphplat.__file__).parent
PLUGINS = CORE.parent / "plugins"
BUILT_IN = ("graphplat_cpu", "graphplat_cuda", "graphplat_musa", "graphplat_npu", "graphplat_xpu")
VENDORS = re.compile(
    r"nvidia|cuda|\bhip\b|\brocm\b|\bamd\b|musa|moore|\bnpu\b|_npu|npu_|\bascend\b|\bacl\b|\bxpu\b|_xpu|xpu_|intel\b|metax"
    r"|cambricon|\bmlu\b|habana|\bhpu\b|\bmps\b|cublas|cudnn|nccl|hccl|mccl",
    re.IGNORECASE,
)
CONTRACT_NAMES = {
    "capture_cuda_graphs",
    "CudaGraphsCapture",
    "capture_decode_cuda_graph",
    "supports_cuda_graph",
    "support_cuda_graph",
    "triton.cudagraphs",
    "cudagraph_mark_step_begin",
}
"""Names that the contract fixes for any device graph, and two of torch's compiler."""


def modules(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


def core() -> list[Path]:
    return [path for path in modules(CORE) if "simulated" not in path.parts]


def everything() -> list[Path]:
    return modules(CORE) + [path for name in BUILT_IN for path in modules(PLUGINS / name)]


def label(path: Path) -> str:
    return str(path.relative_to(CORE.parent))


@pytest.mark.parametrize("path", core(), ids=label)
def test_the_core_names_no_vendor(path: Path) -> None:
    """
    Capabilities are asked for by name, vendors never: nothing but the one list of in-tree device types, the
    names of the contract, and the profiles of simulated devices may speak of one. Prose counts too.
    """
    text = path.read_text(encoding="utf-8")
    if path.name == "platform.py":
        text, lists = re.subn(r"^IN_TREE_DEVICE_TYPES = .*$", "", text, flags=re.MULTILINE)
        assert lists == 1
    for name in CONTRACT_NAMES:
        text = re.sub(rf"\b{name}\b", "", text)
    found = [
        f"{number}: {line.strip()}"
        for number, line in enumerate(text.splitlines(), 1)
        if VENDORS.search(line)
    ]
    assert found == []


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_plugins_use_the_public_interface_alone(name: str) -> None:
    """They import no underscored name and no underscored module of graphplat, and nothing of each other."""
    for path in modules(PLUGINS / name):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            elif isinstance(node, ast.Import):
                names = [part for alias in node.names for part in alias.name.split(".")]
            else:
                continue
            if any(part.startswith("graphplat") for part in names):
                assert not [part for part in names if part.startswith("_")], label(path)
                assert not set(names) & (set(BUILT_IN) - {name}), label(path)


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node


def code_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring."""
    documented = ast.get_docstring(node) is not None
    first = node.body[1] if documented and len(node.body) > 1 else node.body[0]
    return (node.end_lineno or 0) - first.lineno + 1 + (node.body[0].lineno - node.lineno)


@pytest.mark.parametrize("path", everything(), ids=label)
def test_modules_and_functions_stay_small(path: Path) -> None:
    """A module that cannot be read in one go, or a function that fills a screen, is to be split."""
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 300
    long = {node.name: code_lines(node) for node in functions(ast.parse(text)) if code_lines(node) > 45}
    assert long == {}


def targets(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return node.targets
    if isinstance(node, (ast.AugAssign, ast.AnnAssign)):
        return [node.target]
    if isinstance(node, ast.Delete):
        return node.targets
    return []


@pytest.mark.parametrize("path", everything(), ids=label)
def test_nothing_assigns_to_attributes_of_torch(path: Path) -> None:
    """
    No module is patched. The simulated devices put a module of their own into torch, and the guard of
    plugins puts back what one changed; both do it through named functions. Deliberately broken platforms
    may do anything.
    """
    if path.name.startswith("broken"):
        return
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        for target in targets(node):
            inner = target
            while isinstance(inner, (ast.Attribute, ast.Subscript)):
                inner = inner.value
            if isinstance(target, ast.Attribute) and isinstance(inner, ast.Name):
                assert inner.id != "torch", f"{label(path)}:{target.lineno}"
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("setattr", "delattr")
        ):
            first = ast.unparse(node.args[0])
            allowed = path.name == "torch_guard.py" or "simulated" in path.parts
            assert allowed or first.split(".")[0] != "torch", f"{label(path)}:{node.lineno}"


SIDE_EFFECTS = """
import sys
import torch
before = set(sys.modules)
import graphplat
for name in graphplat.__all__:
    getattr(graphplat, name)
loaded = set(sys.modules) - before
bad = [m for m in loaded if m.partition(".")[0] in (
    "torch_npu", "torch_musa", "torch_xpu", "intel_extension_for_pytorch",
    "transformers", "rich", "typer", "gguf")]
assert not bad, bad
assert not [m for m in loaded if m.startswith("graphplat_")], "a plugin was imported"
assert not torch.cuda.is_initialized()
assert not torch.xpu.is_initialized()
print("clean")
"""


def test_importing_touches_no_device_and_no_vendor_package() -> None:
    """
    In a fresh process, importing every public name makes no device context and imports neither a vendor's
    package, nor a plugin, nor what only the command line or an integration needs.
    """
    done = subprocess.run([sys.executable, "-c", SIDE_EFFECTS], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "clean", done.stderr


TRACED = """
import torch
from graphplat import current_platform, platform_for

probes = 0

def forward(x):
    if platform_for("cpu").capabilities.graph_capture:
        x = x + 1
    return x * 2 if current_platform().device_type == "cpu" else x

compiled = torch.compile(forward, fullgraph=True, backend="eager")
for n in (2, 3):
    x = torch.arange(float(n))
    assert torch.equal(compiled(x), forward(x))
print("no graph break")
"""


def test_platform_flags_can_be_asked_in_traced_code() -> None:
    """
    Guards against sgl-project/sglang#39054: the tracer takes the answer as a constant, without a graph break.
    """
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:graphplat", "-c", TRACED],
        capture_output=True,
        text=True,
        check=False,
        env={"GRAPHPLAT_PLATFORM": "cpu", **__import__("os").environ},
    )
    assert done.stdout.strip() == "no graph break", done.stderr


def test_every_public_name_has_a_docstring() -> None:
    """What a user can import says what it promises."""
    bare = [
        name
        for name in graphplat.__all__
        if not isinstance(getattr(graphplat, name), (str, tuple)) and not getattr(graphplat, name).__doc__
    ]
    assert bare == []
