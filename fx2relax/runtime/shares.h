// How threads share the columns of a product whose weight is read where it lies.
#pragma once

#include <torch/csrc/stable/c/shim.h>
#ifdef __linux__
#include <unistd.h>
#endif

#include <algorithm>

#include "calls.h"
#include "vectors.h"

namespace fx2relax {
namespace rows {

// Of what each of the threads would read, how much the caller reads where its cache is to hold more.
// A network of 2.7 MB, called from Python, took 46 us and not 52.
constexpr double kCallers = 0.8;

// Bytes of a processor's own second cache; none where they are not known.
inline int64_t own_cache() {
#if defined(_SC_LEVEL2_CACHE_SIZE)
  static const int64_t size = sysconf(_SC_LEVEL2_CACHE_SIZE);
  return size;
#else
  return 0;
#endif
}

// How many bytes of weights this thread's products read between two uses of a weight.
class Circuit {
 public:
  // Count a weight in. More than `most` are not told apart.
  int64_t next(const float* weight, int64_t bytes, int64_t most) {
    if (weight == first_ || first_ == nullptr || sum_ > most) {
      total_ = weight == first_ ? sum_ : most + 1;
      first_ = weight;
      sum_ = 0;
    }
    sum_ += bytes;
    return total_;
  }

 private:
  const float* first_ = nullptr;
  int64_t sum_ = 0;
  int64_t total_ = 0;
};

using Work = void (*)(int64_t begin, int64_t end, void* task);

struct Share {
  Work work;
  void* task;
  int64_t columns, callers, threads;
};

// Columns of the shares from `begin` to `end`: the first one is the caller's.
inline void run_shares(int64_t begin, int64_t end, void* task) {
  const Share& share = *static_cast<const Share*>(task);
  const int64_t rest = share.columns - share.callers;
  auto place = [&](int64_t n) {
    return n == 0 ? 0 : share.callers + rest * (n - 1) / (share.threads - 1);
  };
  share.work(place(begin), place(end), share.task);
}

// Do the work of all columns, in pieces of `grain` or more, a piece a thread.
//
// Where all weights stay in the threads' caches, that of the thread which calls has the caller's
// data to hold as well, and would read it anew: it takes fewer columns. The results are the same.
inline void in_shares(const Job& job, int64_t grain, Work work, void* task) {
  static thread_local Circuit circuit;
  uint32_t threads = 1;
  check(torch_get_num_threads(&threads));
  const int64_t held = own_cache() * threads * 3 / 4;
  const int64_t read = circuit.next(job.w, job.n * job.k * int64_t(sizeof(float)), held);
  const bool reads = job.m <= kMostRows;  // and does not compute for longer
  if (threads == 1 || !reads || read > held || job.n < grain * threads) {
    return check(torch_parallel_for(0, job.n, grain, work, task));
  }
  const int64_t callers = int64_t(double(job.n) * kCallers / threads);
  Share share{work, task, job.n, callers, threads};
  check(torch_parallel_for(0, threads, 1, run_shares, &share));
}

}  // namespace rows
}  // namespace fx2relax
