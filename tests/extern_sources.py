"""C++ kernels that several tests take, as one source."""

from __future__ import annotations

import torch

from fx2relax import extern
from fx2relax.extern import ExternFunction
from fx2relax.spec import Tensor

CODE = r"""
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>

#include <stdexcept>

namespace ffi = tvm::ffi;

namespace {

template <typename T>
void scale(ffi::TensorView x, double factor, ffi::TensorView y) {
  const T* from = static_cast<const T*>(x.data_ptr());
  T* to = static_cast<T*>(y.data_ptr());
  for (int64_t i = 0; i < x.numel(); ++i) to[i] = static_cast<T>(from[i] * factor);
}

// Sum and largest of each row; no row is empty.
void rows(DLTensor* x, DLTensor* sums, DLTensor* places) {
  const float* from = static_cast<const float*>(x->data);
  for (int64_t i = 0; i < x->shape[0]; ++i) {
    float sum = 0;
    int64_t best = 0;
    for (int64_t j = 0; j < x->shape[1]; ++j) {
      float value = from[i * x->shape[1] + j];
      sum += value;
      if (value > from[i * x->shape[1] + best]) best = j;
    }
    static_cast<float*>(sums->data)[i] = sum;
    static_cast<int64_t*>(places->data)[i] = best;
  }
}

// x[n, m] with k columns of zeros at its right, and a bias where there is one.
void widen(ffi::TensorView x, ffi::Optional<ffi::Tensor> bias, int64_t k, bool negate,
           ffi::TensorView y) {
  int64_t n = x.size(0), m = x.size(1);
  const float* from = static_cast<const float*>(x.data_ptr());
  float* to = static_cast<float*>(y.data_ptr());
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < m + k; ++j) {
      float value = j < m ? from[i * m + j] : 0;
      if (bias.has_value()) value += static_cast<const float*>((*bias).data_ptr())[j];
      to[i * (m + k) + j] = negate ? -value : value;
    }
  }
}

int sum_all(DLTensor* x, DLTensor* y) {
  float sum = 0;
  for (int64_t i = 0; i < x->shape[0]; ++i) sum += static_cast<const float*>(x->data)[i];
  *static_cast<float*>(y->data) = sum;
  return 0;
}

void refuse(ffi::TensorView x, ffi::TensorView y) { TVM_FFI_THROW(ValueError) << "no such thing"; }
void crash(ffi::TensorView x, ffi::TensorView y) { throw std::runtime_error("out of luck"); }

}  // namespace

// Generated kernels are called `add` too.
TVM_FFI_DLL_EXPORT_TYPED_FUNC(add, scale<float>);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(scale_f64, scale<double>);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(rows, rows);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(widen, widen);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(sum_all, sum_all);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(refuse, refuse);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(crash, crash);
"""

N, M = ("n",), ("n", "m")
SCALE = ExternFunction([Tensor(M), float], Tensor(M))
FUNCTIONS = {
    "scale": SCALE.for_dtypes({"float32": "add", "float64": "scale_f64"}),
    "rows": ExternFunction([Tensor(M)], (Tensor(N), Tensor(N, "int64"))),
    # A size that an int names.
    "widen": ExternFunction([Tensor(M), Tensor(("w",)), "k", bool], Tensor(("n", "w"))),
    "sum_all": ExternFunction([Tensor(N)], Tensor(())),
    "refuse": ExternFunction([Tensor(N)], Tensor(N)),
    "crash": ExternFunction([Tensor(N)], Tensor(N)),
}

HEAD = "#include <tvm/ffi/container/tensor.h>\n#include <tvm/ffi/function.h>\n"
COPY = """
static void copy(tvm::ffi::TensorView x, tvm::ffi::TensorView y) {{ {body} }}
TVM_FFI_DLL_EXPORT_TYPED_FUNC({symbol}, copy);
"""
ONE = ExternFunction([Tensor(N)], Tensor(N))


def small(symbol: str, body: str = "", extra: str = "", **kwargs):
    """A source of one kernel of one axis."""
    code = HEAD + extra + COPY.format(symbol=symbol, body=body)
    return extern.source(code, functions={symbol: ONE}, **kwargs)


#: The body of a kernel that fills its result.
FILL = "for (int64_t i = 0; i < x.numel(); ++i) static_cast<float*>(y.data_ptr())[i] = {};"


def kernels() -> extern.Kernels:
    """The source's kernels; compiled once on this machine."""
    return extern.source(CODE, functions=FUNCTIONS, name="kernels.cpp")


def traced() -> torch.fx.GraphModule:
    return torch.fx.symbolic_trace(lambda x: (x + x).erfinv() + 1)
