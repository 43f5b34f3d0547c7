"""The recorded graph: what a replay promises on plain CPU tensors."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from graphplat.errors import CaptureError, HostReadError, ReplayError
from graphplat.recorded import RecordedGraph, RecordedPool, is_recording

MODES = [torch.no_grad, torch.inference_mode]


@pytest.fixture(params=MODES, ids=["no_grad", "inference_mode"])
def mode(request):
    """Both ways to run without grad, in which operators arrive in different families."""
    return request.param


def capture(forward, *args, pool=None):
    """Capture *forward* on *args*; return the graph and the outputs of the capturing call."""
    graph = RecordedGraph()
    graph.capture_begin(pool)
    try:
        output = forward(*args)
        graph.capture_end()
    finally:
        graph.abort()
    return graph, output


class Block(nn.Module):
    """A transformer layer with a cache, rotary-like factories, in-place writes and many views."""

    def __init__(self, width=16, heads=2):
        super().__init__()
        self.heads = heads
        self.norm = nn.RMSNorm(width)
        self.after = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.register_buffer("cache", torch.zeros(2, heads, 8, width // heads))

    def forward(self, ids, table, position):
        x = F.embedding(ids, table)
        rows, tokens, width = x.shape
        q, k, v = (
            part.view(rows, tokens, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm(x)).chunk(3, dim=-1)
        )
        angle = position[:, None] * torch.arange(4)[None].to(torch.float32)
        q = torch.cat([q[..., :4] * angle.cos(), q[..., 4:] * angle.sin()], dim=-1)
        self.cache.index_copy_(2, position, k)
        mask = torch.full((tokens, 8), float("-inf"))
        mask.masked_fill_(torch.arange(8) <= position[:, None], 0.0)
        weights = torch.softmax(q @ self.cache.transpose(-1, -2) + mask, dim=-1)
        hidden = (weights @ self.cache + v).transpose(1, 2).reshape(rows, tokens, width)
        hidden = self.after(self.out(hidden)) + x
        hidden[:, 0] *= 2
        best, index = hidden.topk(3, dim=-1)
        return {"hidden": hidden, "best": best, "order": [index, hidden.sort(dim=-1).values]}


@pytest.fixture
def block():
    torch.manual_seed(0)
    return Block().eval()


def leaves(output):
    return [output["hidden"], output["best"], *output["order"]]


def test_a_replay_gives_what_eager_gives_bit_by_bit(mode, block):
    """Fresh inputs in the static buffers: several replays equal eager exactly, in every nested output."""
    ids, table, position = torch.tensor([[1], [2]]), torch.randn(10, 16), torch.tensor([0])
    with mode():
        graph, output = capture(block, ids, table, position)
        for step in range(1, 4):
            ids.copy_(torch.tensor([[step + 2], [9 - step]]))
            position.fill_(step)
            before = block.cache.clone()
            expected = [leaf.clone() for leaf in leaves(block(ids, table, position))]
            after = block.cache.clone()
            block.cache.copy_(before)
            graph.replay()
            assert all(torch.equal(a, b) for a, b in zip(leaves(output), expected, strict=True))
            assert torch.equal(block.cache, after)


def test_the_capturing_call_itself_is_right(mode, block):
    """Operators run while they are captured, so the first result is no placeholder."""
    args = torch.tensor([[1], [2]]), torch.randn(10, 16), torch.tensor([0])
    with mode():
        expected = block(*args)
        _, output = capture(block, *args)
    assert all(torch.equal(a, b) for a, b in zip(leaves(output), leaves(expected), strict=True))


def test_a_llama_model_replays_bit_equal_logits(mode):
    """A model of transformers, as it is, gives at replay the logits it gives eagerly."""
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.randint(0, 97, (2, 5))
    positions = torch.arange(5)[None].repeat(2, 1)
    mask = torch.ones(5, 5, dtype=torch.bool).tril()[None, None].repeat(2, 1, 1, 1)

    def forward():
        return model(input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False).logits

    with mode():
        forward()
        graph, logits = capture(forward)
        for _ in range(3):
            ids.copy_(torch.randint(0, 97, (2, 5)))
            positions.add_(1)
            expected = forward()
            graph.replay()
            assert torch.equal(logits, expected)


@pytest.mark.parametrize("capture_mode", MODES)
@pytest.mark.parametrize("replay_mode", [*MODES, torch.enable_grad])
def test_capture_and_replay_need_not_share_a_mode(capture_mode, replay_mode):
    """Tensors made inside and outside inference mode are read and written in place from either side."""
    normal = torch.zeros(4)
    with torch.inference_mode():
        inference = torch.zeros(4)

    def forward():
        inference_sum = (inference * 2)[:2] + 1
        if torch.is_inference_mode_enabled():
            inference.add_(1)
        normal.view(2, 2)[0].add_(1)
        return normal * 2, inference_sum

    with capture_mode():
        graph, (doubled, summed) = capture(forward)
    with replay_mode():
        graph.replay()
    assert normal.tolist() == [2, 2, 0, 0]
    assert doubled.tolist() == [4, 4, 0, 0]
    assert summed.tolist() == ([3, 3] if capture_mode is torch.inference_mode else [1, 1])


HOST_READS = {
    "item": lambda x: x[0].item(),
    "bool": lambda x: bool(x[0] > 0),
    "int": lambda x: int(x.max()),
    "float": lambda x: float(x.sum()),
    "index": lambda x: [1, 2, 3, 4][x.argmax()],
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "format": lambda x: f"{x[0]}",
    "equal": lambda x: torch.equal(x, x),
    "allclose": lambda x: torch.allclose(x, x),
    "nonzero": lambda x: x.nonzero(),
    "where_one": lambda x: torch.where(x > 0),
    "mask_index": lambda x: x[x > 0],
    "mask_index_put": lambda x: x.index_put_((x > 0,), torch.ones(4)),
    "masked_select": lambda x: torch.masked_select(x, x > 0),
    "unique": lambda x: x.unique(),
    "repeat_interleave": lambda x: x.repeat_interleave(torch.tensor([1, 2, 1, 1])),
    "bincount": lambda x: torch.bincount(x.long()),
    "other_device": lambda x: x.to("meta"),
    "slice": lambda x: x[: x.argmax() + 1],
}


@pytest.mark.parametrize("read", HOST_READS.values(), ids=HOST_READS)
def test_a_host_read_is_refused_and_leaves_nothing_behind(mode, read):
    """It raises where it happens and names the line; after abort the thread is clean and captures again."""
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    graph = RecordedGraph()
    with mode():
        graph.capture_begin()
        y = x + 1
        with pytest.raises(HostReadError, match=r"(?s)^operator .*\n.*test_recorded\.py:\d+$"):
            read(y)
        graph.abort()
        graph.abort()
        assert not is_recording()
        assert graph.num_ops == 0
        read(y)
        graph, out = capture(lambda: x * 2)
        x.fill_(5)
        graph.replay()
        assert out.tolist() == [10, 10, 10, 10]


def test_a_swallowed_host_read_still_fails_the_capture(mode):
    """A forward that catches the error has made a decision on the host: its graph would be wrong."""
    x = torch.ones(3)
    graph = RecordedGraph()
    with mode():
        graph.capture_begin()
        try:
            x[0].item()
        except HostReadError as error:
            first = error
        x.add_(1)
        with pytest.raises(HostReadError, match=r"went on .* at .*test_recorded\.py:\d+: operator") as raised:
            graph.capture_end()
    assert raised.value.__cause__ is first
    assert not is_recording()


def test_a_custom_operator_that_returns_a_number_is_a_host_read(mode):
    """An operator from outside torch that makes a number of a tensor reads it, whatever its tags say."""
    with torch.library._scoped_library("recorded_number", "FRAGMENT") as library:
        library.define("count(Tensor x) -> int")
        library.impl("count", lambda x: int((x > 0).sum()), "CPU")
        with mode(), pytest.raises(HostReadError, match=r"recorded_number\.count"):
            capture(lambda: torch.ops.recorded_number.count(torch.ones(3)))


def test_a_write_of_one_value_through_a_mask_is_captured(mode):
    """Its shapes do not depend on the mask, so devices capture it too."""
    x = torch.tensor([1.0, -1.0])

    def forward():
        y = x * 1
        y[y < 0] = 0.5
        return y

    with mode():
        graph, out = capture(forward)
        x.copy_(torch.tensor([-3.0, 4.0]))
        graph.replay()
    assert out.tolist() == [0.5, 4.0]


def test_views_cost_nothing_at_replay(mode):
    """Views, also composite ones that happen to alias, are geometry and not work."""
    x = torch.arange(12.0)

    def forward():
        y = x.view(3, 4).reshape(4, 3).t().contiguous()
        return y.reshape(-1)[2:].unsqueeze(0).to(torch.float32).squeeze_(0), x.detach()[:3]

    with mode():
        graph, (out, head) = capture(forward)
        x.add_(100)
        graph.replay()
        expected = forward()[0]
    assert graph.num_ops == 1
    assert torch.equal(out, expected)
    assert head.tolist() == [100, 101, 102]


def _autocast(x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.linear(x.view(2, 3), x.view(2, 3)), x.view(2, 3) @ x.view(3, 2)


OPERATORS = {
    "add_int_bool": lambda x: (x.long() + 1, x > 0, (x > 0) & (x < 2), x.to(torch.int8) // 2),
    "complex": lambda x: (
        torch.view_as_complex(x.view(-1, 2)).conj() * 2j,
        torch.fft.rfft(x),
        x.to(torch.cfloat).imag,
    ),
    "zero_size": lambda x: (x[:0] + 1, torch.cat([x[:0], x]), x[:0].sum()),
    "broadcast": lambda x: (x[:, None] + x, x[0] * 3, x.expand(2, -1).clone(), 2 - x),
    "factories": lambda x: (
        torch.zeros(3).add_(x[:3]),
        torch.ones_like(x).mul_(x),
        torch.arange(6) + x,
        torch.full((2,), 3),
    ),
    "literal": lambda x: (torch.tensor([1.0, 2.0]).add_(x[:2]), torch.tensor(2.0) * x),
    "empty": lambda x: (torch.empty_like(x).copy_(x), torch.empty(2, 3).fill_(1)),
    "scatter": lambda x: (
        torch.zeros(6).scatter_(0, torch.tensor([3, 2, 1, 0, 5, 4]), x),
        torch.zeros(6).scatter_add(0, torch.zeros(6, dtype=torch.long), x),
        torch.zeros(6).index_put((torch.tensor([1, 2]),), x[:2]),
        x.gather(0, torch.tensor([1, 1])),
        x.index_select(0, torch.tensor([4, 0])),
    ),
    "stack_topk": lambda x: (
        torch.stack([x, x * 2]),
        *x.topk(2),
        *x.sort(descending=True),
        *x.max(0),
        x.cumsum(0),
    ),
    "norms": lambda x: (
        F.layer_norm(x, (6,)),
        F.rms_norm(x, (6,)),
        F.softmax(x, 0),
        F.gelu(x),
        F.group_norm(x.view(1, 2, 3), 2),
    ),
    "sdpa": lambda x: F.scaled_dot_product_attention(*[x.view(1, 1, 3, 2)] * 3, is_causal=True),
    "matmul": lambda x: (
        x.view(2, 3) @ x.view(3, 2),
        F.linear(x.view(2, 3), x.view(2, 3)),
        x.dot(x),
        torch.einsum("i,j->ij", x, x),
    ),
    "conv": lambda x: F.conv1d(x.view(1, 1, 6), x[:3].view(1, 1, 3)),
    "out_argument": lambda x: torch.mul(x, 2, out=torch.empty(0)),
    "as_strided": lambda x: torch.as_strided_scatter(x * 1, x[:2] * 5, (2,), (2,), 1),
    "foreach": lambda x: torch._foreach_add([x, x[:2]], 1.5),
    "split_copy": lambda x: torch.split_copy(x, 2),
    "low_precision": lambda x: (
        x.bfloat16() * 3,
        x.half().float(),
        F.linear(x.view(2, 3).bfloat16(), x.view(2, 3).bfloat16()),
    ),
    "resolve": lambda x: (x.resolve_neg() + 1, x.resolve_conj() + 1, F.one_hot(x.abs().long() % 5, 5)),
    "interpolate": lambda x: F.interpolate(x.view(1, 1, 2, 3), scale_factor=1.7, mode="bilinear"),
    "nan": lambda x: (x / 0 - x / 0, torch.where(x > 2, x, torch.nan)),
    "in_place_view": lambda x: (x * 1).t_().view(2, 3).transpose_(0, 1) + 1,
    "autocast": _autocast,
}


def flat(value):
    return [value] if isinstance(value, torch.Tensor) else list(value)


@pytest.mark.parametrize("forward", OPERATORS.values(), ids=OPERATORS)
def test_each_family_of_operators_replays_as_eager(mode, forward):
    """Values, dtypes and layouts after two replays on new inputs are those of an eager call."""
    x = torch.arange(6.0)
    with mode():
        graph, out = capture(lambda: forward(x))
        for shift in (1.5, -2.0):
            x.add_(shift)
            expected = flat(forward(x))
            graph.replay()
            for got, want in zip(flat(out), expected, strict=True):
                torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True, check_stride=True)


def test_autocast_around_a_replay_changes_nothing():
    """The casts are in the recording; those of the caller's mode must not come on top."""
    x = torch.randn(4, 4)
    with torch.library._scoped_library("recorded_cast", "FRAGMENT") as library:
        library.define("square(Tensor x) -> Tensor")
        library.impl("square", lambda x: (x @ x).float(), "CPU")
        with torch.no_grad():
            graph, out = capture(lambda: torch.ops.recorded_cast.square(x))
            with torch.autocast("cpu", dtype=torch.bfloat16):
                graph.replay()
            assert torch.equal(out, x @ x)


