// The functions of library.py: the same operators of PyTorch on the same tensors, and so the same
// bits, without Python. What is rare is declined.
#pragma once

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

#include "tensors.h"

namespace fx2relax {
namespace {

bool same_batch(const View& a, const View& b) {
  if (a.rank != b.rank || a.rank < 3) return false;
  for (int n = 0; n < a.rank - 2; ++n) {
    if (a.sizes[n] != b.sizes[n]) return false;
  }
  return true;
}

// A product of two matrices, with a vector added to its rows where there is one.
inline void multiply(const View& a, const View& b, const View& out, const TVMFFIAny* bias) {
  Tensor first = a.tensor(), second = b.tensor(), result = out.tensor();
  if (bias == nullptr) {
    check(aoti_torch_cpu_mm_out(result, first, second));
    return;
  }
  Tensor added = as_dtype(view(*bias), out);
  check(aoti_torch_cpu_addmm_out(result, added, first, second, 1.0, 1.0));
}

// `a @ b`, or `a @ b + bias` with a vector for the last axis; each may come transposed.
template <bool left, bool right>
void matmul(const TVMFFIAny* arguments, int count, TVMFFIAny*) {
  require(count == 3 || count == 4);
  View a = view(arguments[0]), b = view(arguments[1]), out = view(arguments[count - 1]);
  Tensor cast_a, cast_b;
  const bool cast = !a.same_dtype(out);
  require(a.same_dtype(b) && out.compact() && !(cast && !(a.compact() && b.compact())));
  if (cast) {
    cast_a = as_dtype(a, out);
    cast_b = as_dtype(b, out);
    for (auto pair : {std::make_pair(&a, &cast_a), std::make_pair(&b, &cast_b)}) {
      check(aoti_torch_get_data_ptr(*pair.second, &pair.first->data));
      pair.first->dtype = out.dtype;
    }
  }
  if (a.rank == 1 && b.rank == 2 && !left) {
    a.prepend();
    out.prepend();
  }
  const bool rows = b.rank == 2 && a.rank >= 2 && !left;
  const bool batches = !rows && same_batch(a, b) && (a.rank == 3 || (a.compact() && b.compact()));
  View flat = out;
  if (rows) {
    if (a.rank > 2) {
      a = a.flat(1);
      flat = out.flat(1);
    }
  } else if (batches && a.rank > 3) {
    a = a.flat(2);
    b = b.flat(2);
    flat = out.flat(2);
  }
  if (left && a.rank > 1) a.swap_axes(a.rank - 2, a.rank - 1);
  if (right && b.rank > 1) b.swap_axes(b.rank - 2, b.rank - 1);
  require(!(left && a.rank < 2) && !(right && b.rank < 2));
  if (rows) {
    multiply(a, b, flat, count == 4 ? &arguments[2] : nullptr);
    return;
  }
  if (batches) {
    check(aoti_torch_cpu_bmm_out(flat.tensor(), a.tensor(), b.tensor()));
  } else {
    StableIValue stack[] = {owned(a.tensor()), owned(b.tensor()), owned(out.tensor())};
    check(aoti_torch_call_dispatcher("aten::matmul", "out", stack));
    returned(stack[0]);
  }
  if (count == 4) {
    Tensor sum;
    check(aoti_torch_cpu_add_Tensor(out.tensor(), view(arguments[2]).tensor(), 1.0, sum.out()));
    check(aoti_torch_copy_(out.tensor(), sum, 0));
  }
}

// A tensor whose second axis is its last in memory, as it is written.
inline View from_last(const TVMFFIAny& value) {
  View result = view(value);
  require(result.rank == 4);
  result.channels_to_front();
  return result;
}

// Settings: strides, padding, dilation and output padding per axis, groups, transposed.
struct Settings {
  int64_t n;
  const int64_t* values;

  Settings(const TVMFFIAny& given, int rank) : n(rank - 2), values(integers(given).data) {
    require(n >= 1 && static_cast<int64_t>(integers(given).size) == 4 * n + 2);
  }

  bool transposed() const { return values[4 * n + 1] != 0; }
  int64_t groups() const { return values[4 * n]; }

  Tensor convolve(AtenTensorHandle x, AtenTensorHandle weight, Tensor& bias) const {
    Tensor result;
    check(aoti_torch_cpu_convolution(x, weight, bias ? bias.out() : nullptr, values, n, values + n,
                                     n, values + 2 * n, n, transposed(), values + 3 * n, n,
                                     groups(), result.out()));
    return result;
  }

