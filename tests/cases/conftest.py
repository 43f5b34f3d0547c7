"""The kinds of fault that engines have shipped, tried on each device, phase and backend.

Every docstring names the public reports that its test would have caught. Without more, the tests run on the
cpu, and with ``-m cuda`` on a GPU. Where ``GRAPHPLAT_SIMULATED`` names a device they run on that one, through
its vendor's platform, as ``nox -s tests`` does for each. By hand::

    GRAPHPLAT_SIMULATED=npu pytest tests/cases -p graphplat.testing.plugin
"""

from __future__ import annotations

import gc
import importlib.metadata
import os
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from graphplat import (
    EagerRunner,
    ForwardBatch,
    InputSpec,
    Phase,
    PhaseConfig,
    Platform,
    TensorSpec,
    capture_cuda_graphs,
    eager_on_graph,
    hookimpl,
    platform_for,
    registry,
)

HERE = Path(__file__).parent
NAME = os.environ.get("GRAPHPLAT_SIMULATED", "").partition(":")[0]
PROJECTS = {
    "acme": HERE.parents[1] / "plugins" / "graphplat-acme",
    "simxpu": HERE.parent / "devices" / "simxpu",
}
SIM: Any = None

if NAME:
    from graphplat.testing.distributions import expose
    from graphplat.testing.simulated import install_from_environment, ledger

    SIM = install_from_environment()
    if NAME in PROJECTS and not importlib.metadata.entry_points(group="graphplat", name=NAME):
        SITE = tempfile.TemporaryDirectory()
        sys.path.insert(0, str(expose(PROJECTS[NAME], Path(SITE.name))))
    registry.reset_registry()
    collect_ignore = ["test_distributed.py"]


