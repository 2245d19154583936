/* Checks of the thread team, of work dealt out while it runs and of reading ahead; test_cpu_team.py compiles it. */
#include "zl_ahead.h"
#include "zl_quantize.h"

typedef struct job {
  zl_team *team;
  int64_t items, phases;
  int32_t calls; /* of a phase; those past ZL_DEALS are dealt out beforehand */
  _Atomic int64_t *taken; /* [calls, items] */
  int64_t sleep_us;
} job;

static void take_all(void *arg, int32_t thread) {
  job *j = arg;
  zl_task t = {.thread = thread, .n_threads = j->team->n_threads, .team = j->team};
  for (int64_t p = 0; p < j->phases; p++) {
    for (int32_t c = 0; c < j->calls; c++) {
      t.deal = c < ZL_DEALS ? c : -1;
      zl_deal d = {j->items, 0, 0, 0};
      int64_t i;
      while (zl_deal_item(&t, &d, &i)) j->taken[c * j->items + i]++;
    }
    zl_team_barrier(j->team);
  }
}

/* How often each item of `calls` calls was taken in `runs` runs of `phases` phases: [calls, items]. */
int deal(int32_t threads, int64_t items, int32_t calls, int64_t phases, int64_t runs, int64_t *counts) {
  zl_team *team = NULL;
  if (zl_team_create(threads, NULL, 0, &team)) return -1;
  job j = {team, items, phases, calls, calloc((size_t)(calls * items) + 1, sizeof(int64_t)), 0};
  for (int64_t r = 0; r < runs; r++) zl_team_run(team, take_all, &j);
  for (int64_t i = 0; i < calls * items; i++) counts[i] = j.taken[i];
  free(j.taken);
  zl_team_destroy(team);
  return 0;
}

static int nothing_to_do(void *arg) { return (void)arg, 0; }

static void come_late(void *arg, int32_t thread) {
  job *j = arg;
  if (thread && j->sleep_us) usleep((useconds_t)j->sleep_us);
  for (int64_t p = 0; p < j->phases; p++)
    zl_team_barrier_with(j->team, NULL, NULL, j->calls ? nothing_to_do : NULL, NULL);
}

/* The team's patience before anything, after a barrier that another thread came late to, after many quick ones; `few`:
 * barriers of short phases. */
int patience(int32_t few, int64_t sleep_us, int64_t quick, int32_t *seen) {
  zl_team *team = NULL;
  if (zl_team_create(2, NULL, 0, &team)) return -1;
  job j = {team, 0, 1, few, NULL, sleep_us};
  seen[0] = team->patience;
  zl_team_run(team, come_late, &j);
  seen[1] = team->patience;
  j.sleep_us = 0;
  j.phases = quick;
  zl_team_run(team, come_late, &j);
  seen[2] = team->patience;
  zl_team_destroy(team);
  return 0;
}

/* What thread `thread` has in hand for phases after `phase`: begin and end of each stream, as offsets. */
int ahead(const zl_region *regions, int32_t n, int32_t thread, int32_t n_threads, int32_t phase, int32_t next,
          int64_t rows, int64_t *out) {
  static const char weights[1];
  zl_ahead a = {.weights = weights, .regions = regions, .n_regions = n, .thread = thread, .n_threads = n_threads};
  zl_ahead_begin(&a, phase, next, rows);
  for (int32_t s = 0; s < a.streams; s++) {
    out[2 * s] = a.at[s] - weights;
    out[2 * s + 1] = a.end[s] - weights;
  }
  return a.streams;
}

/* The same eight blocks of 32 columns, a[8][16] and b[8][16], alone and together. */
void quantize(const float *a, const float *b, int8_t *q, float *scale, float *sums, int8_t *q8, float *scale8,
              float *sums8) {
  v16f x[8], y[8];
  for (int m = 0; m < 8; m++) {
    x[m] = zl_load(a + 16 * m);
    y[m] = zl_load(b + 16 * m);
    zl_quantize32(x[m], y[m], q + 32 * m, scale + m, sums + 2 * m);
  }
  zl_quantize32_eight(x, y, q8, 32, scale8, 1, sums8, 2);
}
