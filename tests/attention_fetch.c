/* Records what one token's attention asks for: every prefetch is a call of note(). test_cpu_attention_fetch.py. */
#define ZL_KV_BLOCK_BYTES block_bytes
#include "zl_task.h" /* first: it asks the system headers for their Linux parts */

static int64_t block_bytes;
static const char *pool;
static int64_t *asked, n_asked, room;
static void note(uintptr_t at) {
  if (n_asked < room) asked[n_asked] = (int64_t)(at - (uintptr_t)pool);
  n_asked++;
}
#define __builtin_prefetch(at, write, locality) note((uintptr_t)(at))
#include "zl_attention.h"

/* one token at `position` over blocks of [K][V], table i32[blocks]; returns how often something was asked for */
int64_t attend(char *kv, const int32_t *table, int32_t blocks, int32_t position, int64_t heads, int64_t kv_heads,
               int64_t head_dim, int64_t block_size, int kv_dtype, const float *q, float *y, int64_t *to, int64_t size) {
  const int64_t k_bytes = kv_heads * zl_kv_head_bytes(head_dim, block_size, kv_dtype);
  const int32_t starts[2] = {0, 1}, seq[1] = {0};
  zl_task t = {0, 1, 1, blocks, seq, &position, starts, table, NULL, NULL, NULL, 0, -1};
  pool = kv, asked = to, room = size, n_asked = 0, block_bytes = 2 * k_bytes;
  zl_paged_attention(&t, 1, q, kv, kv + k_bytes, &position, starts, table, y, heads, kv_heads, head_dim, 0.125, 0.0, 0,
                     block_size, kv_dtype);
  return n_asked;
}
