// Products of a few rows with a weight (k, n), whose rows are added up.
#pragma once

#include <algorithm>
#include <type_traits>

#include "vectors.h"

namespace fx2relax {
namespace rows {

// Calls a function for all of `m` rows: with how many at once, as a constant, and the first of them.
template <typename Function>
FX2RELAX_INLINE void for_rows(int64_t m, Function call) {
  int64_t first = 0;
  if constexpr (kMostRows == 8) {
    for (; first + 8 <= m; first += 8) call(std::integral_constant<int, 8>(), first);
  }
  for (; first + 4 <= m; first += 4) call(std::integral_constant<int, 4>(), first);
  switch (m - first) {
    case 3: call(std::integral_constant<int, 3>(), first); break;
    case 2: call(std::integral_constant<int, 2>(), first); break;
    case 1: call(std::integral_constant<int, 1>(), first); break;
    default: break;
  }
}

template <typename V>
FX2RELAX_INLINE void add_to(float* to, const V& sum) {
  V before;
  load(before, to);
  before += sum;
  __builtin_memcpy(to, &before, sizeof(V));
}

// Adds M rows of x, whose `factors` these are, times K rows of w to as many columns of out as C
// vectors at a time take; the column after them.
template <typename V, int M, int K, int C>
FX2RELAX_INLINE int64_t add_vectors(const Job& job, const float (&factors)[M][K], const float* w,
                                    float* out, int64_t column, int64_t end) {
  constexpr int64_t kLanes = sizeof(V) / sizeof(float);
  const int64_t n = job.n;
  for (; column + C * kLanes <= end; column += C * kLanes) {
    V sums[C][M];  // of their own: a sum grows by few large steps, which round less
    FX2RELAX_UNROLL
    for (int c = 0; c < C; ++c)
      FX2RELAX_UNROLL
      for (int m = 0; m < M; ++m) sums[c][m] = V{};
    FX2RELAX_UNROLL
    for (int i = 0; i < K; ++i) {
      FX2RELAX_UNROLL
      for (int c = 0; c < C; ++c) {
        const float* from = w + i * n + column + c * kLanes;
        V right;
        load(right, from);
        if (M > 1) __builtin_prefetch(from + K * n);  // one row alone is read ahead well enough
        FX2RELAX_UNROLL
        for (int m = 0; m < M; ++m) sums[c][m] += factors[m][i] * right;
      }
    }
    FX2RELAX_UNROLL
    for (int c = 0; c < C; ++c) {
      FX2RELAX_UNROLL
      for (int m = 0; m < M; ++m) add_to(out + m * n + column + c * kLanes, sums[c][m]);
    }
  }
  return column;
}

// M rows of x, from `first`, times K rows of w, from `at`, added to columns of out; w is (k, n).
template <typename V, int M, int K>
FX2RELAX_OUTLINE void add(const Job& job, int64_t first, int64_t at, int64_t begin, int64_t end) {
  const float* w = job.w + at * job.n;
  float* out = job.out + first * job.n;
  float factors[M][K];
  FX2RELAX_UNROLL
  for (int m = 0; m < M; ++m)
    FX2RELAX_UNROLL
    for (int i = 0; i < K; ++i) factors[m][i] = job.x[(first + m) * job.k + at + i];
  int64_t column = begin;
  if (M == 1) column = add_vectors<V, M, K, 4>(job, factors, w, out, column, end);
  column = add_vectors<V, M, K, 1>(job, factors, w, out, column, end);
  for (; column < end; ++column) {
    FX2RELAX_UNROLL
    for (int m = 0; m < M; ++m) {
      float sum = 0;
      FX2RELAX_UNROLL
      for (int i = 0; i < K; ++i) sum += factors[m][i] * w[i * job.n + column];
      out[m * job.n + column] += sum;
    }
  }
}

// Columns whose rows of w stay in the nearest cache until all rows of x are multiplied by them.
constexpr int64_t kColumns = 512;

template <typename V, int K>
FX2RELAX_INLINE void add_to_all(const Job& job, int64_t at, int64_t begin, int64_t end) {
  if (job.m == 1) return add<V, 1, K>(job, 0, at, begin, end);
  const bool once = job.m <= 4 || job.m == kMostRows;
  const int64_t step = once ? end - begin : kColumns;
  for (int64_t column = begin; column < end; column += step) {
    const int64_t stop = std::min(end, column + step);
    for_rows(job.m, [&](auto rows, int64_t first) {
      add<V, decltype(rows)::value, K>(job, first, at, column, stop);
    });
  }
}

// M rows of x, from `first`, times rows `at` to `stop` of w, added to C vectors of columns. The
// sums stay in registers, and w is read in short pieces, which is faster where it is in a cache.
template <typename V, int M, int C>
FX2RELAX_OUTLINE void add_tile(const Job& job, int64_t first, int64_t at, int64_t stop,
                              int64_t column) {
  constexpr int64_t kLanes = sizeof(V) / sizeof(float);
  const float* x = job.x + first * job.k;
  V sums[C][M];
  FX2RELAX_UNROLL
  for (int c = 0; c < C; ++c)
    FX2RELAX_UNROLL
    for (int m = 0; m < M; ++m) sums[c][m] = V{};
  for (int64_t row = at; row < stop; ++row) {
    V right[C];
    FX2RELAX_UNROLL
    for (int c = 0; c < C; ++c) load(right[c], job.w + row * job.n + column + c * kLanes);
    FX2RELAX_UNROLL
    for (int m = 0; m < M; ++m)
      FX2RELAX_UNROLL
      for (int c = 0; c < C; ++c) sums[c][m] += x[m * job.k + row] * right[c];
  }
  FX2RELAX_UNROLL
  for (int c = 0; c < C; ++c) {
    FX2RELAX_UNROLL
    for (int m = 0; m < M; ++m) {
      add_to(job.out + (first + m) * job.n + column + c * kLanes, sums[c][m]);
    }
  }
}

template <typename V, int M>
FX2RELAX_OUTLINE void add_tiles(const Job& job, int64_t first, int64_t at, int64_t stop,
                               int64_t begin, int64_t end) {
  constexpr int64_t kLanes = sizeof(V) / sizeof(float);
  constexpr int C = rows_of_weight(M);
  int64_t column = begin;
  for (; column + C * kLanes <= end; column += C * kLanes) {
    add_tile<V, M, C>(job, first, at, stop, column);
  }
  for (; column + kLanes <= end; column += kLanes) add_tile<V, M, 1>(job, first, at, stop, column);
  if (column == end) return;
  for (int m = 0; m < M; ++m) {
    float rest[kLanes] = {};
    for (int64_t row = at; row < stop; ++row) {
      const float factor = job.x[(first + m) * job.k + row];
      const float* from = job.w + row * job.n + column;
      for (int64_t i = 0; i < end - column; ++i) rest[i] += factor * from[i];
    }
    for (int64_t i = 0; i < end - column; ++i) job.out[(first + m) * job.n + column + i] += rest[i];
  }
}

template <typename V>
FX2RELAX_INLINE void add_block(const Job& job, int64_t at, int64_t stop, int64_t begin,
                               int64_t end) {
  for_rows(job.m, [&](auto rows, int64_t first) {
    add_tiles<V, decltype(rows)::value>(job, first, at, stop, begin, end);
  });
}

// Rows of w from `at` to `stop`: on and on where they are read from memory, which `kAsk` says.
template <typename V, bool kAsk>
FX2RELAX_INLINE void add_rows(const Job& job, int64_t at, int64_t stop, int64_t begin,
                              int64_t end) {
  if constexpr (kAsk) {
    for (; at + 8 <= stop; at += 8) add_to_all<V, 8>(job, at, begin, end);
  }
  for (; at < stop; at += kBlock) add_block<V>(job, at, std::min(stop, at + kBlock), begin, end);
}

// How many sums of rows of a weight (k, n) are added up apart: a long sum is a sum of sums. Those
// of a small weight are sums of blocks.
FX2RELAX_INLINE int64_t parts(const Job& job) {
  return job.k < 512 || !large(job) ? 1 : 4 * ((job.k + 4095) / 4096);
}

// What part `part` of the rows of w adds to some columns, written to `out`.
template <typename V, bool kAsk>
FX2RELAX_INLINE void sum_part(const Job& job, float* out, int64_t part, int64_t begin,
                              int64_t end) {
  const int64_t count = parts(job), each = (job.k + count - 1) / count;
  for (int64_t m = 0; m < job.m; ++m) {
    std::fill(out + m * job.n + begin, out + m * job.n + end, 0.0f);
  }
  Job other = job;
  other.out = out;
  const int64_t at = part * each;
  add_rows<V, kAsk>(other, at, std::min(job.k, at + each), begin, end);
}

template <typename V>
FX2RELAX_INLINE void add_row(float* to, const float* from, int64_t count) {
  constexpr int64_t kLanes = sizeof(V) / sizeof(float);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    V other;
    load(other, from + i);
    add_to(to + i, other);
  }
  for (; i < count; ++i) to[i] += from[i];
}

// Adds the sums of `count` parts, each `apart` from the one before, to the output.
template <typename V>
FX2RELAX_INLINE void add_parts(const Job& job, const float* sums, int64_t count, int64_t apart,
                               int64_t begin, int64_t end) {
  for (int64_t m = 0; m < job.m; ++m) {
    float* row = job.out + m * job.n + begin;
    for (int64_t part = 0; part < count; ++part) {
      add_row<V>(row, sums + part * apart + m * job.n + begin, end - begin);
    }
  }
}

template <typename V>
FX2RELAX_INLINE void add_bias(const Job& job, int64_t begin, int64_t end) {
  if (job.bias == nullptr) return;
  for (int64_t m = 0; m < job.m; ++m) {
    add_row<V>(job.out + m * job.n + begin, job.bias + begin, end - begin);
  }
}

template <typename V, bool kAsk>
FX2RELAX_INLINE void straight(const Job& job, int64_t begin, int64_t end) {
  const int64_t count = parts(job);
  sum_part<V, kAsk>(job, job.out, 0, begin, end);
  for (int64_t part = 1; part < count; ++part) {
    sum_part<V, kAsk>(job, job.sums, part, begin, end);
    add_parts<V>(job, job.sums, 1, 0, begin, end);
  }
  add_bias<V>(job, begin, end);
}

// Parts `begin` to `end`, of all columns: the first one's sums to the output, the others' apart.
template <typename V, bool kAsk>
FX2RELAX_INLINE void straight_parts(const Job& job, int64_t begin, int64_t end) {
  for (int64_t part = begin; part < end; ++part) {
    float* out = part == 0 ? job.out : job.sums + (part - 1) * job.m * job.n;
    sum_part<V, kAsk>(job, out, part, 0, job.n);
  }
}

}  // namespace rows
}  // namespace fx2relax
