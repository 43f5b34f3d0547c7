"""Tensors and operators of the simulated device."""

import copy
import pickle

import pytest
import torch

from graphplat.testing.simulated import SimTensor, ledger

MODES = [torch.no_grad, torch.inference_mode, torch.enable_grad]


@pytest.fixture
def at(sim):
    """The device string of device *index*."""
    return lambda index=0: f"{sim.name}:{index}"


@pytest.mark.parametrize("mode", MODES)
def test_operators_give_the_numbers_of_the_cpu(at, mode):
    """
    What the device computes equals the CPU bit for bit, in every gradient mode.
    """
    x, w, b = torch.randn(3, 8), torch.randn(5, 8), torch.randn(5)
    with mode():
        for function in (
            lambda x, w, b: torch.nn.functional.linear(x, w, b).softmax(-1),
            lambda x, w, b: torch.nn.functional.layer_norm(x @ w.t(), (5,)).sort(-1).values,
            lambda x, w, b: torch.cat([x, x * 2]).view(2, 3, 8).transpose(0, 1).reshape(3, -1).cumsum(1),
            lambda x, w, b: torch.where(x > 0, x, -x).to(torch.bfloat16).float().mean(0),
            lambda x, w, b: torch.topk(x, 3).indices,
            lambda x, w, b: torch.einsum("ij,kj->ik", x, w) + b,
            lambda x, w, b: (
                x[:, ::2].contiguous().flatten().index_select(0, torch.arange(3, device=x.device))
            ),
        ):
            there = function(*(t.to(at(1)) for t in (x, w, b)))
            assert there.device == torch.device(at(1))
            torch.testing.assert_close(there.cpu(), function(x, w, b), rtol=0, atol=0)


@pytest.mark.parametrize("mode", MODES)
def test_views_share_memory(at, mode):
    """
    A write through a view is seen by the base and by other views, also when the base was made outside
    inference mode and viewed inside.
    """
    base = torch.zeros(4, 6, device=at())
    with mode():
        row, column = base[1], base.t()[2]
        row.add_(1)
        column.mul_(5)
        base.view(-1)[0] = 7
        torch.as_strided(base, (2,), (6,), 3).fill_(9)
    want = torch.zeros(4, 6)
    want[1] += 1
    want[:, 2] *= 5
    want[0, 0] = 7
    want[:2, 3] = 9
    assert torch.equal(base.cpu(), want)
    assert row.data_ptr() == base.data_ptr() + 6 * 4
    assert row.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()


@pytest.mark.parametrize("mode", MODES)
def test_factories(at, mode):
    """
    Every way to make a tensor on the device gives the CPU's values, shape and dtype.
    """
    with mode():
        for make in (
            lambda d: torch.tensor([[1, 2], [3, 4]], device=d),
            lambda d: torch.tensor(2.5, device=d, dtype=torch.float16),
            lambda d: torch.as_tensor([1.0, 2.0], device=d),
            lambda d: torch.arange(5, device=d),
            lambda d: torch.arange(2, 9, 3, device=d),
            lambda d: torch.arange(0.0, 1.0, 0.25, device=d, dtype=torch.float64),
            lambda d: torch.full((2, 3), 7, device=d),
            lambda d: torch.linspace(0, 1, 5, device=d),
            lambda d: torch.eye(3, device=d),
            lambda d: torch.tril(torch.ones(3, 3, device=d)),
            lambda d: torch.zeros(2, device=d).new_full((3,), 2.0),
            lambda d: torch.ones_like(torch.zeros(2, 3, device=d).t()),
            lambda d: torch.zeros(3, device=d, dtype=torch.bool),
            lambda d: torch.zeros(0, 3, device=d),
            lambda d: torch.tril_indices(3, 3, device=d),
        ):
            there, here = make(at()), make("cpu")
            assert there.device == torch.device(at())
            assert (there.shape, there.dtype, there.stride()) == (here.shape, here.dtype, here.stride())
            assert torch.equal(there.cpu(), here)


def test_random_numbers_follow_the_seed(at):
    """
    After the same seed the device draws what the CPU draws.
    """
    draws = []
    for device in ("cpu", at()):
        torch.manual_seed(5)
        draws.append((torch.randn(4, device=device).cpu(), torch.randint(9, (4,), device=device).cpu()))
    assert torch.equal(draws[0][0], draws[1][0])
    assert torch.equal(draws[0][1], draws[1][1])


def test_unwritten_memory_is_poison(at):
    """
    A tensor that nobody wrote reads as NaN, or as a huge integer.
    """
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        assert torch.empty(5, device=at(), dtype=dtype).isnan().all().item()
    for dtype, least in ((torch.int64, 2**62), (torch.int32, 2**30), (torch.int16, 2**14)):
        assert (torch.empty(5, device=at(), dtype=dtype) > least).all().item()


