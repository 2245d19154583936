/* What each thread did and when: the laps of a traced step.
 *
 * In: zl_abi.h (zl_lap), zl_team.h (zl_now).  Out: the recording that module.c.jinja calls between kernels.
 * Next file: zl_probe.h (what the machine can do).
 *
 * A thread reads the clock once at the end of each thing it does; the next thing began then.  So nothing of a step is
 * lost between two laps, and the laps of every thread add up to the step's time.  Without zl_trace the trace has no
 * lanes and a step costs one comparison per kernel more.
 */
#ifndef ZL_TRACE_H
#define ZL_TRACE_H
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "zl_team.h"

/* One thread's laps, alone on its cache line. */
typedef struct zl_lane {
  _Alignas(64) zl_lap *laps; /* [capacity] */
  int64_t n, capacity;
  uint64_t mark; /* when the thread's present lap began */
} zl_lane;

typedef struct zl_tracer {
  zl_lane *lanes;  /* [n_threads]; NULL: nobody asked */
  int64_t *counts; /* [n_threads], the caller's */
  int32_t n_threads;
} zl_tracer;

static int32_t zl_tracer_set(zl_tracer *tracer, int32_t n_threads, zl_lap *laps, int64_t capacity, int64_t *counts) {
  free(tracer->lanes);
  memset(tracer, 0, sizeof *tracer);
  if (!laps) return ZL_OK;
  tracer->lanes = (zl_lane *)aligned_alloc(64, (size_t)n_threads * sizeof(zl_lane));
  if (!tracer->lanes) return ZL_NO_MEMORY;
  for (int32_t i = 0; i < n_threads; i++)
    tracer->lanes[i] = (zl_lane){.laps = laps + (size_t)i * (size_t)capacity, .capacity = capacity};
  tracer->counts = counts;
  tracer->n_threads = n_threads;
  return ZL_OK;
}

static void zl_lap_end(zl_lane *lane, int64_t call, int64_t rows, uint64_t now) {
  if (lane->n < lane->capacity) lane->laps[lane->n] = (zl_lap){lane->mark, now, call, rows};
  lane->n++;
  lane->mark = now;
}

/* `thread` has ended a call, or sampling. */
static inline void zl_trace_work(const zl_tracer *tracer, int32_t thread, int64_t call, int64_t rows) {
  if (tracer->lanes) zl_lap_end(&tracer->lanes[thread], call, rows, zl_now());
}

/* `thread` has come out of a barrier, or is the first to get where others wait; a thread alone never waits. */
static inline void zl_trace_wait(const zl_tracer *tracer, int32_t thread) {
  if (tracer->lanes && tracer->n_threads > 1) zl_lap_end(&tracer->lanes[thread], ZL_LAP_WAIT, 0, zl_now());
}

/* Before the team starts on a step. */
static inline void zl_trace_begin(const zl_tracer *tracer) {
  if (!tracer->lanes) return;
  const uint64_t now = zl_now();
  for (int32_t i = 0; i < tracer->n_threads; i++) {
    tracer->lanes[i].n = 0;
    tracer->lanes[i].mark = now;
  }
}

/* After the team has ended it: all threads wait up to now; one that is alone was at its last call. */
static inline void zl_trace_end(const zl_tracer *tracer) {
  if (!tracer->lanes) return;
  const uint64_t now = zl_now();
  for (int32_t i = 0; i < tracer->n_threads; i++) {
    zl_lane *lane = &tracer->lanes[i];
    const int last = tracer->n_threads == 1 && lane->n > 0 && lane->n <= lane->capacity;
    if (last)
      lane->laps[lane->n - 1].end_ns = now;
    else
      zl_lap_end(lane, ZL_LAP_WAIT, 0, now);
    tracer->counts[i] = lane->n;
  }
}

#endif
