"""Several ranks: one path for all of them at every step, and no rank that hangs because another failed."""

import json
import os
import queue
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch.distributed

LIMIT = 60
"""Seconds for one scenario; a hang ends here."""

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
    reason="needs the gloo backend",
)


class Rank:
    """One process that runs scenarios."""

    def __init__(self, number):
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("ranks.py")), str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.answers = queue.Queue()
        self.listener = threading.Thread(target=self.listen, daemon=True)
        self.listener.start()

    def listen(self):
        for line in self.process.stdout:
            if line.startswith("{"):
                self.answers.put(json.loads(line))
        self.answers.put(None)

    def send(self, order):
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def stop(self):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.listener.join()
        self.process.stdout.close()


class Ranks:
    """Two ranks, started when needed."""

    def __init__(self):
        self.ranks = []

    def run(self, scenario, store, timeout):
        if not self.ranks:
            self.ranks = [Rank(0), Rank(1)]
        for rank in self.ranks:
            rank.send({"scenario": scenario, "store": str(store), "timeout": timeout})
        try:
            answers = [rank.answers.get(timeout=LIMIT) for rank in self.ranks]
        except queue.Empty:
            self.stop()
            pytest.fail(f"a rank hangs in {scenario}")
        if None in answers:
            self.stop()
        for answer in answers:
            assert answer is not None, "a rank died"
            assert "crash" not in answer, answer["crash"]
        return answers

    def stop(self):
        for rank in self.ranks:
            rank.stop()
        self.ranks = []


@pytest.fixture(scope="module")
def ranks():
    pair = Ranks()
    yield pair
    pair.stop()


@pytest.fixture
def both(ranks, tmp_path):
    """Run a scenario on two ranks and give both answers."""

    def run(scenario, timeout=20):
        return ranks.run(scenario, tmp_path / "store", timeout)

    return run


def paths(answers, field="steps"):
    """How each step ran on the ranks: one entry where all agree on graph or eager, and on the bucket."""
    found = []
    for steps in zip(*(answer[field] for answer in answers), strict=True):
        buckets = {step["bucket"] for step in steps}
        assert len(buckets) == 1, steps
        assert all(step.get("right", True) for step in steps), steps
        found.append(buckets.pop())
    return found


# Steps


def test_ranks_take_the_bucket_of_the_largest(both):
    """
    Guards against vllm-project/vllm#25906, sgl-project/sglang#37933 and sgl-project/sglang#5527: sizes
    (3, 8), (0, 8) and (8, too large) run the same path on both ranks and equal eager; a rank without work
    replays a padded graph, or runs eagerly with zero rows.
    """
    answers = both("sizes")
    assert paths(answers) == [8, 4, 8, None, 2, None, None]
    reasons = [[step["reason"] for step in answer["steps"]] for answer in answers]
    assert reasons[0][3:] == ["empty_batch", "", "peer_rank_eager", "over_max_bucket"]
    assert reasons[1][3:] == ["empty_batch", "", "over_max_bucket", "peer_rank_eager"]
    assert [answer["replayed"] for answer in answers] == [4, 4]
    assert [answer["forwards"] for answer in answers] == [3, 3], "a graph was not replayed"


def test_padding_is_judged_by_the_largest_rank(both):
    """
    Guards against sgl-project/sglang#5527 and #6092: a rank with few tokens does not make all run eagerly for
    its own padding; where the largest rank would waste too much, all do.
    """
    assert paths(both("prefill")) == [64, 64, 8, None]


def test_ranks_that_ask_for_different_variants_run_eagerly(both):
    """
    Guards against vllm-project/vllm#25906: never two different graphs with collectives inside; an idle rank
    follows.
    """
    answers = both("variants")
    assert paths(answers) == [2, 2, None, None]
    assert {answer["steps"][3]["reason"] for answer in answers} == {"peer_rank_eager"}
    assert [answer["idle"]["bucket"] for answer in answers] == [4, 4]


def test_ranks_that_differ_in_host_values_run_eagerly(both):
    """
    Guards against vllm-project/vllm#25906: host values choose the graph; different ones, or one nobody
    captured, make all ranks run eagerly.
    """
    assert paths(both("host_values")) == [2, None, 2, None]


