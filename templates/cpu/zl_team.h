/* The thread team: fork/join over all threads and a barrier inside a parallel region.
 *
 * In: a thread count and, optionally, the CPUs to pin to.  Out: zl_team_create/run/destroy, zl_team_barrier, the cursors
 * of work that is dealt out.  Next file: zl_task.h (what a kernel is told).
 *
 * Waiting is spin -> futex.  The spin covers the usual few microseconds between phases.  How long it may last is
 * learned, at barriers of short phases (zl_team_barrier_with): there a wait of half a millisecond means that a thread of
 * the team is not running (a busy neighbour, a cgroup quota, a second model), and who spins then keeps the core from whom
 * everybody waits for; so the next spins are short, and grow again with every wait that was worth it.  Long phases
 * (prefill) end unevenly by themselves and teach nothing.  Yielding instead of sleeping gives the neighbour whole time
 * slices.  The futex makes an idle team cost nothing.
 *
 * The caller of zl_team_run is thread 0 and is never pinned: its affinity belongs to the host process; worker i is
 * pinned to cpus[i % n_cpus].
 */
#ifndef ZL_TEAM_H
#define ZL_TEAM_H
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "zl_abi.h"

#define ZL_SPIN_MOST 8000  /* pauses before a waiting thread sleeps: 0.2 ms on Zen 4, 0.4 where a pause is 140 cycles */
#define ZL_SPIN_LEAST 400  /* after a wait for an absent thread; most waits of a decode step are shorter */
#define ZL_SPIN_MORE 4     /* for a wait that ended in the spin */
#define ZL_ABSENT_NS 500000 /* a sleep that lasted longer was for a thread that had no core */
#define ZL_MAX_THREADS 1024

typedef void (*zl_team_fn)(void *arg, int32_t thread);

/* A 32-bit word that threads wait on until it changes, alone on its cache line. */
typedef struct zl_gate {
  _Alignas(64) _Atomic uint32_t value;
  _Atomic uint32_t sleepers;
} zl_gate;

/* How much of one thread's range of a call is taken, alone on its cache line: zl_deal in zl_task.h. */
typedef struct zl_cursor {
  _Alignas(64) _Atomic int64_t taken;
} zl_cursor;
#define ZL_DEALS 2 /* calls of a phase that deal out their items while they run */

typedef struct zl_team {
  zl_gate start, done, phase;              /* generation counters */
  _Alignas(64) _Atomic uint32_t arrived;   /* at the barrier */
  _Alignas(64) _Atomic uint32_t finished;  /* workers that ended the current job */
  _Alignas(64) zl_team_fn fn;
  void *arg;
  int32_t n_threads, n_cpus, stop;
  _Atomic int32_t patience; /* pauses before a thread that waits for others sleeps; 0, with more threads than CPUs */
  int32_t idle;             /* the same for workers without a job */
  int32_t *cpus;                  /* [n_cpus] */
  struct zl_worker *workers;      /* [n_threads]; 0 unused */
  zl_cursor *cursors;             /* [ZL_DEALS, n_threads], all 0 when a phase begins */
  int32_t n_started;
} zl_team;

typedef struct zl_worker {
  zl_team *team;
  int32_t thread;
  pthread_t id;
} zl_worker;

static inline void zl_pause(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("isb" ::: "memory");
#endif
}

