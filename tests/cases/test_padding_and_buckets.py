"""Padding and buckets: padded rows are defined and unseen, every axis and every size has its place."""

from __future__ import annotations

import pytest
import torch

from graphplat import (
    CaptureError,
    ConfigError,
    ForwardBatch,
    GraphConfig,
    HostSpec,
    InputError,
    InputSpec,
    Phase,
    PhaseConfig,
    Reason,
    TensorSpec,
    UpTo,
    capture_cuda_graphs,
)

TABLE = 10


def fields(rig):
    """One field of each kind, each with a fill of its own."""
    return InputSpec(
        index=rig.tensor(dtype=torch.int64, fill=1),
        x=rig.tensor(3, fill=0.5),
        mask=rig.tensor(2, dtype=torch.bool, fill=True),
        small=rig.tensor(dtype=torch.int32, fill=-7),
        deep={"half": [rig.tensor(2, dtype=torch.float16, fill=2)]},
        table=rig.tensor(UpTo(4), dtype=torch.int64, fill=9),
        maybe=rig.tensor(2, fill=3, optional=True),
    )


def values(rig, n, width, huge):
    at = rig.device
    fill = (1 << 40) if huge else 2
    return {
        "index": torch.full((n,), TABLE - 1 if huge else 2, device=at),
        "x": torch.full((n, 3), float(fill), device=at),
        "mask": torch.zeros(n, 2, dtype=torch.bool, device=at),
        "small": torch.full((n,), 1000, dtype=torch.int32, device=at),
        "deep": {"half": [torch.full((n, 2), 100.0, dtype=torch.float16, device=at)]},
        "table": torch.full((n, width), fill, device=at),
        "maybe": torch.full((n, 2), float(fill), device=at),
    }


FILLS = {"index": 1, "x": 0.5, "mask": True, "small": -7, "deep.half[0]": 2, "table": 9, "maybe": 3}


@pytest.mark.parametrize("writes", ["", "counted", "uncounted"])
@pytest.mark.parametrize("host", [False, True], ids=["device", "host"])
def test_rows_beyond_the_batch_hold_their_fill(rig, host, writes):
    """
    Guards against sgl-project/sglang#10892, #18984 and #24401: after a larger batch of huge values, every row
    beyond a smaller one holds its field's declared fill, in every field by rule, whatever ran in between,
    wherever the batch came from, and though the forward itself writes to its inputs, be it past torch's count
    of writes, as kernels may; the next larger batch is whole again.
    """
    spec = fields(rig)
    table = torch.arange(TABLE, device=rig.device)

    def forward(batch):
        i = batch.inputs
        y = rig.cut(i["x"] + table[i["index"]][:, None])
        if writes:
            for written in (i["x"], i["table"]):
                (written.data if writes == "uncounted" else written).add_(1000)
        return y

    runner = rig.start(forward, spec, buckets=(4, 8))
    keys = [key for key in runner.entries if key.size == 8 and key.present]
    for rows, width in ((8, 4), (5, 2), (8, 4), (3, 4), (8, 3), (8, 4), (6, 1), (5, 1), (7, 4), (7, 2)):
        given = values(rig, rows, width, huge=rows == 8)
        if host:
            given["x"], given["index"] = given["x"].cpu(), given["index"].cpu()
        found = runner.execute(rig.batch(rows, **given))
        assert torch.equal(
            found, values(rig, rows, width, huge=rows == 8)["x"] + table[given["index"]][:, None]
        )
        if rows <= 4:
            continue
        entry = runner.entries[keys[0]]
        for path, buffer in entry.inputs.views().items():
            assert path in FILLS
            moved = 1000 if writes and path in {"x", "table"} else 0
            assert torch.all(buffer[rows:] == FILLS[path] + moved), (path, rows)
            if path == "table":
                assert torch.all(buffer[:, width:] == FILLS[path] + moved)
    assert runner.stats.ran_eagerly == 0


