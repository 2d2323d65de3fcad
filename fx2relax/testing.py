"""Compare a compiled function with eager: values, types, layout, aliasing, mutation, gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fx2relax import report
from fx2relax.closeness import TOLERANCES, close, is_further, strides
from fx2relax.onnx_check import OnnxComparison, assert_matches_onnx

__all__ = [
    "TOLERANCES",
    "OnnxComparison",
    "assert_matches_eager",
    "assert_matches_onnx",
    "assert_same_call",
    "close",
    "copied",
    "is_further",
]


def assert_matches_eager(
    fn: Callable[..., Any],
    *inputs: Any,
    dynamic: bool | None = None,
    grad: bool = False,
    tol: float | tuple[float, float] | None = None,
    torch_calls: bool = False,
    seed: int | None = None,
    fullgraph: bool = True,
    options: dict[str, Any] | None = None,
    backend: str = "relax",
    every_stride: bool = False,
) -> None:
    """Assert that ``torch.compile(fn, backend="relax")`` does what ``fn`` does.

    Compared are the outputs' structure, shape, dtype, strides, aliasing of the inputs and
    values (NaN equals NaN); the inputs afterwards; with ``grad``, the gradients of every
    floating-point input that requires one (all of them, if none does) and of a module's
    parameters.

    Args:
        fn: a function or module of the inputs. A module is copied, so that both sides start
            from the same buffers.
        inputs: tensors, or nests of tensors and Python values.
        dynamic: passed to `torch.compile`.
        grad: compare gradients as well.
        tol: relative and absolute tolerance, or one figure for both; a figure per dtype is
            used when it is left out.
        torch_calls: allow operators that run in PyTorch.
        seed: PyTorch's seed before each side is run.
        fullgraph: passed to `torch.compile`.
        options: passed to `torch.compile`.
        backend: another backend, to see whether a difference is PyTorch's own.
        every_stride: compare those of axes of one element too, which place nothing in memory.

    Raises:
        AssertionError: the two sides differ.
    """
    actual_fn = copy.deepcopy(fn)
    torch._dynamo.reset()
    before = report.stats()["nodes_fallback"]
    compiled = torch.compile(
        actual_fn, backend=backend, dynamic=dynamic, fullgraph=fullgraph, options=options
    )
    expected_fn = copy.deepcopy(fn)
    assert_same_call(
        compiled,
        expected_fn,
        *inputs,
        grad=grad,
        tol=tol,
        seed=seed,
        every_stride=every_stride,
    )
    missed = report.stats()["nodes_fallback"] - before
    if missed and not torch_calls:
        raise AssertionError(f"{missed} nodes ran in PyTorch: {report.stats()['fallback_ops']}")


def assert_same_call(
    compiled: Callable[..., Any],
    fn: Callable[..., Any],
    *inputs: Any,
    grad: bool = False,
    tol: float | tuple[float, float] | None = None,
    seed: int | None = None,
    every_stride: bool = False,
) -> None:
    """Assert that one call of a compiled function does what one of ``fn`` does.

    Each side gets copies of the inputs. What is compared is what `assert_matches_eager` compares.

    Args:
        compiled: what is judged.
        fn: what it should do.
        inputs: of the call: tensors, or nests of tensors and Python values.
        grad: see `assert_matches_eager`, as for the next three.
        tol: the same.
        seed: the same.
        every_stride: the same.

    Raises:
        AssertionError: the two sides differ.
    """
    expected_inputs, actual_inputs = copied(inputs, grad), copied(inputs, grad)
    expected = _run(fn, expected_inputs, seed)
    actual = _run(compiled, actual_inputs, seed)
    _compare(actual, expected, actual_inputs, expected_inputs, tol, every_stride)
    if grad:
        _compare_gradients((actual, actual_inputs, compiled), (expected, expected_inputs, fn), tol)


def _run(fn: Callable[..., Any], inputs: Sequence[Any], seed: int | None) -> Any:
    if seed is not None:
        torch.manual_seed(seed)
    return fn(*inputs)


def copied(inputs: Sequence[Any], grad: bool = False) -> Any:
    """The inputs again: other memory, the same strides, offset and shared storages.

    Args:
        inputs: tensors, or nests of tensors and Python values.
        grad: whether floating-point tensors require gradients where none does.

    Returns:
        a list of the same nests.
    """
    storages: dict[int, torch.UntypedStorage] = {}
    bases: dict[int, torch.Tensor] = {}
    wanted = grad and not any(
        isinstance(t, torch.Tensor) and t.requires_grad for t in pytree.tree_leaves(inputs)
    )

    def one(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            return copy.deepcopy(value)
        if isinstance(value, torch.nn.Parameter):
            return torch.nn.Parameter(value.detach().clone(), value.requires_grad)
        storage = value.untyped_storage()
        key = storage.data_ptr() or id(value)
        if key not in storages:
            storages[key] = storage.clone()
        twin = torch.empty(0, dtype=value.dtype, device=value.device)
        if value._is_view():
            base = bases.setdefault(key, twin.set_(storages[key]))
            twin = base.as_strided(value.shape, value.stride(), value.storage_offset())
        else:
            twin.set_(storages[key], value.storage_offset(), value.shape, value.stride())
        if value.requires_grad or (wanted and value.is_floating_point()):
            # A leaf, as gradients are compared on leaves: not a view of its base.
            twin = twin.detach().requires_grad_()
        return twin

    return pytree.tree_map(one, list(inputs))


def _compare(
    actual: Any,
    expected: Any,
    actual_inputs: Any,
    expected_inputs: Any,
    tol: Any,
    every_stride: bool,
) -> None:
    actual_flat, actual_spec = pytree.tree_flatten(actual)
    expected_flat, expected_spec = pytree.tree_flatten(expected)
    assert actual_spec == expected_spec, f"structure {actual_spec}, eager {expected_spec}"
    for index, (a, e) in enumerate(zip(actual_flat, expected_flat, strict=True)):
        _compare_value(a, e, tol, f"output {index}", every_stride)
    actual_leaves = pytree.tree_leaves(actual_inputs)
    expected_leaves = pytree.tree_leaves(expected_inputs)
    for index, (a, e) in enumerate(zip(actual_leaves, expected_leaves, strict=True)):
        _compare_value(a, e, tol, f"input {index} afterwards")
    ours = _aliases([*actual_flat, *actual_leaves])
    eager = _aliases([*expected_flat, *expected_leaves])
    assert ours == eager, f"aliasing {ours}, eager {eager} (outputs, then inputs)"


def _aliases(values: Sequence[Any]) -> list[int]:
    """For each tensor the first one with which it shares storage."""
    seen: dict[int, int] = {}
    groups = []
    for index, value in enumerate(values):
        if isinstance(value, torch.Tensor) and value.layout is torch.strided and value.numel():
            groups.append(seen.setdefault(value.untyped_storage().data_ptr(), index))
        else:
            groups.append(index)
    return groups


def _compare_value(
    actual: Any, expected: Any, tol: Any, where: str, every_stride: bool = False
) -> None:
    if not isinstance(expected, torch.Tensor):
        assert type(actual) is type(expected), f"{where}: {actual!r}, eager {expected!r}"
        # A copy of a module is another module.
        same = isinstance(expected, torch.nn.Module)
        same = same or actual == expected or (actual != actual and expected != expected)
        assert same, f"{where}: {actual!r}, eager {expected!r}"
        return
    assert isinstance(actual, torch.Tensor), f"{where}: {actual!r}, eager a tensor"
    for attribute in ("dtype", "shape", "device", "layout", "requires_grad"):
        ours, eager = getattr(actual, attribute), getattr(expected, attribute)
        assert ours == eager, f"{where}: {attribute} {ours}, eager {eager}"
    if expected.layout is torch.strided:
        ours, eager = strides(actual, every_stride), strides(expected, every_stride)
        assert ours == eager, f"{where}: strides {ours}, eager {eager}"
    close(actual, expected, tol, where)


def _compare_gradients(actual: Any, expected: Any, tol: Any) -> None:
    for outputs, _, _ in (actual, expected):
        roots = [
            t
            for t in pytree.tree_leaves(outputs)
            if isinstance(t, torch.Tensor) and t.requires_grad
        ]
        generator = torch.Generator().manual_seed(0)
        grads = [
            torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.dtype)
            for t in roots
        ]
        if roots:
            torch.autograd.backward(roots, grads)
    for (name, a), (_, e) in zip(_leaves(actual), _leaves(expected), strict=True):
        assert (a.grad is None) == (e.grad is None), (
            f"gradient of {name}: {a.grad is not None}, eager {e.grad is not None}"
        )
        if e.grad is not None:
            assert a.grad.dtype == e.grad.dtype
            assert a.grad.shape == e.grad.shape
            close(a.grad, e.grad, tol, f"gradient of {name}")


def _leaves(side: Any) -> list[tuple[str, Any]]:
    _, inputs, fn = side
    found = [
        (f"input {i}", t)
        for i, t in enumerate(pytree.tree_leaves(inputs))
        if isinstance(t, torch.Tensor) and t.is_leaf and t.requires_grad
    ]
    module = getattr(fn, "_orig_mod", fn)
    if isinstance(module, torch.nn.Module):
        found.extend(module.named_parameters())
    return found
