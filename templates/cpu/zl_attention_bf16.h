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
  return (v16f)_mm512_scalef_ps((__m512)p, (__m512)n);
}

/* x[n] -> pairs[n / 2]; n even */
ZL_KERNEL void zl_pairs(const float *x, uint32_t *pairs, int64_t n) {
  for (int64_t d = 0; d < n; d += 16) {
    v16u16 h = zl_to_bf16(zl_load_n(x + d, n - d));
    memcpy(pairs + d / 2, &h, (size_t)(n - d < 16 ? n - d : 16) * 2);
  }
}

/* s[i][0..64) = scores of QB queries; kp[v]: 16 positions, rows of block_size lanes */
ZL_KERNEL void zl_scores_bf16(const zl_attention_shape *a, int QB, const uint32_t *const *q, const char *const *kp,
                              float s[][ZL_CHUNK]) {
  const int64_t step = a->block_size * 4;
  v16f acc[4][4];
  ZL_UNROLL
  for (int v = 0; v < 4; v++) {
    ZL_UNROLL
    for (int i = 0; i < QB; i++) acc[v][i] = zl_set(0.0f);
  }
  ZL_NO_UNROLL
  for (int64_t d = 0; d < a->head_dim / 2; d++) {
    ZL_UNROLL
    for (int v = 0; v < 4; v++) {
      const v16i k = (v16i)zl_load((const float *)(const void *)(kp[v] + d * step));
      ZL_UNROLL
      for (int i = 0; i < QB; i++) acc[v][i] = zl_dot_pair(acc[v][i], k, q[i][d]);
    }
  }
  ZL_UNROLL
  for (int v = 0; v < 4; v++) {
    ZL_UNROLL
    for (int i = 0; i < QB; i++) zl_store(s[i] + 16 * v, acc[v][i]);
  }
}

/* Scores of one query -> probabilities in bf16, masked positions 0; updates max (in powers of two) and sum, returns the
 * factor for what was accumulated before.  c0 is the chunk's first position. */
ZL_KERNEL float zl_softmax_chunk_bf16(const zl_attention_shape *a, float *s, uint16_t *p, int64_t c0, int64_t from,
                                      int64_t last, float *max, float *sum) {
  const v16i lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const float log2e = 0x1.715476p+0f;
  const int whole = from <= c0 && last >= c0 + ZL_CHUNK - 1;
  const int32_t lo = (int32_t)(from - c0 < 0 ? 0 : from - c0 > ZL_CHUNK ? ZL_CHUNK : from - c0);
  const int32_t hi = (int32_t)(last - c0 > ZL_CHUNK ? ZL_CHUNK : last - c0 < -1 ? -1 : last - c0);
  v16f x[4], total = zl_set(0.0f);
  ZL_UNROLL
  for (int v = 0; v < 4; v++) {
    x[v] = zl_load(s + 16 * v);
    if (a->softcap > 0.0f)
      x[v] = (a->softcap * log2e) * zl_tanh(x[v] * (a->scale / a->softcap));
    else
      x[v] = x[v] * (a->scale * log2e);
    if (!whole) {
      v16i at = lane + 16 * v;
      x[v] = zl_select((v16i)((at >= lo) & (at <= hi)), x[v], zl_set(-__builtin_inff()));
    }
  }
  const float before = *max, now = zl_hmax(zl_max(zl_max(x[0], x[1]), zl_max(x[2], x[3])));
  const float top = now > before ? now : before;
  const float base = top == -__builtin_inff() ? 0.0f : top; /* nothing to attend to yet */
  ZL_UNROLL
  for (int v = 0; v < 4; v++) {
    v16u16 h = zl_to_bf16(zl_exp2_low(x[v] - base));
    memcpy(p + 16 * v, &h, 32);
    total = total + zl_from_bf16(h);
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

/* out[i] = factor[i] * out[i] + sum over positions of p[i] V; vp[v] points at V[16 v] of the chunk */
ZL_KERNEL void zl_weigh_bf16(const zl_attention_shape *a, int QB, const uint16_t p[][ZL_CHUNK], const float *factor,
                             const char *const *vp, int64_t positions, float *const *out) {
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
    for (int64_t j = 0; j < pairs; j++)
      zl_weigh_pair(QB, acc, p, j, vp[j / 8] + ((j % 8) * hd + d) * 4, width, left, 0);
    if (positions % 2) zl_weigh_pair(QB, acc, p, pairs, vp[pairs / 8] + ((pairs % 8) * hd + d) * 4, width, left, 1);
    ZL_UNROLL
    for (int i = 0; i < QB; i++) {
      ZL_UNROLL
      for (int w = 0; w < 4; w++)
        if (w < width) zl_store(out[i] + d + 16 * w, acc[i][w]);
    }
  }
}

/* QB queries from index i of the tile, one chunk; `positions` of the chunk exist */
ZL_KERNEL void zl_chunk_bf16(const zl_attention_shape *a, int QB, const zl_queries *tile, int64_t i, int64_t c0,
                             int64_t positions, const char *const *kp, const char *const *vp, zl_seen *seen) {
  _Alignas(64) float s[4][ZL_CHUNK];
  _Alignas(64) uint16_t p[4][ZL_CHUNK];
  float factor[4];
  float *out[4];
  const int64_t stride = (a->head_dim + 15) / 16 * 16;
  zl_scores_bf16(a, QB, tile->pairs + i, kp, s);
  for (int m = 0; m < QB; m++) {
    factor[m] = zl_softmax_chunk_bf16(a, s[m], p[m], c0, tile->from[i + m], tile->last[i + m], &seen->max[i + m],
                                      &seen->sum[i + m]);
    out[m] = seen->out + (i + m) * stride;
  }
  zl_weigh_bf16(a, QB, (const uint16_t(*)[ZL_CHUNK])p, factor, vp, positions, out);
}

#endif
