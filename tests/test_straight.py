"""Programs whose steps are Python's: PyTorch's calls and generated kernels, past TVM's machine.

Graphs of tensors on the processor stand in for those on a GPU, as in `cuda_models.as_on_gpu`.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_models import as_on_gpu, is_kept_on_disk
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile
from tvm import relax

from fx2relax import stages
from fx2relax.calling import Calling
from fx2relax.errors import ArgumentError
from fx2relax.pipeline import straight as pipeline_straight
from fx2relax.runtime import straight, torch_call
from fx2relax.runtime.program import Program

OPTIONS = {"never_slower": False, "cache": False}
pytestmark = pytest.mark.usefixtures("fresh")


class Block(nn.Module):
    """One layer of a transformer."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm, self.inputs = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.inputs(self.norm(x)).view(b, t, 3, 2, d // 2).permute(2, 0, 3, 1, 4)
        x = x + scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d)
        return x + self.down(gelu(self.up(x)))


def compiled(model: Any, *arguments: Any, **how: Any) -> tuple[Any, Program]:
    """A compiled model, and the program of its first graph."""
    with as_on_gpu(), stages.kept("program") as noted:
        fast = torch.compile(model, backend="relax", options=OPTIONS, **how)
        close(fast(*arguments), model(*arguments))
    return fast, noted["program"][0]["program"]


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.fixture
def no_machine(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Calls that TVM's machine hands to PyTorch, which are not to be."""
    crossed: list[Any] = []
    to_torch = torch_call._to_torch
    monkeypatch.setattr(torch_call, "_to_torch", lambda v: (crossed.append(v), to_torch(v))[1])
    return crossed


def test_a_network(no_machine: list[Any]) -> None:
    model, x = nn.Sequential(Block(), Block()).eval(), torch.randn(2, 4, 16)
    with torch.no_grad():
        fast, program = compiled(model, x)
        kinds = [step[0] for step in program._straight._line]
        assert {"empty", "kernel", "torch", "view", "item", "return"} <= set(kinds)
        for batch in (x, x + 1, -x):
            close(fast(batch), model(batch))
        model[0].up.weight.mul_(0.5)
        close(fast(x), model(x))
    assert no_machine == []


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: ((x @ w).relu(), x * 2),
        lambda x, w: (x @ w, (x @ w) + 1),
        lambda x, w: (x + 1, x.view(-1), x),
        lambda x, w: torch.sort(x @ w),
        lambda x, w: torch.cumsum((x * 2).t() @ x, 0) + torch.arange(4),
        lambda x, w: (x @ w).t() @ (x.t() + 1).t(),
        lambda x, w: torch.fft.fft(x).abs() + x,
        lambda x, w: torch.linalg.solve_triangular(w, x, upper=True),
        lambda x, w: nn.functional.dropout(x @ w, 0.0) + 1,
        lambda x, w: x[:, :0] + 1,
    ],
)
@pytest.mark.parametrize("grad", [False, True])
def test_results_lie_as_eagers(function: Callable[..., Any], grad: bool) -> None:
    x, w = torch.randn(4, 4), torch.randn(4, 4) + 4 * torch.eye(4)
    w.requires_grad_(grad)
    fast, _ = compiled(function, x, w)
    for _ in range(2):
        found, expected = fast(x, w), function(x, w)
        close(found, expected)
        flat = torch.utils._pytree.tree_leaves
        for ours, eager in zip(flat(found), flat(expected), strict=True):
            assert ours.stride() == eager.stride()
            assert ours.requires_grad == eager.requires_grad


def test_random_draws_are_eagers() -> None:
    def drawn(x: Tensor) -> Tensor:
        return torch.rand_like(x) * x + torch.randn(4, 4) @ x

    x = torch.randn(4, 4)
    torch.manual_seed(7)
    with as_on_gpu():
        again = torch.compile(drawn, backend="relax", options=OPTIONS)
        found = again(x)
    torch.manual_seed(7)
    close(found, torch.compile(drawn, backend="aot_eager")(x))


