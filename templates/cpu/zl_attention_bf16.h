/* Attention over a bf16 cache: products of pairs (vdpbf16ps), twice the multiply-adds per instruction of float32.
 *
 * In: zl_attention.h's types, a target with AVX512-BF16.  Out: zl_pairs, zl_chunk_bf16.  Next file: zl_attention.h.
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

/* 2^x for x <= 0, relative error 3e-6; -inf -> 0, NaN stays NaN.  2^0 is 1 exactly: a chunk of which a query sees
 * nothing, because only others of its tile do, leaves that query's sums as they are. */
ZL_KERNEL v16f zl_exp2_low(v16f x) {
  x = zl_max(zl_set(-200.0f), x);
  v16f n = zl_round_even(x), f = x - n;
  v16f p = zl_set(0x1.3a02ccp-7f);
  p = zl_fma(p, f, zl_set(0x1.c9fc46p-5f));
  p = zl_fma(p, f, zl_set(0x1.ec0378p-3f));
  p = zl_fma(p, f, zl_set(0x1.62e12cp-1f));
  p = zl_fma(p, f, zl_set(1.0f));
  return zl_scale2(p, n);
}

/* by * x[n] -> pairs[n / 2]; n even */
ZL_KERNEL void zl_pairs(const float *x, float by, uint32_t *pairs, int64_t n) {
  for (int64_t d = 0; d < n; d += 16) {
    v16u16 h = zl_to_bf16(zl_load_n(x + d, n - d) * by);
    memcpy(pairs + d / 2, &h, (size_t)(n - d < 16 ? n - d : 16) * 2);
  }
}

/* s[i][0 .. 16 vectors) = scores of QB queries; at->k[v]: 16 positions, rows of block_size lanes */
ZL_KERNEL void zl_scores_bf16(const zl_attention_shape *a, int QB, int vectors, int fetch, const uint32_t *const *q,
                              const zl_chunk_at *at, float s[][ZL_CHUNK]) {
  const int64_t step = a->block_size * 4;
  v16f acc[4][4];
  ZL_UNROLL
  for (int v = 0; v < vectors; v++) {
    ZL_UNROLL
    for (int i = 0; i < QB; i++) acc[v][i] = zl_set(0.0f);
  }
  ZL_NO_UNROLL
  for (int64_t d = 0; d < a->head_dim / 2; d++) {
    ZL_UNROLL
    for (int v = 0; v < vectors; v++) {
      const v16i k = (v16i)zl_load((const float *)(const void *)(at->k[v] + d * step));
      if (fetch) zl_fetch_l2(at->next_k[v] + d * step);
      ZL_UNROLL
      for (int i = 0; i < QB; i++) acc[v][i] = zl_dot_pair(acc[v][i], k, q[i][d]);
    }
  }
  ZL_UNROLL
  for (int v = 0; v < vectors; v++) {
    ZL_UNROLL
    for (int i = 0; i < QB; i++) zl_store(s[i] + 16 * v, acc[v][i]);
  }
}

/* What zl_pairs multiplies a query by, so that its scores are exponents of 2. */
ZL_KERNEL float zl_query_scale(const zl_attention_shape *a) { return a->scale * 0x1.715476p+0f; }

/* Scores of one query -> probabilities in bf16, masked positions 0; updates max (in powers of two) and sum, returns the
 * factor for what was accumulated before.  c0 is the chunk's first position; positions from 16 * vectors on are masked. */
