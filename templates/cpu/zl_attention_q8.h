/* Attention over a cache of 8-bit codes: keys and values as Q8_0, a scale for 32 neighbouring elements of a position.
 *
 * In: zl_attention.h's types, zl_attention_float.h's zl_mask_scores, zl_math.h, zl_quantize.h's zl_fold8_max_wide.
 * Out: zl_query_q8, zl_chunk_q8.  Next file: zl_attention.h.
 *
 * A head's share of a block is a row of pieces of 16 positions, each 17 head_dim bytes that lie together:
 *     K  i8  [head_dim / 2][16][2]   lane = position, pair = elements (2 i, 2 i + 1)
 *     V  i8  [8][head_dim][2]        lane = element, pair = positions (2 i, 2 i + 1)
 *     then of either the scales, f16 [head_dim / 32][16]; zl_cache_put_q8 in zl_attention.h writes it
 * Codes are widened to 16 bits and multiplied in pairs (vpmaddwd: on AVX2 twice the multiply-adds of float32 an
 * instruction).  A query is rounded to 16 bits once, probabilities times the values' scales chunk by chunk, both
 * relative to their largest: an element of a query loses 1/65,534 of the largest where a code loses 1/254, a chunk's
 * probabilities together 64/65,534 of the largest at worst.  Sums are exact: 64 x 127 x 32767 < 2^31.
 */
#ifndef ZL_ATTENTION_Q8_H
#define ZL_ATTENTION_Q8_H

#define ZL_Q8_TOP 32767.0f /* the largest number of 16 bits that a query or a probability becomes */

/* Pieces of 16 positions whose sums are kept in registers at a time. */
#define ZL_Q8_PIECES (ZL_AVX512 ? 4 : 1)

/* by * q[n] -> pairs[n / 2] of 16 bits; returns what their products are multiplied by, more than 0: 0 times a masked
 * score, -infinity, would be NaN */
ZL_KERNEL float zl_query_q8(const float *q, float by, uint32_t *pairs, int64_t n) {
  v16i top = {0};
  for (int64_t d = 0; d < n; d += 16) top = __builtin_elementwise_max(top, (v16i)zl_abs(zl_load(q + d) * by));
  const float most = zl_hmax_abs((v16f)top), inverse = most < 0x1p-100f ? 0.0f : ZL_Q8_TOP / most;
  for (int64_t d = 0; d < n; d += 16) zl_store_s16(pairs + d / 2, zl_round_to_int(zl_load(q + d) * by * inverse));
  return most < 0x1p-100f ? 0x1p-126f : most / ZL_Q8_TOP;
}

/* s[i][16 v ..] = scores of QB queries for the 16 positions of piece at->k[v], but for each query's factor; fetch: asks
 * for the next chunk's keys meanwhile, a line for every two pairs of elements and one for the scales of 64 */
ZL_KERNEL void zl_scores_q8(const zl_attention_shape *a, int QB, int fetch, const uint32_t *const *q,
                            const zl_chunk_at *at, int64_t vectors, float s[][ZL_CHUNK]) {
  const int64_t hd = a->head_dim, turns = (vectors + ZL_Q8_PIECES - 1) / ZL_Q8_PIECES * ZL_Q8_PIECES;
  for (int64_t v = 0; v < vectors; v += ZL_Q8_PIECES) {
    const char *p[ZL_Q8_PIECES];
    ZL_UNROLL
    for (int w = 0; w < ZL_Q8_PIECES; w++) p[w] = at->k[v + w < vectors ? v + w : vectors - 1]; /* again, not stored */
    for (int64_t d = 0; d < hd; d += 32) {
      v16i acc[ZL_Q8_PIECES][ZL_MANY_QUERIES];
      ZL_UNROLL
      for (int w = 0; w < ZL_Q8_PIECES; w++) {
        ZL_UNROLL
        for (int i = 0; i < QB; i++) acc[w][i] = (v16i){0};
      }
      ZL_NO_UNROLL
      for (int64_t e = d; e < d + 32; e += 4) {
        ZL_UNROLL
        for (int w = 0; w < ZL_Q8_PIECES; w++)
          for (int64_t i = v + w; fetch && i < ZL_CHUNK / 16; i += turns)
            zl_fetch((uintptr_t)at->next_k[i] + (uintptr_t)(16 * e), fetch);
        ZL_UNROLL
        for (int h = 0; h < 2; h++) {
          v32s16 k[ZL_Q8_PIECES];
          ZL_UNROLL
          for (int w = 0; w < ZL_Q8_PIECES; w++) k[w] = zl_load_widened(p[w] + 16 * (e + 2 * h));
          ZL_UNROLL
          for (int i = 0; i < QB; i++) {
            ZL_UNROLL
            for (int w = 0; w < ZL_Q8_PIECES; w++) acc[w][i] = zl_dot_s16(acc[w][i], k[w], q[i][e / 2 + h]);
          }
        }
      }
      ZL_UNROLL
      for (int w = 0; w < ZL_Q8_PIECES; w++) {
        for (int64_t i = v + w; fetch && d % 64 == 0 && i < ZL_CHUNK / 16; i += turns)
          zl_fetch((uintptr_t)at->next_k[i] + (uintptr_t)(16 * hd + d), fetch);
        if (v + w >= vectors) break;
        const v16f scale = zl_load_half(p[w] + 16 * hd + d);
        ZL_UNROLL
        for (int i = 0; i < QB; i++) {
          float *to = s[i] + 16 * (v + w);
          const v16f x = zl_to_float(acc[w][i]) * scale;
          zl_store(to, d ? zl_load(to) + x : x);
        }
      }
    }
  }
}

