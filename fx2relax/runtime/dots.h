// Products of a few rows with a weight (n, k), whose rows are multiplied by those of x.
#pragma once

#include <algorithm>

#include "vectors.h"

namespace fx2relax {
namespace rows {

// How far ahead of its use a weight is asked for, in floats.
constexpr int64_t kAhead = 512;

// Of two factors that are both used several times one is loaded once, and the other at each use.
// Loads of a weight that still arrives wait for it; where vectors are half a line, this is no gain.
constexpr bool kKeepsWeight = kRegisters >= 32;

// Rows `first`.. of x (M of them) times N rows of w from `column` on, `step` apart; w is (n, k).
// Each of the N is read on and on: a processor follows several such ways through memory at once.
template <typename V, int M, int N, bool kAsk>
FX2RELAX_OUTLINE void dots(const Job& job, int64_t first, int64_t column, int64_t step) {
  constexpr int64_t kLanes = sizeof(V) / sizeof(float);
  const int64_t k = job.k;
  const float* x = job.x + first * k;
  const float* w = job.w + column * k;
  const int64_t apart = step * k;
  float* out = job.out + first * job.n + column;
  int64_t at = 0;
  do {
    V sums[N * M];
    FX2RELAX_UNROLL
    for (int n = 0; n < N; ++n)
      FX2RELAX_UNROLL
      for (int m = 0; m < M; ++m) sums[n * M + m] = V{};
    const bool begins = at == 0;
    const int64_t stop = std::min(k, at + kBlock * kLanes);
    for (; at + kLanes <= stop; at += kLanes) {
      if (kKeepsWeight && M <= N) {
        FX2RELAX_UNROLL
        for (int n = 0; n < N; ++n) {
          V right;
          load(right, w + n * apart + at);
          FX2RELAX_IN_REGISTER(right);
          if (kAsk) __builtin_prefetch(w + n * apart + at + kAhead);
          FX2RELAX_UNROLL
          for (int m = 0; m < M; ++m) {
            V left;
            load(left, x + m * k + at);
            sums[n * M + m] += left * right;
          }
        }
        continue;
      }
      V right[N];
      FX2RELAX_UNROLL
      for (int n = 0; n < N; ++n) {
        load(right[n], w + n * apart + at);
        if (kAsk) __builtin_prefetch(w + n * apart + at + kAhead);
      }
      FX2RELAX_UNROLL
      for (int m = 0; m < M; ++m) {
        V left;
        load(left, x + m * k + at);
        FX2RELAX_IN_REGISTER(left);
        FX2RELAX_UNROLL
        for (int n = 0; n < N; ++n) sums[n * M + m] += left * right[n];
      }
    }
    float found[N * M];
    totals<V, N * M>(sums, found);
    FX2RELAX_UNROLL
    for (int n = 0; n < N; ++n) {
      float* to = out + n * step;
      if (begins) {
        const float bias = job.bias == nullptr ? 0 : job.bias[column + n * step];
        FX2RELAX_UNROLL
        for (int m = 0; m < M; ++m) to[m * job.n] = found[n * M + m] + bias;
      } else {
        FX2RELAX_UNROLL
        for (int m = 0; m < M; ++m) to[m * job.n] += found[n * M + m];
      }
    }
  } while (at + kLanes <= k);
  if (at == k) return;
  for (int n = 0; n < N; ++n) {
    for (int m = 0; m < M; ++m) {
      float sum = 0;
      for (int64_t rest = at; rest < k; ++rest) sum += x[m * k + rest] * w[n * apart + rest];
      out[n * step + m * job.n] += sum;
    }
  }
}

// All rows of x times N rows of w: those after the first kFirst find these in the cache.
template <typename V, int kFirst, int N, bool kAsk>
FX2RELAX_INLINE void dots_of_all(const Job& job, int64_t column, int64_t step) {
  dots<V, kFirst, N, kAsk>(job, 0, column, step);
  int64_t first = kFirst;
  for (; first + kFirst <= job.m; first += kFirst) dots<V, kFirst, N, false>(job, first, column, step);
  if constexpr (kFirst > 4) {
    if (first + 4 <= job.m) {
      dots<V, 4, N, false>(job, first, column, step);
      first += 4;
    }
  }
  if constexpr (kFirst > 3) {
    switch (job.m - first) {
      case 3: dots<V, 3, N, false>(job, first, column, step); break;
      case 2: dots<V, 2, N, false>(job, first, column, step); break;
      case 1: dots<V, 1, N, false>(job, first, column, step); break;
      default: break;
    }
  }
}

template <typename V, int kFirst, bool kAsk>
FX2RELAX_INLINE void turned_from(const Job& job, int64_t begin, int64_t end) {
  constexpr int N = rows_of_weight(kFirst);
  const int64_t step = (end - begin) / N;
  for (int64_t column = begin; column < begin + step; ++column) {
    dots_of_all<V, kFirst, N, kAsk>(job, column, step);
  }
  if (N * step == end - begin) return;
  // The last ones with some that are made already, and come out the same.
  if (step > 0) return dots_of_all<V, kFirst, N, false>(job, end - N, 1);
  for (int64_t column = begin; column < end; ++column) {
    for (int64_t m = 0; m < job.m; ++m) dots<V, 1, 1, false>(job, m, column, 1);
  }
}

template <typename V, bool kAsk>
FX2RELAX_INLINE void turned(const Job& job, int64_t begin, int64_t end) {
  if constexpr (kMostRows == 8) {
    if (job.m >= 8) return turned_from<V, 8, kAsk>(job, begin, end);
  }
  if (job.m >= 4) return turned_from<V, 4, kAsk>(job, begin, end);
  if (job.m == 3) return turned_from<V, 3, kAsk>(job, begin, end);
  if (job.m == 2) return turned_from<V, 2, kAsk>(job, begin, end);
  // Eight ways through memory keep the processor's own reading ahead busy, if not with whole lines.
  turned_from<V, 1, kKeepsWeight>(job, begin, end);
}

}  // namespace rows
}  // namespace fx2relax
