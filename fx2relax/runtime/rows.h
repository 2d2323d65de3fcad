// Products of a few rows, `x @ w + bias` in float32, which read each weight once and as it lies.
//
// A library packs the weight first, or works on panels that so few rows cannot fill. Here the time
// is that of reading the weight from memory. Sums are kept in several accumulators, in an order
// that depends on the sizes alone, and long ones are sums of sums: their error stays small.
#pragma once

#include <torch/csrc/stable/c/shim.h>

#include <algorithm>
#include <memory>

#include "calls.h"
#include "tensors.h"

#define FX2RELAX_INLINE inline __attribute__((always_inline))

// What is kept in registers is indexed by loops that have to vanish.
#define FX2RELAX_UNROLL _Pragma("GCC unroll 16")

namespace fx2relax {
namespace rows {

// Vectors of 4, 8 and 16 floats, which need not be aligned in memory.
typedef float Float4 __attribute__((vector_size(16)));
typedef float Float8 __attribute__((vector_size(32)));
typedef float Float16 __attribute__((vector_size(64)));

template <typename V>
FX2RELAX_INLINE void load(V& result, const float* from) {
  __builtin_memcpy(&result, from, sizeof(V));
}

struct Job {
  const float* x;     // (m, k)
  const float* w;     // (n, k), or (k, n)
  const float* bias;  // (n), or null
  float* out;         // (m, n)
  int64_t m, k, n;
};

// What an accumulator adds up before it is added to another.
constexpr int64_t kBlock = 64;

// Rows `first`.. of x (M of them) times N rows of w from `column` on, `step` apart; w is (n, k).
template <typename V, int M, int N>
FX2RELAX_INLINE void dots(const Job& job, int64_t first, int64_t column, int64_t step) {
  constexpr int kLanes = sizeof(V) / sizeof(float);
  // Few sums would wait for each other: each gets several accumulators.
  constexpr int kTurns = M * N == 1 ? 8 : M * N <= 4 ? 2 : 1;
  const int64_t k = job.k;
  const float* x = job.x + first * k;
  const float* w = job.w + column * k;
  const int64_t apart = step * k;
  // What is read next: the following rows where these lie together, else further in each.
  const int64_t ahead = step == 1 ? N * k : 512;
  constexpr int64_t kStep = kTurns * kLanes;
  V totals[M][N];
  FX2RELAX_UNROLL
  for (int m = 0; m < M; ++m)
    FX2RELAX_UNROLL
    for (int n = 0; n < N; ++n) totals[m][n] = V{};
  int64_t at = 0;
  while (at + kStep <= k) {
    V sums[kTurns][M][N];
    FX2RELAX_UNROLL
    for (int t = 0; t < kTurns; ++t)
      FX2RELAX_UNROLL
      for (int m = 0; m < M; ++m)
        FX2RELAX_UNROLL
        for (int n = 0; n < N; ++n) sums[t][m][n] = V{};
    const int64_t stop = std::min(k, at + kBlock * kStep);
    for (; at + kStep <= stop; at += kStep) {
      FX2RELAX_UNROLL
      for (int t = 0; t < kTurns; ++t) {
        V right[N];
        FX2RELAX_UNROLL
        for (int n = 0; n < N; ++n) {
          load(right[n], w + n * apart + at + t * kLanes);
          if (t % 2 == 0) __builtin_prefetch(w + n * apart + ahead + at + t * kLanes, 0, 2);
        }
        FX2RELAX_UNROLL
        for (int m = 0; m < M; ++m) {
          V left;
          load(left, x + m * k + at + t * kLanes);
          FX2RELAX_UNROLL
          for (int n = 0; n < N; ++n) sums[t][m][n] += left * right[n];
        }
      }
    }
    FX2RELAX_UNROLL
    for (int m = 0; m < M; ++m) {
      FX2RELAX_UNROLL
      for (int n = 0; n < N; ++n) {
        V lanes = sums[0][m][n];
        FX2RELAX_UNROLL
        for (int t = 1; t < kTurns; ++t) lanes += sums[t][m][n];
        totals[m][n] += lanes;
      }
    }
  }
  FX2RELAX_UNROLL
  for (int m = 0; m < M; ++m) {
    FX2RELAX_UNROLL
    for (int n = 0; n < N; ++n) {
      float sum = 0;
      FX2RELAX_UNROLL
      for (int i = 0; i < kLanes; ++i) sum += totals[m][n][i];
      for (int64_t rest = at; rest < k; ++rest) sum += x[m * k + rest] * w[n * apart + rest];
      if (job.bias != nullptr) sum += job.bias[column + n * step];
      job.out[(first + m) * job.n + column + n * step] = sum;
    }
  }
}

template <typename V, int N>
FX2RELAX_INLINE void dots_of_all(const Job& job, int64_t column, int64_t step) {
  int64_t first = 0;
  for (; first + 4 <= job.m; first += 4) dots<V, 4, N>(job, first, column, step);
  switch (job.m - first) {
    case 3: dots<V, 3, N>(job, first, column, step); break;
    case 2: dots<V, 2, N>(job, first, column, step); break;
    case 1: dots<V, 1, N>(job, first, column, step); break;
    default: break;
  }
}

constexpr int64_t kLarge = 1 << 20;  // floats that come from memory, not from a cache

template <typename V>
FX2RELAX_INLINE void turned(const Job& job, int64_t begin, int64_t end) {
  int64_t column = begin;
  if (job.m == 1 || (job.m == 2 && job.k * job.n > kLarge)) {
    // Reading the weight is all the work: four places are read at once, each of them on and on.
    const int64_t step = (end - begin) / 4;
    for (; column < begin + step; ++column) dots_of_all<V, 4>(job, column, step);
    column = begin + 4 * step;
  } else if (job.m == 2) {
    for (; column + 2 <= end; column += 2) dots_of_all<V, 2>(job, column, 1);
  } else {
    for (; column + 3 <= end; column += 3) dots_of_all<V, 3>(job, column, 1);
  }
  for (; column < end; ++column) dots_of_all<V, 1>(job, column, 1);
}

// M rows of x, from `first`, times K rows of w, from `at`, added to columns of out; w is (k, n).
template <typename V, int M, int K>
FX2RELAX_INLINE void add(const Job& job, int64_t first, int64_t at, int64_t begin, int64_t end) {
  constexpr int kLanes = sizeof(V) / sizeof(float);
  const int64_t n = job.n;
  const float* w = job.w + at * n;
  float factors[M][K];
  FX2RELAX_UNROLL
  for (int m = 0; m < M; ++m)
    FX2RELAX_UNROLL
    for (int i = 0; i < K; ++i) factors[m][i] = job.x[(first + m) * job.k + at + i];
  float* out = job.out + first * n;
  int64_t column = begin;
  for (; column + kLanes <= end; column += kLanes) {
    V sums[M];  // of their own: a sum grows by few large steps, which round less
    FX2RELAX_UNROLL
    for (int m = 0; m < M; ++m) sums[m] = V{};
    FX2RELAX_UNROLL
    for (int i = 0; i < K; ++i) {
      V right;
      load(right, w + i * n + column);
      FX2RELAX_UNROLL
      for (int m = 0; m < M; ++m) sums[m] += factors[m][i] * right;
    }
    FX2RELAX_UNROLL
    for (int m = 0; m < M; ++m) {
      V before;
      load(before, out + m * n + column);
      before += sums[m];
      __builtin_memcpy(out + m * n + column, &before, sizeof(V));
    }
  }
  for (; column < end; ++column) {
    FX2RELAX_UNROLL
    for (int m = 0; m < M; ++m) {
      float sum = 0;
      FX2RELAX_UNROLL
      for (int i = 0; i < K; ++i) sum += factors[m][i] * w[i * n + column];
      out[m * n + column] += sum;
    }
  }
}

template <typename V, int K>
FX2RELAX_INLINE void add_to_all(const Job& job, int64_t at, int64_t begin, int64_t end) {
  int64_t first = 0;
  for (; first + 4 <= job.m; first += 4) add<V, 4, K>(job, first, at, begin, end);
  switch (job.m - first) {
    case 3: add<V, 3, K>(job, first, at, begin, end); break;
    case 2: add<V, 2, K>(job, first, at, begin, end); break;
    case 1: add<V, 1, K>(job, first, at, begin, end); break;
    default: break;
  }
}

// Rows of w from `at` to `stop`.
template <typename V>
FX2RELAX_INLINE void add_rows(const Job& job, int64_t at, int64_t stop, int64_t begin,
                              int64_t end) {
  for (; at + 8 <= stop; at += 8) add_to_all<V, 8>(job, at, begin, end);
  for (; at < stop; ++at) add_to_all<V, 1>(job, at, begin, end);
}

template <typename V>
FX2RELAX_INLINE void straight(const Job& job, int64_t begin, int64_t end) {
  constexpr int64_t kRows = 8 * kBlock;
  for (int64_t m = 0; m < job.m; ++m) {
    float* out = job.out + m * job.n;
    for (int64_t column = begin; column < end; ++column) {
      out[column] = job.bias == nullptr ? 0 : job.bias[column];
    }
  }
  // The rest of a short sum is not worth a block.
  if (job.k < 2 * kRows) return add_rows<V>(job, 0, job.k, begin, end);
  const std::unique_ptr<float[]> memory(new float[job.m * job.n]);
  Job block = job;
  block.out = memory.get();
  for (int64_t at = 0; at < job.k; at += kRows) {
    for (int64_t m = 0; m < job.m; ++m) {
      std::fill(block.out + m * job.n + begin, block.out + m * job.n + end, 0.0f);
    }
    add_rows<V>(block, at, std::min(job.k, at + kRows), begin, end);
    for (int64_t m = 0; m < job.m; ++m) {
      for (int64_t column = begin; column < end; ++column) {
        job.out[m * job.n + column] += block.out[m * job.n + column];
      }
    }
  }
}

// What PyTorch found this machine to have is passed as one of these macros.
#if defined(FX2RELAX_AVX512) && defined(__x86_64__)
using Lanes = Float16;
#define FX2RELAX_TARGET __attribute__((target("avx512f")))
#elif defined(FX2RELAX_AVX2) && defined(__x86_64__)
using Lanes = Float8;
#define FX2RELAX_TARGET __attribute__((target("avx2,fma")))
#else
using Lanes = Float4;
#define FX2RELAX_TARGET
#endif

constexpr int64_t kFew = 16;

using Kernel = void (*)(const Job& job, int64_t begin, int64_t end);

FX2RELAX_TARGET inline void turned_kernel(const Job& job, int64_t begin, int64_t end) {
  turned<Lanes>(job, begin, end);
}

FX2RELAX_TARGET inline void straight_kernel(const Job& job, int64_t begin, int64_t end) {
  straight<Lanes>(job, begin, end);
}

struct Task {
  Job job;
  Kernel kernel;
};

inline void run(int64_t begin, int64_t end, void* task) {
  const Task& given = *static_cast<const Task*>(task);
  given.kernel(given.job, begin, end);
}

inline const float* floats(const View& view) {
  require(view.compact() && view.dtype.code == kDLFloat && view.dtype.bits == 32);
  return static_cast<const float*>(view.data);
}

// Operands x (..., k) and w, (n, k) where it comes turned and else (k, n), an optional bias (n),
// and the output (..., n). Of more rows than a few, the library makes more.
template <bool turned_weight>
void multiply(const TVMFFIAny* arguments, int count, TVMFFIAny* result) {
  constexpr Kernel chosen = turned_weight ? turned_kernel : straight_kernel;
  require(count == 3 || count == 4);
  View x = view(arguments[0]), w = view(arguments[1]), out = view(arguments[count - 1]);
  require(x.rank >= 1 && w.rank == 2 && out.rank == x.rank);
  Task task{{floats(x), floats(w), nullptr, const_cast<float*>(floats(out)), 1, 0, 0}, chosen};
  Job& job = task.job;
  for (int n = 0; n + 1 < x.rank; ++n) {
    require(x.sizes[n] == out.sizes[n]);
    job.m *= x.sizes[n];
  }
  if (job.m > kFew) return matmul<false, turned_weight>(arguments, count, result);
  job.k = x.size(-1);
  job.n = out.size(-1);
  require(w.size(turned_weight ? 1 : 0) == job.k && w.size(turned_weight ? 0 : 1) == job.n);
  if (count == 4) {
    View bias = view(arguments[2]);
    require(bias.rank == 1 && bias.sizes[0] == job.n);
    job.bias = floats(bias);
  }
  // A thread is worth its start from 64 KiB of weight on.
  const int64_t grain = 16384 / (job.k > 0 ? job.k : 1) + 1;
  check(torch_parallel_for(0, job.n, grain < 64 ? 64 : grain, run, &task));
}

}  // namespace rows

inline void define_rows() {
  define("rows_nn", rows::multiply<false>);
  define("rows_nt", rows::multiply<true>);
}

}  // namespace fx2relax