@pytest.mark.parametrize("mode", MODES)
def test_devices_do_not_mix(at, mode):
    """
    Tensors of two devices, or of the device and the CPU, meet only in explicit copies; a 0-dimensional CPU
    tensor counts as a number.
    """
    a, b = torch.ones(3, device=at(0)), torch.ones(3, device=at(1))
    with mode():
        for wrong in (
            lambda: a + b,
            lambda: a + torch.ones(3),
            lambda: torch.ones(3) + a,
            lambda: a.add_(b),
            lambda: torch.cat([a, b]),
            lambda: torch.where(a > 0, a, b),
            lambda: torch.nn.functional.linear(a, torch.ones(2, 3)),
        ):
            with pytest.raises(RuntimeError, match="same device"):
                wrong()
        assert (a + torch.tensor(2.0)).tolist() == [3, 3, 3]
        assert torch.equal(b.to(at(0)).add(a).cpu(), torch.full((3,), 2.0))
        assert a.copy_(torch.zeros(3)).tolist() == [0, 0, 0]


def test_data_assignment_moves_memory(at):
    """
    ``parameter.data = other`` makes the parameter read the other memory, at another address.
    """
    layer = torch.nn.Linear(3, 2, bias=False).to(at())
    before, new = layer.weight.data_ptr(), torch.full((2, 3), 4.0, device=at())
    layer.weight.data = new
    assert layer.weight.data_ptr() == new.data_ptr() != before
    assert layer(torch.ones(1, 3, device=at())).tolist() == [[12, 12]]
    new.zero_()
    assert layer(torch.ones(1, 3, device=at())).tolist() == [[0, 0]]
    layer.half()
    assert layer.weight.dtype == torch.float16
    assert isinstance(layer.weight, torch.nn.Parameter)


def test_objects_copy_print_and_pickle(at):
    """
    Device tensors can be deep-copied, printed, formatted, listed and pickled.
    """
    x = torch.arange(3.0, device=at())
    twin = copy.deepcopy({"x": x})["x"]
    twin.add_(1)
    assert x.tolist() == [0, 1, 2]
    assert twin.tolist() == [1, 2, 3]
    assert repr(x) == f"tensor([0., 1., 2.], device='{at()}')"
    assert f"{x[1]:.2f}" == "1.00"
    back = pickle.loads(pickle.dumps(x))
    assert back.device == x.device
    assert back.tolist() == [0, 1, 2]
    with pytest.raises(TypeError, match="numpy"):
        x.numpy()


def test_out_and_resize(at):
    """
    ``out=`` results and ``resize_`` change the tensor in place, its shape too.
    """
    out = torch.empty(0, device=at())
    torch.add(torch.ones(3, device=at()), 1, out=out)
    assert out.tolist() == [2, 2, 2]
    x = torch.arange(4.0, device=at())
    x.resize_(6)
    assert x.shape == (6,)
    assert x[:4].tolist() == [0, 1, 2, 3]


def test_grouped_copies(at):
    """
    One grouped copy takes sources on the device and on the CPU, and other grouped operators work in place.
    """
    targets = [torch.zeros(2, device=at()), torch.zeros(3, dtype=torch.int64, device=at())]
    torch._foreach_copy_(targets, [torch.ones(2), torch.arange(3, device=at())])
    torch._foreach_add_(targets, 1)
    assert [t.tolist() for t in targets] == [[2, 2], [1, 2, 3]]


def test_autograd_works(at):
    """
    Gradients on the device equal those on the CPU.
    """
    w = torch.randn(3, 4)
    grads = []
    for device in ("cpu", at()):
        p = w.to(device).clone().requires_grad_()
        (p.sin() @ torch.ones(4, 2, device=device)).pow(2).sum().backward()
        grads.append(p.grad.cpu())
    assert torch.equal(*grads)


def test_leaving_the_device(at):
    """
    Factories that name another device go there.
    """
    x = torch.ones(2, 3, device=at())
    assert torch.empty_like(x, device="meta").device.type == "meta"
    assert torch.zeros_like(x, device="cpu").device.type == "cpu"
    assert x.to("meta").shape == (2, 3)
    assert x.to(at(1)).device == torch.device(at(1))
    assert isinstance(x, SimTensor)


def test_current_device(sim, dev, at):
    """
    A device string without a number means this thread's device; one that does not exist is refused.
    """
    with dev.device(1):
        assert torch.empty(1, device=sim.name).device.index == 1
        assert dev.current_device() == 1
    assert torch.empty(1, device=sim.name).device.index == 0
    with pytest.raises(RuntimeError, match="ordinal"):
        torch.empty(1, device=at(7))


def test_host_reads_are_counted(at):
    """
    Every way to get a value onto the host is one, in both families of operators.
    """
    x = torch.ones(2, device=at())
    for mode in MODES:
        with mode():
            for read in (
                lambda: x.sum().item(),
                lambda: bool(x.sum() > 0),
                x.cpu,
                x.tolist,
                x.nonzero,
                lambda: x[x > 0],
                lambda: torch.equal(x, x),
                lambda: torch.allclose(x, x),
                lambda: int(x[0]),
                lambda: x.to("cpu", torch.float64),
            ):
                before = ledger().host_reads
                read()
                assert ledger().host_reads > before
