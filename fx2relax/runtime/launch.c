/* Parallel loops of TVM's kernels on the OpenMP pool of another library.
   The lambda's signature and the group's layout are TVM's C ABI (runtime/c_backend_api.h). */
#include <stdatomic.h>

typedef struct {
  void *sync;
  int num_task;
} Group;
typedef int (*Lambda)(int, Group *, void *);
typedef struct {
  Lambda lambda;
  void *data;
  atomic_int failed;
} Job;

static void (*parallel)(void (*)(void *), void *, unsigned, unsigned);
static int (*thread_num)(void);
static int (*num_threads)(void);
/* PyTorch's torch_get_num_threads: it tells OpenMP how many threads this thread may use, which
   OpenMP keeps apart for each, and PyTorch tells it when its own first loop is run. */
static int (*settle)(unsigned *);
static _Thread_local int settled;

static void task(void *p) {
  Job *job = p;
  Group group = {0, num_threads()};
  if (job->lambda(thread_num(), &group, job->data)) atomic_store(&job->failed, -1);
}

int fx2relax_launch(Lambda lambda, void *data, int tasks) {
  Job job = {lambda, data, 0};
  unsigned count;
  (void)tasks;
  if (!settled) {
    settled = 1;
    if (settle) settle(&count);
  }
  parallel(task, &job, 0, 0);
  return atomic_load(&job.failed);
}

/* GOMP_parallel, omp_get_thread_num, omp_get_num_threads, and torch_get_num_threads or null. */
void fx2relax_bind(void *p, void *t, void *n, void *s) {
  parallel = p;
  thread_num = t;
  num_threads = n;
  settle = s;
}
