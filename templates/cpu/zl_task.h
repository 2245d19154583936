/* What every kernel is told besides its operands: which thread it is, the state of the step, scratch.
 *
 * In: zl_team.h.  Out: zl_task, the enumerations that constants name, and the work split.  Next file:
 * zl_simd.h (vectors).
 *
 * A kernel is `static inline void zl_xxx(const zl_task *t, int64_t rows, inputs.., outputs.., constants..)`.
 * All threads of the team call it with their own task; each does its own share and returns: there is no barrier
 * inside a kernel, and no kernel reads what another thread writes in the same call.  The value of a row never
 * depends on the other rows of the batch nor on the number of threads (batch invariance).
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

#if defined(__AVX512BW__) /* x86-64-v4 tuning would split vectors into halves without being told */
#define ZL_KERNEL static inline __attribute__((always_inline, min_vector_width(512)))
#else
#define ZL_KERNEL static inline __attribute__((always_inline))
#endif

enum zl_format {
  ZL_FMT_F32, ZL_FMT_F16, ZL_FMT_BF16, ZL_FMT_Q4_0, ZL_FMT_Q4_1, ZL_FMT_Q5_0, ZL_FMT_Q5_1, ZL_FMT_Q8_0,
  ZL_FMT_Q2_K, ZL_FMT_Q3_K, ZL_FMT_Q4_K, ZL_FMT_Q5_K, ZL_FMT_Q6_K, ZL_FMT_IQ4_NL
};
enum zl_activation_kind { ZL_A_F32, ZL_A_BF16, ZL_A_INT8 };
enum zl_activation {
  ZL_ACT_NONE, ZL_ACT_SILU, ZL_ACT_GELU_TANH, ZL_ACT_GELU_ERF, ZL_ACT_RELU, ZL_ACT_TANH, ZL_ACT_SIGMOID
};
enum zl_kv_dtype { ZL_KV_F32, ZL_KV_F16, ZL_KV_BF16 };
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
  zl_team *team;
} zl_task;

static inline void zl_barrier(const zl_task *t) { zl_team_barrier(t->team); }

/* Work items [*begin, *end) of this thread out of n: contiguous, sizes differ by at most one. */
ZL_KERNEL void zl_share(const zl_task *t, int64_t n, int64_t *begin, int64_t *end) {
  *begin = n * t->thread / t->n_threads;
  *end = n * (t->thread + 1) / t->n_threads;
}

/* token_seq[T] from seq_starts[S + 1]; serial, for the step's prologue. */
static inline void zl_token_seq(const int32_t *seq_starts, int32_t n_seqs, int32_t *token_seq) {
  for (int32_t s = 0; s < n_seqs; s++)
    for (int32_t i = seq_starts[s]; i < seq_starts[s + 1]; i++) token_seq[i] = s;
}

#endif
