/* Attention over a bf16 cache: products of pairs (vdpbf16ps), twice the multiply-adds per instruction of float32.
 *
 * In: zl_attention.h's types, a target with AVX512-BF16.  Out: zl_pairs, zl_chunk_bf16, zl_span_bf16.  Next file:
 * zl_attention.h.
 *
 * Cache of one layer in a block, 32-bit lanes of two bf16:
 *     K  [kv_heads][head_dim / 2][block_size]   lane = position, pair = elements (2 i, 2 i + 1)
 *     V  [kv_heads][block_size / 2][head_dim]   lane = element, pair = positions (2 i, 2 i + 1)
 * Queries and probabilities are rounded to bf16 (nearest even), sums are float32; the sum of probabilities is over the
 * rounded ones, so that the weights of a row add to one.
 */
#ifndef ZL_ATTENTION_BF16_H
#define ZL_ATTENTION_BF16_H

#if !defined(__AVX512BF16__)
#error "a bf16 cache needs AVX512-BF16; the kernel table must not have chosen it"
#endif

/* 2^x for x <= 0, relative error 3e-6; -inf -> 0, NaN stays NaN (measured by tests/test_cpu_kernels_attention.py).  2^0 is 1 exactly: a chunk of which a query sees nothing,
 * because only others of its tile do, leaves that query's sums as they are. */
ZL_KERNEL v16f zl_exp2_low(v16f x) {
  x = zl_max(zl_set(-200.0f), x);
  v16f n = zl_round_even(x), f = x - n;
  return zl_scale2(zl_exp2_part(f), n);
}

/* by * x[n] -> pairs[n / 2]; n even */
ZL_KERNEL void zl_pairs(const float *x, float by, uint32_t *pairs, int64_t n) {
  for (int64_t d = 0; d < n; d += 16) {
    v16u16 h = zl_to_bf16(zl_load_n(x + d, n - d) * by);
    memcpy(pairs + d / 2, &h, (size_t)(n - d < 16 ? n - d : 16) * 2);
  }
}

/* QB queries on one chunk, between their scores and their weighted sums. */
typedef struct zl_halfway {
  v16f s[4][4];                         /* scores, [query][16 positions] */
  _Alignas(64) uint16_t p[4][ZL_CHUNK]; /* probabilities */
  v16f total[4];                        /* their sums, lane by lane */
  v16f base, factor;                    /* lane m of every four: of query m; factor: its exponent first */
  const zl_chunk_at *at;
  int64_t i, positions; /* index of the first query in its tile; positions of the chunk that they attend to */
} zl_halfway;

ZL_KERNEL void zl_zero_bf16(int QB, int vectors, v16f acc[4][4]) {
  ZL_UNROLL
  for (int v = 0; v < vectors; v++) {
    ZL_UNROLL
    for (int m = 0; m < QB; m++) acc[v][m] = zl_set(0.0f);
  }
}

/* acc[v][i] += q[i] k for pairs d .. end of elements, QB queries and the 16 positions at at->k[v], rows of block_size
 * lanes; fetch: ask for those of the next chunk meanwhile */
ZL_KERNEL void zl_dots_bf16(const zl_attention_shape *a, int QB, int vectors, int fetch, const uint32_t *const *q,
                            const zl_chunk_at *at, int64_t d, int64_t end, v16f acc[4][4]) {
  const int64_t step = a->block_size * 4;
  ZL_NO_UNROLL
  for (; d < end; d++) {
    ZL_UNROLL
    for (int v = 0; v < vectors; v++) {
      const v16i k = (v16i)zl_load((const float *)(const void *)(at->k[v] + d * step));
      zl_fetch((uintptr_t)(at->next_k[v] + d * step), fetch);
      ZL_UNROLL
      for (int i = 0; i < QB; i++) acc[v][i] = zl_dot_pair(acc[v][i], k, q[i][d]);
    }
  }
}

/* What zl_pairs multiplies a query by, so that its scores are exponents of 2. */
ZL_KERNEL float zl_query_scale(const zl_attention_shape *a) { return a->scale * 0x1.715476p+0f; }

