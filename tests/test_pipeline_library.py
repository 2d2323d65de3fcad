"""Calls into PyTorch's kernels: what is replaced, what comes along, what stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pipeline_cases import module, run
from tvm.script import relax as R

from fx2relax.onednn import computes_in
from fx2relax.pipeline import lower
from fx2relax.runtime import native

FLOATS = {
    "float32": torch.float32,
    "float64": torch.float64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


def linear(b: Any, x: Any, w: Any, c: Any) -> Any:
    return R.add(b.emit(R.matmul(x, b.emit(R.permute_dims(w)))), c)


def half_linear(b: Any, x: Any, w: Any, c: Any) -> Any:
    product = b.emit(R.matmul(x, b.emit(R.permute_dims(w)), out_dtype="float32"))
    total = b.emit(R.add(product, b.emit(R.astype(c, "float32"))))
    return R.astype(total, x.ty.dtype)


def conv(b: Any, x: Any, w: Any, c: Any) -> Any:
    product = b.emit(R.nn.conv2d(x, w, strides=(2, 1), padding=(1, 2), dilation=(1, 2), groups=2))
    return R.add(product, b.emit(R.reshape(c, (1, -1, 1, 1))))


def attention(b: Any, q: Any, k: Any, v: Any) -> Any:
    q, k, v = [b.emit(R.permute_dims(x, [0, 2, 1, 3])) for x in (q, k, v)]
    return R.nn.attention(q, k, v, causal_mask="TopLeft")


CASES: list[tuple[str, str, Any, Any, list[Any]]] = [
    ("mm", "matmul_nn", lambda b, x, y: R.matmul(x, y), torch.matmul, [(5, 7), (7, 9)]),
    (
        "batch by matrix",
        "matmul_nn",
        lambda b, x, y: R.matmul(x, y),
        torch.matmul,
        [(2, 5, 7), (7, 9)],
    ),
    (
        "batches",
        "matmul_nn",
        lambda b, x, y: R.matmul(x, y),
        torch.matmul,
        [(2, 3, 5, 7), (3, 7, 9)],
    ),
    ("vector", "matmul_nn", lambda b, x, y: R.matmul(x, y), torch.matmul, [(5, 7), (7,)]),
    ("dot", "matmul_nn", lambda b, x, y: R.matmul(x, y), torch.matmul, [(7,), (7,)]),
    ("no rows", "matmul_nn", lambda b, x, y: R.matmul(x, y), torch.matmul, [(0, 7), (7, 9)]),
    ("no sum", "matmul_nn", lambda b, x, y: R.matmul(x, y), torch.matmul, [(5, 0), (0, 9)]),
    (
        "left transposed",
        "matmul_tn",
        lambda b, x, y: R.matmul(b.emit(R.permute_dims(x, [0, 2, 1])), y),
        lambda x, y: x.mT @ y,
        [(2, 7, 5), (2, 7, 9)],
    ),
    ("linear", "matmul_nt", linear, F.linear, [(2, 5, 7), (9, 7), (9,)]),
    (
        "conv2d",
        "conv2d",
        conv,
        lambda x, w, c: F.conv2d(x, w, c, (2, 1), (1, 2), (1, 2), 2),
        [(2, 4, 9, 11), (6, 2, 3, 3), (6,)],
    ),
    (
        "conv1d transposed",
        "conv1d",
        lambda b, x, w: R.nn.conv1d_transpose(
            x, w, strides=2, padding=1, output_padding=1, groups=2
        ),
        lambda x, w: F.conv_transpose1d(x, w, None, 2, 1, 1, 2),
        [(2, 4, 9), (4, 3, 3)],
    ),
    (
        "conv3d",
        "conv3d",
        lambda b, x, w: R.nn.conv3d(x, w, padding=1),
        lambda x, w: F.conv3d(x, w, padding=1),
        [(1, 2, 5, 6, 7), (3, 2, 3, 3, 3)],
    ),
    (
        "attention",
        "attention",
        attention,
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2),
        [(2, 3, 5, 8)] * 3,
    ),
    (
        "attention with a bias, sequence first",
        "attention",
        lambda b, q, k, v, m: R.nn.attention(q, k, v, m, scale=0.3),
        lambda q, k, v, m: F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), m, scale=0.3
        ).transpose(1, 2),
        [(2, 5, 3, 8), (2, 6, 3, 8), (2, 6, 3, 8), (2, 3, 5, 6)],
    ),
]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("name", "call", "body", "eager", "shapes"), CASES, ids=[c[0] for c in CASES]
)
def test_library_call(
    name: str,
    call: str,
    body: Any,
    eager: Any,
    shapes: Any,
    dtype: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(s).to(FLOATS[dtype]) for s in shapes]
    mod = module(body, *shapes, dtypes=dtype)
    with monkeypatch.context() as plain:
        plain.setattr(native, "use", lambda: False)  # it would put calls of its own in their place
        text = lower(mod).script()
    assert f"fx2relax.library.{call}" in text
    assert text.count("call_dps_packed") == 1
    assert "call_tir" not in text, "something was left outside the call"
    torch.testing.assert_close(run(mod, *inputs, library="torch"), eager(*inputs))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_sums_are_rounded_once(dtype: str) -> None:
    torch.manual_seed(0)
    x, w, c = (torch.randn(s).to(FLOATS[dtype]) for s in [(5, 512), (9, 512), (9,)])
    mod = module(half_linear, x.shape, w.shape, c.shape, dtypes=dtype)
    text = lower(mod).script()
    assert "fx2relax.library.matmul_nt" in text
    # The library's own rounding, where its sums of this dtype are not slower than float32's.
    assert ("call_tir" not in text) == computes_in(dtype)
    torch.testing.assert_close(run(mod, x, w, c, library="torch"), F.linear(x, w, c))
    one_row = lower(module(half_linear, (1, 512), w.shape, c.shape, dtypes=dtype)).script()
    assert "call_tir" not in one_row


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("library", ["torch", "none"])
def test_half_precision_sums_in_float32(dtype: str, library: str) -> None:
    x, y = torch.ones(2, 4096).to(FLOATS[dtype]), torch.ones(4096, 16).to(FLOATS[dtype])
    mod = module(lambda b, x, y: R.matmul(x, y), x.shape, y.shape, dtypes=dtype)
    assert run(mod, x, y, library=library).tolist() == [[4096.0] * 16] * 2
    image, kernel = x[:1].reshape(1, 1, 64, 64), torch.ones(1, 1, 64, 64).to(FLOATS[dtype])
    mod = module(lambda b, x, w: R.nn.conv2d(x, w), image.shape, kernel.shape, dtypes=dtype)
    assert run(mod, image, kernel, library=library).tolist() == [[[[4096.0]]]]


def test_symbolic_sizes() -> None:
    mod = module(linear, ["n", "k"], ["m", "k"], ["m"])
    assert "call_tir" not in lower(mod).script()
    for n, k, m in ((3, 4, 5), (1, 1, 1), (0, 4, 5)):
        x, w, c = torch.randn(n, k), torch.randn(m, k), torch.randn(m)
        torch.testing.assert_close(run(mod, x, w, c, library="torch"), F.linear(x, w, c))


def test_a_bias_stays_with_the_activation_that_follows() -> None:
    mod = module(lambda b, *a: R.nn.gelu(b.emit(linear(b, *a))), (5, 7), (9, 7), (9,))
    text = lower(mod).script()
    assert text.count("call_dps_packed") == 1
    assert text.count("R.call_tir") == 1
    x, w, c = torch.randn(5, 7), torch.randn(9, 7), torch.randn(9)
    torch.testing.assert_close(run(mod, x, w, c, library="torch"), F.gelu(F.linear(x, w, c)))


def test_a_product_read_twice_is_computed_once() -> None:
    def body(b: Any, x: Any, y: Any, c: Any) -> Any:
        product = b.emit(R.matmul(x, y))
        return R.multiply(b.emit(R.add(product, c)), product)

    mod = module(body, (5, 7), (7, 9), (9,))
    assert lower(mod).script().count("call_dps_packed") == 1
    x, y, c = torch.randn(5, 7), torch.randn(7, 9), torch.randn(9)
    torch.testing.assert_close(run(mod, x, y, c, library="torch"), (x @ y + c) * (x @ y))


@pytest.mark.parametrize(
    ("body", "shapes", "dtype"),
    [
        (lambda b, x, y: R.matmul(x, y), [(5, 7), (7, 9)], "int32"),
        (
            lambda b, x, w: R.nn.conv2d(x, w, padding=(0, 0, 1, 1)),
            [(1, 2, 5, 5), (3, 2, 3, 3)],
            "float32",
        ),
        (
            lambda b, x, w: R.nn.conv2d(x, w, data_layout="NHWC"),
            [(1, 5, 5, 2), (3, 2, 3, 3)],
            "float32",
        ),
    ],
    ids=["integers", "uneven padding", "channels last"],
)
def test_what_stays_with_generated_kernels(body: Any, shapes: Any, dtype: str) -> None:
    assert "call_dps_packed" not in lower(module(body, *shapes, dtypes=dtype)).script()


def test_library_none_calls_nothing() -> None:
    mod = module(linear, (5, 7), (9, 7), (9,))
    assert "call_dps_packed" not in lower(mod, library="none").script()
    with pytest.raises(ValueError, match="'torch', 'generated' or 'none'"):
        lower(mod, library="mkl")


@pytest.mark.parametrize(("length", "calls"), [(64, 0), (2100, 1)])
def test_attention_whose_scores_would_fill_memory(length: int, calls: int) -> None:
    """It is the library's also where products are generated, with its mask and its scale."""
    shapes = [(1, 2, 2100, 8), (1, 2, length, 8), (1, 2, length, 8), (1, 1, 1, length)]

    def body(b: Any, q: Any, k: Any, v: Any, m: Any) -> Any:
        q, k, v = [b.emit(R.permute_dims(x, [0, 2, 1, 3])) for x in (q, k, v)]
        return R.nn.attention(q, k, v, m, scale=0.5)

    torch.manual_seed(0)
    inputs = [torch.randn(shape) for shape in shapes]
    mod = module(body, *shapes)
    assert lower(mod, library="generated").script().count("call_dps_packed") == calls
    expected = F.scaled_dot_product_attention(*inputs, scale=0.5).transpose(1, 2)
    torch.testing.assert_close(run(mod, *inputs, library="generated"), expected)
