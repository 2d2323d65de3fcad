"""One call of each core ATen operator, by which `fx2relax ops` measures it.

A call is written with tensors of a few kinds and with sizes that have names:
``call(x[n, k], x[k, m])`` multiplies two matrices. A size is a number of `SIZES`, or symbolic where
dynamic shapes are tried; one that is written as a number is always that number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch.utils import _pytree as pytree

__all__ = ["CALLS", "DTYPE", "SIZES", "Call", "Operand"]


_FIXED = {"double": torch.float64, "index": torch.int64, "mask": torch.bool}


@dataclass(frozen=True)
class Operand:
    """A tensor among the arguments of a call.

    Attributes:
        kind: ``"x"``, which has each dtype in turn and takes gradients; ``"stat"``, of the same
            dtype without gradients; ``"double"``, float64 with gradients; ``"index"``, int64 of
            0 and 1; or ``"mask"``, bool.
        sizes: ints and symbols, none for a 0-d tensor.
    """

    kind: str
    sizes: tuple[Any, ...]

    def __repr__(self) -> str:
        return f"{self.kind}[{', '.join(map(str, self.sizes)) or '()'}]"

    @property
    def shape(self) -> list[int]:
        """The sizes as ints."""
        return [number(size) for size in self.sizes]

    def dtype(self, varied: torch.dtype) -> torch.dtype:
        """Its dtype where those that vary are `varied`."""
        return _FIXED.get(self.kind, varied)

    @property
    def takes_gradient(self) -> bool:
        """Whether the gradient is tried with respect to it."""
        return self.kind in ("x", "double")

    def tensor(self, varied: torch.dtype) -> torch.Tensor:
        """Its value in eager: 1, 2 and 3 in turn, or 0 and ones, or True and False."""
        shape, dtype = self.shape, self.dtype(varied)
        count = torch.arange(torch.Size(shape).numel())
        if self.kind == "mask":
            values = count % 2 == 0
        else:
            values = count.clamp(max=1) if self.kind == "index" else count % 3 + 1
        return values.to(dtype).reshape(shape)


class _Kind:
    """Writes an operand: ``x[n, m]``; ``x[()]`` is a 0-d tensor."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getitem__(self, sizes: Any) -> Operand:
        return Operand(self.name, sizes if isinstance(sizes, tuple) else (sizes,))


class _Dtype:
    """Stands for the dtype that varies."""

    def __repr__(self) -> str:
        return "dtype"


