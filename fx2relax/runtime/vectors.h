// What products of few rows are written with: vectors of the width that this machine has.
#pragma once

#include <cstdint>

#define FX2RELAX_INLINE inline __attribute__((always_inline))

// What is kept in registers is indexed by loops that have to vanish.
#define FX2RELAX_UNROLL _Pragma("GCC unroll 16")

namespace fx2relax {
namespace rows {

// Vectors of 4, 8 and 16 floats, which need not be aligned in memory.
typedef float Float4 __attribute__((vector_size(16)));
typedef float Float8 __attribute__((vector_size(32)));
typedef float Float16 __attribute__((vector_size(64)));

// What PyTorch found this machine to have is passed as one of these macros.
#if defined(FX2RELAX_AVX512) && defined(__x86_64__)
using Lanes = Float16;
constexpr int kRegisters = 32;
#define FX2RELAX_TARGET __attribute__((target("avx512f")))
// Else each of several products loads its factor again, and loads are what takes the time.
#define FX2RELAX_IN_REGISTER(value) __asm__("" : "+v"(value))
#elif defined(FX2RELAX_AVX2) && defined(__x86_64__)
using Lanes = Float8;
constexpr int kRegisters = 16;
#define FX2RELAX_TARGET __attribute__((target("avx2,fma")))
#define FX2RELAX_IN_REGISTER(value) __asm__("" : "+x"(value))
#else
using Lanes = Float4;
constexpr int kRegisters = 16;
#define FX2RELAX_TARGET
#define FX2RELAX_IN_REGISTER(value)
#endif

// What is compiled once, and not into each place that calls it.
#define FX2RELAX_OUTLINE FX2RELAX_TARGET __attribute__((noinline))

template <typename V>
FX2RELAX_INLINE void load(V& result, const float* from) {
  __builtin_memcpy(&result, from, sizeof(V));
}

// The sums of the halves of a vector, down to four.
FX2RELAX_INLINE Float4 four(const Float4& value) { return value; }

FX2RELAX_INLINE Float4 four(const Float8& value) {
  Float4 low, high;
  __builtin_memcpy(&low, &value, sizeof(low));
  __builtin_memcpy(&high, reinterpret_cast<const char*>(&value) + sizeof(low), sizeof(high));
  return low + high;
}

FX2RELAX_INLINE Float4 four(const Float16& value) {
  Float8 low, high;
  __builtin_memcpy(&low, &value, sizeof(low));
  __builtin_memcpy(&high, reinterpret_cast<const char*>(&value) + sizeof(low), sizeof(high));
  return four(low + high);
}

#ifdef __clang__
#define FX2RELAX_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int Int4 __attribute__((vector_size(16)));
#define FX2RELAX_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Int4{__VA_ARGS__})
#endif

// The sums of the lanes of M vectors. Four are summed at once: one by one takes three times as long.
template <typename V, int M>
FX2RELAX_INLINE void totals(const V (&values)[M], float (&found)[M]) {
  int m = 0;
  FX2RELAX_UNROLL
  for (; m + 4 <= M; m += 4) {
    const Float4 a = four(values[m]), b = four(values[m + 1]);
    const Float4 c = four(values[m + 2]), d = four(values[m + 3]);
    const Float4 ab = FX2RELAX_SHUFFLE(a, b, 0, 4, 2, 6) + FX2RELAX_SHUFFLE(a, b, 1, 5, 3, 7);
    const Float4 cd = FX2RELAX_SHUFFLE(c, d, 0, 4, 2, 6) + FX2RELAX_SHUFFLE(c, d, 1, 5, 3, 7);
    const Float4 all = FX2RELAX_SHUFFLE(ab, cd, 0, 1, 4, 5) + FX2RELAX_SHUFFLE(ab, cd, 2, 3, 6, 7);
    __builtin_memcpy(found + m, &all, sizeof(all));
  }
  FX2RELAX_UNROLL
  for (; m < M; ++m) {
    const Float4 sum = four(values[m]);
    found[m] = (sum[0] + sum[1]) + (sum[2] + sum[3]);
  }
}

// A product of matrices.
struct Job {
  const float* x;     // (m, k)
  const float* w;     // (n, k), or (k, n)
  const float* bias;  // (n), or null
  float* out;         // (m, n)
  float* sums;        // (parts - 1, m, n), or (m, n) where threads share the columns
  int64_t m, k, n;
};

// Weights of more floats come from beyond a core's own cache, and are worth asking for early: two
// cores' prefetches of 1 MB that were in their caches took a third of the time of the product.
constexpr int64_t kLarge = 1 << 19;

FX2RELAX_INLINE bool large(const Job& job) { return job.k * job.n > kLarge; }

// What an accumulator adds up before it is added to another.
constexpr int64_t kBlock = 64;

// How many rows of x are multiplied at once, and by how many rows of w, or vectors of its
// columns: what registers hold.
constexpr int kMostRows = kRegisters >= 32 ? 8 : 4;
constexpr int rows_of_weight(int rows) {
  if (rows == 1) return 8;
  if (kRegisters >= 32) return rows > 4 ? 3 : rows > 2 ? 6 : 8;
  return rows > 2 ? 3 : 4;
}

}  // namespace rows
}  // namespace fx2relax
