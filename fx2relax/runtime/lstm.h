// LSTMs by oneDNN's layer, one direction at a time, with weights as they lie or packed.
#pragma once

#include "packed.h"

namespace fx2relax {

#if AT_MKLDNN_ENABLED()

namespace lstm {

constexpr int64_t kLstm = 2;  // among oneDNN's kinds of layers

// An array of what lies in `items`, which it takes over.
inline void give_array(TVMFFIAny* items, int count, TVMFFIAny* result) {
  static const TVMFFIByteArray name{"ffi.Array", 9};
  static TVMFFIObjectHandle make = nullptr;
  int code = make == nullptr ? TVMFFIFunctionGetGlobal(&name, &make) : 0;
  if (code == 0) code = TVMFFIFunctionCall(make, items, count, result);
  for (int n = 0; n < count; ++n) TVMFFIObjectDecRef(items[n].v_obj);
  if (code != 0) throw Declined();
}

// As new_lstm of library.py; each weight may be packed.
inline void layer(const TVMFFIAny* arguments, int count, TVMFFIAny* result) {
  constexpr int kTensors = 7, kStates = 5;
  require(count == kTensors + 1);
  View views[kTensors];
  Tensor own[kTensors];
  AtenTensorHandle handles[kTensors];
  for (int n = 0; n < kTensors; ++n) {
    const bool packed = arguments[n].type_index == packed::weight_type();
    require(!packed || n == 1 || n == 2);
    if (packed) {
      handles[n] = packed::weight(arguments[n]);
    } else {
      views[n] = view(arguments[n]);
      require(views[n].compact());
      own[n] = views[n].tensor();
      handles[n] = own[n];
    }
  }
  View &y = views[0], &h = views[kStates], &c = views[kStates + 1];
  const TVMFFIShapeCell& settings = integers(arguments[kTensors]);
  require(settings.size == 2 && y.rank == 3 && h.rank == 3 && c.rank == 3);
  const int64_t size = c.sizes[2], features[] = {y.sizes[2], size};
  const bool biased = settings.data[1] != 0;
  for (int n = 1; n < (biased ? kStates : 3); ++n) {  // PyTorch reads as much as there should be
    if (own[n]) require(views[n].count() == 4 * size * (n < 3 ? features[n - 1] : 1));
  }
  Tensor made[3], workspace;
  check(aoti_torch_cpu_mkldnn_rnn_layer(
      handles[0], handles[1], handles[2], handles[3], handles[4], handles[5], handles[6],
      settings.data[0] != 0, nullptr, 0, kLstm, size, 1, biased, 0, 0, 0,
      made[0].out(), made[1].out(), made[2].out(), workspace.out()));
  y.sizes[2] = h.sizes[2];
  TVMFFIAny given[3];
  packed::give_tensor(std::move(made[0]), y, &given[0]);
  packed::give_tensor(std::move(made[1]), h, &given[1]);
  packed::give_tensor(std::move(made[2]), c, &given[2]);
  give_array(given, 3, result);
}

// One of a layer's two weights. Settings: which of them, the features of the input, the size of the
// state, whether the layer is reversed, whether it has biases; where they are known, the time steps
// and the batch that its order is for.
inline void pack(const TVMFFIAny* arguments, int count, TVMFFIAny* result) {
  require(count == 2);
  View given = view(arguments[0]);
  const TVMFFIShapeCell& settings = integers(arguments[1]);
  require(given.rank == 2 && (settings.size == 5 || settings.size == 7));
  const int64_t *values = settings.data, which = values[0], features = values[1], size = values[2];
  // oneDNN is asked for both at once: the other one's elements do not matter.
  View like = given;
  like.sizes[1] = which == 0 ? size : features;
  like.set_compact();
  Tensor other = empty(like.rank, like.sizes, like.strides, dtype_code(like.dtype));
  Tensor own = given.tensor();
  Tensor& first = which == 0 ? own : other;
  Tensor& second = which == 0 ? other : own;
  StableIValue hint = boxed(static_cast<StableIValue*>(nullptr));
  if (settings.size == 7) {
    const int64_t sizes[] = {values[5], values[6], features};
    hint = optional(packed::list(sizes, 3));
  }
  StableIValue stack[] = {owned(std::move(first)),
                          owned(std::move(second)),
                          boxed(size),
                          boxed(values[3] != 0),
                          boxed(values[4] != 0),
                          boxed(false),
                          hint};
  check(aoti_torch_call_dispatcher("mkldnn::_reorder_mkldnn_rnn_layer_weight", "", stack));
  StableListHandle both;
  std::memcpy(&both, &stack[0], sizeof(both));
  Tensor made[2];
  AOTITorchError code = AOTI_TORCH_SUCCESS;
  for (int n = 0; n < 2 && code == AOTI_TORCH_SUCCESS; ++n) {
    StableIValue element;
    code = torch_list_get_item(both, n, &element);
    if (code == AOTI_TORCH_SUCCESS) made[n] = returned(element);
  }
  torch_delete_list(both);
  check(code);
  packed::give_weight(std::move(made[which]), result);
}

}  // namespace lstm

#endif

inline void define_lstm() {
#if AT_MKLDNN_ENABLED()
  define("new_lstm", lstm::layer);
  define("pack_lstm", lstm::pack);
  define("packed_lstm", lstm::layer);
#endif
}

}  // namespace fx2relax
