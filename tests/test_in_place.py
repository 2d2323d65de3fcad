"""Inputs that a graph writes to: at once, where nobody reads what they were."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fx2relax
from fx2relax import stages
from fx2relax.calling import Calling

OPTIONS = {"never_slower": False}


class _Callings:
    """The programs that are compiled meanwhile."""

    def __init__(self) -> None:
        self.found: list[Calling] = []

    def note(self, stage: str, what: dict[str, Any]) -> None:
        if stage == "program":
            self.found.append(what["built"].calling)


@pytest.fixture(autouse=True)
def _afresh() -> None:
    torch._dynamo.reset()  # many modules share the code of one forward


@pytest.fixture
def callings(monkeypatch: pytest.MonkeyPatch) -> _Callings:
    watch = _Callings()
    monkeypatch.setattr(stages, "listeners", [*stages.listeners, watch])
    return watch


class Cache(nn.Module):
    """Keys that a step writes at a position, and reads."""

    keys: Tensor

    def __init__(self, write: Callable[[Tensor, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.write = write
        self.register_buffer("keys", torch.randn(2, 3, 16, 4))

    def forward(self, x: Tensor, position: Tensor) -> Any:
        return self.write(self.keys, x, position)


def _copied(keys: Tensor, x: Tensor, position: Tensor) -> Tensor:
    keys.index_copy_(2, position, x)
    return keys.sum(2) * x[:, :, 0]


def _indexed(keys: Tensor, x: Tensor, position: Tensor) -> Tensor:
    keys[:, :, position] = x
    return (keys @ x.transpose(2, 3)).softmax(2)


def _twice(keys: Tensor, x: Tensor, position: Tensor) -> Tensor:
    keys.index_copy_(2, position, x)
    keys.index_copy_(2, (position + 1) % 16, x * 2)
    return keys.sum(2)


def _added(keys: Tensor, x: Tensor, position: Tensor) -> Tensor:
    keys.index_add_(2, position, x)
    return keys.mean(2)


def _scattered(keys: Tensor, x: Tensor, position: Tensor) -> Tensor:
    keys.scatter_(2, position.expand(2, 3, 1, 4), x)
    return keys.amax(2)


def _unread(keys: Tensor, x: Tensor, position: Tensor) -> Tensor:
    keys.index_copy_(2, position, x)
    return x + 1


def _as_well(keys: Tensor, x: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    keys.index_copy_(2, position, x)
    return keys, keys.cos()


AT_ONCE = [_copied, _indexed, _twice, _added, _scattered, _unread, _as_well]


def _read_before_and_after(keys: Tensor, x: Tensor, position: Tensor) -> Tensor:
    before = keys.clone()
    keys.index_copy_(2, position, x)
    return before - keys


def _returned_anew(keys: Tensor, x: Tensor, position: Tensor) -> Tensor:
    new = keys.index_copy(2, position, x)
    keys.copy_(new)
    return new


def _returns_what_was(keys: Tensor, x: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    before = keys * 1
    new = keys.index_copy(2, position, x)
    keys.copy_(new * 2)
    return before, new


def _once_in_two(keys: Tensor, x: Tensor, position: Tensor) -> Tensor:
    other = (x.sum() * keys).index_copy(2, position, x)  # the same kernel, of another tensor
    keys.index_copy_(2, position, x)
    return other + keys


COPIED = [_read_before_and_after, _returned_anew, _returns_what_was, _once_in_two]


def _agree(write: Callable[..., Any], keys: Tensor | None = None) -> None:
    """Three steps, of which eager and the compiled module have the same results and keys."""
    torch.manual_seed(0)
    eager = Cache(write).eval()
    if keys is not None:
        eager.keys = keys
    # A deep copy would make other strides of a view's.
    own = copy.deepcopy(eager)
    own.keys = eager.keys.detach().clone(memory_format=torch.preserve_format)
    address = own.keys.data_ptr()
    fast = torch.compile(own, backend="relax", options=OPTIONS)
    with torch.no_grad():
        for step in (0, 5, 15):
            x, position = torch.randn(2, 3, 1, 4), torch.tensor([step])
            torch.testing.assert_close(fast(x, position), eager(x, position))
            torch.testing.assert_close(own.keys, eager.keys, rtol=0, atol=0)
    assert own.keys.data_ptr() == address


@pytest.mark.sweep
@pytest.mark.parametrize("write", AT_ONCE)
def test_a_cache_is_written_to_at_once(write: Callable[..., Any], callings: _Callings) -> None:
    _agree(write)
    (calling,) = callings.found
    assert [given.into is not None for given in calling.given].count(True) == 1


@pytest.mark.sweep
@pytest.mark.parametrize("write", COPIED)
def test_what_is_read_otherwise_is_copied(write: Callable[..., Any], callings: _Callings) -> None:
    _agree(write)
    (calling,) = callings.found
    assert all(given.into is None for given in calling.given)


@pytest.mark.parametrize(
    "keys",
    [
        torch.randn(2, 3, 4, 16).transpose(2, 3),  # permuted
        torch.randn(2, 3, 16, 8)[..., ::2],  # not dense
        torch.randn(2, 3, 17, 4)[:, :, 1:],  # begins within its storage
        torch.zeros(2, 3, 16, 4, dtype=torch.float32).share_memory_(),
    ],
)
def test_a_cache_in_any_order_of_memory(keys: Tensor) -> None:
    _agree(_copied, keys)


def test_a_cache_that_comes_to_lie_otherwise() -> None:
    """The short way of a call is for tensors that lie as those before did."""
    torch.manual_seed(0)

    def step(keys: Tensor, x: Tensor, position: Tensor) -> Tensor:
        return _copied(keys, x, position)

    fast = torch.compile(step, backend="relax", options=OPTIONS, dynamic=False)
    whole = torch.randn(2, 3, 16, 4)
    for keys in (whole, torch.randn(2, 3, 16, 8)[..., ::2], whole, torch.randn(2, 3, 16, 4)):
        other = keys.clone()
        x, position = torch.randn(2, 3, 1, 4), torch.tensor([3])
        with torch.no_grad():
            torch.testing.assert_close(fast(keys, x, position), step(other, x, position))
        torch.testing.assert_close(keys, other, rtol=0, atol=0)


def test_autograd_is_told_of_the_write() -> None:
    keys, weight = torch.randn(2, 3, 16, 4), torch.randn(2, 3, 16, 4, requires_grad=True)
    product = (keys * weight).sum()  # keeps the keys for the backward pass
    fast = torch.compile(_copied, backend="relax", options=OPTIONS)
    before = keys._version
    with torch.no_grad():
        fast(keys, torch.randn(2, 3, 1, 4), torch.tensor([3]))
    assert keys._version > before
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_sizes_that_vary(callings: _Callings) -> None:
    torch.manual_seed(0)
    fast = torch.compile(_copied, backend="relax", options=OPTIONS, dynamic=True)
    with torch.no_grad():
        for size in (16, 24, 9):
            keys = torch.randn(2, 3, size, 4)
            other = keys.clone()
            x, position = torch.randn(2, 3, 1, 4), torch.tensor([3])
            torch.testing.assert_close(fast(keys, x, position), _copied(other, x, position))
            torch.testing.assert_close(keys, other, rtol=0, atol=0)
    assert any(given.into is not None for found in callings.found for given in found.given)


def test_two_programs_take_turns() -> None:
    """Each call writes once, also while two ways of it are timed."""

    def step(keys: Tensor, x: Tensor, position: Tensor, weight: Tensor) -> Tensor:
        keys.index_add_(2, position, x)
        return keys @ weight

    fast = torch.compile(step, backend="relax")
    keys, weight = torch.zeros(2, 3, 16, 64), torch.randn(64, 64)
    with torch.no_grad():
        for _ in range(12):
            fast(keys, torch.ones(2, 3, 1, 64), torch.tensor([3]), weight)
        assert fx2relax.wait_for_compilation(300)
        for _ in range(12):
            fast(keys, torch.ones(2, 3, 1, 64), torch.tensor([3]), weight)
    assert (keys[:, :, 3] == 24).all()
    assert keys.count_nonzero() == 2 * 3 * 64


def test_an_index_out_of_range_leaves_the_cache() -> None:
    keys = torch.randn(2, 3, 16, 4)
    before = keys.clone()
    fast = torch.compile(_copied, backend="relax", options=OPTIONS)
    with pytest.raises((IndexError, RuntimeError)), torch.no_grad():
        fast(keys, torch.randn(2, 3, 1, 4), torch.tensor([16]))
    torch.testing.assert_close(keys, before, rtol=0, atol=0)


def test_a_second_program_is_not_tried_where_weights_are_read_once() -> None:
    net = nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(3)]).eval()
    fast = torch.compile(net, backend="relax")
    fx2relax.reset_stats()
    with torch.no_grad():
        for _ in range(3):
            fast(torch.randn(1, 2048))
    assert fx2relax.wait_for_compilation(300)
    stats = fx2relax.stats()
    assert stats["cache_hits"] + stats["cache_misses"] <= 1


def _one_step(cache: Tensor, x: Tensor, start: int) -> Tensor:
    cache[:, start : start + 1] = x[:2, None]
    return cache[:, : start + 1].amax(1)


def _of_some(cache: Tensor, x: Tensor, start: int) -> Tensor:
    cache[:1, start : start + 2] = x[0]
    return cache[:1].amax(1)


def _selected(cache: Tensor, x: Tensor, start: int) -> Tensor:
    cache[1, start] = x[0].double()
    return cache.amin(1)


def _from_the_end(cache: Tensor, x: Tensor, start: int) -> Tensor:
    cache[-1:, -8:-2:3] = x[:2]
    return cache[:, start:].amax(1)


def _two_slices(cache: Tensor, x: Tensor, start: int) -> Tensor:
    cache[:, start] = x[0]
    cache[:, start + 7 : start + 9] = x[:2]
    return cache.amax(1)


def _apart(cache: Tensor, x: Tensor, start: int) -> Tensor:
    cache[:1, start : start + 1, :, 2:5] = x[0, :, 2:5]  # the axes are no neighbours
    return cache.amax(1)


def _over_the_end(cache: Tensor, x: Tensor, start: int) -> Tensor:
    cache[:, 1020 + start : 1030 + start] = x[0]
    return cache.amax(1)


def _all_of_it(cache: Tensor, x: Tensor, start: int) -> Tensor:
    cache[:] = x[0] + start
    return cache.amax(1)


SLICES = [_one_step, _of_some, _selected, _from_the_end, _two_slices]
OTHERS = [_apart, _over_the_end, _all_of_it]


@pytest.mark.sweep
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("write", [*SLICES, *OTHERS])
def test_slices_of_a_cache(
    write: Callable[..., Tensor], dynamic: bool | None, callings: _Callings
) -> None:
    """Those of few places are elements at indices, which are written to at once."""
    torch.manual_seed(0)
    fast = torch.compile(write, backend="relax", options=OPTIONS, dynamic=dynamic)
    cache = torch.randn(2, 1024, 3, 8)
    other = cache.clone()
    with torch.no_grad():
        for start in (0, 3, 4, 511):
            x = torch.randn(2, 3, 8)
            torch.testing.assert_close(fast(cache, x, start), write(other, x, start))
            torch.testing.assert_close(cache, other, rtol=0, atol=0)
    if write in SLICES and dynamic is None:
        for calling in callings.found:
            assert any(given.into is not None for given in calling.given)
