// What the text of CUDA kernels needs to run on a processor.
//
// The threads of a block are contexts that take turns: each runs until it waits for others. Which
// thread goes first is a setting, so that a kernel that lacks a barrier gives something else when
// the order is turned around.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <ucontext.h>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static
#define alignas(bytes) __attribute__((aligned(bytes)))
#define uint unsigned
#define uchar unsigned char
#define ushort unsigned short
#define CUDART_INF_F INFINITY
#define CUDART_INF double(INFINITY)
#define CUDART_NAN_F NAN
#define CUDART_NAN double(NAN)

// -- types ---------------------------------------------------------------------------------------

/// Two bytes that are computed with as a float is, and rounded once an operation.
template <class Bits> struct Short {
  uint16_t bits;
  Short() = default;
  template <class T, class = std::enable_if_t<std::is_arithmetic_v<T>>>
  Short(T value) : bits(Bits::rounded(value)) {}
  operator float() const { return Bits::widened(bits); }
  Short operator-() const { return Short(-float(*this)); }
  friend Short operator+(Short a, Short b) { return Short(float(a) + float(b)); }
  friend Short operator-(Short a, Short b) { return Short(float(a) - float(b)); }
  friend Short operator*(Short a, Short b) { return Short(float(a) * float(b)); }
  friend Short operator/(Short a, Short b) { return Short(float(a) / float(b)); }
};

struct HalfBits {
  static uint16_t rounded(double value) {
    _Float16 half = value;
    uint16_t bits;
    std::memcpy(&bits, &half, 2);
    return bits;
  }
  static float widened(uint16_t bits) {
    _Float16 half;
    std::memcpy(&half, &bits, 2);
    return half;
  }
};

struct BrainBits {
  static uint16_t rounded(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if (value != value) return 0x7fff;
    return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  }
  static float widened(uint16_t bits) {
    uint32_t wide = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
  }
};

using half = Short<HalfBits>;
using nv_bfloat16 = Short<BrainBits>;
inline half __float2half_rn(float value) { return half(value); }
inline nv_bfloat16 __float2bfloat16_rn(float value) { return nv_bfloat16(value); }

#define VECTORS(NAME, TYPE)                                                                        \
  struct alignas(2 * sizeof(TYPE)) NAME##2 { TYPE x, y; };                                         \
  struct alignas(4 * sizeof(TYPE)) NAME##4 { TYPE x, y, z, w; };                                   \
  inline NAME##2 make_##NAME##2(TYPE x, TYPE y) { return {x, y}; }                                 \
  inline NAME##4 make_##NAME##4(TYPE x, TYPE y, TYPE z, TYPE w) { return {x, y, z, w}; }
VECTORS(char, signed char)
VECTORS(uchar, unsigned char)
VECTORS(short, short)
VECTORS(ushort, unsigned short)
VECTORS(int, int)
VECTORS(uint, unsigned)
VECTORS(longlong, long long)
VECTORS(ulonglong, unsigned long long)
VECTORS(float, float)
VECTORS(double, double)
VECTORS(half, half)
VECTORS(nv_bfloat16, nv_bfloat16)

// -- functions -----------------------------------------------------------------------------------

/// The greater of two; of a NaN and a number the number, as on a GPU.
template <class A, class B> auto max(A a, B b) {
  using C = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<C>) return C(std::fmax(C(a), C(b)));
  else return C(a) < C(b) ? C(b) : C(a);
}
template <class A, class B> auto min(A a, B b) {
  using C = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<C>) return C(std::fmin(C(a), C(b)));
  else return C(b) < C(a) ? C(b) : C(a);
}