@pytest.mark.parametrize(
    "host", [(), ("x",), ("index", "x", "mask", "small")], ids=["device", "mixed", "host"]
)
def test_rows_beyond_the_batch_hold_their_fill_at_sizes_seen_before(rig, host):
    """
    Guards against sgl-project/sglang#10892: sizes that come again take a shorter way, and batches in host
    memory travel packed; rows beyond the batch are reset there too, at once and after any other size.
    """
    wanted = {"index": 1, "x": 0.5, "mask": True, "small": -7}
    every = fields(rig)
    spec = InputSpec(**{name: every.fields[name] for name in wanted})
    table = torch.arange(TABLE, device=rig.device)
    runner = rig.start(
        lambda batch: rig.cut(batch.inputs["x"] + table[batch.inputs["index"]][:, None]), spec, buckets=(8,)
    )
    for rows in (8, 5, 8, 5, 3, 8, 3, 5, 7, 5, 8, 8, 3):
        given = {name: values(rig, rows, 1, huge=rows == 8)[name] for name in wanted}
        expected = given["x"] + table[given["index"]][:, None]
        given |= {name: given[name].cpu() for name in host}
        assert torch.equal(runner.execute(rig.batch(rows, **given)), expected)
        for path, buffer in rig.buffers(runner, 8).items():
            assert torch.all(buffer[rows:] == wanted[path]), (path, rows)
    assert runner.stats.ran_eagerly == 0


def test_an_index_from_an_earlier_batch_is_never_used_again(rig):
    """
    Guards against sgl-project/sglang#6309, #8296, #8336 and #9888: a gather whose indices were in range when
    they came is not run again with rows of that batch once the table is shorter.
    """
    table = torch.arange(100.0, device=rig.device)
    limit = torch.full((1,), 100, device=rig.device)
    worst = torch.zeros(1, dtype=torch.int64, device=rig.device)

    def forward(batch):
        index = batch.inputs["index"]
        worst.copy_(torch.maximum(worst, (index - limit).max()))
        return rig.cut(table[index])

    runtime = rig.runtime(forward, InputSpec(index=rig.tensor(dtype=torch.int64)), buckets=(8,))
    runtime.extra_tensors = lambda: {"table": table, "limit": limit, "worst": worst}
    runner = rig.runner(runtime)
    runner.execute(rig.batch(8, index=torch.full((8,), 99, device=rig.device)))
    limit.fill_(10)
    worst.fill_(-100)
    for n in (5, 1, 7):
        index = torch.full((n,), 3, device=rig.device)
        assert torch.equal(runner.execute(rig.batch(n, index=index)), table[index])
    assert int(worst) < 0


WRITES = {
    "set": lambda cache, slot, x: cache.index_copy_(0, slot, x),
    "add": lambda cache, slot, x: cache.index_add_(0, slot, x),
    "put": lambda cache, slot, x: cache.__setitem__(slot, x),
    "scatter": lambda cache, slot, x: cache.scatter_(0, slot[:, None].expand_as(x), x),
}


@pytest.mark.parametrize("how", WRITES)
def test_padded_rows_change_no_real_slot(rig, rows, how):
    """
    Guards against vllm-project/vllm#43810 and #43869: padded rows, two of them and more, write to the slot
    that is their fill; every slot that no real row names keeps its content, the last real one among them.
    """
    slots = 8
    cache = torch.zeros(slots + 1, 3, device=rig.device)

    def forward(batch):
        WRITES[how](cache, batch.inputs["slot"], rig.cut(batch.inputs["x"] * 2))
        return batch.inputs["x"] + 1

    spec = InputSpec(x=rig.tensor(3, fill=5), slot=rig.tensor(dtype=torch.int64, fill=slots))
    runtime = rig.runtime(forward, spec, buckets=(4, 8))
    runtime.extra_tensors = lambda: {"cache": cache}
    runner = rig.runner(runtime)
    for n in (2, 3, 6, 1):
        cache.fill_(-3.0)
        slot = torch.arange(n, device=rig.device)
        x = rows(n)
        runner.execute(rig.batch(n, x=x, slot=slot))
        assert torch.equal(cache[:n], x * 2 + (-3 if how == "add" else 0))
        assert torch.all(cache[n:slots] == -3.0)
    assert runner.stats.replayed == 4


