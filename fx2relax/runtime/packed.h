// Weights in oneDNN's or MKL's own order, and calls that take them.
//
// `pack_*` makes an object of TVM that holds such a weight, once for a weight. `packed_*` and
// `new_conv*` return a tensor that PyTorch has allocated: its operators cannot write into one
// that is given.
#pragma once

#include <ATen/Config.h>
#include <torch/csrc/inductor/aoti_torch/c/shim_cpu.h>
#include <torch/csrc/stable/c/shim.h>

#include "calls.h"
#include "tensors.h"

namespace fx2relax {
namespace packed {

struct Weight {
  TVMFFIObject header;
  AtenTensorHandle tensor;
};

inline void free_weight(void* self, int flags) {
  Weight* weight = static_cast<Weight*>(self);
  if (flags & kTVMFFIObjectDeleterFlagBitMaskStrong) aoti_torch_delete_tensor_object(weight->tensor);
  if (flags & kTVMFFIObjectDeleterFlagBitMaskWeak) delete weight;
}

inline int32_t weight_type() {
  static const TVMFFIByteArray name{"fx2relax.PackedWeight", 21};
  static const int32_t index = TVMFFITypeGetOrAllocIndex(&name, -1, 1, 0, 0, kTVMFFIObject);
  return index;
}

inline void give_weight(Tensor tensor, TVMFFIAny* result) {
  Weight* weight = new Weight{};
  weight->header.combined_ref_count = (uint64_t{1} << 32) | 1;  // one strong, one weak
  weight->header.type_index = weight_type();
  weight->header.deleter = free_weight;
  weight->tensor = tensor.release();
  result->type_index = weight->header.type_index;
  result->zero_padding = 0;
  result->v_obj = &weight->header;
}

inline AtenTensorHandle weight(const TVMFFIAny& value) {
  require(value.type_index == weight_type());
  return reinterpret_cast<Weight*>(value.v_obj)->tensor;
}

// A tensor of PyTorch's as one of TVM's.
struct Given {
  DLManagedTensor managed;
  Tensor tensor;
  int64_t sizes[kMaxRank];
  int64_t strides[kMaxRank];
};

// `view` says what the tensor is, `data` apart.
inline void give_tensor(Tensor tensor, const View& view, TVMFFIAny* result) {
  Given* given = new Given{};
  std::memcpy(given->sizes, view.sizes, sizeof(given->sizes));
  View compact = view;
  compact.set_compact();
  std::memcpy(given->strides, compact.strides, sizeof(given->strides));
  DLTensor& made = given->managed.dl_tensor;
  void* data = nullptr;
  AOTITorchError code = aoti_torch_get_data_ptr(tensor, &data);
  given->tensor = std::move(tensor);
  made.data = data;
  made.device = DLDevice{kDLCPU, 0};
  made.ndim = view.rank;
  made.dtype = view.dtype;
  made.shape = given->sizes;
  made.strides = given->strides;
  given->managed.manager_ctx = given;
  given->managed.deleter = [](DLManagedTensor* self) {
    delete static_cast<Given*>(self->manager_ctx);
  };
  TVMFFIObjectHandle object = nullptr;
  if (code != AOTI_TORCH_SUCCESS ||
      TVMFFITensorFromDLPack(&given->managed, 0, 0, &object) != 0) {
    delete given;
    throw Declined();
  }
  result->type_index = kTVMFFITensor;
  result->zero_padding = 0;
  result->v_obj = static_cast<TVMFFIObject*>(object);
}

// Gives `tensor` with its axes in the order of its memory that is wanted: (n, c, ...), or, with
// the channels last, (n, ..., c). It is copied where it lies otherwise.
inline void give_convolved(Tensor tensor, const View& x, bool last, TVMFFIAny* result) {
  int64_t *sizes = nullptr, *strides = nullptr;
  check(aoti_torch_get_sizes(tensor, &sizes));
  check(aoti_torch_get_strides(tensor, &strides));
  View made;
  made.rank = x.rank;
  made.dtype = x.dtype;
  std::memcpy(made.sizes, sizes, sizeof(int64_t) * x.rank);
  std::memcpy(made.strides, strides, sizeof(int64_t) * x.rank);
  if (last) made.channels_to_end();
  if (!made.compact()) {
    View wanted = made;
    wanted.set_compact();
    View order = wanted;
    if (last) order.channels_to_front();
    Tensor copy = empty(order.rank, order.sizes, order.strides, dtype_code(x.dtype));
    check(aoti_torch_copy_(copy, tensor, 0));
    tensor = std::move(copy);
  }
  give_tensor(std::move(tensor), made, result);
}

// As conv*d of calls.h, without the output: x, weight, an optional bias, settings.
template <bool last>
void new_convolution(const TVMFFIAny* arguments, int count, TVMFFIAny* result) {
  require(count == 3 || count == 4);
  const auto laid = last ? from_last : view;
  View x = laid(arguments[0]), weight = laid(arguments[1]);
  Settings settings(arguments[count - 1], x.rank);
  require(weight.same_dtype(x));
  Tensor bias;
  if (count == 4) bias = as_dtype(view(arguments[2]), x);
  give_convolved(settings.convolve(x.tensor(), weight.tensor(), bias), x, last, result);
}

// As conv*d_weight of calls.h, without the output.
inline void new_weight_gradient(const TVMFFIAny* arguments, int count, TVMFFIAny* result) {
  require(count == 4);
  View x = view(arguments[0]), gradient = view(arguments[1]);
  Settings settings(arguments[2], x.rank);
  const TVMFFIShapeCell& sizes = integers(arguments[3]);
  require(gradient.same_dtype(x) && static_cast<int64_t>(sizes.size) == x.rank);
  View weight = x;
  std::memcpy(weight.sizes, sizes.data, sizeof(int64_t) * x.rank);
  weight.set_compact();
  Tensor like = empty(weight.rank, weight.sizes, weight.strides, dtype_code(x.dtype));
  give_convolved(settings.backward(x.tensor(), gradient.tensor(), like), x, false, result);
}

#if AT_MKLDNN_ENABLED()

inline StableIValue list(const int64_t* values, int64_t count) {
  StableListHandle made = nullptr;
  check(torch_new_list_reserve_size(count, &made));
  for (int64_t n = 0; n < count; ++n) check(torch_list_push_back(made, boxed(values[n])));
  return boxed(made);
}

// A weight (o, i / groups, ...), the settings of its convolution, and the sizes of x, (n, c, ...).
// With the channels last, the weight is (o, ..., i / groups).
template <bool last>
void pack_convolution(const TVMFFIAny* arguments, int count, TVMFFIAny* result) {
  require(count == 3);
  const View given = last ? from_last(arguments[0]) : view(arguments[0]);
  const Settings settings(arguments[1], given.rank);
  const TVMFFIShapeCell& sizes = integers(arguments[2]);
  const int64_t n = settings.n, *values = settings.values;
  require(!settings.transposed());
  StableIValue stack[] = {owned(given.tensor()),
                          list(values + n, n),
                          list(values, n),
                          list(values + 2 * n, n),
                          boxed(settings.groups()),
                          optional(list(sizes.data, sizes.size))};
  check(aoti_torch_call_dispatcher("mkldnn::_reorder_convolution_weight", "", stack));
  give_weight(returned(stack[0]), result);
}

// x, packed weight, an optional bias, settings; returns the output.
template <bool last>
void packed_convolution(const TVMFFIAny* arguments, int count, TVMFFIAny* result) {
  require(count == 3 || count == 4);
  const View given = last ? from_last(arguments[0]) : view(arguments[0]);
  const Settings settings(arguments[count - 1], given.rank);
  const int64_t n = settings.n, *values = settings.values;
  Tensor bias, made, x = given.tensor();
  if (count == 4) bias = view(arguments[2]).tensor();
  check(aoti_torch_cpu_mkldnn__convolution_pointwise(
      x, weight(arguments[1]), count == 4 ? bias.out() : nullptr, values + n, n, values, n,
      values + 2 * n, n, settings.groups(), "none", nullptr, 0, nullptr, made.out()));
  give_convolved(std::move(made), given, last, result);
}

// A weight (n, k), or (k, n) where the first setting is 0; the second is how many rows x has. MKL's
// order is for just as many.
template <bool mkl>
void pack_linear(const TVMFFIAny* arguments, int count, TVMFFIAny* result) {
  require(count == 2);
  View given = view(arguments[0]);
  const TVMFFIShapeCell& settings = integers(arguments[1]);
  require(given.rank == 2 && settings.size == 2);
  if (settings.data[0] == 0) given.swap_axes(0, 1);
  const int64_t rows = settings.data[1];
  StableIValue stack[] = {owned(given.tensor()), mkl ? boxed(rows) : optional(rows)};
  const char* reorder = mkl ? "mkl::_mkl_reorder_linear_weight" : "mkldnn::_reorder_linear_weight";
  check(aoti_torch_call_dispatcher(reorder, "", stack));
  give_weight(returned(stack[0]), result);
}

// x (..., k), packed weight, an optional bias (n); returns (..., n).
inline void packed_linear(const TVMFFIAny* arguments, int count, TVMFFIAny* result) {
  require(count == 2 || count == 3);
  View x = view(arguments[0]);
  require(x.rank >= 2 && x.compact());
  AtenTensorHandle right = weight(arguments[1]);
  Tensor bias, made, rows = x.flat(1).tensor();
  if (count == 3) bias = view(arguments[2]).tensor();
  check(aoti_torch_cpu__linear_pointwise(rows, right, count == 3 ? bias.out() : nullptr, "none",
                                         nullptr, 0, nullptr, made.out()));
  check(aoti_torch_get_size(made, 1, &x.sizes[x.rank - 1]));
  give_tensor(std::move(made), x, result);
}

#if AT_MKL_ENABLED()

// x (..., k), packed weight, an optional bias (n), and the sizes: rows of x, n, k.
inline void packed_linear_mkl(const TVMFFIAny* arguments, int count, TVMFFIAny* result) {
  require(count == 3 || count == 4);
  View x = view(arguments[0]);
  const TVMFFIShapeCell& settings = integers(arguments[count - 1]);
  require(x.rank >= 2 && x.compact() && settings.size == 3);
  const int64_t rows = settings.data[0], n = settings.data[1], k = settings.data[2];
  View flat = x.flat(1);
  require(flat.sizes[0] == rows && flat.sizes[1] == k);
  // What the weight was before it was packed is asked for its sizes alone.
  View origin = flat;
  origin.sizes[0] = n;
  origin.strides[0] = origin.strides[1] = 0;
  AtenTensorHandle right = weight(arguments[1]);
  Tensor bias, made, left = flat.tensor(), sizes = origin.tensor();
  if (count == 4) bias = view(arguments[2]).tensor();
  check(aoti_torch_cpu__mkl_linear(left, right, sizes, count == 4 ? bias.out() : nullptr, rows,
                                   made.out()));
  x.sizes[x.rank - 1] = n;
  give_tensor(std::move(made), x, result);
}

#endif
#endif

}  // namespace packed

inline void define_packed() {
  for (const char* name : {"new_conv1d", "new_conv2d", "new_conv3d"}) {
    define(name, packed::new_convolution<false>);
  }
  define("new_conv2d_nhwc", packed::new_convolution<true>);
  for (const char* name : {"new_conv1d_weight", "new_conv2d_weight", "new_conv3d_weight"}) {
    define(name, packed::new_weight_gradient);
  }
#if AT_MKLDNN_ENABLED()
  define("pack_conv", packed::pack_convolution<false>);
  define("pack_conv_nhwc", packed::pack_convolution<true>);
  define("packed_conv", packed::packed_convolution<false>);
  define("packed_conv_nhwc", packed::packed_convolution<true>);
  define("pack_linear", packed::pack_linear<false>);
  define("packed_linear", packed::packed_linear);
#if AT_MKL_ENABLED()
  define("pack_linear_mkl", packed::pack_linear<true>);
  define("packed_linear_mkl", packed::packed_linear_mkl);
#endif
#endif
}

}  // namespace fx2relax
