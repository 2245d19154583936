/* What every kernel is told besides its operands: which thread it is, the state of the step, scratch.
 *
 * In: zl_team.h.  Out: zl_task, the enumerations that constants name, and the work split.  Next file:
 * zl_simd.h (vectors).
 *
 * A kernel is `static inline void zl_xxx(const zl_task *t, int64_t rows, inputs.., outputs.., constants..)`.
 * All threads of the team call it with their own task; each does its own share and returns: there is no barrier
 * inside a kernel, no thread waits for another, and no kernel reads what another thread writes in the same call, with
 * one exception: spans of attention meet in `shared` (zl_attention_deal.h).  Who is done with a span adds one to a
 * counter there, and only who finds it complete reads the others' (acquire and release); it leaves the counter 0.  The
 * value of a row never depends on the other rows of the batch nor on the number of threads (batch invariance).
 *
 * KV pointers (`char *k`) point at the kernel's buffer inside KV block 0: kv + offset in block.  Block b of the
 * pool is at + b * ZL_KV_BLOCK_BYTES.
 */
#ifndef ZL_TASK_H
#define ZL_TASK_H
#include "zl_team.h" /* first: it asks the system headers for their Linux parts */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifndef ZL_KV_BLOCK_BYTES
#define ZL_KV_BLOCK_BYTES 0 /* bytes of one KV block, all layers; set by the module */
#endif
#ifndef ZL_SCRATCH_BYTES
#define ZL_SCRATCH_BYTES 0 /* per thread; the largest cpu_rows.scratch_bytes() of the module's calls */
#endif

#ifndef ZL_SLOTS_BYTES
#define ZL_SLOTS_BYTES 0 /* what spans of attention are kept in: cpu_rows.slots_bytes(); 0: no call has any */
#endif
#define ZL_MEETINGS 1024 /* most contexts of a call whose spans meet; a counter each, alone on its cache line */
#define ZL_SHARED_BYTES ((size_t)(ZL_SLOTS_BYTES ? ZL_MEETINGS * 64 + ZL_SLOTS_BYTES : 0))

#ifndef ZL_SCREEN_ROWS
#define ZL_SCREEN_ROWS 8 /* cpu_rows.SCREEN_ROWS: more logit rows compute for longer than they read (zl_screen.h, _split.h) */
#endif

#ifndef ZL_STREAMS
#define ZL_STREAMS 1 /* streams of weights that a thread reads side by side for one or two rows: a fact of the target */
#endif
_Static_assert(ZL_STREAMS == 1 || ZL_STREAMS == 2, "a product has code for one stream and for two");
#define ZL_STREAM_ROWS 2 /* most rows of a product that reads two: their sums leave registers for a block */

#if defined(__AVX512BW__) /* x86-64-v4 tuning would split vectors into halves without being told */
#define ZL_KERNEL static inline __attribute__((always_inline, min_vector_width(512)))
#else
#define ZL_KERNEL static inline __attribute__((always_inline))
#endif

#define ZL_UNROLL _Pragma("clang loop unroll(full)")
#define ZL_NO_UNROLL _Pragma("clang loop unroll(disable) vectorize(disable)")

enum zl_format {
  ZL_FMT_F32, ZL_FMT_F16, ZL_FMT_BF16, ZL_FMT_Q4_0, ZL_FMT_Q4_1, ZL_FMT_Q5_0, ZL_FMT_Q5_1, ZL_FMT_Q8_0,
  ZL_FMT_Q2_K, ZL_FMT_Q3_K, ZL_FMT_Q4_K, ZL_FMT_Q5_K, ZL_FMT_Q6_K, ZL_FMT_IQ4_NL,
  ZL_FMT_Q8_HIGH, ZL_FMT_Q8_LOW, /* the upper six and the lower two bits of Q8_0: zl_screen_split.h */
  ZL_FMT_BF16_12 /* bf16 in 12 bits: zl_bf16_12.h */
};
enum zl_activation_kind { ZL_A_F32, ZL_A_BF16, ZL_A_INT8 };
enum zl_activation {
  ZL_ACT_NONE, ZL_ACT_SILU, ZL_ACT_GELU_TANH, ZL_ACT_GELU_ERF, ZL_ACT_RELU, ZL_ACT_TANH, ZL_ACT_SIGMOID
};
enum zl_kv_dtype { ZL_KV_F32, ZL_KV_F16, ZL_KV_BF16, ZL_KV_Q8_0 };
enum zl_kv_role { ZL_ROLE_K, ZL_ROLE_V };
/* how the operands of Add, Sub, Mul, Div meet: one value, or one row [C], is repeated */
enum zl_broadcast { ZL_SAME, ZL_SCALAR_A, ZL_SCALAR_B, ZL_ROW_A, ZL_ROW_B };