def test_what_a_step_has_made_is_freed_after_its_last_use(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Sequential(*[Block() for _ in range(4)]).eval(), torch.randn(2, 4, 16)
    alive: list[weakref.ref[Any]] = []
    most = [0]
    made = straight.allocator

    def counted(kind: str) -> Any:
        empty = made(kind)

        def run(*how: Any) -> Tensor:
            fresh = empty(*how)
            alive.append(weakref.ref(fresh))
            most[0] = max(most[0], sum(ref() is not None for ref in alive))
            return fresh  # type: ignore[no-any-return]

        return run

    monkeypatch.setattr(straight, "allocator", counted)
    with torch.no_grad():
        fast, _ = compiled(model, x)
        alive.clear()
        most[0] = 0
        fast(x)
    gc.collect()
    assert len(alive) >= 20
    assert most[0] <= 12
    assert not any(ref() is not None for ref in alive)


def test_arguments_that_do_not_fit_are_named() -> None:
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    _, program = compiled(lambda x, w: (x @ w).exp() + 1, x, w)
    close(program(x, w)[0], (x @ w).exp() + 1)
    for wrong, said in (
        ((x[:3], w), "expected shape"),
        ((x.double(), w), "expected dtype"),
        ((x,), "is missing"),
        ((x, 3), "expected a tensor"),
    ):
        with pytest.raises(ArgumentError, match=said):
            program(*wrong)
    close(program(x.t(), w)[0], (x.t() @ w).exp() + 1)  # in another order of memory
    storage = torch.randn(17)
    odd = storage[1:].view(4, 4)
    close(program(odd, w)[0], (odd @ w).exp() + 1)


def test_an_operators_own_error_is_raised() -> None:
    def solved(x: Tensor) -> Tensor:
        return torch.linalg.cholesky(x @ x) + 1

    x = torch.eye(3)
    fast, _ = compiled(solved, x)
    with pytest.raises(torch.linalg.LinAlgError):
        fast(torch.tensor([[0.0, 1.0, 0.0], [-1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]))
    close(fast(2 * x), solved(2 * x))


def test_sizes_of_the_call(no_machine: list[Any]) -> None:
    model = Block().eval()
    with torch.no_grad():
        fast, program = compiled(model, torch.randn(3, 5, 16), dynamic=True)
        assert program._straight is not None
        for batch, length in ((2, 4), (7, 3), (4, 9)):
            x = torch.randn(batch, length, 16)
            close(fast(x), model(x))
    assert no_machine == []


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x[1:] * 2).exp() + x.shape[0],
        lambda x: torch.cat([x, x.flip(0)]).cumsum(0) * 2,
        lambda x: x.new_zeros(x.shape[0] * 2, 3) + x.repeat(2, 1).sin(),
        lambda x: (x @ x.t()).softmax(-1) @ torch.arange(x.shape[0]).to(x.dtype).exp(),
        lambda x: torch.roll(x, x.shape[0] // 2, 0).sin() + 1,
    ],
)
def test_sizes_that_are_worked_out(function: Callable[..., Any]) -> None:
    fast, program = compiled(function, torch.randn(6, 3), dynamic=True)
    assert program._straight is not None
    for rows in (5, 2, 9):
        x = torch.randn(rows, 3)
        close(fast(x), function(x))


def test_a_size_that_comes_to_nothing_is_left_to_the_machine() -> None:
    function = lambda x: ((x[2:] * 2) @ x.t() + 1, x.sin())  # noqa: E731
    x = torch.randn(6, 3)
    fast, program = compiled(function, x, dynamic=True)
    assert "not (n0 - 2)" in program._straight.condition
    for rows in (5, 2, 3):
        found, expected = fast(x[:rows]), function(x[:rows])
        close(found, expected)
        assert found[0].stride() == expected[0].stride()


def test_sizes_that_depend_on_data_are_left_to_the_machine() -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        _, program = compiled(lambda x: x.nonzero() * 2, torch.randn(5, 4))
    assert program._straight is None


@pytest.mark.parametrize("dense", [True, False])
def test_arguments_that_are_no_tensors_are_left_to_the_machine(dense: bool) -> None:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType([2], "float32") if dense else relax.AnyType())
    with builder.function("main", [x]):
        builder.emit_func_output(builder.emit(relax.Tuple([x])))
    _, calling = pipeline_straight.straight(builder.get(), "main", Calling(1))
    assert calling.line == ((("take", 1), ("return", (0,))) if dense else ())


def test_a_profiler_shows_kernels_by_their_nodes() -> None:
    x = torch.randn(4, 4)
    fast, _ = compiled(lambda x: ((x @ x).exp() + 1) @ x, x)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        fast(x)
    names = {event.key for event in seen.key_averages()}
    assert any("exp" in name and name != "aten::exp" for name in names), names
    assert "aten::mm" in names


def test_the_machine_makes_the_calls_that_are_watched() -> None:
    x = torch.randn(4, 4)
    fast, program = compiled(lambda x: ((x @ x).exp() + 1) @ x, x)
    told: list[str] = []

    def instrument(function: Any, symbol: str, before: bool, result: Any, *args: Any) -> int:
        told.append(symbol)
        return 0

    with program.watched(instrument):
        close(fast(x), ((x @ x).exp() + 1) @ x)
    assert any("exp" in symbol for symbol in told)
    told.clear()
    close(fast(x), ((x @ x).exp() + 1) @ x)
    assert told == []


def test_steps_are_kept_on_disk(
    no_machine: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FX2RELAX_CACHE", "1")
    monkeypatch.setenv("FX2RELAX_CACHE_DIR", str(tmp_path))
    with torch.no_grad():
        is_kept_on_disk(Block().eval(), torch.randn(2, 4, 16), {"rtol": 1e-4, "atol": 1e-5})
    assert no_machine == []


def test_steps_are_spelled_and_read() -> None:
    _, program = compiled(lambda x: (x @ x).exp(), torch.randn(4, 4))
    straight = program._straight
    calling = Calling(0, line=(("take", straight.count), *straight._line))
    assert Calling.read(calling.spelled()) == calling