@pytest.fixture(params=[NAME or "cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device of this process, and a GPU where that is asked for."""
    return torch.device(request.param)


@pytest.fixture(params=list(Phase))
def phase(request: pytest.FixtureRequest) -> Phase:
    """Both phases."""
    return request.param


@pytest.fixture(params=["full", "breakable"])
def backend(request: pytest.FixtureRequest) -> str:
    """Both ways to record; a forward calls ``rig.cut`` where the second one breaks."""
    return request.param


@eager_on_graph
def cut(value: torch.Tensor) -> torch.Tensor:
    """*value* again, past a graph break where the backend makes one."""
    return value + 0


class Rig:
    """Runners of one phase on one device through one backend, and what eager gives in their place."""

    def __init__(self, make: Callable[..., Any], device: torch.device, phase: Phase, backend: str) -> None:
        self.device, self.phase, self.backend = device, phase, backend
        self.rows = "requests" if phase is Phase.DECODE else "tokens"
        self.cut = cut
        self.runners: list[Any] = []
        self._make = make

    @property
    def platform(self) -> Platform:
        """What serves the device."""
        return platform_for(self.device)

    def generator(self) -> torch.Generator:
        """A random generator for the device; the simulated one draws from those of the host."""
        return torch.Generator(device=self.device if SIM is None or self.device.type == "cuda" else "cpu")

    def tensor(self, *rest: int, dtype: torch.dtype = torch.float32, **more: Any) -> TensorSpec:
        """The spec of a tensor with this phase's rows."""
        return TensorSpec((self.rows, *rest), dtype=dtype, **more)

    def runtime(self, forward: Any, spec: InputSpec | None = None, **settings: Any) -> Any:
        """A runtime made of *forward*; settings of the phase, or members of the runtime, by name."""
        members = {
            name: settings.pop(name) for name in list(settings) if name not in PhaseConfig.__struct_fields__
        }
        settings = {"backend": self.backend, "buckets": (1, 2, 4, 8), "max_padding": 100.0} | settings
        config = {str(self.phase): PhaseConfig(**settings)}
        if self.phase is Phase.PREFILL:
            config["decode"] = PhaseConfig(backend="disabled")
        spec = spec or InputSpec(x=self.tensor(3))
        return self._make(forward, spec, **config, **members)

    def runner(self, runtime: Any) -> Any:
        """The graph runner of the phase, captured; released when the test ends."""
        self.capture = capture_cuda_graphs(model_runner=runtime)
        decode = self.phase is Phase.DECODE
        runner = self.capture.decode_runner if decode else self.capture.prefill_runner
        self.runners.append(runner)
        return runner

    def start(self, forward: Any, spec: InputSpec | None = None, **settings: Any) -> Any:
        """``runtime`` and ``runner`` in one."""
        return self.runner(self.runtime(forward, spec, **settings))

    def batch(self, rows: int, *, variant: str | None = None, per: int = 1, **inputs: Any) -> ForwardBatch:
        """A batch of so many rows; one request where rows are tokens."""
        decode = self.phase is Phase.DECODE
        return ForwardBatch(
            phase=self.phase,
            num_requests=rows if decode else min(rows, 1),
            num_tokens=rows * per,
            inputs=inputs,
            variant=variant,
        )

    def eagerly(self, runner: Any, batch: ForwardBatch) -> Any:
        """What the runtime gives without any graph."""
        runtime = runner.context.model_runner
        with torch.no_grad():
            return EagerRunner(self.platform, runtime).execute(batch)

    def buffers(self, runner: Any, size: int) -> dict[str, torch.Tensor]:
        """The whole static inputs of the bucket *size*, padded rows included."""
        (entry,) = [entry for key, entry in runner.entries.items() if key.size == size]
        return entry.inputs.views()

    def close(self) -> None:
        """Destroy every graph."""
        for runner in self.runners:
            runner.release()
        self.runners.clear()
        self.capture = None


@pytest.fixture
def rig(runtime: Any, device: torch.device, phase: Phase, backend: str) -> Iterator[Rig]:
    """Each phase through each backend on the device."""
    rig = Rig(runtime, device, phase, backend)
    yield rig
    rig.close()


@pytest.fixture
def decode_rig(runtime: Any, device: torch.device) -> Iterator[Rig]:
    """Decode through whole graphs, where phase and backend play no part."""
    rig = Rig(runtime, device, Phase.DECODE, "full")
    yield rig
    rig.close()


@pytest.fixture
def sim() -> Any:
    """The simulated device of this process."""
    if SIM is None:
        pytest.skip("needs a simulated device")
    return SIM


@pytest.fixture
def vendor(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Platform]]:
    """Make a platform class that of the cpu, as an out-of-tree vendor would; *hooks* are further hooks."""
    names: list[str] = []

    def install(cls: type[Platform], **hooks: Any) -> Platform:
        plugin = types.ModuleType(f"plugin_{cls.name}")
        plugin.provide_platforms = hookimpl(lambda: [cls])
        for name, hook in hooks.items():
            setattr(plugin, name, hookimpl(hook))
        registry.register_plugin(plugin, cls.name)
        names.append(cls.name)
        return platform_for(cls.device_type, name=cls.name)

    yield install
    for name in names:
        registry.unregister_plugin(name)


@pytest.fixture
def installed(tmp_path: Path) -> Iterator[Callable[..., None]]:
    """Install a throwaway distribution beside the real ones: its entry points, and its modules by name."""
    path, modules = list(sys.path), set(sys.modules)

    def install(distribution: str, entries: dict[str, str], **sources: str) -> None:
        folder = tmp_path / distribution
        info = folder / f"{distribution.replace('-', '_')}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        points = "".join(f"{name} = {value}\n" for name, value in entries.items())
        (info / "entry_points.txt").write_text(f"[graphplat]\n{points}")
        for name, source in sources.items():
            (folder / f"{name}.py").write_text(source)
        sys.path.insert(0, str(folder))
        importlib.invalidate_caches()
        registry.reset_registry()

    yield install
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
    registry.reset_registry()


@pytest.fixture(autouse=True)
def _at_rest() -> Iterator[None]:
    """Every test leaves a simulated driver at rest: no capture, no stream but the default, no graph."""
    yield
    if SIM is None:
        return
    if ledger().graphs:
        gc.collect()
    module = getattr(torch, NAME)
    left = (ledger().captures, module.current_stream().stream_id, ledger().graphs)
    SIM.recover()
    assert left == (0, 0, 0), f"captures, stream, graphs left over: {left}"
