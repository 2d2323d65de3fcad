"""Weight gradients of convolutions, from PyTorch's own backward kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import tvm
import tvm_ffi
from pipeline_cases import run
from torch.fx.experimental.proxy_tensor import make_fx

import fx2relax
from fx2relax.pipeline import lower
from fx2relax.runtime import library, native
from fx2relax.testing import assert_matches_eager

CASES: dict[str, tuple[type[torch.nn.Module], dict[str, Any], tuple[int, ...]]] = {
    "plain": (torch.nn.Conv2d, {"padding": 1}, (2, 4, 9, 8)),
    "strides that leave some out": (torch.nn.Conv2d, {"stride": (3, 2)}, (2, 4, 10, 8)),
    "dilation": (torch.nn.Conv2d, {"dilation": (1, 2), "padding": (2, 1)}, (2, 4, 9, 8)),
    "groups": (torch.nn.Conv2d, {"groups": 2, "stride": 2}, (3, 4, 9, 8)),
    "each channel by itself": (torch.nn.Conv2d, {"groups": 4, "padding": 1}, (3, 4, 9, 8)),
    "one axis": (torch.nn.Conv1d, {"stride": 2}, (2, 4, 11)),
    "three axes": (torch.nn.Conv3d, {"padding": 1, "groups": 2}, (1, 4, 5, 6, 4)),
    "transposed": (torch.nn.ConvTranspose2d, {"stride": 2, "padding": 1}, (2, 4, 5, 6)),
    "transposed, longer": (
        torch.nn.ConvTranspose2d,
        {"stride": 2, "output_padding": 1, "groups": 2},
        (2, 4, 5, 6),
    ),
    "transposed, longer than a stride": (
        torch.nn.ConvTranspose1d,
        {"stride": 1, "dilation": 2, "output_padding": 1},
        (2, 4, 7),
    ),
}


def gradient(layer: torch.nn.Module, dtype: torch.dtype, x: torch.Tensor) -> tuple[Any, Any]:
    """A function that gives the weight's gradient, and what it takes."""
    layer = layer.to(dtype)
    weight = next(layer.parameters()).detach()
    out = torch.func.functional_call(layer, {"weight": weight}, (x,)).detach()
    axes = x.dim() - 2
    transposed = getattr(layer, "transposed", False)

    def backward(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.convolution_backward.default(
            grad,
            x,
            weight,
            None,
            list(layer.stride),
            list(layer.padding),
            list(layer.dilation),
            transposed,
            list(layer.output_padding) if transposed else [0] * axes,
            layer.groups,
            [False, True, False],
        )[1]

    return backward, (torch.randn_like(out), x, weight)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CASES)
def test_gradient(name: str, dtype: torch.dtype) -> None:
    kind, settings, sizes = CASES[name]
    torch.manual_seed(1)
    layer = kind(4, 8, 3, bias=False, **settings)
    fn, args = gradient(layer, dtype, torch.randn(sizes, dtype=dtype))
    mod = fx2relax.from_fx(make_fx(fn)(*args), args)
    # An output longer than a stride allows has windows that reach no input.
    called = "longer than a stride" not in name
    text = lower(mod).script()
    assert (f"library.new_conv{len(sizes) - 2}d_weight" in text) == (called and native.use())
    assert "conv2d_weight" not in lower(mod, library="none").script()
    ours = torch.from_dlpack(run(mod, *args, library="torch"))
    torch.testing.assert_close(ours, fn(*args))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    layer = torch.nn.Conv2d(4, 6, 3, padding=1, bias=False)
    fn, args = gradient(layer, dtype, torch.randn(2, 4, 7, 7).to(dtype))
    mod = fx2relax.from_fx(make_fx(fn)(*args), args)
    ours = torch.from_dlpack(run(mod, *args, library="torch"))
    exact = fn(*[x.double() for x in args])
    bound = torch.finfo(dtype).eps
    torch.testing.assert_close(ours.double(), exact, rtol=bound / 2, atol=1e-4)


@pytest.mark.parametrize("sizes", [(2, 3, 8, 8), (5, 3, 8, 8)])
def test_unknown_batch(sizes: tuple[int, ...]) -> None:
    torch.manual_seed(3)
    weight = torch.randn(6, 3, 3, 3)
    assert_matches_eager(
        lambda x, w: torch.conv2d(x, w, stride=2, padding=1),
        torch.randn(sizes),
        weight,
        grad=True,
        dynamic=True,
    )


@pytest.mark.skipif(not native.use(), reason="no C++ compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_native_helper(dtype: torch.dtype) -> None:
    """The very bits of the Python functions, whether the result's memory is given or not."""
    torch.manual_seed(4)
    x, grad = torch.randn(2, 4, 9, 8).to(dtype), torch.randn(2, 6, 5, 4).to(dtype)
    settings = tvm_ffi.Shape([2, 2, 1, 1, 1, 1, 0, 0, 2, 0])
    sizes = tvm_ffi.Shape([6, 2, 3, 3])
    wide = torch.float32 if dtype == torch.bfloat16 else dtype
    expected, got = torch.empty(6, 2, 3, 3, dtype=wide), torch.empty(6, 2, 3, 3, dtype=wide)
    operands = [tvm_ffi.from_dlpack(v) for v in (x, grad)]
    before = native.declined()
    name = "conv2d_weight"
    library.FUNCTIONS[name](*operands, settings, sizes, tvm_ffi.from_dlpack(expected))
    compiled = tvm.get_global_func(library.PREFIX + name)
    compiled(*operands, settings, sizes, tvm_ffi.from_dlpack(got))
    assert torch.equal(got, expected)
    made = tvm.get_global_func(library.PREFIX + "new_" + name)(*operands, settings, sizes)
    assert torch.equal(
        torch.from_dlpack(made), library.FUNCTIONS["new_" + name](*operands, settings, sizes)
    )
    assert native.declined() == before