@dataclass(frozen=True)
class Call:
    """The arguments of one call, in which `Operand`, symbols and `DTYPE` stand for values.

    Attributes:
        args, kwargs: the arguments.
        dtypes: the only dtypes to try, or None for all.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    dtypes: tuple[torch.dtype, ...] | None = None

    def __str__(self) -> str:
        named = [f"{name}={value}" for name, value in self.kwargs.items()]
        return ", ".join([*map(repr, self.args), *named])

    @property
    def operands(self) -> list[Operand]:
        """The tensors, in the arguments' order."""
        leaves = pytree.tree_leaves((self.args, self.kwargs))
        return [leaf for leaf in leaves if isinstance(leaf, Operand)]

    @property
    def symbols(self) -> list[sympy.Symbol]:
        """The sizes that have names, in order of their first use."""
        leaves: list[Any] = pytree.tree_leaves((self.args, self.kwargs))
        sizes = [s for leaf in leaves for s in getattr(leaf, "sizes", (leaf,))]
        return list(dict.fromkeys(s for e in sizes for s in _symbols(e)))

    @property
    def symbols_of_arguments(self) -> list[sympy.Symbol]:
        """Those that stand among the arguments themselves, not only among tensors' sizes."""
        leaves: list[Any] = pytree.tree_leaves((self.args, self.kwargs))
        return list(dict.fromkeys(s for leaf in leaves for s in _symbols(leaf)))

    def filled(
        self, tensors: list[Any], dtype: torch.dtype, size: Callable[[sympy.Expr], Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with a value for each operand, for the dtype, and for sizes."""
        given = iter(tensors)

        def value(leaf: Any) -> Any:
            if isinstance(leaf, Operand):
                return next(given)
            if isinstance(leaf, sympy.Expr):
                return size(leaf)
            return dtype if leaf is DTYPE else leaf

        args, kwargs = pytree.tree_map(value, (self.args, self.kwargs))
        return args, kwargs


def call(*args: Any, **kwargs: Any) -> Call:
    """Write a call."""
    return Call(args, kwargs)


def number(size: Any) -> int:
    """A size as an int."""
    if isinstance(size, int):
        return size
    return SIZES[size] if size in SIZES else int(size.subs(SIZES))


def _symbols(value: Any) -> list[Any]:
    return sorted(value.free_symbols, key=str) if isinstance(value, sympy.Expr) else []


DTYPE = _Dtype()
x, stat, double, index, mask = map(_Kind, ("x", "stat", "double", "index", "mask"))
c, d, h, k, m, n, v, w = sympy.symbols("c d h k m n v w", integer=True, positive=True)
SIZES = {c: 2, d: 5, h: 8, k: 3, m: 6, n: 4, v: 9, w: 7}

_MATRIX = x[n, m]
_IMAGE = x[n, c, h, w]
_VOLUME = x[n, c, d, h, w]
# Windows of 3 by 3, in steps of 1, that leave the sizes as they are.
_WINDOWS = ([3, 3], [1, 1], [1, 1])
_CONVOLUTION = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)


def _same(names: str, written: Call) -> dict[str, Call]:
    """The same call for several operators."""
    return dict.fromkeys(names.split(), written)


# By the overload's name without `aten.`; an overload that is called `default` is left out.
_ROWS: dict[str, Call] = {
    # One tensor, element by element.
    **_same(
        "abs acos acosh alias asin asinh atan atanh bitwise_not ceil clone cos cosh elu erf exp "
        "expm1 floor gelu hardtanh isinf isnan leaky_relu log log10 log1p log2 logical_not neg "
        "reciprocal relu round rsqrt sigmoid sign sin sinh sqrt tan tanh trunc",
        call(_MATRIX),
    ),
    "_to_copy": call(double[n, m], dtype=DTYPE),
    "clamp": call(_MATRIX, 1, 2),
    "fill.Scalar": call(_MATRIX, 2),
    "native_dropout": call(_MATRIX, 0.5, True),
    # Two tensors, or a tensor and a number, element by element.
    **_same(
        "add.Tensor atan2 bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor div.Tensor "
        "eq.Tensor fmod.Tensor ge.Tensor gt.Tensor le.Tensor logical_and logical_or logical_xor "
        "lt.Tensor maximum minimum mul.Tensor ne.Tensor pow.Tensor_Tensor remainder.Tensor "
        "sub.Tensor",
        call(_MATRIX, x[m]),
    ),
    **_same(
        "add.Scalar bitwise_and.Scalar bitwise_or.Scalar bitwise_xor.Scalar div.Scalar eq.Scalar "
        "fmod.Scalar ge.Scalar gt.Scalar le.Scalar lt.Scalar mul.Scalar ne.Scalar "
        "pow.Tensor_Scalar remainder.Scalar sub.Scalar",
        call(_MATRIX, 2),
    ),
    "atan2.out": call(_MATRIX, x[m], out=stat[n, m]),
    "clamp.Tensor": call(_MATRIX, x[m], x[n, 1]),
    "copy": call(_MATRIX, x[m]),
    "div.Tensor_mode": call(_MATRIX, x[m], rounding_mode="floor"),
    "div.Scalar_mode": call(_MATRIX, 2, rounding_mode="floor"),
    "pow.Scalar": call(2, _MATRIX),
    "where.self": call(mask[n, m], _MATRIX, x[m]),
    # Reductions, scans and order.
    **_same("any mean prod", call(_MATRIX)),
    **_same(
        "any.dim argmax argmin cumsum max.dim min.dim prod.dim_int",
        call(_MATRIX, 1),
    ),
    **_same("_log_softmax _softmax", call(_MATRIX, 1, False)),
    **_same("amax amin any.dims mean.dim sum.dim_IntList var.dim", call(_MATRIX, [1])),
    "var.correction": call(_MATRIX, [1], correction=1),
    "sort": call(_MATRIX),
    "topk": call(_MATRIX, 2),
    # Products and distances.
    "_cdist_forward": call(x[n, d], x[k, d], 2.0, None),
    "_pdist_forward": call(x[n, d], 2.0),
    "addmm": call(x[m], x[n, k], x[k, m]),
    "bmm": call(x[v, n, k], x[v, k, m]),
    "mm": call(x[n, k], x[k, m]),
    # Views and rearrangements.
    "as_strided": call(_MATRIX, [m, n], [1, m], 0),
    "cat": call([x[n, m], x[k, m]]),
    "constant_pad_nd": call(_MATRIX, [1, 1], 0),
    "diagonal": call(_MATRIX),
    "expand": call(x[n, 1], [n, m]),
    "flip": call(_MATRIX, [1]),
    "permute": call(_MATRIX, [1, 0]),
    "reflection_pad1d": call(x[n, c, w], [1, 1]),
    **_same("reflection_pad2d replication_pad2d", call(_IMAGE, [1] * 4)),
    **_same("reflection_pad3d replication_pad3d", call(_VOLUME, [1] * 6)),
    "repeat": call(_MATRIX, [2, 1]),
    # PyTorch does not trace it with symbolic sizes.
    "resize_": call(stat[4, 6], [6, 4]),
    "select.int": call(_MATRIX, 1, 0),
    "select_scatter": call(_MATRIX, x[n], 1, 0),
    "slice.Tensor": call(_MATRIX, 1, 1, 3),
    "slice_scatter": call(_MATRIX, x[n, 2], 1, 1, 3),
    "split_with_sizes": call(_MATRIX, [2, m - 2], 1),
    "squeeze.dim": call(x[n, 1, m], 1),
    "squeeze.dims": call(x[n, 1, m], [1]),
    "unsqueeze": call(_MATRIX, 1),
    "view": call(_MATRIX, [n * m]),
    # Elements by index.
    "_embedding_bag": call(x[v, d], index[n], index[k]),
    "embedding": call(x[v, d], index[n, k]),
    "embedding_dense_backward": call(x[n, k, d], index[n, k], v, -1, False),
    "gather": call(_MATRIX, 1, index[n, k]),
    "index.Tensor": call(_MATRIX, [index[k], None]),
    "index_put": call(_MATRIX, [index[k]], x[k, m], True),
    "index_select": call(_MATRIX, 1, index[k]),
    "masked_scatter": call(_MATRIX, mask[n, m], x[n, m]),
    "nonzero": call(_MATRIX),
    "scatter.src": call(_MATRIX, 1, index[n, m], x[n, m]),
    "scatter.value": call(_MATRIX, 1, index[n, m], 2),
    "scatter_add": call(_MATRIX, 1, index[n, m], x[n, m]),
    "scatter_reduce.two": call(_MATRIX, 1, index[n, m], x[n, m], "sum"),
    # Convolution, pooling, resampling.
    "_adaptive_avg_pool2d": call(_IMAGE, [3, 2]),
    "_adaptive_avg_pool2d_backward": call(x[n, c, 3, 2], _IMAGE),
    "_adaptive_avg_pool3d": call(_VOLUME, [3, 2, 2]),
    "adaptive_avg_pool1d": call(x[n, c, w], [3]),
    "avg_pool1d": call(x[n, c, w], [3], [1], [1]),
    "avg_pool2d": call(_IMAGE, *_WINDOWS),
    "avg_pool2d_backward": call(_IMAGE, _IMAGE, *_WINDOWS, False, True, None),
    "avg_pool3d": call(_VOLUME, [3, 3, 3], [1, 1, 1], [1, 1, 1]),
    "col2im": call(x[n, 8, w], [w + 1, 2], [2, 2], [1, 1], [0, 0], [1, 1]),
    "convolution": call(_IMAGE, x[k, c, 3, 3], x[k], *_CONVOLUTION),
    "convolution_backward": call(
        x[n, k, h, w], _IMAGE, x[k, c, 3, 3], [k], *_CONVOLUTION, [True, True, True]
    ),
    "grid_sampler_2d": call(_IMAGE, x[n, k, m, 2], 0, 0, False),
    "max_pool2d_with_indices": call(_IMAGE, *_WINDOWS),
    "max_pool2d_with_indices_backward": call(
        _IMAGE, _IMAGE, *_WINDOWS, [1, 1], False, index[n, c, h, w]
    ),
    "max_pool3d_with_indices": call(_VOLUME, [3, 3, 3], [1, 1, 1], [1, 1, 1]),
    "upsample_bilinear2d.vec": call(_IMAGE, None, False, [2.0, 2.0]),
    "upsample_nearest2d.vec": call(_IMAGE, None, [2.0, 2.0]),
    # Normalisation.
    "_native_batch_norm_legit": call(_IMAGE, x[c], x[c], stat[c], stat[c], True, 0.1, 1e-5),
    "_native_batch_norm_legit.no_stats": call(_IMAGE, x[c], x[c], True, 0.1, 1e-5),
    "_native_batch_norm_legit_no_training": call(_IMAGE, x[c], x[c], stat[c], stat[c], 0.1, 1e-5),
    "native_group_norm": call(x[n, 4, h, w], x[4], x[4], n, 4, h * w, 2, 1e-5),
    "native_group_norm_backward": call(
        x[n, 4, h, w], x[n, 4, h, w], stat[n, 2], stat[n, 2], x[4], n, 4, h * w, 2, [True] * 3
    ),
    "native_layer_norm": call(_MATRIX, [m], x[m], x[m], 1e-5),
    "native_layer_norm_backward": call(
        _MATRIX, _MATRIX, [m], stat[n, 1], stat[n, 1], x[m], x[m], [True] * 3
    ),
    # Tensors out of numbers.
    "arange.start_step": call(0, n, 1, dtype=DTYPE),
    "empty.memory_format": call([n, m], dtype=DTYPE),
    "empty_strided": call([n, m], [m, 1], dtype=DTYPE),
    "full": call([n, m], 2, dtype=DTYPE),
    "full_like": call(_MATRIX, 2),
    **_same("rand randn", call([n, m], dtype=DTYPE)),
    "randperm": call(n, dtype=DTYPE),
    "scalar_tensor": call(2, dtype=DTYPE),
    # Numbers out of tensors.
    "_local_scalar_dense": call(x[()]),
    **_same("sym_is_contiguous sym_numel sym_storage_offset", call(_MATRIX)),
    **_same("sym_size.int sym_stride.int", call(_MATRIX, 0)),
    # Fourier transforms.
    "_fft_c2r": call(_MATRIX, [1], 0, 2 * (m - 1)),
    # Half precision makes PyTorch warn on standard error before it is refused.
    "_fft_r2c": replace(call(_MATRIX, [1], 0, True), dtypes=(torch.float32, torch.float64)),
}
CALLS: dict[str, Call] = {
    f"aten.{name}" if "." in name else f"aten.{name}.default": row for name, row in _ROWS.items()
}
