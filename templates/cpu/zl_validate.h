/* Every bound of a batch, checked before anything is read through it.
 *
 * In: zl_abi.h.  Out: zl_validate_batch.  Next file: module.c.jinja (the step).
 */
#ifndef ZL_VALIDATE_H
#define ZL_VALIDATE_H
#include <stddef.h>

#include "zl_abi.h"

/* sequence s: its positions lie in its row of the block table and the blocks up to them in the pool */
static int32_t zl_validate_sequence(const zl_batch *b, int32_t s, int32_t block_size, uint64_t kv_blocks) {
  int64_t last = -1;
  for (int32_t i = b->seq_starts[s]; i < b->seq_starts[s + 1]; i++) {
    const int64_t p = b->positions[i];
    if (p < 0 || p >= (int64_t)b->max_blocks * block_size) return ZL_BAD_BLOCK;
    if (p > last) last = p;
  }
  /* attention reads every position before the last */
  for (int64_t k = 0; last >= 0 && k <= last / block_size; k++) {
    const int32_t id = b->block_table[(int64_t)s * b->max_blocks + k];
    if (id < 0 || (uint64_t)id >= kv_blocks) return ZL_BAD_BLOCK;
  }
  return ZL_OK;
}

static int32_t zl_validate_sampling(const zl_batch *b, int32_t vocab_size) {
  for (int32_t r = 0; r < b->n_logit_rows; r++) {
    const zl_sampling *s = &b->sampling[r];
    if (s->n_history < 0 || (s->n_history > 0 && !s->history)) return ZL_BAD_ARGUMENT;
    for (int32_t i = 0; i < s->n_history; i++)
      if (s->history[i] < 0 || s->history[i] >= vocab_size) return ZL_BAD_TOKEN;
  }
  return ZL_OK;
}

/* ZL_OK, or the first thing wrong: sizes, limits, pointers, sequence starts, tokens, positions and blocks, logit rows,
 * sampling.  kv_block_size 0: the model has no KV cache. */
static int32_t zl_validate_batch(const zl_module_info *info, uint64_t kv_blocks, const zl_batch *b) {
  if (!info || !b) return ZL_BAD_ARGUMENT;
  if (b->n_tokens < 1 || b->n_seqs < 1 || b->max_blocks < 0 || b->n_logit_rows < 0) return ZL_BAD_ARGUMENT;
  if (b->n_tokens > info->max_tokens || b->n_seqs > info->max_seqs || b->n_logit_rows > info->max_logit_rows)
    return ZL_OVER_LIMIT;
  if (!b->tokens || !b->positions || !b->seq_starts) return ZL_BAD_ARGUMENT;
  if (b->n_logit_rows > 0 && (!b->logit_rows || (!b->next && !b->logits))) return ZL_BAD_ARGUMENT;
  if (b->taps && b->n_logit_rows != b->n_tokens) return ZL_BAD_ARGUMENT;
  if (b->seq_starts[0] != 0 || b->seq_starts[b->n_seqs] != b->n_tokens) return ZL_BAD_ARGUMENT;
  for (int32_t s = 0; s < b->n_seqs; s++) /* with the ends fixed, ascending means in range */
    if (b->seq_starts[s + 1] < b->seq_starts[s]) return ZL_BAD_ARGUMENT;
  for (int32_t i = 0; i < b->n_tokens; i++)
    if (b->tokens[i] < 0 || b->tokens[i] >= info->vocab_size) return ZL_BAD_TOKEN;
  if (info->kv_block_size > 0) {
    if (b->max_blocks > 0 && !b->block_table) return ZL_BAD_ARGUMENT;
    for (int32_t s = 0; s < b->n_seqs; s++) {
      int32_t status = zl_validate_sequence(b, s, info->kv_block_size, kv_blocks);
      if (status != ZL_OK) return status;
    }
  }
  for (int32_t r = 0; r < b->n_logit_rows; r++) {
    if (b->logit_rows[r] < 0 || b->logit_rows[r] >= b->n_tokens) return ZL_BAD_ARGUMENT;
    if (r > 0 && b->logit_rows[r] < b->logit_rows[r - 1]) return ZL_BAD_ARGUMENT;
    if (b->taps && b->logit_rows[r] != r) return ZL_BAD_ARGUMENT; /* the last layer makes these rows and no others */
  }
  return b->n_logit_rows > 0 && b->sampling ? zl_validate_sampling(b, info->vocab_size) : ZL_OK;
}

#endif