  // The gradient of a weight, of whose values nothing is read.
  Tensor backward(AtenTensorHandle x, AtenTensorHandle gradient, AtenTensorHandle weight) const {
    static const int32_t wanted[] = {0, 1, 0};
    Tensor none, result, neither;
    check(aoti_torch_cpu_convolution_backward(
        gradient, x, weight, nullptr, 0, values, n, values + n, n, values + 2 * n, n, transposed(),
        values + 3 * n, n, groups(), wanted, 3, none.out(), result.out(), neither.out()));
    return result;
  }
};

// Whether each place of the output is a product of the channels of the same place.
inline bool pointwise(const View& weight, const Settings& settings) {
  if (settings.transposed() || settings.groups() != 1) return false;
  for (int64_t n = 0; n < settings.n; ++n) {
    if (weight.sizes[n + 2] != 1 || settings.values[n] != 1) return false;
    if (settings.values[settings.n + n] != 0) return false;
  }
  return true;
}

// Such a convolution of one dtype as a product, which writes into what it is given.
inline bool multiplied(const TVMFFIAny* arguments, int count) {
  View x = view(arguments[0]), weight = view(arguments[1]), out = view(arguments[count - 1]);
  Settings settings(arguments[count - 2], x.rank);
  if (!pointwise(from_last(arguments[1]), settings)) return false;
  if (!x.same_dtype(out) || !x.compact() || !weight.compact() || out.count() == 0) return false;
  View rows = x.flat(1), matrix = weight.flat(1), written = out.flat(1);
  matrix.swap_axes(0, 1);
  multiply(rows, matrix, written, count == 5 ? &arguments[2] : nullptr);
  return true;
}

template <bool last>
void convolution(const TVMFFIAny* arguments, int count, TVMFFIAny*) {
  require(count == 4 || count == 5);
  if (last && multiplied(arguments, count)) return;
  const auto laid = last ? from_last : view;
  require(view(arguments[count - 1]).compact());
  View out = laid(arguments[count - 1]), x = laid(arguments[0]);
  Settings settings(arguments[count - 2], x.rank);
  Tensor weight = as_dtype(laid(arguments[1]), out), bias;
  if (count == 5) bias = as_dtype(view(arguments[2]), out);
  deliver(out, settings.convolve(as_dtype(x, out), weight, bias));
}

// x, the gradient of the output of its convolution, settings, the sizes of the weight.
void weight_gradient(const TVMFFIAny* arguments, int count, TVMFFIAny*) {
  require(count == 5);
  View out = view(arguments[4]), x = view(arguments[0]), gradient = view(arguments[1]);
  require(out.compact());
  Settings settings(arguments[2], x.rank);
  deliver(out, settings.backward(as_dtype(x, out), as_dtype(gradient, out), out.tensor()));
}

// Queries, keys, values as (batch, sequence, heads, size), or heads first where a bit says so.
// Settings: the causal mask (0 none, 1 from the top left, 2 from the bottom right) and the bits.
void attention(const TVMFFIAny* arguments, int count, TVMFFIAny*) {
  require(count == 6 || count == 7);
  const bool masked = count == 7;
  const TVMFFIShapeCell& settings = integers(arguments[count - 3]);
  require(settings.size == 2);
  const int64_t causal = settings.data[0], order = settings.data[1];
  require(causal == 0 || (causal == 1 && !masked));
  View operands[3], out = view(arguments[count - 1]);
  require(out.compact() && out.rank == 4);
  for (int n = 0; n < 3; ++n) {
    operands[n] = view(arguments[n]);
    require(operands[n].rank == 4);
    if (!(order >> n & 1)) operands[n].swap_axes(1, 2);
  }
  StableIValue mask = boxed(static_cast<StableIValue*>(nullptr));
  if (masked) mask = optional(as_dtype(view(arguments[3]), operands[0]).release());
  const bool grouped = operands[0].sizes[1] != operands[1].sizes[1];
  StableIValue stack[] = {owned(operands[0].tensor()),
                          owned(operands[1].tensor()),
                          owned(operands[2].tensor()),
                          mask,
                          boxed(0.0),
                          boxed(causal == 1),
                          optional(number(arguments[count - 2])),
                          boxed(grouped)};
  check(aoti_torch_call_dispatcher("aten::scaled_dot_product_attention", "", stack));
  Tensor heads = returned(stack[0]), result;
  int64_t *sizes = nullptr, *strides = nullptr, offset = 0;
  check(aoti_torch_get_sizes(heads, &sizes));
  check(aoti_torch_get_strides(heads, &strides));
  check(aoti_torch_get_storage_offset(heads, &offset));
  const int64_t turned[] = {sizes[0], sizes[2], sizes[1], sizes[3]};
  const int64_t steps[] = {strides[0], strides[2], strides[1], strides[3]};
  check(aoti_torch__reinterpret_tensor(heads, 4, turned, steps, offset, result.out()));
  deliver(out, result);
}

}  // namespace

void define_calls() {
  define("matmul_nn", matmul<false, false>);
  define("matmul_nt", matmul<false, true>);
  define("matmul_tn", matmul<true, false>);
  define("matmul_tt", matmul<true, true>);
  define("conv1d", convolution<false>);
  define("conv2d", convolution<false>);
  define("conv3d", convolution<false>);
  define("conv2d_nhwc", convolution<true>);
  for (const char* name : {"conv1d_weight", "conv2d_weight", "conv3d_weight"}) {
    define(name, weight_gradient);
  }
  define("attention", attention);
}

}  // namespace fx2relax