def test_custom_operators_replay_their_kernels(mode):
    """Functional, in-place and result-free operators of torch.library run again on the new values."""
    seen = []
    with torch.library._scoped_library("recorded_test", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> (Tensor, Tensor)")
        library.define("bump_(Tensor(a!) x) -> ()")
        library.define("watch(Tensor x) -> ()")
        library.impl("twice", lambda x: (x * 2, x + 0), "CPU")
        library.impl("bump_", lambda x: (x.add_(1), None)[1], "CPU")
        library.impl("watch", lambda x: seen.append(float(x.sum())), "CPU")
        ops = torch.ops.recorded_test
        x = torch.ones(2)

        def forward():
            double, same = ops.twice(x)
            ops.bump_(double)
            ops.watch(double)
            return double, same

        with mode():
            graph, (double, same) = capture(forward)
            x.fill_(3)
            graph.replay()
        assert double.tolist() == [7, 7]
        assert same.tolist() == [3, 3]
        assert seen == [6.0, 14.0]


def test_random_operators_draw_fresh_numbers(mode):
    """Two replays differ; reseeding gives eager's sequence again, for the default and a private generator."""
    private = torch.Generator()

    def forward():
        noise = torch.empty(8).normal_(generator=private)
        return noise, torch.rand(8), F.dropout(torch.ones(8), 0.5), torch.randn(4) * 2

    def seed():
        torch.manual_seed(3)
        private.manual_seed(5)

    with mode():
        graph, out = capture(forward)
        seed()
        expected = [tensor.clone() for _ in range(2) for tensor in forward()]
        seed()
        got = []
        for _ in range(2):
            graph.replay()
            got += [tensor.clone() for tensor in out]
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert not torch.equal(got[0], got[4])
    assert not torch.equal(got[1], got[5])


def test_a_capture_draws_as_many_numbers_as_eager(mode):
    """Nothing that recording does besides running the forward advances a generator."""

    def forward():
        return torch.rand(8), F.dropout(torch.ones(8), 0.5), torch.full((4,), 0.5).bernoulli()

    with mode():
        torch.manual_seed(3)
        forward()
        expected = torch.rand(4)
        torch.manual_seed(3)
        capture(forward)
        assert torch.equal(torch.rand(4), expected)


def chain(x, steps=10):
    """Intermediates of equal size, of which two are alive at a time."""
    for _ in range(steps):
        x = x + 1
        x = x * 1.5
    return x.sum()


def test_intermediates_share_memory(mode):
    """The graph needs about the peak of what is alive at once, not the sum of all it computed."""
    x = torch.zeros(1024)
    with mode():
        graph, out = capture(chain, x)
        x.fill_(2)
        graph.replay()
        assert torch.equal(out, chain(x))
    assert graph.num_ops == 21
    assert 2 * x.nbytes <= graph.memory_bytes <= 2 * x.nbytes + 256


def test_a_smaller_graph_of_the_pool_reserves_nothing(mode):
    """Captured largest first, graphs of one pool take turns in one arena, and each replays rightly."""
    large, small = torch.ones(512), torch.ones(64)
    pool = RecordedPool()
    with mode():
        first, out_large = capture(chain, large, pool=pool)
        reserved = pool.bytes
        second, out_small = capture(chain, small, pool=pool)
        assert reserved > 0
        assert pool.bytes == reserved
        assert first.pool() is second.pool() is pool
        for value in (3.0, 4.0):
            large.fill_(value)
            small.fill_(value + 1)
            second.replay()
            first.replay()
            assert torch.equal(out_large, chain(large))
            assert torch.equal(out_small, chain(small))
        third, _ = capture(chain, torch.ones(2048), pool=pool)
        assert pool.bytes > reserved
    for graph in (first, second, third):
        graph.reset()
    assert pool.bytes == 0


def test_what_the_caller_holds_keeps_its_memory(mode):
    """A tensor held at the end is an output: no later operator or graph of the pool writes over it."""
    x = torch.ones(64)
    pool = RecordedPool()
    kept = []

    def forward():
        middle = x + 1
        kept.append(middle[:2])
        return chain(middle)

    with mode():
        graph, out = capture(forward, pool=pool)
        other, _ = capture(chain, torch.full((64,), 9.0), pool=pool)
        address = kept[0].data_ptr()
        x.fill_(4)
        graph.replay()
        other.replay()
    assert kept[0].tolist() == [5, 5]
    assert kept[0].data_ptr() == address
    assert out.item() != 0


def test_weights_updated_in_place_show_at_replay(mode):
    """The graph reads weights where they lie."""
    linear = nn.Linear(4, 4)
    x = torch.randn(2, 4)
    with mode():
        graph, out = capture(lambda: linear(x))
        linear.weight.data.mul_(3)
        graph.replay()
        assert torch.equal(out, linear(x))


def test_the_graph_keeps_what_it_reads_alive_until_reset(mode):
    """Inputs that only the forward knew are still there at replay, whatever was allocated since."""
    with mode():
        x = torch.full((1000,), 2.0)
        died = weakref.ref(x)
        graph, out = capture(lambda t: t * 2, x)
        storage = weakref.ref(x.untyped_storage())
        del x
        gc.collect()
        assert died() is None
        churn = [torch.full((1000,), 1e9) for _ in range(50)]
        out.zero_()
        graph.replay()
        assert out.unique().tolist() == [4.0]
        assert storage() is not None
        graph.reset()
        gc.collect()
        assert storage() is None
        del churn


def test_a_numpy_array_is_read_where_it_lies(mode):
    """Memory that torch does not own is an input like any other."""
    np = pytest.importorskip("numpy", reason="needs numpy")
    array = np.ones(3, dtype=np.float32)
    with mode():
        graph, out = capture(lambda: torch.from_numpy(array) * 2)
        array[:] = 5
        graph.replay()
    assert out.tolist() == [10, 10, 10]


def test_reset_allows_another_capture(mode):
    """A captured graph refuses a second capture; after reset it forgets everything and takes one."""
    x = torch.ones(3)
    with mode():
        graph, _ = capture(chain, x)
        with pytest.raises(CaptureError, match="reset"):
            graph.capture_begin()
        assert not is_recording()
        graph.reset()
        graph.reset()
        assert (graph.num_ops, graph.memory_bytes) == (0, 0)
        with pytest.raises(ReplayError, match="not captured"):
            graph.replay()
        with pytest.raises(CaptureError, match="not captured"):
            graph.pool()
        graph.capture_begin()
        out = x + 1
        graph.capture_end()
        x.fill_(7)
        graph.replay()
    assert out.tolist() == [8, 8, 8]


def test_a_failing_operator_leaves_a_clean_thread(mode):
    """The operator's own error comes out; after abort nothing is recorded and the next capture works."""
    x = torch.ones(3)
    graph = RecordedGraph()
    with mode():
        graph.capture_begin()
        with pytest.raises(RuntimeError, match="size"):
            torch.dot(x + 1, torch.ones(4))
        assert is_recording()
        graph.abort()
        assert not is_recording()
        graph.capture_begin()
        out = x + 1
        graph.capture_end()
        x.fill_(2)
        graph.replay()
    assert out.tolist() == [3, 3, 3]
    assert graph.num_ops == 1


def test_one_capture_at_a_time_in_a_thread():
    """A second begin, a replay inside a capture, an end without begin: errors that the capture survives."""
    x = torch.ones(2)
    with torch.no_grad():
        other, _ = capture(lambda: x + 1)
        graph = RecordedGraph()
        with pytest.raises(CaptureError, match="capture_begin"):
            graph.capture_end()
        graph.capture_begin()
        with pytest.raises(CaptureError, match="active"):
            RecordedGraph().capture_begin()
        with pytest.raises(ReplayError, match="inside a capture"):
            other.replay()
        out = x * 3
        graph.capture_end()
        assert graph.num_ops == 1
        x.fill_(2)
        graph.replay()
    assert out.tolist() == [6, 6]


def test_other_threads_are_unharmed_and_unrecorded():
    """Another thread may read on the host and even capture, while this one captures."""
    results = []

    def work():
        with torch.no_grad():
            results.append(torch.ones(3).sum().item())
            results.append(is_recording())
            source = torch.ones(1)
            graph, out = capture(lambda: source + 1)
            source.fill_(4)
            graph.replay()
            results.append(out.item())

    x = torch.ones(2)
    with torch.no_grad():
        graph = RecordedGraph()
        graph.capture_begin()
        out = x + 1
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert is_recording()
        out = out * 2
        graph.capture_end()
        graph.replay()
    assert results == [3.0, False, 5.0]
    assert graph.num_ops == 2
    assert out.tolist() == [4, 4]


def test_a_replay_error_names_the_operator():
    """An index that is out of range at replay is reported with its operator, chained to torch's error."""
    index = torch.tensor([0])
    table = torch.ones(3)
    with torch.no_grad():
        graph, out = capture(lambda: table.index_select(0, index) + 1)
        index.fill_(7)
        with pytest.raises(ReplayError, match=r"aten\.index_select.*1 of 2") as raised:
            graph.replay()
        assert isinstance(raised.value.__cause__, IndexError | RuntimeError)
        index.fill_(1)
        graph.replay()
    assert out.tolist() == [2]


def test_a_shape_that_changes_at_replay_is_an_error():
    """A custom operator whose output size depends on values cannot write into fixed memory."""
    with torch.library._scoped_library("recorded_shape", "FRAGMENT") as library:
        library.define("positive(Tensor x) -> Tensor")
        library.impl("positive", lambda x: x[x > 0], "CPU")
        x = torch.ones(3)
        with torch.no_grad():
            graph, _out = capture(lambda: torch.ops.recorded_shape.positive(x))
            x[0] = -1
            with pytest.raises(ReplayError, match=r"shape \(2,\), but \(3,\)"):
                graph.replay()


def test_a_compiled_function_is_recorded_operator_by_operator():
    """Its kernels would bypass the dispatcher; in a capture it runs eagerly instead and replays rightly."""
    compiled = torch.compile(lambda x: torch.sin(x) + 1, backend="eager")
    x = torch.ones(3)
    with torch.no_grad():
        compiled(x)
        graph, out = capture(lambda: compiled(x))
        assert graph.num_ops == 2
        x.fill_(0)
        graph.replay()
    assert out.tolist() == [1, 1, 1]


def test_sparse_tensors_are_refused():
    """A layout whose memory cannot be placed is an error at capture, not a wrong result later."""
    with torch.no_grad(), pytest.raises(CaptureError, match="layout"):
        capture(lambda: torch.eye(3).to_sparse())
    assert not is_recording()


def test_collectives_run_to_their_end_at_replay(mode, tmp_path):
    """A collective is recorded though its schema names no write, and later operators see its result."""
    distributed = pytest.importorskip("torch.distributed")
    if not (distributed.is_available() and distributed.is_gloo_available()):
        pytest.skip("needs the gloo backend")
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        x = torch.ones(4)

        def forward():
            doubled = x * 2
            distributed.all_reduce(doubled)
            gathered = [torch.empty(4)]
            distributed.all_gather(gathered, doubled)
            return gathered[0] + 1

        with mode():
            graph, out = capture(forward)
            x.fill_(3)
            graph.replay()
        assert out.tolist() == [7, 7, 7, 7]
        assert graph.num_ops == 4
        # The group must not end with the graph: its end waits for a thread that may want the interpreter, and
        # torch lets go of the interpreter only where the group itself is dropped (pytorch#56297).
        graph.reset()
    finally:
        distributed.destroy_process_group()