/* Scores of one query: those of positions that it does not attend to -inf, and where they are capped, times `unit` and
 * capped; returns the largest. */
ZL_KERNEL float zl_top_q8(const zl_attention_shape *a, float unit, float *s, int64_t vectors, int64_t lo, int64_t hi) {
  if (a->softcap > 0.0f || lo > 0 || hi < 16 * vectors - 1)
    return zl_mask_scores(a, a->softcap > 0.0f ? unit : 1.0f, s, vectors, lo, hi);
  v16f m = zl_load(s);
  for (int64_t v = 1; v < vectors; v++) m = zl_max(m, zl_load(s + 16 * v));
  return zl_hmax(m);
}

/* Scores of QB queries, to be multiplied by unit[i] -> e^(score - the chunk's maximum), masked positions 0; updates
 * maxima and sums.  factor[QB]: for what was accumulated before; weight[QB]: for what these will add.  Relative to the
 * chunk's own maximum, not to the largest so far: rounded to 16 bits beside a much larger one, thousands of small ones
 * would be none.  Each step is made for all queries before the next one, as in zl_softmax_chunk. */
ZL_KERNEL void zl_softmax_q8(const zl_attention_shape *a, int QB, const float *unit, float s[][ZL_CHUNK],
                             int64_t vectors, int64_t c0, const int64_t *from, const int64_t *last, float *max,
                             float *sum, float *factor, float *weight) {
  const int capped = a->softcap > 0.0f;
  float now[16], base[16], total[16];
  for (int i = 0; i < QB; i++) {
    now[i] = zl_top_q8(a, unit[i], s[i], vectors, from[i] - c0, last[i] - c0);
    base[i] = now[i] == -__builtin_inff() ? 0.0f : now[i];
    if (!capped) now[i] *= unit[i];
  }
  const v16f before = zl_load_n(max, QB), chunk = zl_load_n(now, QB), top = zl_max(chunk, before);
  const v16f floor = zl_max(zl_set(-0x1.fffffep127f), top); /* for -inf: nothing to attend to yet */
  const v16f f = zl_exp(before - floor), w = zl_exp(chunk - floor);
  for (int i = 0; i < QB; i++) {
    const float by = (capped ? 1.0f : unit[i]) * 0x1.715476p+0f;
    v16f t = zl_set(0.0f);
    for (int64_t v = 0; v < vectors; v++) {
      const v16f e = zl_exp2_rough((zl_load(s[i] + 16 * v) - base[i]) * by);
      zl_store(s[i] + 16 * v, e);
      t = t + e;
    }
    total[i] = zl_hsum(t);
  }
  zl_store_n(max, top, QB);
  zl_store_n(sum, zl_load_n(sum, QB) * f + zl_load_n(total, QB) * w, QB);
  zl_store_n(factor, f, QB);
  zl_store_n(weight, w, QB);
}

/* s * scale, but 0 where s is: a position that is not attended to may have a scale that is no number */
ZL_KERNEL v16f zl_scaled_q8(const float *s, v16f scale) {
  const v16f x = zl_load(s);
  return (v16f)((v16i)(x * scale) & (v16i)(x != 0.0f));
}

/* s[i][16 v ..] times `scale` -> 16 bits p[i][64], relative to their largest; by[i] = what sums of products with them
 * are multiplied by, times weight[i] */
