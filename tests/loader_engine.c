/* A stand-in for a compiled model: the whole ABI, a model that is a hash.
 *
 * A KV slot holds one token; the next token is a hash of every token read back through the block
 * table, the first weight byte, and (with sampling) seed and draw.  tests/loader_fake.py computes the
 * same without blocks.  Next file: loader_fake.py. */
#include <stdlib.h>
#include <string.h>

#include "zl_abi.h"

struct zl_engine {
  zl_create_args args;
  zl_lap *laps;
  int64_t capacity, *counts;
};

static const zl_module_info info = {
    ZL_ABI_VERSION, sizeof(zl_module_info), "fake", "hash", 256, 4096, 16 * sizeof(int32_t), 16,
    32, 4, 4, 259, 2, 1, 1, 3};

const zl_module_info *zl_info(void) { return &info; }

int32_t zl_create(const zl_create_args *a, zl_engine **out) {
  if (!a || !out || !a->weights || !a->workspace) return ZL_BAD_ARGUMENT;
  if (((uintptr_t)a->workspace | (uintptr_t)a->kv) & 63) return ZL_BAD_ARGUMENT;
  if (a->n_threads > 100) return ZL_NO_THREADS;
  memset(a->workspace, 1, a->workspace_bytes);
  zl_engine *e = malloc(sizeof *e);
  if (!e) return ZL_NO_MEMORY;
  memset(e, 0, sizeof *e);
  e->args = *a;
  *out = e;
  return ZL_OK;
}

static uint64_t mix(uint64_t h, uint64_t x) { return (h ^ x) * 1099511628211ull; }

#ifndef WITHOUT_TRACE
int32_t zl_trace(zl_engine *e, zl_lap *laps, int64_t capacity, int64_t *counts) {
  e->laps = laps, e->capacity = capacity, e->counts = counts;
  return ZL_OK;
}

int32_t zl_probe(zl_engine *e, void *memory, uint64_t bytes, uint64_t cache_bytes, zl_ceilings *out) {
  if (!e || !memory || cache_bytes > bytes) return ZL_BAD_ARGUMENT;
  *out = (zl_ceilings){.read_memory = 10, .read_cache = 100, .f32 = 5, .int8 = 20};
  return ZL_OK;
}
#endif

/* Each thread: 1, 2 and 3 us for the calls, then 4 us of waiting. */
static void write_laps(zl_engine *e, const zl_batch *b) {
  for (int32_t thread = 0; e->laps && thread < e->args.n_threads; thread++) {
    uint64_t now = 5000000;
    for (int64_t i = 0; i < 4 && i < e->capacity; i++) {
      const uint64_t end = now + 1000u * (uint64_t)(i + 1);
      e->laps[thread * e->capacity + i] = (zl_lap){now, end, i < 3 ? i : ZL_LAP_WAIT, i < 3 ? b->n_tokens : 0};
      now = end;
    }
    e->counts[thread] = 4;
  }
}

int32_t zl_step(zl_engine *e, const zl_batch *b) {
  if (!e || !b) return ZL_BAD_ARGUMENT;
  if (b->n_tokens > info.max_tokens || b->n_seqs > info.max_seqs ||
      b->n_logit_rows > info.max_logit_rows)
    return ZL_OVER_LIMIT;
  int32_t *kv = e->args.kv;
  for (int32_t s = 0; s < b->n_seqs; s++) {
    const int32_t *table = b->block_table + (int64_t)s * b->max_blocks;
    for (int32_t t = b->seq_starts[s]; t < b->seq_starts[s + 1]; t++) {
      if (b->tokens[t] < 0 || b->tokens[t] >= info.vocab_size) return ZL_BAD_TOKEN;
      int32_t column = b->positions[t] / 16;
      if (column >= b->max_blocks || (uint64_t)table[column] >= e->args.kv_blocks)
        return ZL_BAD_BLOCK;
      kv[table[column] * 16 + b->positions[t] % 16] = b->tokens[t];
    }
  }
  for (int32_t r = 0; r < b->n_logit_rows; r++) {
    int32_t row = b->logit_rows[r], s = 0;
    while (b->seq_starts[s + 1] <= row) s++;
    const int32_t *table = b->block_table + (int64_t)s * b->max_blocks;
    uint64_t h = mix(14695981039346656037ull, *(const uint8_t *)e->args.weights);
    for (int32_t p = 0; p <= b->positions[row]; p++) h = mix(h, (uint64_t)kv[table[p / 16] * 16 + p % 16]);
    if (b->sampling) {
      const zl_sampling *q = &b->sampling[r];
      if (q->temperature > 0) h = mix(mix(h, q->seed), q->draw);
      for (int32_t i = 0; i < q->n_history; i++) h = mix(h, (uint64_t)q->history[i]);
    }
    if (b->next) b->next[r] = (int32_t)((h >> 20) % 259);
    if (b->logits)
      for (int32_t v = 0; v < 259; v++) b->logits[r * 259 + v] = (float)(v == b->next[r]);
  }
  if (b->taps)
    for (int32_t i = 0; i < b->n_tokens * 2; i++) b->taps[i] = (float)i;
  if (b->call_ns)
    for (int32_t i = 0; i < 3; i++) b->call_ns[i] = 1000u * (uint64_t)(i + 1);
  write_laps(e, b);
  return ZL_OK;
}

#ifndef WITHOUT_TRACE
int32_t zl_decode(zl_engine *e, const zl_batch *b, zl_decoding *d) {
  int32_t tokens[4], positions[4], stop = 0;
  zl_sampling sampling[4];
  zl_batch step = *b;
  d->n_done = 0;
  if (b->n_tokens != b->n_seqs || b->n_logit_rows != b->n_seqs || b->n_seqs > 4) return ZL_BAD_ARGUMENT;
  if (b->next || b->call_ns || b->logits || b->taps) return ZL_BAD_ARGUMENT;
  for (int32_t s = 0; s < b->n_seqs; s++) {
    if (b->seq_starts[s] != s || b->logit_rows[s] != s) return ZL_BAD_ARGUMENT;
    if (b->sampling && b->sampling[s].repetition_penalty != 1) return ZL_BAD_ARGUMENT;
  }
  memcpy(tokens, b->tokens, (size_t)b->n_seqs * 4);
  memcpy(positions, b->positions, (size_t)b->n_seqs * 4);
  step.tokens = tokens;
  step.positions = positions;
  if (b->sampling) step.sampling = memcpy(sampling, b->sampling, (size_t)b->n_seqs * sizeof *sampling);
  while (d->n_done < d->n_steps && !stop) {
    step.next = d->next + d->n_done * b->n_seqs;
    int32_t status = zl_step(e, &step);
    if (status) return status;
    d->n_done++;
    for (int32_t s = 0; s < b->n_seqs; s++) {
      for (int32_t i = 0; i < d->n_stops; i++) stop |= d->stops[i] == step.next[s];
      tokens[s] = step.next[s];
      positions[s]++;
      if (b->sampling) sampling[s].draw++;
    }
  }
  return ZL_OK;
}
#endif

/* one input f32[n], one output f32[n] = input * 2 */
int32_t zl_run(zl_engine *e, const void *const *in, void *const *out, const int64_t *dims,
               int32_t n_dims, uint64_t *call_ns) {
  (void)call_ns;
  if (!e || n_dims != 1) return ZL_NO_ENTRY;
  for (int64_t i = 0; i < dims[0]; i++) ((float *)out[0])[i] = 2 * ((const float *)in[0])[i];
  return ZL_OK;
}

void zl_destroy(zl_engine *e) { free(e); }
