// DLPack tensors as PyTorch's, through libtorch's C shim, and packed functions of TVM's C ABI.
//
// Nothing here needs the C++ ABI of either library.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <tvm/ffi/c_api.h>

namespace fx2relax {

// Thrown where PyTorch raised, or where a call is none for this helper: the Python function of the
// same name is then called instead. It raises PyTorch's own error, or does the work.
struct Declined {};
struct Failed : Declined {};  // PyTorch raised, and keeps what it said

inline void require(bool holds) {
  if (!holds) throw Declined();
}

inline void check(AOTITorchError code) {
  if (code != AOTI_TORCH_SUCCESS) throw Failed();
}

// An owned tensor.
class Tensor {
 public:
  Tensor() = default;
  explicit Tensor(AtenTensorHandle handle) : handle_(handle) {}
  Tensor(Tensor&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Tensor& operator=(Tensor&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;
  ~Tensor() {
    if (handle_ != nullptr) aoti_torch_delete_tensor_object(handle_);
  }
  operator AtenTensorHandle() const { return handle_; }
  explicit operator bool() const { return handle_ != nullptr; }
  AtenTensorHandle* out() { return &handle_; }
  AtenTensorHandle release() { return std::exchange(handle_, nullptr); }

 private:
  AtenTensorHandle handle_ = nullptr;
};

inline int32_t dtype_code(DLDataType dtype) {
  require(dtype.lanes == 1);
  switch (dtype.code << 8 | dtype.bits) {
    case kDLFloat << 8 | 16: return aoti_torch_dtype_float16();
    case kDLFloat << 8 | 32: return aoti_torch_dtype_float32();
    case kDLFloat << 8 | 64: return aoti_torch_dtype_float64();
    case kDLBfloat << 8 | 16: return aoti_torch_dtype_bfloat16();
    case kDLBool << 8 | 8: return aoti_torch_dtype_bool();
    case kDLInt << 8 | 32: return aoti_torch_dtype_int32();
    case kDLInt << 8 | 64: return aoti_torch_dtype_int64();
    default: throw Declined();
  }
}

constexpr int kMaxRank = 8;

// Where a tensor lies: sizes and strides in elements, which can be viewed otherwise for nothing.
struct View {
  void* data = nullptr;
  int rank = 0;
  DLDataType dtype{};
  int64_t sizes[kMaxRank];
  int64_t strides[kMaxRank];

  int64_t size(int axis) const { return sizes[axis < 0 ? axis + rank : axis]; }

  int64_t count() const {
    int64_t product = 1;
    for (int n = 0; n < rank; ++n) product *= sizes[n];
    return product;
  }

  bool same_dtype(const View& other) const {
    return dtype.code == other.dtype.code && dtype.bits == other.dtype.bits;
  }

  bool compact() const {
    if (count() == 0) return true;
    int64_t expected = 1;
    for (int n = rank - 1; n >= 0; --n) {
      if (sizes[n] != 1 && strides[n] != expected) return false;
      expected *= sizes[n];
    }
    return true;
  }

  void swap_axes(int a, int b) {
    std::swap(sizes[a], sizes[b]);
    std::swap(strides[a], strides[b]);
  }

  // A first axis of one.
  void prepend() {
    require(rank < kMaxRank);
    for (int n = rank; n > 0; --n) {
      sizes[n] = sizes[n - 1];
      strides[n] = strides[n - 1];
    }
    sizes[0] = 1;
    strides[0] = rank > 0 ? sizes[1] * strides[1] : 1;
    ++rank;
  }

  // From (n, ..., c) to (n, c, ...).
  void channels_to_front() {
    for (int n = rank - 1; n > 1; --n) swap_axes(n - 1, n);
  }

  void channels_to_end() {
    for (int n = 1; n + 1 < rank; ++n) swap_axes(n, n + 1);
  }

  // All axes but the last `kept` as one; the tensor has to be compact.
  View flat(int kept) const {
    require(compact());
    View result = *this;
    result.rank = kept + 1;
    int64_t rows = 1;
    for (int n = 0; n < rank - kept; ++n) rows *= sizes[n];
    result.sizes[0] = rows;
    for (int n = 0; n < kept; ++n) result.sizes[n + 1] = sizes[rank - kept + n];
    result.set_compact();
    return result;
  }

  void set_compact() {
    int64_t stride = 1;
    for (int n = rank - 1; n >= 0; --n) {
      strides[n] = stride;
      stride *= sizes[n] > 0 ? sizes[n] : 1;
    }
  }

  Tensor tensor() const {
    Tensor result;
    check(aoti_torch_create_tensor_from_blob_v2(
        data, rank, sizes, strides, 0, dtype_code(dtype), aoti_torch_device_type_cpu(), 0,
        result.out(), aoti_torch_layout_strided(), nullptr, 0));
    return result;
  }
};

inline View view(const TVMFFIAny& value) {
  const DLTensor* given;
  if (value.type_index == kTVMFFITensor) {
    given = TVMFFITensorGetDLTensorPtr(value.v_obj);
  } else {
    require(value.type_index == kTVMFFIDLTensorPtr);
    given = static_cast<const DLTensor*>(value.v_ptr);
  }
  require(given->device.device_type == kDLCPU && given->ndim <= kMaxRank);
  View result;
  result.data = static_cast<char*>(given->data) + given->byte_offset;
  result.rank = given->ndim;
  result.dtype = given->dtype;
  for (int n = 0; n < result.rank; ++n) result.sizes[n] = given->shape[n];
  // Strides of a tensor of no elements say nothing, and TVM counts them its own way.
  if (given->strides == nullptr || result.count() == 0) {
    result.set_compact();
  } else {
    for (int n = 0; n < result.rank; ++n) result.strides[n] = given->strides[n];
  }
  return result;
}

inline const TVMFFIShapeCell& integers(const TVMFFIAny& value) {
  require(value.type_index == kTVMFFIShape);
  return *TVMFFIShapeGetCellPtr(value.v_obj);
}

inline double number(const TVMFFIAny& value) {
  if (value.type_index == kTVMFFIInt) return static_cast<double>(value.v_int64);
  require(value.type_index == kTVMFFIFloat);
  return value.v_float64;
}

// A compact tensor of PyTorch's own memory.
inline Tensor empty(int rank, const int64_t* sizes, const int64_t* strides, int32_t dtype) {
  Tensor result;
  check(aoti_torch_empty_strided(rank, sizes, strides, dtype, aoti_torch_device_type_cpu(), 0,
                                 result.out()));
  return result;
}

// `view` as a tensor of another dtype: a copy, unless it has that dtype.
inline Tensor as_dtype(const View& view, const View& like) {
  if (view.same_dtype(like)) return view.tensor();
  require(view.rank == 0 || view.strides[view.rank - 1] >= 0);
  Tensor result = empty(view.rank, view.sizes, view.strides, dtype_code(like.dtype));
  check(aoti_torch_copy_(result, view.tensor(), 0));
  return result;
}

// Copies a result to where the caller wants it: memory without gaps.
inline void deliver(const View& out, const Tensor& result) {
  constexpr int64_t kSmall = 1 << 15;
  int64_t* strides = nullptr;
  check(aoti_torch_get_strides(result, &strides));
  bool same = out.count() <= kSmall;
  for (int n = 0; n < out.rank && same; ++n) {
    same = out.sizes[n] == 1 || strides[n] == out.strides[n];
  }
  if (!same) {
    check(aoti_torch_copy_(out.tensor(), result, 0));
    return;
  }
  void* data = nullptr;
  check(aoti_torch_get_data_ptr(result, &data));
  if (out.count() > 0) std::memcpy(out.data, data, out.count() * (out.dtype.bits / 8));
}

// A value on the dispatcher's stack. What is optional lies on the heap, and is taken over.
template <typename T>
StableIValue boxed(T value) {
  StableIValue result = 0;
  std::memcpy(&result, &value, sizeof(value));
  return result;
}

template <typename T>
StableIValue optional(T value) {
  return boxed(new StableIValue(boxed(value)));
}

// The dispatcher takes over what it is given.
inline StableIValue owned(Tensor tensor) { return boxed(tensor.release()); }

// What the dispatcher left on its stack.
inline Tensor returned(const StableIValue& value) {
  AtenTensorHandle handle;
  std::memcpy(&handle, &value, sizeof(handle));
  return Tensor(handle);
}

using Function = void (*)(const TVMFFIAny* arguments, int count, TVMFFIAny* result);

// Registers a packed function, of a name after "fx2relax.library."; what it declines goes to the function of that name before it.
int define(const char* name, Function function);

}  // namespace fx2relax