inline float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline unsigned __float_as_uint(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __popcll(unsigned long long bits) { return __builtin_popcountll(bits); }
inline int __clz(int bits) { return bits ? __builtin_clz(bits) : 32; }
#ifndef rsqrtf
inline float rsqrtf(float value) { return 1 / std::sqrt(value); }
inline double rsqrt(double value) { return 1 / std::sqrt(value); }
#endif

// -- memory --------------------------------------------------------------------------------------

struct Trap {};
[[noreturn]] inline void __trap() { throw Trap(); }
struct Beyond {};
struct Askew {};

/// A pointer into a tensor of known size.
template <class T> struct Checked {
  char *at, *begin, *end;
  T *inside(size_t bytes) const {
    if (at < begin || at + bytes > end) throw Beyond();
    return reinterpret_cast<T *>(at);
  }
  Checked operator+(int64_t by) const { return {at + by * int64_t(sizeof(T)), begin, end}; }
  T &operator[](int64_t index) const { return *(*this + index).inside(sizeof(T)); }
  template <class U> explicit operator U *() const {
    if (uintptr_t(at) % alignof(U)) throw Askew();
    return reinterpret_cast<U *>(inside(sizeof(U)));
  }
};

/// The memory of a thread, which holds ones before it is written to: NaN, or -1.
template <class T, int64_t N> struct Local {
  alignas(64) T items[N];
  Local() { forget(); }
  void forget() { std::memset(static_cast<void *>(items), 0xff, sizeof items); }
  Checked<T> operator+(int64_t by) {
    char *begin = reinterpret_cast<char *>(items);
    return Checked<T>{begin, begin, begin + sizeof items} + by;
  }
  T &operator[](int64_t index) { return (*this + index)[0]; }
  template <class U> explicit operator U *() { return static_cast<U *>(*this + 0); }
};

static std::vector<std::pair<void *, size_t>> shared_memory;

/// The memory of a block.
template <class T, int64_t N> struct Shared : Local<T, N> {
  Shared() { shared_memory.emplace_back(this->items, sizeof this->items); }
};

static std::vector<std::pair<char *, size_t>> tensors;

template <class T> Checked<T> within(void *pointer) {
  char *at = static_cast<char *>(pointer);
  for (auto &[begin, size] : tensors)
    if (begin <= at && at <= begin + size) return {at, begin, begin + size};
  return {at, nullptr, reinterpret_cast<char *>(~uintptr_t(0))};  // made for the launches alone
}

// -- threads -------------------------------------------------------------------------------------

struct Place { unsigned x = 0, y = 0, z = 0; };
static Place threadIdx, blockIdx;

enum class State { ready, at_block, at_warp, done };

struct Thread {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(64 << 10);
  Place place;
  State state = State::ready;
  unsigned turns = 0;  // how many exchanges it has taken part in
};

/// The threads of the block that runs.
static struct Block {
  std::vector<Thread> threads;
  ucontext_t scheduler;
  unsigned now = 0;
  bool backwards = false, trapped = false, beyond = false, askew = false;
  void (*body)(void *) = nullptr;
  void *given = nullptr;
  uint64_t exchanged[2][1024];

  void wait(State state) {
    threads[now].state = state;
    swapcontext(&threads[now].context, &scheduler);
    threadIdx = threads[now].place;
  }

  static void enter();

  /// Wake those who wait together, from one place to another; whether any did.
  bool wake(State state, unsigned begin, unsigned end) {
    bool any = false;
    for (unsigned n = begin; n < end; ++n) {
      if (threads[n].state != State::done && threads[n].state != state) return false;
      any |= threads[n].state == state;
    }
    for (unsigned n = begin; any && n < end; ++n)
      if (threads[n].state == state) threads[n].state = State::ready;
    return any;
  }

  /// Run all threads to their ends; whether they came there.
  bool run() {
    unsigned count = threads.size();
    for (auto &thread : threads) {
      getcontext(&thread.context);
      thread.context.uc_stack.ss_sp = thread.stack.data();
      thread.context.uc_stack.ss_size = thread.stack.size();
      thread.context.uc_link = &scheduler;
      thread.state = State::ready;
      thread.turns = 0;
      makecontext(&thread.context, enter, 0);
    }
    for (bool moved = true; moved && !trapped;) {
      moved = false;
      for (unsigned n = 0; n < count && !trapped; ++n) {
        now = backwards ? count - 1 - n : n;
        if (threads[now].state != State::ready) continue;
        threadIdx = threads[now].place;
        swapcontext(&scheduler, &threads[now].context);
        moved = true;
      }
      for (unsigned n = 0; n < count; n += 32)
        moved |= wake(State::at_warp, n, std::min(n + 32, count));
      moved |= wake(State::at_block, 0, count);
    }
    for (auto &thread : threads)
      if (thread.state != State::done) return false;
    return true;
  }
} block;

void Block::enter() {
  try {
    block.body(block.given);
  } catch (Trap) {
    block.trapped = true;
  } catch (Beyond) {
    block.trapped = block.beyond = true;
  } catch (Askew) {
    block.trapped = block.askew = true;
  }
  block.threads[block.now].state = State::done;
}

inline void __syncthreads() { block.wait(State::at_block); }
inline void __syncwarp(unsigned = ~0u) { block.wait(State::at_warp); }
inline unsigned __activemask() { return ~0u; }

/// What another lane of the warp gives; a thread's own where there is no such lane.
template <class T> T exchange(T value, int lane, bool inside) {
  unsigned first = block.now / 32 * 32, own = block.now;
  auto &slots = block.exchanged[block.threads[own].turns++ % 2];
  std::memcpy(&slots[own], &value, sizeof value);
  block.wait(State::at_warp);
  unsigned from = first + lane;
  if (!inside || from >= block.threads.size()) from = own;
  std::memcpy(&value, &slots[from], sizeof value);
  return value;
}
template <class T> T __shfl_sync(unsigned, T value, int lane, int width = 32) {
  int own = block.now % 32;
  return exchange(value, own / width * width + lane % width, true);
}
template <class T> T __shfl_down_sync(unsigned, T value, int by, int width = 32) {
  int own = block.now % 32;
  return exchange(value, own + by, own % width + by < width);
}
template <class T> T __shfl_up_sync(unsigned, T value, int by, int width = 32) {
  int own = block.now % 32;
  return exchange(value, own - by, own % width >= by);
}
template <class T> T __shfl_xor_sync(unsigned, T value, int mask, int width = 32) {
  int own = block.now % 32;
  return exchange(value, own ^ mask, (own % width ^ mask) < width);
}

// -- launches ------------------------------------------------------------------------------------

/// An argument as TVM passes it.
struct Any {
  int32_t kind;
  uint32_t padding;
  union { int64_t whole; double real; void *pointer; };
};

template <class T> struct Taken {
  static T from(const Any &given) {
    if constexpr (std::is_floating_point_v<T>) return static_cast<T>(given.real);
    else return static_cast<T>(given.whole);
  }
};
template <class T> struct Taken<Checked<T>> {
  static Checked<T> from(const Any &given) { return within<T>(given.pointer); }
};

static bool stuck = false, empty = false;

template <class... P, size_t... I>
int launch(void (*kernel)(P...), const Any *args, const int *tags, int count, bool together,
           std::index_sequence<I...>) {
  unsigned sizes[6] = {1, 1, 1, 1, 1, 1};  // of the grid and of a block
  for (int n = 0; n < count; ++n)
    if (tags[n] >= 0) sizes[tags[n]] = args[sizeof...(P) + n].whole;
  auto body = [&] { kernel(Taken<P>::from(args[I])...); };
  block.body = [](void *given) { (*static_cast<decltype(body) *>(given))(); };
  block.given = &body;
  block.trapped = false;
  std::vector<Place> places;
  for (unsigned z = 0; z < sizes[5]; ++z)
    for (unsigned y = 0; y < sizes[4]; ++y)
      for (unsigned x = 0; x < sizes[3]; ++x) places.push_back({x, y, z});
  block.threads.clear();
  if (together) {
    block.threads.resize(places.size());
    for (size_t n = 0; n < places.size(); ++n) block.threads[n].place = places[n];
  }
  uint64_t blocks = uint64_t(sizes[0]) * sizes[1] * sizes[2];
  empty |= !blocks || places.empty();  // which CUDA refuses
  for (uint64_t n = 0; n < blocks && !block.trapped && !stuck; ++n) {
    uint64_t one = block.backwards ? blocks - 1 - n : n;
    blockIdx = {unsigned(one % sizes[0]), unsigned(one / sizes[0] % sizes[1]),
                unsigned(one / sizes[0] / sizes[1])};
    for (auto &[memory, size] : shared_memory) std::memset(memory, 0xff, size);
    if (together) {
      stuck = !block.run() && !block.trapped;
    } else {
      try {
        for (auto &place : places) {
          threadIdx = place;
          body();
        }
      } catch (Trap) {
        block.trapped = true;
      } catch (Beyond) {
        block.trapped = block.beyond = true;
      } catch (Askew) {
        block.trapped = block.askew = true;
      }
    }
  }
  return 0;
}

template <class... P>
int launch(void (*kernel)(P...), const Any *args, const int *tags, int count, bool together) {
  return launch(kernel, args, tags, count, together, std::index_sequence_for<P...>());
}

static bool beyond = false, trapped = false, askew = false;

/// Sets the order of threads, and the tensors: an address and a size each.
extern "C" int __tvm_ffi_emulated_begin(void *, const Any *args, int count, Any *result) {
  *result = {0, 0, {0}};
  beyond = trapped = askew = stuck = empty = false;
  block.backwards = args[0].whole;
  tensors.clear();
  for (int n = 1; n + 1 < count; n += 2)
    tensors.emplace_back(reinterpret_cast<char *>(args[n].whole), args[n + 1].whole);
  return 0;
}

/// What has happened: 1, a trap; 2, threads that wait for ever; 3, an access beyond a tensor's end;
/// 4, a launch of nothing; 5, a vector that does not begin at a multiple of its size.
extern "C" int __tvm_ffi_emulated_end(void *, const Any *, int, Any *result) {
  *result = {1, 0, {askew ? 5 : empty ? 4 : beyond ? 3 : trapped ? 1 : stuck ? 2 : 0}};
  return 0;
}

#define KERNEL(NAME, TOGETHER, COUNT, ...)                                                         \
  extern "C" int __tvm_ffi_##NAME(void *, const Any *args, int, Any *result) {                     \
    static const int tags[] = {__VA_ARGS__};                                                       \
    *result = {0, 0, {0}};                                                                         \
    launch(NAME, args, tags, COUNT, TOGETHER);                                                     \
    trapped |= block.trapped;                                                                      \
    beyond |= block.beyond;                                                                        \
    askew |= block.askew;                                                                          \
    block.beyond = block.askew = false;                                                            \
    return 0;                                                                                      \
  }
