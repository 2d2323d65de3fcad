// Packed functions of TVM's C ABI, each with the Python function that it stands in for.

#include <atomic>
#include <string>

#include "calls.h"
#include "lstm.h"
#include "packed.h"
#include "rows.h"
#include "tensors.h"

namespace fx2relax {
namespace {

// How many calls have been left to Python.
std::atomic<int64_t> declined{0};

struct Entry {
  Function function;
  TVMFFIObjectHandle fallback;
};

// What PyTorch said last; only releases that know this name of one tell.
const char* message() {
#if defined(TORCH_VERSION_2_13_0) && TORCH_FEATURE_VERSION >= TORCH_VERSION_2_13_0
  return torch_exception_get_what_without_backtrace();
#else
  return "PyTorch's kernel has failed";
#endif
}

int leave(const Entry& entry, const TVMFFIAny* arguments, int32_t count, TVMFFIAny* result,
          const char* message) {
  ++declined;
  if (entry.fallback != nullptr) {
    return TVMFFIFunctionCall(entry.fallback, const_cast<TVMFFIAny*>(arguments), count, result);
  }
  TVMFFIErrorSetRaisedFromCStr("RuntimeError", message);
  return -1;
}

int call(void* self, const TVMFFIAny* arguments, int32_t count, TVMFFIAny* result) {
  const Entry& entry = *static_cast<const Entry*>(self);
  try {
    entry.function(arguments, count, result);
    return 0;
  } catch (const Failed&) {
    return leave(entry, arguments, count, result, message());
  } catch (...) {
    return leave(entry, arguments, count, result, "arguments that a packed weight does not take");
  }
}

}  // namespace

int define(const char* name, Function function) {
  const std::string full = std::string("fx2relax.library.") + name;
  TVMFFIByteArray key{full.data(), full.size()};
  // Both live as long as the process: so does the table of functions.
  Entry* entry = new Entry{function, nullptr};
  if (TVMFFIFunctionGetGlobal(&key, &entry->fallback) != 0) entry->fallback = nullptr;
  TVMFFIObjectHandle made = nullptr;
  if (TVMFFIFunctionCreate(entry, call, nullptr, &made) != 0) return -1;
  int code = TVMFFIFunctionSetGlobal(&key, made, 1);
  TVMFFIObjectDecRef(made);
  return code;
}

}  // namespace fx2relax

extern "C" int64_t fx2relax_declined() { return fx2relax::declined; }

extern "C" int fx2relax_register() {
  try {
    fx2relax::define_calls();
    fx2relax::define_rows();
    fx2relax::define_packed();
    fx2relax::define_lstm();
    return 0;
  } catch (...) {
    return -1;
  }
}