ZL_KERNEL void zl_probabilities_q8(int QB, float s[][ZL_CHUNK], const v16f *scale, const float *weight, int64_t vectors,
                                   uint32_t p[][ZL_CHUNK / 2], float *by) {
  const v16f magic = zl_set(0x1.8p23f); /* added: the nearest integer in the low bits */
  v16i top[8] = {{0}};
  ZL_UNROLL
  for (int i = 0; i < QB; i++) {
    for (int64_t v = 0; v < vectors; v++)
      top[i] = __builtin_elementwise_max(top[i], (v16i)zl_scaled_q8(s[i] + 16 * v, scale[v]));
  }
  const v8f most = (v8f)zl_fold8_max_wide(top); /* none is negative; NaN is the largest */
  const v8f inverse = (v8f)((v8i)(ZL_Q8_TOP / most) & ~(v8i)(most < 0x1p-100f)), unit = most * (1.0f / ZL_Q8_TOP);
  ZL_UNROLL
  for (int i = 0; i < QB; i++) {
    by[i] = unit[i] * weight[i];
    for (int64_t v = 0; v < vectors; v++) {
      const v16f x = zl_fma(zl_scaled_q8(s[i] + 16 * v, scale[v]), zl_set(inverse[i]), magic);
      zl_store_s16(p[i] + 8 * v, (v16i)x - (v16i)magic);
    }
  }
}

/* out[i] = factor[i] * out[i] + weight[i] * sum over positions of s[i][p] V[p] */
ZL_KERNEL void zl_weigh_q8(const zl_attention_shape *a, int QB, int fetch, float s[][ZL_CHUNK], const float *factor,
                           const float *weight, const zl_chunk_at *at, int64_t vectors, float *const *out) {
  const int64_t hd = a->head_dim;
  _Alignas(64) uint32_t p[ZL_MANY_QUERIES][ZL_CHUNK / 2];
  float by[8];
  for (int64_t d = 0; d < hd; d += 16) {
    if (d % 32 == 0) {
      v16f scale[ZL_CHUNK / 16];
      for (int64_t v = 0; v < vectors; v++) scale[v] = zl_load_half(at->v[v] + 16 * hd + d);
      zl_probabilities_q8(QB, s, scale, weight, vectors, p, by);
    }
    v16i acc[ZL_MANY_QUERIES];
    ZL_UNROLL
    for (int i = 0; i < QB; i++) acc[i] = (v16i){0};
    for (int64_t v = 0; v < vectors; v++) {
      const char *x = at->v[v] + 2 * d;
      for (int64_t i = v; fetch && d % 64 == 0 && i < ZL_CHUNK / 16; i += vectors)
        zl_fetch((uintptr_t)at->next_v[i] + (uintptr_t)(16 * hd + d), fetch);
      ZL_NO_UNROLL
      for (int64_t pair = 0; pair < 8; pair += 2) {
        for (int64_t i = v; fetch && i < ZL_CHUNK / 16; i += vectors)
          zl_fetch((uintptr_t)at->next_v[i] + (uintptr_t)(32 * (d / 2 + pair)), fetch);
        ZL_UNROLL
        for (int h = 0; h < 2; h++, x += 2 * hd) {
          const v32s16 y = zl_load_widened(x);
          ZL_UNROLL
          for (int i = 0; i < QB; i++) acc[i] = zl_dot_s16(acc[i], y, p[i][8 * v + pair + h]);
        }
      }
    }
    ZL_UNROLL
    for (int i = 0; i < QB; i++)
      zl_store(out[i] + d, zl_fma(zl_to_float(acc[i]), zl_set(by[i]), zl_load(out[i] + d) * factor[i]));
  }
}

/* zl_chunk over such a cache */
ZL_KERNEL void zl_chunk_q8(const zl_attention_shape *a, int QB, int fetch, const zl_queries *tile, int64_t i, int64_t c0,
                           int64_t positions, const zl_chunk_at *at, zl_seen *seen) {
  _Alignas(64) float s[ZL_MANY_QUERIES][ZL_CHUNK];
  float factor[ZL_MANY_QUERIES], weight[ZL_MANY_QUERIES], *out[ZL_MANY_QUERIES];
  const int64_t vectors = (positions + 15) / 16;
  zl_scores_q8(a, QB, fetch, tile->pairs + i, at, vectors, s);
  zl_softmax_q8(a, QB, tile->unit + i, s, vectors, c0, tile->from + i, tile->last + i, seen->max + i, seen->sum + i,
                factor, weight);
  for (int m = 0; m < QB; m++) out[m] = seen->out + (i + m) * a->head_dim;
  zl_weigh_q8(a, QB, fetch, s, factor, weight, at, vectors, out);
}

#endif