/* Lane i of every four: OP over the lanes of x[i], always in the same order. */
#define ZL_FOLD4(name, OP)                                                                                     \
  ZL_KERNEL v16f name(const v16f *x) {                                                                         \
    v16f p[2], r;                                                                                              \
    ZL_UNROLL                                                                                                  \
    for (int i = 0; i < 2; i++)                                                                                \
      p[i] = OP(__builtin_shufflevector(x[2 * i], x[2 * i + 1], 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12,  \
                                        28, 13, 29),                                                           \
                __builtin_shufflevector(x[2 * i], x[2 * i + 1], 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27,    \
                                        14, 30, 15, 31));                                                      \
    r = OP(__builtin_shufflevector(p[0], p[1], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29),      \
           __builtin_shufflevector(p[0], p[1], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31));   \
    r = OP(r, __builtin_shufflevector(r, r, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));            \
    return OP(r, __builtin_shufflevector(r, r, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));         \
  }
ZL_FOLD4(zl_fold4_max, zl_max)
ZL_FOLD4(zl_fold4_sum, ZL_SUM)

/* four floats, four times; the first four back */
ZL_KERNEL v16f zl_load_four(const float *p) {
  typedef float v4f_ __attribute__((vector_size(16)));
  v4f_ x;
  memcpy(&x, p, 16);
  return __builtin_shufflevector(x, x, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3);
}
ZL_KERNEL void zl_store_four(float *p, v16f x) { memcpy(p, &x, 16); }

/* lane i of every four in all lanes */
ZL_KERNEL v16f zl_one_of_four(v16f x, int i) {
  switch (i) {
    case 0: return __builtin_shufflevector(x, x, 0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12);
    case 1: return __builtin_shufflevector(x, x, 1, 1, 1, 1, 5, 5, 5, 5, 9, 9, 9, 9, 13, 13, 13, 13);
    case 2: return __builtin_shufflevector(x, x, 2, 2, 2, 2, 6, 6, 6, 6, 10, 10, 10, 10, 14, 14, 14, 14);
    default: return __builtin_shufflevector(x, x, 3, 3, 3, 3, 7, 7, 7, 7, 11, 11, 11, 11, 15, 15, 15, 15);
  }
}

/* Scores of query m from c0 on, those of positions that it does not attend to -inf. */
ZL_KERNEL void zl_mask_bf16(int vectors, zl_halfway *h, int m, int64_t c0, int64_t from, int64_t last) {
  const v16i lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const int32_t lo = (int32_t)(from - c0 < 0 ? 0 : from - c0 > ZL_CHUNK ? ZL_CHUNK : from - c0);
  const int32_t hi = (int32_t)(last - c0 > ZL_CHUNK ? ZL_CHUNK : last - c0 < -1 ? -1 : last - c0);
  ZL_UNROLL
  for (int v = 0; v < vectors; v++) {
    const v16i at = lane + 16 * v;
    h->s[m][v] = zl_select((v16i)((at >= lo) & (at <= hi)), h->s[m][v], zl_set(-__builtin_inff()));
  }
}

/* acc -> scores, and from them maxima and bases of QB queries, in powers of two.  c0 is the chunk's first
 * position; positions from 16 * vectors on are masked.  whole: all queries attend to all of the chunk. */
ZL_KERNEL void zl_tops_bf16(const zl_attention_shape *a, int QB, int vectors, int whole, v16f acc[4][4], int64_t c0,
                            const zl_queries *tile, zl_halfway *h, zl_seen *seen) {
  const float log2e = 0x1.715476p+0f;
  v16f of[4];
  ZL_UNROLL
  for (int m = 0; m < QB; m++) {
    ZL_UNROLL
    for (int v = 0; v < vectors; v++) {
      h->s[m][v] = acc[v][m];
      if (a->softcap > 0.0f)
        h->s[m][v] = (a->softcap * log2e) * zl_tanh(h->s[m][v] * (1.0f / (a->softcap * log2e)));
    }
    const int64_t from = tile->from[h->i + m], last = tile->last[h->i + m];
    if (!whole && (from > c0 || last < c0 + 16 * vectors - 1)) zl_mask_bf16(vectors, h, m, c0, from, last);
    of[m] = h->s[m][0];
    ZL_UNROLL
    for (int v = 1; v < vectors; v++) of[m] = zl_max(of[m], h->s[m][v]);
  }
  ZL_UNROLL
  for (int m = QB; m < 4; m++) of[m] = of[0];
  const v16f before = zl_load_four(seen->max + h->i), top = zl_max(before, zl_fold4_max(of));
  h->base = zl_max(zl_set(-0x1.fffffep127f), top); /* -inf, nothing to attend to yet: the least finite score */
  h->factor = before - h->base;
  zl_store_four(seen->max + h->i, top);
}