def test_an_idle_rank_follows_the_optional_inputs_of_the_others(both):
    """
    Guards against sgl-project/sglang#37933: an idle rank has none of them and replays the others' graph on
    fill values; ranks with work that differ run eagerly.
    """
    answers = both("optional_inputs")
    assert paths(answers) == [2, None]
    assert [answer["idle"] for answer in answers] == [{"bucket": 4, "reason": "", "right": True}] * 2


def test_a_bad_batch_on_one_rank_is_an_error_on_all(both):
    """
    Guards against vllm-project/vllm#25906: the rank names its field, the others say that a peer refused; the
    next step is right.
    """
    answers = both("malformed")
    assert [answer["error"]["type"] for answer in answers] == ["InputError", "ReplayError"]
    assert "'x'" in answers[0]["error"]["text"]
    assert "rank 0" in answers[1]["error"]["text"]
    assert [answer["next"]["bucket"] for answer in answers] == [4, 4]
    assert all(answer["next"]["right"] for answer in answers)


@pytest.mark.parametrize(
    ("scenario", "text"),
    [
        ("no_batch", "expected a ForwardBatch, found dict"),
        ("no_inputs", "expected a dict of inputs, found NoneType"),
        ("unhashable_counts", "expected a count, found [2]"),
    ],
)
def test_a_rank_without_a_batch_is_an_error_on_all(both, scenario, text):
    """
    Guards against vllm-project/vllm#25906: a rank that passes no batch, or one without inputs or counts,
    takes part by refusing; the other does not wait for it in a collective, and the next step is right on
    both.
    """
    answers = both(scenario)
    assert [answer["error"]["type"] for answer in answers] == ["ReplayError", "InputError"]
    assert "rank 1" in answers[0]["error"]["text"]
    assert text in answers[1]["error"]["text"]
    assert paths(answers) == [4, 4]
    assert [answer["replayed"] for answer in answers] == [2, 2]


def test_graphs_released_on_one_rank_make_all_run_eagerly(both):
    """Guards against vllm-project/vllm#25906: the other rank still has its graphs and does not use them."""
    answers = both("released_on_one")
    assert [answer["step"] for answer in answers] == [
        {"bucket": None, "reason": "released", "right": True},
        {"bucket": None, "reason": "peer_rank_eager", "right": True},
    ]


def test_ranks_at_different_places_raise_on_both(both):
    """
    Guards against vllm-project/vllm#25906: one rank that captures again while another takes a step is an
    error on both, and neither hangs.
    """
    answers = both("different_methods")
    assert [answer["error"]["type"] for answer in answers] == ["CaptureError", "ReplayError"]
    assert [answer["after"]["type"] for answer in answers] == [None, None]
    assert all(answer["step"] == {"bucket": 4, "reason": "", "right": True} for answer in answers)


# Fields for capture


@pytest.mark.parametrize("scenario", ["live_numbers", "live_numbers_lazy"])
def test_a_number_that_was_captured_as_another_on_one_rank_makes_all_run_eagerly(both, scenario):
    """
    Guards against vllm-project/vllm#25906 and vllm-project/vllm#51119: also where the graph is captured
    within that step, and where the rank with the number has no work.
    """
    answers = both(scenario)
    assert paths(answers) == [None, 4, 4, None, None, None]
    reasons = [[step["reason"] for step in answer["steps"]] for answer in answers]
    assert reasons[0] == ["host_value", "", "", "host_value", "host_value", "host_value"]
    assert reasons[1] == ["peer_rank_eager", "", "", "peer_rank_eager", "peer_rank_eager", "peer_rank_eager"]
    assert answers[0]["buckets"] == ([4] if scenario.endswith("lazy") else [4, 8])


def test_a_number_must_hold_for_every_graph_that_the_ranks_may_choose(both):
    """
    Guards against vllm-project/vllm#25906 and vllm-project/vllm#51119: which bucket it is shows only when all
    ranks have spoken; ``None`` is as captured in any.
    """
    assert paths(both("live_numbers_by_bucket")) == [8, None, None, 4]