static inline void zl_gate_open(zl_gate *g) {
  atomic_fetch_add(&g->value, 1u);
  if (atomic_load(&g->sleepers) != 0u)
    syscall(SYS_futex, &g->value, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
}

/* What a thread does while it waits: a little at a time, 0 when there is nothing left. */
typedef int (*zl_idle_fn)(void *arg);

/* nanoseconds, from some fixed moment on */
static inline uint64_t zl_now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void zl_gate_sleep(zl_gate *g, uint32_t seen, _Atomic int32_t *patience) {
  const uint64_t begin = zl_now();
  while (atomic_load_explicit(&g->value, memory_order_acquire) == seen) {
    atomic_fetch_add(&g->sleepers, 1u);
    /* the kernel compares value with seen again, so a wake between the two is not lost */
    syscall(SYS_futex, &g->value, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
    atomic_fetch_sub(&g->sleepers, 1u);
  }
  if (patience && atomic_load_explicit(patience, memory_order_relaxed) > ZL_SPIN_LEAST &&
      zl_now() - begin > ZL_ABSENT_NS)
    atomic_store_explicit(patience, ZL_SPIN_LEAST, memory_order_relaxed);
}

/* Returns when g->value differs from seen.  patience: that of the team, or NULL, and the wait teaches nothing. */
static inline void zl_gate_wait(zl_gate *g, uint32_t seen, int32_t spins, _Atomic int32_t *patience, zl_idle_fn idle,
                                void *arg) {
  for (int32_t i = 0; i < spins; i++) {
    if (atomic_load_explicit(&g->value, memory_order_acquire) != seen) {
      if (patience && spins < ZL_SPIN_MOST)
        atomic_store_explicit(patience, spins + ZL_SPIN_MORE, memory_order_relaxed);
      return;
    }
    if (!idle || !idle(arg)) zl_pause();
  }
  zl_gate_sleep(g, seen, patience);
}

/* By the only thread that is not waiting, before it lets the others go on. */
static inline void zl_team_deal_anew(zl_team *team) {
  for (int32_t i = 0; i < ZL_DEALS * team->n_threads; i++)
    atomic_store_explicit(&team->cursors[i].taken, 0, memory_order_relaxed);
}

/* All n_threads threads of the team call this inside a job; none returns before all have arrived.  The last to arrive
 * runs fn(arg), if there is one, before anyone goes on: work for one thread costs no barrier of its own.  With `idle` the
 * phase was a short one: the others call idle(idle_arg) as long as it finds something to do, and their wait teaches. */
static inline void zl_team_barrier_with(zl_team *team, void (*fn)(void *), void *arg, zl_idle_fn idle,
                                        void *idle_arg) {
  if (team->n_threads == 1) {
    if (fn) fn(arg);
    return;
  }
  uint32_t seen = atomic_load_explicit(&team->phase.value, memory_order_relaxed);
  if (atomic_fetch_add(&team->arrived, 1u) + 1u == (uint32_t)team->n_threads) {
    if (fn) fn(arg);
    zl_team_deal_anew(team);
    atomic_store_explicit(&team->arrived, 0u, memory_order_relaxed);
    zl_gate_open(&team->phase);
  } else {
    zl_gate_wait(&team->phase, seen, team->patience, idle ? &team->patience : NULL, idle, idle_arg);
  }
}

static inline void zl_team_barrier(zl_team *team) { zl_team_barrier_with(team, NULL, NULL, NULL, NULL); }

static void zl_worker_pin(const zl_team *team, int32_t thread) {
  if (team->n_cpus <= 0) return;
  int32_t cpu = team->cpus[thread % team->n_cpus];
  unsigned long mask[ZL_MAX_THREADS / (8 * sizeof(unsigned long))] = {0};
  const int32_t bits = 8 * (int32_t)sizeof(unsigned long);
  if (cpu < 0 || cpu >= ZL_MAX_THREADS) return;
  mask[cpu / bits] = 1ul << (cpu % bits);
  /* a CPU taken away by the host only costs speed, so a failure here is not an error */
  syscall(SYS_sched_setaffinity, 0, sizeof mask, mask);
}

static void *zl_worker_main(void *p) {
  zl_worker *w = (zl_worker *)p;
  zl_team *team = w->team;
  uint32_t seen = 0;
  zl_worker_pin(team, w->thread);
  for (;;) {
    zl_gate_wait(&team->start, seen, team->idle, NULL, NULL, NULL); /* nobody is late for a job that is not there */
    seen++;
    if (team->stop) return NULL;
    team->fn(team->arg, w->thread);
    if (atomic_fetch_add(&team->finished, 1u) + 1u == (uint32_t)team->n_threads - 1u)
      zl_gate_open(&team->done);
  }
}

/* A stack of its own size: kernels keep tiles there, and the host's limit may be small. */
static int zl_worker_start(zl_worker *w) {
  pthread_attr_t attr;
  if (pthread_attr_init(&attr) != 0) return -1;
  int status = pthread_attr_setstacksize(&attr, 2u << 20);
  if (status == 0) status = pthread_create(&w->id, &attr, zl_worker_main, w);
  pthread_attr_destroy(&attr);
  return status;
}

/* Runs fn(arg, thread) on every thread of the team and returns when all have returned.  One caller at a time. */
static inline void zl_team_run(zl_team *team, zl_team_fn fn, void *arg) {
  if (team->n_threads == 1) {
    fn(arg, 0);
    return;
  }
  uint32_t seen = atomic_load_explicit(&team->done.value, memory_order_relaxed);
  team->fn = fn;
  team->arg = arg;
  atomic_store_explicit(&team->finished, 0u, memory_order_relaxed);
  zl_team_deal_anew(team);
  zl_gate_open(&team->start);
  fn(arg, 0);
  zl_gate_wait(&team->done, seen, team->patience, NULL, NULL, NULL);
}

static inline void zl_team_destroy(zl_team *team) {
  if (!team) return;
  team->stop = 1;
  zl_gate_open(&team->start);
  for (int32_t i = 1; i <= team->n_started; i++) pthread_join(team->workers[i].id, NULL);
  free(team->workers);
  free(team->cursors);
  free(team->cpus);
  free(team);
}

/* CPUs that this process may use; 0 when the kernel does not say. */
static int32_t zl_usable_cpus(void) {
  unsigned long mask[ZL_MAX_THREADS / (8 * sizeof(unsigned long))] = {0};
  long bytes = syscall(SYS_sched_getaffinity, 0, sizeof mask, mask);
  int32_t cpus = 0;
  for (long i = 0; bytes > 0 && i < bytes / (long)sizeof(unsigned long); i++) cpus += __builtin_popcountl(mask[i]);
  return cpus;
}

/* ZL_OK, ZL_BAD_ARGUMENT, ZL_NO_MEMORY or ZL_NO_THREADS.  n_threads counts the caller. */
static inline int32_t zl_team_create(int32_t n_threads, const int32_t *cpus, int32_t n_cpus, zl_team **out) {
  if (!out || n_threads < 1 || n_threads > ZL_MAX_THREADS || n_cpus < 0 || (n_cpus > 0 && !cpus))
    return ZL_BAD_ARGUMENT;
  zl_team *team = (zl_team *)aligned_alloc(64, (sizeof(zl_team) + 63) / 64 * 64);
  if (!team) return ZL_NO_MEMORY;
  memset(team, 0, sizeof *team);
  team->n_threads = n_threads;
  team->n_cpus = n_cpus;
  /* a thread that spins while the one it waits for has no CPU to run on only delays it */
  const int32_t usable = zl_usable_cpus();
  const int crowded = usable > 0 && n_threads > usable;
  team->idle = crowded ? 0 : ZL_SPIN_MOST;
  team->patience = team->idle;
  team->workers = (zl_worker *)calloc((size_t)n_threads, sizeof(zl_worker));
  team->cpus = (int32_t *)calloc((size_t)n_cpus + 1, sizeof(int32_t));
  team->cursors = (zl_cursor *)aligned_alloc(64, ZL_DEALS * (size_t)n_threads * sizeof(zl_cursor));
  if (!team->workers || !team->cpus || !team->cursors) {
    zl_team_destroy(team);
    return ZL_NO_MEMORY;
  }
  if (n_cpus) memcpy(team->cpus, cpus, (size_t)n_cpus * sizeof(int32_t));
  for (int32_t i = 1; i < n_threads; i++) {
    team->workers[i] = (zl_worker){team, i, 0};
    if (zl_worker_start(&team->workers[i]) != 0) {
      zl_team_destroy(team);
      return ZL_NO_THREADS;
    }
    team->n_started = i;
  }
  *out = team;
  return ZL_OK;
}

#endif