def test_every_axis_is_checked_before_a_graph_is_picked(rig, rows):
    """
    Guards against GeeeekExplorer/nano-vllm#190, #258, vllm-project/vllm#8068, #9285 and
    vllm-project/vllm-omni#7650: wider than captured or more rows than any bucket runs eagerly, counted with a
    reason that names what is too large; a narrower table after it reads none of its columns.
    """
    width = 5
    spec = InputSpec(x=rig.tensor(3), table=rig.tensor(UpTo(width), dtype=torch.int64, fill=0))
    runner = rig.start(
        lambda batch: rig.cut(batch.inputs["x"] * 2) + batch.inputs["table"].sum(1, keepdim=True), spec
    )

    def step(n, columns):
        x, table = rows(n), rows(n, width=columns, dtype=torch.int64)
        batch = rig.batch(n, x=x, table=table)
        decision = runner.explain(batch)
        assert torch.equal(runner.execute(batch), x * 2 + table.sum(1, keepdim=True))
        return decision

    assert step(3, width).is_graph
    wide = step(3, width + 1)
    assert wide.reason is Reason.OVER_MAX_DIM
    assert "table: axis 1 has 6, graphs hold 5" in wide.detail
    assert step(3, 2).is_graph
    assert step(3, 0).is_graph
    assert step(9, 2).reason is Reason.OVER_MAX_BUCKET
    assert step(8, width).is_graph
    assert runner.stats.eager == {Reason.OVER_MAX_DIM: 1, Reason.OVER_MAX_BUCKET: 1}


def test_the_largest_allowed_batch_replays(rig, rows):
    """
    Guards against InternLM/lmdeploy#4573, sgl-project/sglang#21005 and vllm-project/vllm#40734: whatever list
    is given, clipped, sorted and freed of doubles, it contains the maximum; the effective list can be read.
    """
    runner = rig.start(lambda batch: rig.cut(batch.inputs["x"]), buckets=(8, 4, 4, 999), max_size=10)
    assert runner.buckets == (4, 8, 10)
    for n, bucket in ((10, 10), (9, 10), (8, 8), (3, 4)):
        assert runner.explain(rig.batch(n, x=rows(n))).key.size == bucket
    default = rig.start(lambda batch: rig.cut(batch.inputs["x"]), buckets=None, max_size=13)
    assert default.buckets[-1] == 13
    assert default.can_run_graph(rig.batch(13, x=rows(13)))


@pytest.mark.parametrize("bad", [[], [-1], [0], ["4"], [True], [2.0], [None]])
@pytest.mark.parametrize("name", list(Phase))
def test_a_list_that_is_no_list_of_sizes_is_refused(bad, name):
    """
    Guards against sgl-project/sglang#21005: nothing but positive integers makes a bucket, in either phase.
    """
    with pytest.raises(ConfigError):
        GraphConfig.from_dict({str(name): {"buckets": bad}})
    with pytest.raises(ConfigError):
        PhaseConfig(buckets=tuple(bad))


def test_the_fill_is_set_by_field_and_by_the_plugin(rig, rows, monkeypatch):
    """
    Guards against sgl-project/sglang#1094, #7233 and #1789: a platform may ask for a fill of its own, 1 for
    lengths, say; a division by padded lengths is finite, and a total over the padded rows counts them.
    """
    monkeypatch.setattr(
        type(rig.platform),
        "padding_fill",
        lambda self, field, fill: 1 if field == "lengths" else fill,
    )
    spec = InputSpec(x=rig.tensor(3), lengths=rig.tensor(dtype=torch.int64))
    total = torch.zeros(1, dtype=torch.int64, device=rig.device)
    finite = torch.ones(1, dtype=torch.bool, device=rig.device)

    def forward(batch):
        lengths = batch.inputs["lengths"]
        y = rig.cut(batch.inputs["x"] / lengths[:, None])
        total.copy_(lengths.sum(0, keepdim=True))
        finite.logical_and_(torch.isfinite(y).all())
        return y

    runtime = rig.runtime(forward, spec, buckets=(8,))
    runtime.extra_tensors = lambda: {"total": total, "finite": finite}
    runner = rig.runner(runtime)
    for n in (3, 8, 5):
        x, lengths = rows(n), torch.full((n,), 4, device=rig.device)
        assert torch.equal(runner.execute(rig.batch(n, x=x, lengths=lengths)), x / 4)
        assert int(total) == n * 4 + (8 - n)
    assert bool(finite)


