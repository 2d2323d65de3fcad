"""Results lie in memory of PyTorch's own, laid out as eager would, and belong to the caller."""

import gc
import threading
import weakref

import pytest
import torch

from fx2relax.runtime import boundary, program
from fx2relax.testing import assert_matches_eager, assert_same_call


def _compiled(fn, **options):
    torch._dynamo.reset()
    return torch.compile(fn, backend="relax", **options)


@pytest.fixture
def no_dlpack(monkeypatch):
    """Results that come through DLPack fail."""

    def refuse(value):
        raise AssertionError(f"a result came through DLPack: {value}")

    monkeypatch.setattr(boundary, "result", refuse)


GIVEN = {
    "one kernel": lambda x: x + 1,
    "two results": lambda x: (x + 1, x * 2),
    "two of one kernel": lambda x: x.max(dim=1),
    "of a library call": lambda x: x @ x.mT,
    "transposed": lambda x: x.t() + 1,
    "transposed afterwards": lambda x: (x + 1).t(),
    "reshaped": lambda x: (x @ x.mT).view(-1),
    "expanded": lambda x: (x + 1).unsqueeze(0).expand(3, 4, 6),
    "strided": lambda x: (x + 1)[:, ::2],
    "0-d": lambda x: x.sum(),
    "size one": lambda x: x.sum(1, keepdim=True).t(),
    "bool": lambda x: x > 0,
    "int64": lambda x: x.argmax(1),
    "bfloat16": lambda x: x.bfloat16() * 2,
    "complex": lambda x: torch.complex(x, x) * 2,
    "complex transposed": lambda x: (torch.complex(x, x) * 2).t(),
    "complex conjugate": lambda x: (torch.complex(x, x) * 2).conj(),
    "constant": lambda x: (torch.ones(3), x * 2),
    "twice": lambda x: (lambda y: (y, y))(x + 1),
    "and a view of it": lambda x: (lambda y: (y, y[1:], y.t()))(x + 1),
    "and the input": lambda x: (x, x + 1),
    "and a view of the input": lambda x: (x[1:], x + 1),
}


@pytest.mark.sweep
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", GIVEN)
def test_results_are_written_where_pytorch_wants_them(name, dynamic, no_dlpack):
    compiled = _compiled(GIVEN[name], dynamic=dynamic)
    for x in (torch.randn(4, 6), torch.randn(4, 6), torch.randn(4, 7)[:, 1:]):
        assert_same_call(compiled, GIVEN[name], x)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.nonzero(),
        lambda x: (x.clone(), x + 1),
        lambda x: (x.clone(), x.clone()),
        lambda x: (x.reshape(-1).clone(), x.view(2, -1).clone()),
        lambda x: (lambda y: (y, y.clone()))(x + 1),
        lambda x: (x.new_empty(0, 3), x * 2),
        lambda x: (x[:0] * 2, x.sum(0)),
        lambda x: torch.fft.fft(x),
        lambda x: (x.sort(dim=1), x + 1),
        lambda x: (x[x > 0], x + 1),
    ],
)
def test_other_results(fn):
    assert_matches_eager(fn, torch.randn(4, 6), torch_calls=True)


def test_a_result_can_be_resized():
    compiled = _compiled(lambda x: x + 1)
    y = compiled(torch.randn(4))
    y.resize_(1000)
    y.fill_(1.0)
    out = compiled(torch.randn(4)).resize_(0)
    torch.mul(torch.ones(5, 5), 2, out=out)
    assert out.shape == (5, 5)


def test_a_result_that_is_an_input_is_that_tensor():
    x = torch.randn(4)
    y, z, again = _compiled(lambda x: (lambda y: (x, y, y))(x + 1))(x)
    assert y is x
    assert again is z


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_a_graph_without_results_of_its_own(dtype):
    x = torch.ones(3, dtype=dtype)
    assert_matches_eager(lambda x: x.real, x, options={"on_unsupported": "raise"})


def test_results_are_the_callers_own():
    compiled = _compiled(lambda x: (torch.ones(4), x + 1, x.clone()))
    x = torch.randn(4)
    first = compiled(x)
    kept = [t.clone() for t in first]
    second = compiled(x)
    addresses = {t.data_ptr() for t in (*first, *second, x)}
    assert len(addresses) == 7
    for t in second:
        t.zero_()
    for t, before in zip(first, kept, strict=True):
        torch.testing.assert_close(t, before)