ZL_KERNEL float zl_softmax_chunk_bf16(const zl_attention_shape *a, int vectors, float *s, uint16_t *p, int64_t c0,
                                      int64_t from, int64_t last, float *max, float *sum) {
  const v16i lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const v16i ones = (v16i){0} + 0x3f803f80; /* pairs of 1 */
  const float log2e = 0x1.715476p+0f;
  const int whole = from <= c0 && last >= c0 + 16 * vectors - 1;
  const int32_t lo = (int32_t)(from - c0 < 0 ? 0 : from - c0 > ZL_CHUNK ? ZL_CHUNK : from - c0);
  const int32_t hi = (int32_t)(last - c0 > ZL_CHUNK ? ZL_CHUNK : last - c0 < -1 ? -1 : last - c0);
  v16f x[4], total = zl_set(0.0f), top_of = zl_set(-__builtin_inff());
  ZL_UNROLL
  for (int v = 0; v < vectors; v++) {
    x[v] = zl_load(s + 16 * v);
    if (a->softcap > 0.0f) x[v] = (a->softcap * log2e) * zl_tanh(x[v] * (1.0f / (a->softcap * log2e)));
    if (!whole) {
      v16i at = lane + 16 * v;
      x[v] = zl_select((v16i)((at >= lo) & (at <= hi)), x[v], zl_set(-__builtin_inff()));
    }
    top_of = zl_max(top_of, x[v]);
  }
  const float before = *max, now = zl_hmax(top_of);
  const float top = now > before ? now : before;
  const float base = top == -__builtin_inff() ? 0.0f : top; /* nothing to attend to yet */
  ZL_UNROLL
  for (int v = 0; v < vectors; v += 2) {
    const v16i pair = zl_to_pairs(zl_exp2_low(x[v] - base), zl_exp2_low(x[v + 1] - base));
    memcpy(p + 16 * v, &pair, 64);
    total = zl_dot_pairs(total, pair, ones); /* of the rounded ones */
  }
  const float factor = zl_exp2_low(zl_set(before - base))[0];
  *max = top;
  *sum = *sum * factor + zl_hsum(total);
  return factor;
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

/* out[i] = factor[i] * out[i] + sum over positions of p[i] V; at->v[v] points at V[16 v] of the chunk */
ZL_KERNEL void zl_weigh_bf16(const zl_attention_shape *a, int QB, int fetch, const uint16_t p[][ZL_CHUNK],
                             const float *factor, const zl_chunk_at *at, int64_t positions, float *const *out) {
  const int64_t hd = a->head_dim;
  for (int64_t d = 0; d < hd; d += 64) {
    const int64_t left = hd - d, width = left >= 64 ? 4 : (left + 15) / 16;
    v16f acc[4][4];
    ZL_UNROLL
    for (int i = 0; i < QB; i++) {
      ZL_UNROLL
      for (int w = 0; w < 4; w++)
        acc[i][w] = w < width ? zl_load(out[i] + d + 16 * w) * factor[i] : zl_set(0.0f);
    }
    const int64_t pairs = positions / 2;
    ZL_NO_UNROLL
    for (int64_t j = 0; j < pairs; j++) {
      const int64_t offset = ((j % 8) * hd + d) * 4;
      zl_weigh_pair(QB, acc, p, j, at->v[j / 8] + offset, width, left, 0);
      ZL_UNROLL
      for (int w = 0; w < 4; w++)
        if (fetch && w < width) zl_fetch_l2(at->next_v[j / 8] + offset + 64 * w);
    }
    if (positions % 2) zl_weigh_pair(QB, acc, p, pairs, at->v[pairs / 8] + ((pairs % 8) * hd + d) * 4, width, left, 1);
    ZL_UNROLL
    for (int i = 0; i < QB; i++) {
      ZL_UNROLL
      for (int w = 0; w < 4; w++)
        if (w < width) zl_store(out[i] + d + 16 * w, acc[i][w]);
    }
  }
}

/* QB queries from index i of the tile, one chunk of which `positions` exist, all in the first 16 * vectors */
ZL_KERNEL void zl_chunk_part_bf16(const zl_attention_shape *a, int QB, int vectors, int fetch, const zl_queries *tile,
                                  int64_t i, int64_t c0, int64_t positions, const zl_chunk_at *at, zl_seen *seen) {
  _Alignas(64) float s[4][ZL_CHUNK];
  _Alignas(64) uint16_t p[4][ZL_CHUNK];
  float factor[4];
  float *out[4];
  const int64_t stride = (a->head_dim + 15) / 16 * 16;
  zl_scores_bf16(a, QB, vectors, fetch, tile->pairs + i, at, s);
  for (int m = 0; m < QB; m++) {
    factor[m] = zl_softmax_chunk_bf16(a, vectors, s[m], p[m], c0, tile->from[i + m], tile->last[i + m],
                                      &seen->max[i + m], &seen->sum[i + m]);
    out[m] = seen->out + (i + m) * stride;
  }
  zl_weigh_bf16(a, QB, fetch, (const uint16_t(*)[ZL_CHUNK])p, factor, at, positions, out);
}

ZL_KERNEL void zl_chunk_bf16(const zl_attention_shape *a, int QB, int fetch, const zl_queries *tile, int64_t i,
                             int64_t c0, int64_t positions, const zl_chunk_at *at, zl_seen *seen) {
  if (positions > ZL_CHUNK / 2)
    zl_chunk_part_bf16(a, QB, 4, fetch, tile, i, c0, positions, at, seen);
  else /* the last of a context */
    zl_chunk_part_bf16(a, QB, 2, fetch, tile, i, c0, positions, at, seen);
}

#endif
