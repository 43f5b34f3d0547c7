"""Compile interplay: a compiler is done before a capture begins, platform flags are constants."""

from __future__ import annotations

import pytest
import torch

from graphplat import CaptureError, current_platform, platform_for


def compiling(rig, seen, when=lambda x: True):
    """A forward that compiles, which reads from the device, at the first call of each shape."""

    def forward(batch):
        x = batch.inputs["x"]
        if tuple(x.shape) not in seen and when(x):
            float(x.sum())
            seen.add(tuple(x.shape))
        return rig.cut(x * 2) + 1

    return forward


@pytest.mark.parametrize("capture", ["startup", "lazy"])
@pytest.mark.parametrize("warmup", ["auto", "each"])
def test_what_compiles_at_each_shape_has_done_so_before_capture(rig, rows, capture, warmup):
    """
    Guards against pytorch/pytorch#185074, #131782, vllm-project/vllm#42241 and sgl-project/sglang-omni#579:
    every bucket whose first run cannot be captured is warmed up with the tensors of its capture, so that all
    of them get graphs, at start-up and on first use.
    """
    runner = rig.start(compiling(rig, set()), capture=capture, warmup=warmup)
    for n in (8, 1, 3, 2):
        x = rows(n)
        assert torch.equal(runner.execute(rig.batch(n, x=x)), x * 2 + 1)
    assert runner.buckets == (1, 2, 4, 8)
    assert runner.stats.replayed == 4


def test_the_warm_up_has_the_tensors_of_the_capture(rig):
    """
    Guards against pytorch/pytorch#131782: addresses, shapes, strides and types in the last run before a
    capture are those of the capture, so that no guard of a compiler can miss there.
    """
    runs = []

    def forward(batch):
        x = batch.inputs["x"]
        runs.append(
            (rig.platform.is_capturing(), x.data_ptr(), x.shape, x.stride(), x.dtype, batch.num_requests)
        )
        return rig.cut(x * 2)

    rig.start(forward, warmup="each")
    captured = [index for index, run in enumerate(runs) if run[0]]
    assert len(captured) == 4
    for index in captured:
        assert not runs[index - 1][0]
        assert runs[index - 1][1:] == runs[index][1:]


def test_a_compile_inside_a_capture_is_reported_as_that_bucket(rig):
    """
    Guards against pytorch/pytorch#185074: a forward that compiles anew at every call fails its capture with
    the read that its compiler made, naming the bucket; it is no wrong result.
    """

    def forward(batch):
        float(batch.inputs["x"].sum())
        return rig.cut(batch.inputs["x"] * 2)

    with pytest.raises(CaptureError) as caught:
        rig.start(forward)
    assert caught.value.bucket == 8
    assert "test_compile.py" in str(caught.value)


@pytest.mark.cuda
def test_a_forward_compiled_by_torch_is_captured_at_every_size(rig, rows):
    """
    Guards against pytorch/pytorch#185074 and #131782 with the real compiler: buckets of 1, 2 and 8 of a
    compiled forward have graphs, and give what eager gives.
    """
    if rig.device.type != "cuda":
        pytest.skip("compiled kernels are captured as such on a GPU only")
    compiled = torch.compile(lambda x: torch.nn.functional.silu(x) * 2 + x.sum(1, keepdim=True))
    runner = rig.start(lambda batch: rig.cut(compiled(batch.inputs["x"])), buckets=(1, 2, 8))
    assert runner.buckets == (1, 2, 8)
    for n in (1, 2, 5, 8):
        batch = rig.batch(n, x=rows(n))
        torch.testing.assert_close(runner.execute(batch), rig.eagerly(runner, batch))


def test_platform_flags_are_constants_in_traced_code(device):
    """
    Guards against sgl-project/sglang#39054: a forward that asks which platform it runs on, and what that can
    do, traces whole, with no break at the probe, which ran before.
    """
    if device.type != "cpu":
        pytest.skip("the tracer needs no device")
    asked = platform_for("cpu")

    def forward(x):
        y = x * 2 if platform_for("cpu").capabilities.graph_capture else x
        return y + 1 if platform_for(x.device.type).device_type == "cpu" else y

    torch.compiler.reset()
    traced = torch.compile(forward, fullgraph=True, backend="eager")
    x = torch.ones(3)
    assert torch.equal(traced(x), forward(x))
    assert platform_for("cpu") is asked
    assert current_platform() is current_platform()