def test_memory_of_results_is_pytorchs_to_use_again():
    compiled = _compiled(lambda x: x + 1)
    x = torch.randn(1 << 20)
    kept = [compiled(x) for _ in range(4)]
    assert len({t.data_ptr() for t in kept}) == 4
    for t in kept:
        torch.testing.assert_close(t, x + 1)


@pytest.mark.parametrize("sizes", [(3, 4), (1, 4), (0, 4), (3, 0), (7, 1)])
def test_symbolic_sizes(sizes):
    def fn(x):
        y = x * 2
        return y, y.t() + 1, torch.cat([x, x]), x.sum(0), x.new_ones(x.shape[1] * 2 + 1)

    compiled = _compiled(fn, dynamic=True)
    assert_same_call(compiled, fn, torch.randn(5, 6))
    assert_same_call(compiled, fn, torch.randn(sizes))


def test_calls_that_do_not_lie_alike():
    """Each of these takes another way than the one before."""
    compiled = _compiled(lambda x: x * 2 + 1, dynamic=True)
    base = torch.randn(6, 6, 6)
    complex_base = torch.randn(6, 6, 6, dtype=torch.complex64)
    inputs = [
        base,
        base[1:],
        base[:, :, ::2],
        base.transpose(0, 2),
        base.flatten()[1:-5].view(5, 7, 6),
        complex_base.imag,
        complex_base.conj().imag,
        base.clone().requires_grad_(),
        torch.nn.Parameter(base.clone(), requires_grad=False),
        base[:0],
        base.expand(6, 6, 6),
        base,
    ]
    for x in inputs * 2:
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), x * 2 + 1)


def test_tangents_that_do_not_lie_alike():
    compiled = _compiled(lambda x: (x * x).t())
    tangents = [torch.randn(4, 3), torch.randn(3, 4).t(), torch.randn(4, 6)[:, ::2]]
    tangents.append(torch.randn(4, 3, dtype=torch.complex64).conj().imag)
    tangents.append(torch.randn(()).expand(4, 3))
    for tangent in tangents:
        x = torch.randn(3, 4, requires_grad=True)
        compiled(x).backward(tangent)
        torch.testing.assert_close(x.grad, 2 * x.detach() * tangent.t())


def test_results_in_training_can_be_written_to():
    assert_matches_eager(
        lambda x: (x * x).exp().t(), torch.randn(3, 4), grad=True, every_stride=True
    )
    compiled = _compiled(lambda x: x * x)
    x = torch.randn(3, requires_grad=True)
    y = compiled(x)
    y.add_(1)
    y.sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach())


def test_inference_mode_and_no_grad_by_turns():
    compiled = _compiled(lambda x: x + 1)
    x = torch.randn(4)
    for _ in range(3):
        with torch.inference_mode():
            assert compiled(x).is_inference()
        with torch.no_grad():
            assert not compiled(x).is_inference()


def test_a_program_that_is_gone_leaves_its_results():
    compiled = _compiled(lambda x: (x + 1, x.nonzero()))
    x = torch.randn(1000)
    results = compiled(x)
    del compiled
    torch._dynamo.reset()
    gc.collect()
    torch.testing.assert_close(results, (x + 1, x.nonzero()))


def test_a_program_that_is_gone_leaves_its_memory_at_once(monkeypatch):
    made = []
    plain = program._Parts.__init__

    def watched(self, *arguments):
        plain(self, *arguments)
        made.append(weakref.ref(self))

    monkeypatch.setattr(program._Parts, "__init__", watched)
    model = torch.nn.Linear(4, 4)
    compiled = _compiled(lambda x: model(x) + x.sum())
    with torch.no_grad():
        for _ in range(2):
            compiled(torch.randn(3, 4))
    assert [ref() is None for ref in made] == [False]
    gc.disable()
    try:
        del compiled
        torch._dynamo.reset()
        assert made[0]() is None
    finally:
        gc.enable()


def test_threads_may_call_at_once():
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)]).eval()
    inputs = [torch.randn(8, 64) for _ in range(4)]
    failures = []
    with torch.no_grad():
        expected = [model(x) for x in inputs]
        compiled = _compiled(model)
        compiled(inputs[0])

    def work(index):
        try:
            for _ in range(200):
                with torch.no_grad():
                    torch.testing.assert_close(compiled(inputs[index]), expected[index])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