def test_a_number_is_compared_with_the_graphs_that_a_moved_weight_brings(both):
    """
    Guards against vllm-project/vllm#25906 and vllm-project/vllm#51119: the ranks agree once more when they
    have captured anew.
    """
    answers = both("live_numbers_captured_anew")
    assert [answer["recaptures"] for answer in answers] == [1, 1]
    assert paths(answers) == [None, 4]
    assert [answer["steps"][0]["reason"] for answer in answers] == ["host_value", "peer_rank_eager"]


@pytest.mark.parametrize("scenario", ["live_tensors", "live_tensors_lazy"])
def test_a_tensor_that_the_graph_of_one_rank_does_not_read_is_an_error_on_all(both, scenario):
    """
    Guards against vllm-project/vllm#25906 and vllm-project/vllm#51119: the rank names its field, the other
    that a rank refused; the next step replays on both.
    """
    answers = both(scenario)
    assert [answer["error"]["type"] for answer in answers] == ["ReplayError", "InputError"]
    assert "'global_num_tokens_gpu'" in answers[1]["error"]["text"]
    assert [answer["last"]["bucket"] for answer in answers] == [4, 4]
    assert [answer["step"] for answer in answers] == [{"bucket": 4, "reason": "", "right": True}] * 2


# Weights


def test_weights_moved_on_one_rank_are_captured_again_on_all(both):
    """
    Guards against vllm-project/vllm#25906 and vllm-project/vllm-ascend#7473: the rank whose weights stayed
    records again too, since a capture runs collectives.
    """
    answers = both("moved_recapture")
    assert [answer["recaptures"] for answer in answers] == [1, 1]
    assert [answer["last"]["bucket"] for answer in answers] == [4, 4]
    assert all(answer["after"]["right"] for answer in answers)


def test_weights_moved_on_one_rank_make_all_run_eagerly(both):
    """
    Guards against vllm-project/vllm#25906 and vllm-project/vllm-ascend#7473: weights="eager" on the rank that
    moved is eager on all.
    """
    reasons = [answer["last"]["reason"] for answer in both("moved_eager")]
    assert reasons == ["peer_rank_eager", "weights_moved"]


def test_weights_moved_on_one_rank_raise_on_all(both):
    """
    Guards against vllm-project/vllm#25906 and vllm-project/vllm-ascend#7473: under weights="raise" the rank
    names the weight, the others that a rank refused.
    """
    errors = [answer["error"]["type"] for answer in both("moved_raise")]
    assert errors == ["ReplayError", "WeightsMovedError"]


# Captures


@pytest.mark.parametrize("scenario", ["different_buckets", "different_policies", "one_disabled"])
def test_different_settings_are_an_error_on_all_ranks(both, scenario):
    """
    Guards against vllm-project/vllm#25906: what the ranks are about to capture is compared before anything
    runs.
    """
    for answer in both(scenario):
        assert answer["error"]["type"] == "CaptureError"
        assert "ranks differ" in answer["error"]["text"]


def test_a_bucket_that_fails_on_one_rank_is_dropped_on_all(both):
    """
    Guards against vllm-project/vllm#25906 and NVIDIA/cuopt#1253: under on_failure="eager" both run that
    bucket eagerly and replay the others; a new capture has it again.
    """
    answers = both("fails_after_collective_eager")
    assert paths(answers) == [None, 8, 2]
    for answer in answers:
        assert [skip[:2] for skip in answer["skipped"]] == [["capture_failed", 4]]
        assert answer["again"] == {"bucket": 4, "reason": "", "right": True}
    assert "peer rank" in answers[0]["skipped"][0][2]
    assert "this rank's own" in answers[1]["skipped"][0][2]


def test_a_bucket_that_fails_on_one_rank_raises_on_all(both):
    """
    Guards against vllm-project/vllm#25906: under on_failure="raise" each rank raises, the failing one its own
    error, chained.
    """
    first, second = (answer["error"] for answer in both("fails_after_collective_raise"))
    assert (first["type"], second["type"]) == ("CaptureError", "CaptureError")
    assert "a peer rank failed" in first["text"]
    assert second["chain"] == ["ZeroDivisionError: this rank's own"]


