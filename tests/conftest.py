"""What all tests share: devices, and runtimes small enough to be written inside a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from graphplat import ForwardBatch, GraphConfig, InputSpec, ModelRunner, Phase, PhaseConfig, TensorSpec


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no NVIDIA GPU here")
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(skip)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each device on which graphs really run."""
    return torch.device(request.param)


Forward = Callable[[ForwardBatch], Any]


class Runtime(ModelRunner):
    """A runtime made of one function.

    *spec* is the input spec of both phases. Any other member of ModelRunner can be given by name.
    """

    def __init__(
        self,
        forward: Forward,
        spec: InputSpec | dict[Phase, InputSpec] | None = None,
        *,
        device: torch.device | str = "cpu",
        decode: PhaseConfig | None = None,
        prefill: PhaseConfig | None = None,
        **members: Any,
    ) -> None:
        self.device = torch.device(device)
        self.model = torch.nn.Module()
        self.graph_config = GraphConfig(
            decode=decode or PhaseConfig(buckets=(1, 2, 4, 8)),
            prefill=prefill or PhaseConfig(backend="disabled"),
        )
        self.function = forward
        self.spec = spec or InputSpec(x=TensorSpec(("requests", 3), dtype=torch.float32))
        for name, value in members.items():
            if not hasattr(ModelRunner, name) and name not in ("model", "graph_config"):
                raise AttributeError(name)
            setattr(self, name, value)

    def input_spec(self, phase: Phase) -> InputSpec:
        return self.spec[phase] if isinstance(self.spec, dict) else self.spec

    def forward(self, batch: ForwardBatch) -> Any:
        return self.function(batch)


@pytest.fixture
def runtime(device: torch.device) -> Callable[..., Runtime]:
    """Make a :class:`Runtime` on the device of the test."""

    def make(forward: Forward, spec: Any = None, **settings: Any) -> Runtime:
        return Runtime(forward, spec, device=device, **settings)

    return make


@pytest.fixture
def decode() -> Callable[..., ForwardBatch]:
    """Make a decode batch of so many requests; keywords are its inputs."""

    def make(requests: int, *, per: int = 1, variant: str | None = None, **inputs: Any) -> ForwardBatch:
        return ForwardBatch(
            phase=Phase.DECODE,
            num_requests=requests,
            num_tokens=requests * per,
            inputs=inputs,
            variant=variant,
        )

    return make


@pytest.fixture
def rows(device: torch.device) -> Callable[..., torch.Tensor]:
    """Make a tensor of so many rows and three columns, different at each call; small whole numbers."""
    generator = torch.Generator().manual_seed(7)

    def make(count: int, *, width: int = 3, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randint(1, 100, (count, width), generator=generator).to(device, dtype)

    return make


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Small tensors are slower on many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