/* Scores v and v + 1 of query m -> probabilities in bf16, masked positions 0, and their sum. */
ZL_KERNEL void zl_powers_bf16(int vectors, zl_halfway *h, int m, int v, v16f base) {
  const v16i ones = (v16i){0} + 0x3f803f80; /* pairs of 1 */
  const v16f low = zl_exp2_low(h->s[m][v] - base);
  const v16i pair = zl_to_pairs(low, v + 1 < vectors ? zl_exp2_low(h->s[m][v + 1] - base) : zl_set(0.0f));
  memcpy(h->p[m] + 16 * v, &pair, 64);
  h->total[m] = zl_dot_pairs(v ? h->total[m] : zl_set(0.0f), pair, ones); /* of the rounded ones */
}

/* acc[i][w] += sum over position pairs [0, pairs) of p[i] V for 16 elements each */
ZL_KERNEL void zl_weigh_pair(int QB, v16f acc[4][4], const uint16_t p[][ZL_CHUNK], int64_t pair, const char *row,
                             int64_t width, int64_t left, int odd) {
  ZL_UNROLL
  for (int w = 0; w < 4; w++) {
    if (w >= width) continue;
    v16i x = (v16i)zl_load_n((const float *)(const void *)(row + 64 * w), left - 16 * w);
    if (odd) x = x & 0xffff; /* the pair's second position does not exist yet: whatever lies there */
    ZL_UNROLL
    for (int i = 0; i < QB; i++) {
      uint32_t e;
      memcpy(&e, p[i] + 2 * pair, 4);
      acc[i][w] = zl_dot_pair(acc[i][w], x, e);
    }
  }
}

/* Of QB queries: sum = factor * sum + total, out = factor * out + sum over positions of p V; h->at->v[v] points at
 * V[16 v] of the chunk */
ZL_KERNEL void zl_weigh_bf16(const zl_attention_shape *a, int QB, int fetch, const zl_halfway *h, int64_t positions,
                             zl_seen *seen) {
  const int64_t hd = a->head_dim, stride = (hd + 15) / 16 * 16;
  const zl_chunk_at *at = h->at;
  const uint16_t(*p)[ZL_CHUNK] = (const uint16_t(*)[ZL_CHUNK])h->p;
  float *out = seen->out + h->i * stride;
  v16f total[4];
  ZL_UNROLL
  for (int m = 0; m < 4; m++) total[m] = h->total[m < QB ? m : 0];
  zl_store_four(seen->sum + h->i, zl_load_four(seen->sum + h->i) * h->factor + zl_fold4_sum(total));
  for (int64_t d = 0; d < hd; d += 64) {
    const int64_t left = hd - d, width = left >= 64 ? 4 : (left + 15) / 16;
    v16f acc[4][4];
    ZL_UNROLL
    for (int i = 0; i < QB; i++) {
      ZL_UNROLL
      for (int w = 0; w < 4; w++)
        acc[i][w] = w < width ? zl_load(out + i * stride + d + 16 * w) * zl_one_of_four(h->factor, i) : zl_set(0.0f);
    }
    const int64_t pairs = positions / 2;
    ZL_NO_UNROLL
    for (int64_t j = 0; j < pairs; j++) {
      const int64_t offset = ((j % 8) * hd + d) * 4;
      zl_weigh_pair(QB, acc, p, j, at->v[j / 8] + offset, width, left, 0);
      ZL_UNROLL
      for (int w = 0; w < 4; w++)
        if (w < width) zl_fetch((uintptr_t)(at->next_v[j / 8] + offset + 64 * w), fetch);
    }
    if (positions % 2) zl_weigh_pair(QB, acc, p, pairs, at->v[pairs / 8] + ((pairs % 8) * hd + d) * 4, width, left, 1);
    ZL_UNROLL
    for (int i = 0; i < QB; i++) {
      ZL_UNROLL
      for (int w = 0; w < 4; w++)
        if (w < width) zl_store(out + i * stride + d + 16 * w, acc[i][w]);
    }
  }
}