def test_memory_that_runs_out_on_one_rank_drops_the_bucket_on_all(both):
    """
    Guards against vllm-project/vllm#25906 and vllm-project/vllm#57475: both say so, both keep the other
    buckets, also under on_failure="raise".
    """
    answers = both("out_of_memory_on_one")
    for answer in answers:
        assert [skip[:2] for skip in answer["skipped"]] == [["out_of_memory", 4]]
    assert paths(answers) == [8, 8, 2]


def test_an_interrupted_rank_does_not_wait_and_stops_the_others(both):
    """
    Guards against vllm-project/vllm#25906 and pytorch/pytorch#190308: a KeyboardInterrupt passes on its rank;
    the other raises, whatever its policy.
    """
    first, second = (answer["error"] for answer in both("interrupted"))
    assert second["type"] == "KeyboardInterrupt"
    assert first["type"] == "CaptureError"
    assert "rank 1" in first["text"]


def test_a_preparation_that_fails_on_one_rank_drops_the_bucket_on_all(both):
    """
    Guards against vllm-project/vllm#25906: the preparation fails before the collectives of the warm-up,
    which the other rank then does not start.
    """
    answers = both("prepare_fails")
    assert paths(answers) == [4, None]
    assert [answer["skipped"] for answer in answers] == [[["capture_failed", 8]]] * 2


@pytest.mark.parametrize("scenario", ["hangs_before_collective", "hangs_in_first_run"])
def test_a_rank_that_fails_before_a_collective_holds_the_others_no_longer_than_the_group_allows(
    both, scenario
):
    """
    Guards against vllm-project/vllm#25906: the waiting rank gets a CaptureError chained to the group's
    timeout; the group is broken afterwards.
    """
    answers = both(scenario, timeout=3)
    first, second = (answer["error"] for answer in answers)
    assert (first["type"], second["type"]) == ("CaptureError", "CaptureError")
    assert second["chain"] == ["ZeroDivisionError: this rank's own"]
    assert "Timed out" in first["chain"][0]
    assert "Rank 1 failed too" in " ".join(first["notes"])
    if scenario == "hangs_before_collective":
        assert [answer["group"] for answer in answers] == ["RuntimeError", "RuntimeError"]


def test_a_rank_that_never_comes_is_an_error_in_time(both):
    """
    Guards against vllm-project/vllm#25906: the rank that waits for it gets a CaptureError chained to torch's
    own.
    """
    error = both("broken_plan", timeout=2)[1]["error"]
    assert error["type"] == "CaptureError"
    assert "could not agree" in error["text"]
    assert error["chain"]


def test_lazy_captures_are_agreed(both):
    """
    Guards against vllm-project/vllm#25906 and sgl-project/sglang#37933: both ranks capture when either needs
    it, an idle one too; a bucket that fails on one runs eagerly on both.
    """
    answers = both("lazy")
    assert paths(answers) == [8, 2, None, None, 8]
    assert [answer["buckets"] for answer in answers] == [[2, 8]] * 2
    assert [answer["replayed"] for answer in answers] == [3, 3]


def test_a_lazy_capture_that_fails_raises_on_all_ranks_and_can_be_retried(both):
    """
    Guards against vllm-project/vllm#25906 and NVIDIA/cuopt#1253: under on_failure="raise" the step fails on
    both, and the next one captures.
    """
    answers = both("lazy_raises")
    assert [answer["error"]["type"] for answer in answers] == ["CaptureError", "CaptureError"]
    assert [answer["step"] for answer in answers] == [{"bucket": 4, "reason": "", "right": True}] * 2


def test_a_budget_keeps_the_same_buckets_on_all_ranks(both):
    """Guards against vllm-project/vllm#25906: what counts is the largest measurement of any rank."""
    answers = both("budget")
    assert answers[0]["buckets"] == answers[1]["buckets"]
    assert answers[0]["bytes"] == answers[1]["bytes"]
    assert 0 < len(answers[0]["buckets"]) < 3
    assert [answer["warned"] for answer in answers] == [["GraphplatWarning"]] * 2
    assert paths([{"steps": [answer["step"]]} for answer in answers])
