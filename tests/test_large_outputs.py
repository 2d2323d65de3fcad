"""What a product writes, and where: memory that is planned, without the bias that a kernel adds."""

import pytest
import torch
import tvm_ffi
from library_calls import function, lowered, passed

from fx2relax.runtime import native

pytestmark = pytest.mark.skipif(not native.use(), reason="no C++ compiler")
random = torch.randn

POINTWISE = (1, 1, 0, 0, 1, 1, 0, 0, 1, 0)
STRIDED, PADDED = (2, 2, *POINTWISE[2:]), (1, 1, 0, 1, *POINTWISE[4:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("values", "kernel"),
    [(POINTWISE, 1), (POINTWISE, 3), (STRIDED, 1), (PADDED, 1)],
    ids=["pointwise", "3x3", "strided", "padded"],
)
def test_convolutions_into_given_memory(dtype, biased, values, kernel):
    """A product where each place of the output is one; nothing else is."""
    x = random(2, 5, 6, 8).to(dtype)
    weight = random(16, kernel, kernel, 8).to(dtype)
    bias = [random(16).to(dtype)] if biased else []
    wanted = torch.nn.functional.conv2d(
        x.permute(0, 3, 1, 2),
        weight.permute(0, 3, 1, 2),
        *bias,
        stride=values[:2],
        padding=values[2:4],
    ).permute(0, 2, 3, 1)
    out = torch.full(wanted.shape, 7.0, dtype=dtype)
    before = native.declined()
    function("conv2d_nhwc")(*passed(x, weight, *bias, tvm_ffi.Shape(values), out))
    assert native.declined() == before
    torch.testing.assert_close(out, wanted.contiguous())


def test_a_large_output_of_a_pointwise_convolution_lies_in_planned_memory(monkeypatch):
    net = torch.nn.Sequential(torch.nn.Conv2d(8, 64, 1), torch.nn.Conv2d(64, 8, 3, groups=8))
    # 41 MB; and 23 MB, which the C library keeps from one call to the next.
    large, small = random(4, 8, 200, 200), random(4, 8, 150, 150)
    text = lowered(net, large, monkeypatch=monkeypatch)[0]
    assert text.count("library.conv2d_nhwc") == text.count("library.new_conv2d_nhwc") == 1
    assert "library.conv2d_nhwc" not in lowered(net, small, monkeypatch=monkeypatch)[0]


def test_a_bias_is_left_to_a_kernel_behind_a_reshape(monkeypatch):
    class Net(torch.nn.Module):
        def __init__(self, activation):
            super().__init__()
            self.linear, self.activation = torch.nn.Linear(32, 48), activation

        def forward(self, x):
            return self.activation(self.linear(x.flatten(0, 1)).view(*x.shape[:2], 48))

    def operands(activation):
        text = lowered(Net(activation), random(20, 30, 32), monkeypatch=monkeypatch)[0]
        (call,) = [line for line in text.splitlines() if "library.matmul_nt" in line]
        return call[call.index("library.matmul_nt") : call.index("out_ty")].count(",") - 1

    assert operands(torch.nn.GELU()) == 2
    assert operands(torch.nn.Softmax(-1)) == 3