/* All scores of QB queries -> probabilities. */
ZL_KERNEL void zl_all_powers_bf16(int QB, int vectors, zl_halfway *h) {
  ZL_UNROLL
  for (int m = 0; m < QB; m++) {
    ZL_UNROLL
    for (int v = 0; v < vectors; v += 2) zl_powers_bf16(vectors, h, m, v, zl_one_of_four(h->base, m));
  }
}

/* Scores and maxima of QB queries from index i of the tile on the first 16 * vectors positions of a chunk. */
ZL_KERNEL void zl_begin_bf16(const zl_attention_shape *a, int QB, int vectors, int fetch, const zl_queries *tile,
                             int64_t i, int64_t c0, const zl_chunk_at *at, zl_halfway *h, zl_seen *seen) {
  v16f acc[4][4];
  h->at = at;
  h->i = i;
  zl_zero_bf16(QB, vectors, acc);
  zl_dots_bf16(a, QB, vectors, fetch, tile->pairs + i, at, 0, a->head_dim / 2, acc);
  zl_tops_bf16(a, QB, vectors, 0, acc, c0, tile, h, seen);
}

/* QB queries from index i of the tile, one chunk of which `positions` exist, all in the first 16 * vectors */
ZL_KERNEL void zl_chunk_part_bf16(const zl_attention_shape *a, int QB, int vectors, int fetch, const zl_queries *tile,
                                  int64_t i, int64_t c0, int64_t positions, const zl_chunk_at *at, zl_seen *seen) {
  zl_halfway h;
  zl_begin_bf16(a, QB, vectors, fetch, tile, i, c0, at, &h, seen);
  zl_all_powers_bf16(QB, vectors, &h);
  h.factor = zl_exp2_low(h.factor);
  zl_weigh_bf16(a, QB, fetch, &h, positions, seen);
}

ZL_KERNEL void zl_chunk_bf16(const zl_attention_shape *a, int QB, int fetch, const zl_queries *tile, int64_t i,
                             int64_t c0, int64_t positions, const zl_chunk_at *at, zl_seen *seen) {
  if (positions > ZL_CHUNK / 2)
    zl_chunk_part_bf16(a, QB, 4, fetch, tile, i, c0, positions, at, seen);
  else /* the last of a context */
    zl_chunk_part_bf16(a, QB, 2, fetch, tile, i, c0, positions, at, seen);
}

/* Chunks at c0 .. stop, all queries of a tile attending to all of them: the probabilities of four queries are computed
 * between the scores of the next four, on pipes that the products leave idle.  The last four ask for the next chunk. */
ZL_KERNEL void zl_whole_bf16(const zl_task *t, const zl_attention_shape *a, const zl_queries *tile, const char *k,
                             const char *v, int64_t c0, int64_t stop, int64_t end, zl_seen *seen) {
  const int64_t pairs = a->head_dim / 2, some = pairs / 8; /* of elements; some: between two vectors of probabilities */
  zl_chunk_at at[2];
  zl_halfway both[2];
  int n = 0, any = 0;
  memset(&both[1], 0, sizeof(zl_halfway));
  for (; c0 < stop; c0 += ZL_CHUNK) {
    zl_chunk_at *here = &at[c0 / ZL_CHUNK % 2];
    zl_locate_chunk(t, a, tile, k, v, c0, end, here);
    for (int64_t i = 0; i < tile->n; i += 4, n ^= 1, any = 1) {
      zl_halfway *h = &both[n], *other = &both[n ^ 1];
      const int fetch = i + 4 < tile->n ? 0 : ZL_FETCH_L1;
      v16f acc[4][4];
      h->at = here;
      h->i = i;
      zl_zero_bf16(4, 4, acc);
      other->factor = zl_exp2_low(other->factor);
      ZL_NO_UNROLL
      for (int m = 0; m < 4; m++) {
        const v16f base = zl_set(other->base[m]);
        zl_powers_bf16(4, other, m, 0, base);
        zl_dots_bf16(a, 4, 4, fetch, tile->pairs + i, here, 2 * m * some, (2 * m + 1) * some, acc);
        zl_powers_bf16(4, other, m, 2, base);
        zl_dots_bf16(a, 4, 4, fetch, tile->pairs + i, here, (2 * m + 1) * some, (2 * m + 2) * some, acc);
      }
      zl_dots_bf16(a, 4, 4, fetch, tile->pairs + i, here, 8 * some, pairs, acc);
      zl_tops_bf16(a, 4, 4, 1, acc, c0, tile, h, seen);
      if (any) zl_weigh_bf16(a, 4, i == 0 ? ZL_FETCH_L1 : 0, other, ZL_CHUNK, seen); /* i == 0: the last four's */
    }
  }
  if (!any) return;
  zl_halfway *last = &both[n ^ 1];
  last->factor = zl_exp2_low(last->factor);
  zl_all_powers_bf16(4, 4, last);
  zl_weigh_bf16(a, 4, 0, last, ZL_CHUNK, seen);
}

