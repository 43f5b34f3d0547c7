"""The reference decoder through the three public functions, on every simulated device."""

import pytest
import torch

from graphplat import GraphConfig, PhaseConfig, capture_cuda_graphs

PROMPTS = [[1, 2, 3, 4, 5], [6, 7]]


def config(prefill="full"):
    return GraphConfig(
        decode=PhaseConfig(buckets=(1, 2, 4)),
        prefill=PhaseConfig(backend=prefill, buckets=(8, 16), max_requests=4),
    )


@pytest.mark.parametrize("index", ["", ":0", ":1"])
@pytest.mark.parametrize("prefill", ["full", "breakable"])
def test_prefill_and_decode_equal_the_cpu(sim, reference, eagerly, prefill, index):
    """
    Prefill and four decode steps through graphs give the CPU's logits, on each device string.
    """
    there, here = reference(sim.name + index, config(prefill)), reference("cpu", config(prefill))
    capture = capture_cuda_graphs(model_runner=there)
    assert (capture.prefill_runner.buckets, capture.decode.runner.buckets) == ((8, 16), (1, 2, 4))
    found = capture.prefill_runner.execute(there.prefill_batch(PROMPTS))
    wanted = eagerly(here, here.prefill_batch(PROMPTS))
    assert found.device.type == sim.name
    torch.testing.assert_close(found.cpu(), wanted)
    for length in range(4):
        tokens = wanted.argmax(-1).tolist()
        positions = [len(prompt) + length for prompt in PROMPTS]
        found = capture.decode.runner.execute(there.decode_batch(tokens, positions))
        wanted = eagerly(here, here.decode_batch(tokens, positions))
        torch.testing.assert_close(found.cpu(), wanted)
    assert capture.prefill_runner.stats.replayed == 1
    assert capture.decode.runner.stats.replayed == 4
    capture.prefill_runner.release()
    capture.decode.runner.release()


def test_data_parallel_gather_keeps_its_tensor(sim, reference, eagerly):
    """
    A capture-only tensor is owned by the graphs, so that what is allocated later cannot take its place.
    """
    there = reference(sim.name, GraphConfig(decode=PhaseConfig(buckets=(2,))), ranks=4)
    capture = capture_cuda_graphs(model_runner=there)
    poison = [torch.full((4,), 1 << 40).to(sim.name) for _ in range(200)]
    batch = there.decode_batch([3, 4], [0, 0])
    torch.testing.assert_close(capture.decode.runner.execute(batch), eagerly(there, batch))
    assert capture.report.shapes[0].retained_bytes == 4 * 8
    del poison
    capture.decode.runner.release()


def test_the_report_tells_where_it_ran(sim, reference, platform):
    """
    The report names the platform, the device and why it was chosen.
    """
    capture = capture_cuda_graphs(model_runner=reference(f"{sim.name}:1", config("disabled")))
    assert capture.report.platform == platform.name
    assert capture.report.device == f"{sim.name}:1"
    assert capture.report.chosen_because
    capture.decode.runner.release()