@pytest.mark.parametrize("backend", ["full", "breakable"])
@pytest.mark.parametrize("per", [2, 3])
def test_requests_and_tokens_are_padded_and_cut_apart(runtime, device, rows, per, backend):
    """
    Guards against vllm-project/vllm-ascend#3909, #3910 and vllm-project/vllm#23679: buckets count requests,
    so that any number of tokens a request fits; fields and results per request and per token are each cut to
    their own count, 14 requests of three tokens included.
    """
    spec = InputSpec(
        x=TensorSpec(("tokens", 3), dtype=torch.float32),
        weight=TensorSpec(("requests",), dtype=torch.float32, fill=1),
        starts=TensorSpec(("requests+1",), fill="last"),
    )

    def forward(batch):
        x, weight = batch.inputs["x"], batch.inputs["weight"]
        y = x.view(-1, per, 3) * weight[:, None, None]
        return {"tokens": y.view(-1, 3), "requests": y.sum(1), "ends": batch.inputs["starts"][1:] + 0}

    toy = runtime(
        forward, spec, decode=PhaseConfig(backend=backend, buckets=(4, 8, 16)), tokens_per_request=per
    )
    runner = capture_cuda_graphs(model_runner=toy).decode_runner
    for n in (2, 14, 1, 16, 3):
        x, weight = rows(n * per), rows(n)[:, 0].contiguous()
        starts = torch.arange(0, n * per + 1, per, device=device)
        batch = ForwardBatch(
            phase="decode",
            num_requests=n,
            num_tokens=n * per,
            inputs={"x": x, "weight": weight, "starts": starts},
        )
        found = runner.execute(batch)
        y = x.view(n, per, 3) * weight[:, None, None]
        assert torch.equal(found["tokens"], y.view(-1, 3))
        assert torch.equal(found["requests"], y.sum(1))
        assert torch.equal(found["ends"], starts[1:])
        for key, entry in runner.entries.items():
            if key == runner.stats.last.key:  # empty requests at the end of the last real one
                assert torch.all(entry.inputs.views()["starts"][n:] == n * per)
    assert runner.stats.replayed == 5
    runner.release()


def test_rows_that_are_not_finite_stay_inside(rig, rows):
    """
    Guards against flashinfer-ai/flashinfer#2883, flagos-ai/vllm-plugin-FL#368 and NVIDIA/TensorRT-LLM#5058:
    NaN that a kernel leaves in padded rows reaches no field of the result, nor anything that reduces over
    it, in copies and views alike.
    """

    def forward(batch):
        x = batch.inputs["x"]
        y = rig.cut(x / x)
        return {"y": y, "deep": [y * 2, (y + 1,)], "last": y.t()}

    runner = rig.start(forward, buckets=(8,))
    viewed = rig.start(forward, buckets=(8,), outputs="view")
    for n in (3, 1, 8):
        for one in (runner, viewed):
            found = one.execute(rig.batch(n, x=rows(n)))
            for part in (found["y"], *found["deep"][:1], found["deep"][1][0], found["last"]):
                assert torch.isfinite(part).all()
                assert float(part.mean()) in (1.0, 2.0)
            assert found["last"].shape == (3, n)


@pytest.mark.parametrize("rule", ["maximum", "values"])
def test_a_host_number_is_never_replayed_beyond_its_capture(rig, rows, rule):
    """
    Guards against facebookresearch/xformers#968, vllm-project/vllm#51119 and sgl-project/sglang#28371: a
    Python number that fixes the work is captured at its declared worst case, or has a graph for each value;
    anything else runs eagerly, counted, and nothing is cut short.
    """

    def forward(batch):
        i = batch.inputs
        return rig.cut(i["x"][:, : i["longest"]].sum(1))

    longest = HostSpec(maximum=4) if rule == "maximum" else HostSpec(values=(2, 4))
    spec = InputSpec(x=rig.tensor(9), longest=longest)
    runner = rig.start(forward, spec, buckets=(4,))
    for length in (4, 9, 2, 9, 4):
        x = rows(3, width=9)
        x[:, length:] = 0
        found = runner.execute(rig.batch(3, x=x, longest=length))
        assert torch.equal(found, x.sum(1))
    assert runner.stats.eager == {Reason.HOST_VALUE: 2}


def test_a_number_or_tensor_left_for_capture_is_never_replayed_for_another(rig, rows):
    """
    Guards against vllm-project/vllm#51119: a number that was on the batch at capture is frozen, so that
    another one runs eagerly, counted; a tensor in the place of the one that the graph reads is an error.
    """
    counts = torch.full((2,), 3.0).to(rig.device)

    def prepare(batch):
        batch.global_dp_buffer_len = 8
        batch.global_num_tokens_gpu = counts

    def forward(batch):
        return rig.cut(batch.inputs["x"] * batch.global_dp_buffer_len) + batch.global_num_tokens_gpu[0]

    runner = rig.start(forward, prepare_capture_batch=prepare, buckets=(4,))
    for length in (8, 16, None, 16, 8):
        x = rows(3)
        batch = rig.batch(3, x=x)
        batch.global_dp_buffer_len = length
        batch.global_num_tokens_gpu = counts if length else None
        assert torch.equal(runner.execute(batch), x * (length or 8) + 3)
    assert runner.stats.eager == {Reason.HOST_VALUE: 2}
    assert runner.stats.replays == {4: 3}
    batch.global_num_tokens_gpu = counts.clone()
    with pytest.raises(InputError, match="global_num_tokens_gpu"):
        runner.execute(batch)
    counts.fill_(5.0)
    batch.global_num_tokens_gpu = counts
    assert torch.equal(runner.execute(batch), x * 8 + 5)


