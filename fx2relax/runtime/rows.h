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
#include "dots.h"
#include "shares.h"
#include "sums.h"
#include "tensors.h"

namespace fx2relax {
namespace rows {

// Up to as many rows it is faster than a library; `pipeline.packing` says the same.
constexpr int64_t few(bool turned_weight) { return turned_weight && kRegisters >= 32 ? 32 : 16; }

// As many floats of sums are kept from call to call: memory that is new has to be mapped first.
constexpr int64_t kMostSums = 1 << 20;

using Kernel = void (*)(const Job& job, int64_t begin, int64_t end);

template <bool kAsk>
FX2RELAX_TARGET inline void turned_kernel(const Job& job, int64_t begin, int64_t end) {
  turned<Lanes, kAsk>(job, begin, end);
}

template <bool kAsk>
FX2RELAX_TARGET inline void parts_kernel(const Job& job, int64_t begin, int64_t end) {
  straight_parts<Lanes, kAsk>(job, begin, end);
}

template <bool kAsk>
FX2RELAX_TARGET inline void straight_kernel(const Job& job, int64_t begin, int64_t end) {
  straight<Lanes, kAsk>(job, begin, end);
}

FX2RELAX_TARGET inline void add_up(const Job& job, int64_t count) {
  add_parts<Lanes>(job, job.sums, count - 1, job.m * job.n, 0, job.n);
  add_bias<Lanes>(job, 0, job.n);
}

// Memory for sums: this thread's own, or, of many, new.
struct Sums {
  explicit Sums(int64_t count) {
    static thread_local std::unique_ptr<float[]> kept;
    static thread_local int64_t size = 0;
    if (count > kMostSums) {
      made.reset(new float[count]);
      data = made.get();
      return;
    }
    if (size < count) {
      kept.reset(new float[count]);
      size = count;
    }
    data = kept.get();
  }
  std::unique_ptr<float[]> made;
  float* data;
};

struct Task {
  Job job;
  Kernel kernel;
};

inline void run(int64_t begin, int64_t end, void* task) {
  const Task& given = *static_cast<const Task*>(task);
  given.kernel(given.job, begin, end);
}

// Whether threads share the rows of a weight (k, n), and not its columns: each reads on and on
// then, and not a piece of each row. The sums are the same.
inline bool by_parts(const Job& job) {
  const int64_t count = parts(job);
  uint32_t threads = 1;
  check(torch_get_num_threads(&threads));
  return threads > 1 && count % threads == 0 && count * job.m * job.n <= kMostSums;
}

inline const float* floats(const View& view) {
  require(view.compact() && view.dtype.code == kDLFloat && view.dtype.bits == 32);
  return static_cast<const float*>(view.data);
}

// Operands x (..., k) and w, (n, k) where it comes turned and else (k, n), an optional bias (n),
// and the output (..., n). More rows than a few are the library's.
template <bool turned_weight>
void multiply(const TVMFFIAny* arguments, int count, TVMFFIAny* result) {
  require(count == 3 || count == 4);
  View x = view(arguments[0]), w = view(arguments[1]), out = view(arguments[count - 1]);
  require(x.rank >= 1 && w.rank == 2 && out.rank == x.rank);
  Task task{};
  Job& job = task.job;
  job.x = floats(x);
  job.w = floats(w);
  job.out = const_cast<float*>(floats(out));
  job.m = 1;
  for (int n = 0; n + 1 < x.rank; ++n) {
    require(x.sizes[n] == out.sizes[n]);
    job.m *= x.sizes[n];
  }
  if (job.m > few(turned_weight)) return matmul<false, turned_weight>(arguments, count, result);
  job.k = x.size(-1);
  job.n = out.size(-1);
  require(w.size(turned_weight ? 1 : 0) == job.k && w.size(turned_weight ? 0 : 1) == job.n);
  if (count == 4) {
    View bias = view(arguments[2]);
    require(bias.rank == 1 && bias.sizes[0] == job.n);
    job.bias = floats(bias);
  }
  if (job.m == 0 || job.n == 0) return;
  const bool ask = large(job);
  // A thread is worth its start from 64 KiB of weight on.
  const int64_t grain = std::max<int64_t>(64, 16384 / (job.k > 0 ? job.k : 1) + 1);
  if (turned_weight) {
    task.kernel = ask ? turned_kernel<true> : turned_kernel<false>;
    return in_shares(job, grain, run, &task);
  }
  const int64_t pieces = parts(job), size = job.m * job.n;
  const bool apart = by_parts(job);
  const Sums sums(pieces == 1 ? 0 : apart ? (pieces - 1) * size : size);
  job.sums = sums.data;
  if (apart) {
    task.kernel = ask ? parts_kernel<true> : parts_kernel<false>;
    check(torch_parallel_for(0, pieces, 1, run, &task));
    add_up(job, pieces);
  } else {
    task.kernel = ask ? straight_kernel<true> : straight_kernel<false>;
    check(torch_parallel_for(0, job.n, grain, run, &task));
  }
}

}  // namespace rows

inline void define_rows() {
  define("rows_nn", rows::multiply<false>);
  define("rows_nt", rows::multiply<true>);
}

}  // namespace fx2relax