typedef struct zl_task {
  int32_t thread, n_threads;
  int32_t n_seqs;              /* S */
  int32_t max_blocks;          /* B: columns of block_table */
  const int32_t *token_seq;    /* [T]: sequence of each token, filled by zl_token_seq */
  const int32_t *positions;    /* [T] */
  const int32_t *seq_starts;   /* [S + 1] */
  const int32_t *block_table;  /* [S, B] */
  char *scratch;               /* [ZL_SCRATCH_BYTES], 64-byte aligned, this thread's own */
  char *shared;                /* [ZL_SHARED_BYTES], 64-byte aligned, the whole team's: counters, 0, then slots */
  zl_team *team;
  int32_t screened;            /* only each row's largest logit is asked for: zl_screen.h */
  int32_t deal;                /* the call's cursors in the team, < 0: its items are dealt out beforehand */
} zl_task;

static inline void zl_barrier(const zl_task *t) { zl_team_barrier(t->team); }

/* Work items [*begin, *end) of this thread out of n: contiguous, sizes differ by at most one. */
ZL_KERNEL void zl_share(const zl_task *t, int64_t n, int64_t *begin, int64_t *end) {
  *begin = n * t->thread / t->n_threads;
  *end = n * (t->thread + 1) / t->n_threads;
}

/* Items of a call, dealt out while it runs: each thread takes halves of what is left of its own range, then what is left
 * of the others'.  Cores do not run at the same speed for long, least of all virtual ones, and the slowest would decide.
 * `zl_deal d = {n, 0, 0, 0}; while (zl_deal_item(t, &d, &i)) ...`, once in a call: the call's cursors are in the team. */
typedef struct zl_deal {
  int64_t n;
  int64_t next, end; /* items in hand */
  int32_t tried;     /* ranges found empty, from this thread's own on */
} zl_deal;

/* Takes more items in hand; 0 when there are none. */
static inline int zl_deal_more(const zl_task *t, zl_deal *d) {
  if (t->n_threads == 1 || t->deal < 0) {
    if (d->tried++) return 0;
    zl_share(t, d->n, &d->next, &d->end);
    return d->next < d->end;
  }
  for (; d->tried < t->n_threads; d->tried++) {
    const int32_t owner = (t->thread + d->tried) % t->n_threads;
    const int64_t first = d->n * owner / t->n_threads, size = d->n * (owner + 1) / t->n_threads - first;
    _Atomic int64_t *taken = &t->team->cursors[t->deal * t->n_threads + owner].taken;
    const int64_t left = size - atomic_load_explicit(taken, memory_order_relaxed);
    if (left <= 0) continue;
    const int64_t some = left > 1 ? left / 2 : 1;
    const int64_t from = atomic_fetch_add_explicit(taken, some, memory_order_relaxed);
    if (from >= size) continue;
    d->next = first + from;
    d->end = first + (from + some < size ? from + some : size);
    return 1;
  }
  return 0;
}

ZL_KERNEL int zl_deal_item(const zl_task *t, zl_deal *d, int64_t *item) {
  if (d->next == d->end && !zl_deal_more(t, d)) return 0;
  *item = d->next++;
  return 1;
}

/* Items in pairs.  Some machines read two streams of memory in different pages faster than one (docs/decisions.md).  There
 * a call that reads `items` runs of a matrix for few rows takes item i of the first half together with item i + half, and
 * each half is read in its order.  Returns half, rounded up (the last of the first half may be alone); 0 where items are
 * taken one by one: on other targets, for more rows or none, where a thread would get less than two pairs. */
ZL_KERNEL int64_t zl_first_half(int32_t n_threads, int64_t rows, int64_t items) {
  const int few = rows > 0 && rows <= ZL_STREAM_ROWS;
  return ZL_STREAMS == 2 && few && items >= 4 * (int64_t)n_threads ? (items + 1) / 2 : 0;
}

/* The item that is taken together with `item` of the first half, -1: none. */
ZL_KERNEL int64_t zl_other(int64_t half, int64_t item, int64_t items) {
  return ZL_STREAMS == 2 && half && item + half < items ? item + half : -1;
}

/* token_seq[T] from seq_starts[S + 1]; serial, for the step's prologue. */
static inline void zl_token_seq(const int32_t *seq_starts, int32_t n_seqs, int32_t *token_seq) {
  for (int32_t s = 0; s < n_seqs; s++)
    for (int32_t i = seq_starts[s]; i < seq_starts[s + 1]; i++) token_seq[i] = s;
}

#endif