def test_every_size_and_field_as_eager(rig, rows):
    """
    Guards against sgl-project/sglang#7843 and #13881: there is one way to pad, copy in and cut, so that any
    device gives for every size exactly what eager gives, in structures too; what is None stays None.
    """

    def forward(batch):
        x = rig.cut(batch.inputs["x"] * 3)
        return {"logits": x, "extra": None, "pair": (x.sum(1), [x.t(), None]), "name": "toy"}

    runner = rig.start(forward)
    for n in (*range(9), 8, 1):
        batch = rig.batch(n, x=rows(n))
        found, wanted = runner.execute(batch), rig.eagerly(runner, batch)
        assert found.keys() == wanted.keys()
        assert found["extra"] is None is found["pair"][1][1]
        assert found["name"] == "toy"
        for one, two in (
            (found["logits"], wanted["logits"]),
            (found["pair"][0], wanted["pair"][0]),
            (found["pair"][1][0], wanted["pair"][1][0]),
        ):
            assert one.shape == two.shape
            assert torch.equal(one, two)
    assert runner.stats.eager == {Reason.EMPTY_BATCH: 1}


BEYOND = {
    "flag": (lambda x: {"y": x, "flag": x.shape[0] >= 8}, "output flag"),
    "structure": (lambda x: {"y": x} | ({"z": x} if x.shape[0] >= 8 else {}), r"\['z'\]"),
    "rows": (lambda x: {"y": x[:7]}, "output y"),
    "width": (lambda x: {"y": x[:, : 2 if x.shape[0] >= 8 else 3]}, "output y"),
    "dtype": (lambda x: {"y": x.double() if x.shape[0] >= 8 else x}, "output y"),
    "nothing": (lambda x: {"y": x, "z": None if x.shape[0] >= 8 else x[0]}, "output z"),
}


@pytest.mark.parametrize("what", BEYOND)
def test_an_output_that_changes_at_a_larger_size_is_refused(rig, rows, what):
    """
    Guards against sgl-project/sglang#7843: what a bucket's own run returns is compared with what smaller
    sizes did, so that no batch gets the flag, structure, rows, columns or dtype of its bucket's size. The
    error names the path, and such a bucket alone is given up where that is wanted.
    """
    make, says = BEYOND[what]

    def forward(batch):
        return make(rig.cut(batch.inputs["x"] * 2))

    with pytest.raises(CaptureError, match=says) as caught:
        rig.start(forward, buckets=(2, 8))
    assert caught.value.bucket == 8
    runner = rig.start(forward, buckets=(2, 8), on_failure="eager")
    assert runner.buckets == (2,)
    for n in (3, 8, 2):
        x = rows(n)
        found, wanted = runner.execute(rig.batch(n, x=x)), make(x * 2)
        assert found.keys() == wanted.keys()
        assert torch.equal(found["y"], wanted["y"])
        assert found.get("flag") == wanted.get("flag")
    assert runner.stats.replayed == 1


def test_shapes_come_and_go_within_a_limit(rig, rows):
    """
    Guards against deepspeedai/DeepSpeed#2572 and #2896: sizes A, B, A, and then dozens with a limit of four
    graphs: results are those of eager, at most four graphs live, and evicting them gives everything back.
    """
    runner = rig.start(
        lambda batch: rig.cut(batch.inputs["x"] * 2),
        buckets=tuple(range(1, 31)),
        capture="lazy",
        max_graphs=4,
    )
    segments = 2 if rig.backend == "breakable" else 1
    for n in (5, 7, 5, *range(1, 31), 40, 5):
        x = rows(n)
        assert torch.equal(runner.execute(rig.batch(n, x=x)), x * 2)
        assert len(runner.buckets) <= 4
        assert runner.context.live_graphs <= 4 * segments
    assert runner.stats.eager == {Reason.OVER_MAX_BUCKET: 1}
    runner.release()
    assert runner.context.live_graphs == 0