/* The queries of a tile, four at a time, one chunk that not all of them attend to: the weighted sums of four are
 * computed while the maxima of the next four are folded. */
ZL_KERNEL void zl_masked_bf16(const zl_attention_shape *a, const zl_queries *tile, int64_t c0, const zl_chunk_at *at,
                              zl_seen *seen) {
  zl_halfway both[2], *other = NULL;
  int n = 0;
  for (int64_t i = 0; i < tile->n; i += 4) {
    int64_t from = tile->from[i], last = tile->last[i];
    for (int64_t m = i + 1; m < i + 4; m++) {
      from = tile->from[m] < from ? tile->from[m] : from;
      last = tile->last[m] > last ? tile->last[m] : last;
    }
    if (last < c0 || from >= c0 + ZL_CHUNK) continue;
    zl_halfway *h = &both[n];
    n ^= 1;
    h->positions = last - c0 + 1 < ZL_CHUNK ? last - c0 + 1 : ZL_CHUNK;
    const int64_t vectors = (h->positions + 15) / 16;
    /* a constant in each: what is unrolled by it stays in registers */
    if (vectors == 1) zl_begin_bf16(a, 4, 1, 0, tile, i, c0, at, h, seen);
    if (vectors == 2) zl_begin_bf16(a, 4, 2, 0, tile, i, c0, at, h, seen);
    if (vectors == 3) zl_begin_bf16(a, 4, 3, 0, tile, i, c0, at, h, seen);
    if (vectors == 4) zl_begin_bf16(a, 4, 4, 0, tile, i, c0, at, h, seen);
    if (other) zl_weigh_bf16(a, 4, 0, other, other->positions, seen);
    h->factor = zl_exp2_low(h->factor);
    if (vectors == 1) zl_all_powers_bf16(4, 1, h);
    if (vectors == 2) zl_all_powers_bf16(4, 2, h);
    if (vectors == 3) zl_all_powers_bf16(4, 3, h);
    if (vectors == 4) zl_all_powers_bf16(4, 4, h);
    other = h;
  }
  if (other) zl_weigh_bf16(a, 4, 0, other, other->positions, seen);
}

/* zl_span for more queries than ask for the next chunk: whole chunks, before and after them those that queries attend
 * to in part. */
ZL_KERNEL void zl_span_bf16(const zl_task *t, const zl_attention_shape *a, const zl_queries *tile, const char *k,
                            const char *v, int64_t c0, int64_t end, int64_t context_end, zl_seen *seen) {
  int64_t from = tile->from[0], last = tile->last[0];
  for (int64_t i = 1; i < tile->n; i++) {
    from = tile->from[i] > from ? tile->from[i] : from;
    last = tile->last[i] < last ? tile->last[i] : last;
  }
  while (c0 <= end) {
    int64_t stop = c0; /* as many as are whole */
    while (stop >= from && stop + ZL_CHUNK - 1 <= last && stop + ZL_CHUNK - 1 <= end) stop += ZL_CHUNK;
    if (stop > c0) {
      zl_whole_bf16(t, a, tile, k, v, c0, stop, context_end, seen);
      c0 = stop;
    } else {
      zl_chunk_at at;
      zl_locate_chunk(t, a, tile, k, v, c0, context_end, &at);
      zl_masked_bf16(a, tile, c0, &at, seen);
      c0 += ZL_CHUNK;
    }
  }
}

#endif
