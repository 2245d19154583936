/* Reading ahead: the weights that this thread uses after the current phase.
 *
 * In: zl_task.h.  Out: zl_ahead_begin and zl_ahead_idle, for the module and its barriers.  Next file: zl_simd.h.
 *
 * One token's step is one pass over the weights, and which bytes come next is known before the step begins.  Memory
 * would idle while a thread waits at a barrier: here the thread fetches its share of the next matrices into L2 instead.
 * Only hints are given: results do not depend on it.  How a kernel for few tokens reads its own stream is a fact of the
 * target (zl_asks, zl_first_half).
 */
#ifndef ZL_AHEAD_H
#define ZL_AHEAD_H
#include "zl_task.h"

#ifndef ZL_AHEAD_BYTES
#define ZL_AHEAD_BYTES (128 * 1024) /* most that one phase fetches for later ones: a share of L2 */
#endif
#define ZL_AHEAD_STREAMS (3 * ZL_STREAMS) /* matrices of one call, or their halves */
#define ZL_AHEAD_ROWS 8    /* with more rows the products take longer than the weights */

/* A matrix in the order of the calls: items [first, first + items) of the `total` that its call deals out, in pairs where
 * the rows are few (zl_first_half). */
typedef struct zl_region {
  int64_t offset;     /* in the weights */
  int64_t item_bytes;
  int32_t first, items, total;
  int32_t phase, in_pairs;
} zl_region;

typedef struct zl_ahead {
  const char *weights;
  const zl_region *regions; /* [n_regions], phases ascending */
  int32_t n_regions, thread, n_threads;
  int32_t next;  /* region after those in hand */
  int32_t phase; /* of those in hand */
  int32_t streams;
  int64_t rows;   /* of the current phase; where those of a later one are others, its shares are as of these */
  int64_t budget; /* bytes that this phase may still fetch */
  const char *at[ZL_AHEAD_STREAMS], *end[ZL_AHEAD_STREAMS];
} zl_ahead;

/* Takes the part of items [begin, end) of a call that is in region r in hand. */
static inline void zl_ahead_add(zl_ahead *a, const zl_region *r, int64_t begin, int64_t end) {
  begin -= r->first;
  end -= r->first;
  if (begin < 0) begin = 0;
  if (end > r->items) end = r->items;
  if (begin >= end || a->streams == ZL_AHEAD_STREAMS) return;
  a->at[a->streams] = a->weights + r->offset + begin * r->item_bytes;
  a->end[a->streams++] = a->weights + r->offset + end * r->item_bytes;
}

/* Takes the regions of the next phase in hand: this thread's share of each, as zl_share deals it. */
static inline void zl_ahead_take(zl_ahead *a) {
  a->streams = 0;
  if (a->next >= a->n_regions) return;
  a->phase = a->regions[a->next].phase;
  for (; a->next < a->n_regions && a->regions[a->next].phase == a->phase; a->next++) {
    const zl_region *r = &a->regions[a->next];
    const int64_t half = r->in_pairs ? zl_first_half(a->n_threads, a->rows, r->total) : 0;
    int64_t begin, end;
    zl_share(&(zl_task){.thread = a->thread, .n_threads = a->n_threads}, half ? half : r->total, &begin, &end);
    zl_ahead_add(a, r, begin, end);
    if (half) zl_ahead_add(a, r, begin + half, end + half);
  }
}

/* Phase `phase` begins, for so many rows; `next` is the first region of a later phase.  What is in hand for a later phase
 * stays. */
static inline void zl_ahead_begin(zl_ahead *a, int32_t phase, int32_t next, int64_t rows) {
  a->rows = rows;
  if (a->streams == 0 || a->phase <= phase) {
    a->next = next;
    zl_ahead_take(a);
  }
  a->budget = rows <= ZL_AHEAD_ROWS ? ZL_AHEAD_BYTES : 0;
}

/* Fetches about `lines` lines of what comes next. */
static inline void zl_ahead_fetch(zl_ahead *a, int64_t lines) {
  while (lines > 0 && a->budget > 0) {
    int32_t open = 0;
    for (int32_t s = 0; s < a->streams; s++) {
      if (a->at[s] >= a->end[s]) continue;
      __builtin_prefetch(a->at[s], 0, 2);
      a->at[s] += 64;
      a->budget -= 64;
      lines--;
      open++;
    }
    if (open) continue;
    if (a->next >= a->n_regions) return;
    zl_ahead_take(a);
  }
}

/* For zl_team_barrier_with: a few lines, so that the barrier is looked at often. */
static inline int zl_ahead_idle(void *arg) {
  zl_ahead *a = (zl_ahead *)arg;
  const int64_t before = a->budget;
  zl_ahead_fetch(a, 4);
  return a->budget != before;
}

#endif
