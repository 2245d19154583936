/* Attention over an f32 or f16 cache: one chunk of positions at a time, in float32.
 *
 * In: zl_attention.h's types.  Out: zl_scores, zl_mask_scores, zl_softmax_chunk, zl_weigh, and without AVX-512 the same
 * for whole chunks (zl_takes_whole) and for ZL_MANY_QUERIES.  Next file: zl_attention.h.
 */
#ifndef ZL_ATTENTION_FLOAT_H
#define ZL_ATTENTION_FLOAT_H

/* Vectors of 16 sums that QB queries keep at a time: four each, or with half the registers of half the length, four in
 * all at most.  Eight chains of multiply-adds hide their latency. */
ZL_KERNEL int zl_sums_at_once(int QB) { return ZL_AVX512 || QB == 1 ? 4 : QB == 2 ? 2 : 1; }

/* s[i][16 v ..] = scores of QB queries for the 16 positions of piece at->k[v] */
ZL_KERNEL void zl_scores(const zl_attention_shape *a, int QB, int fetch, const float *const *q,
                         const zl_chunk_at *at, int64_t vectors, float s[][ZL_CHUNK]) {
  const int64_t step = 16 * zl_kv_bytes(a->kv_dtype);
  const int VB = zl_sums_at_once(QB);
  zl_asking next = zl_asking_begin(a, at, fetch, 0);
  const int64_t asks = next.lines / (ZL_CHUNK / 16 / VB * ((a->head_dim + 1) / 2));
  for (int64_t v = 0; v < vectors; v += VB) {
    v16f acc[4][4];
    const char *p[4];
    ZL_UNROLL
    for (int w = 0; w < VB; w++) { /* past the last: read the last again, store nothing */
      p[w] = at->k[v + w < vectors ? v + w : vectors - 1];
      ZL_UNROLL
      for (int i = 0; i < QB; i++) acc[w][i] = zl_set(0.0f);
    }
    ZL_NO_UNROLL
    for (int64_t pair = 0; pair < a->head_dim; pair += 2) {
      zl_ask_lines(&next, asks);
      ZL_UNROLL
      for (int h = 0; h < 2; h++) {
        const int64_t d = pair + h;
        v16f k[4];
        ZL_UNROLL
        for (int w = 0; w < VB; w++) k[w] = zl_kv_load(p[w] + d * step, a->kv_dtype);
        ZL_UNROLL
        for (int i = 0; i < QB; i++) {
          v16f x = zl_set(q[i][d]);
          ZL_UNROLL
          for (int w = 0; w < VB; w++) acc[w][i] = zl_fma(x, k[w], acc[w][i]);
        }
      }
    }
    ZL_UNROLL
    for (int w = 0; w < VB; w++) {
      if (v + w >= vectors) break;
      ZL_UNROLL
      for (int i = 0; i < QB; i++) zl_store(s[i] + 16 * (v + w), acc[w][i]);
    }
  }
  zl_ask_rest(&next);
}

/* The scores of one query times `by`, capped, masked positions -inf; returns the largest.  Positions lo .. hi of the chunk
 * are attended to. */
ZL_KERNEL float zl_mask_scores(const zl_attention_shape *a, float by, float *s, int64_t vectors, int64_t lo64, int64_t hi64) {
  const int32_t lo = (int32_t)(lo64 < 0 ? 0 : lo64 > ZL_CHUNK ? ZL_CHUNK : lo64);
  const int32_t hi = (int32_t)(hi64 > ZL_CHUNK ? ZL_CHUNK : hi64 < -1 ? -1 : hi64);
  const v16i lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const int all = lo == 0 && hi >= 16 * vectors - 1;
  v16f m = zl_set(-__builtin_inff());
  for (int64_t v = 0; v < vectors; v++) {
    v16f x = zl_load(s + 16 * v) * by;
    if (a->softcap > 0.0f) x = a->softcap * zl_tanh(x / a->softcap);
    if (!all) {
      const v16i at = lane + (int32_t)(16 * v);
      x = zl_select((v16i)((at >= lo) & (at <= hi)), x, zl_set(-__builtin_inff()));
    }
    zl_store(s + 16 * v, x);
    m = zl_max(m, x);
  }
  return zl_hmax(m);
}

/* scores of QB queries -> e^(s - max), masked positions 0; updates their maxima and sums; factor[QB]: for what was
 * accumulated before.  c0 is the chunk's first position.  Beside a cache of f16, rounded to 5e-4, powers may err by 3e-6.
 * Each step is made for all queries before the next one: alone, a query would wait for its maximum, its factor and its
 * sum. */
ZL_KERNEL void zl_softmax_chunk(const zl_attention_shape *a, int QB, float s[][ZL_CHUNK], int64_t vectors, int64_t c0,
                                const int64_t *from, const int64_t *last, float *max, float *sum, float *factor) {
  float now[16], base[16], total[16];
  for (int i = 0; i < QB; i++) now[i] = zl_mask_scores(a, a->scale, s[i], vectors, from[i] - c0, last[i] - c0);
  const v16f before = zl_load_n(max, QB), top = zl_max(zl_load_n(now, QB), before);
  const v16f none = zl_set(-__builtin_inff()); /* nothing to attend to yet */
  const v16f floor = zl_select((v16i)(top == none), zl_set(0.0f), top), f = zl_exp(before - floor);
  zl_store(base, floor);
  for (int i = 0; i < QB; i++) {
    v16f t = zl_set(0.0f);
    for (int64_t v = 0; v < vectors; v++) {
      const v16f x = zl_load(s[i] + 16 * v) - base[i];
      const v16f e = a->kv_dtype == ZL_KV_F32 ? zl_exp(x) : zl_exp2_rough(x * 0x1.715476p+0f);
      zl_store(s[i] + 16 * v, e);
      t = t + e;
    }
    total[i] = zl_hsum(t);
  }
  zl_store_n(max, top, QB);
  zl_store_n(sum, zl_load_n(sum, QB) * f + zl_load_n(total, QB), QB);
  zl_store_n(factor, f, QB);
}

/* out[i] = factor[i] * out[i] + sum over positions of s[i][p] V[p]; at->v[v] points at V[16 v] of the chunk */
ZL_KERNEL void zl_weigh(const zl_attention_shape *a, int QB, int fetch, float s[][ZL_CHUNK], const float *factor,
                        const zl_chunk_at *at, int64_t positions, float *const *out) {
  const int64_t bytes = zl_kv_bytes(a->kv_dtype), hd = a->head_dim;
  const int WB = zl_sums_at_once(QB);
  zl_asking next = zl_asking_begin(a, at, fetch, 1);
  const int64_t asks = next.lines / ((hd + 16 * WB - 1) / (16 * WB) * (ZL_CHUNK / 2));
  for (int64_t d = 0; d < hd; d += 16 * WB) {
    const int64_t left = (hd - d + 15) / 16, width = left < WB ? left : WB;
    v16f acc[4][4];
    ZL_UNROLL
    for (int i = 0; i < QB; i++) {
      ZL_UNROLL
      for (int w = 0; w < WB; w++)
        acc[i][w] = w < width ? zl_load(out[i] + d + 16 * w) * factor[i] : zl_set(0.0f);
    }
    ZL_NO_UNROLL
    for (int64_t pair = 0; pair < positions; pair += 2) {
      zl_ask_lines(&next, asks);
      ZL_UNROLL
      for (int h = 0; h < 2; h++) {
        const int64_t p = pair + h;
        if (p == positions) break;
        const char *row = at->v[p / 16] + ((p % 16) * hd + d) * bytes;
        v16f x[4];
        ZL_UNROLL
        for (int w = 0; w < WB; w++)
          x[w] = w < width ? zl_kv_load_n(row + 16 * w * bytes, a->kv_dtype, hd - d - 16 * w) : zl_set(0.0f);
        ZL_UNROLL
        for (int i = 0; i < QB; i++) {
          v16f e = zl_set(s[i][p]);
          ZL_UNROLL
          for (int w = 0; w < WB; w++) acc[i][w] = zl_fma(e, x[w], acc[i][w]);
        }
      }
    }
    ZL_UNROLL
    for (int i = 0; i < QB; i++) {
      ZL_UNROLL
      for (int w = 0; w < WB; w++)
        if (w < width) zl_store(out[i] + d + 16 * w, acc[i][w]);
    }
  }
  zl_ask_rest(&next);
}

#if !ZL_AVX512
/* Eight lanes of keys or values, used by all queries while they are in a register.  Three queries keep twelve chains of
 * sums, which with three factors and these lanes fill the registers; so the order is this one (the compiler's own keeps
 * some in memory: a third slower, Zen 3). */
ZL_KERNEL void zl_eight(int QB, const v8f *x, v8f lanes, v8f *acc) {
  ZL_UNROLL
  for (int i = 0; i < QB; i++) {
    acc[i] = (v8f)_mm256_fmadd_ps((__m256)x[i], (__m256)lanes, (__m256)acc[i]);
    __asm__ volatile("" : "+v"(acc[i]));
  }
}

ZL_KERNEL v8f zl_kv_load8(const char *p, int kv_dtype) {
  if (kv_dtype == ZL_KV_F32) return (v8f)_mm256_loadu_ps((const float *)(const void *)p);
  return (v8f)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)p));
}

/* Whether a chunk goes through the two below, which give the bits of zl_scores and zl_weigh. */
ZL_KERNEL int zl_takes_whole(const zl_attention_shape *a, int64_t positions) {
  return positions == ZL_CHUNK && a->head_dim % 32 == 0;
}

/* Eights of lanes whose sums QB queries keep at a time: eight chains or twelve; four of one query, which has the most to
 * read for what it computes. */
ZL_KERNEL int zl_eights(int QB) { return QB == 4 ? 2 : 4; }

/* zl_scores of a whole chunk */
ZL_KERNEL void zl_scores_whole(const zl_attention_shape *a, int QB, int fetch, const float *const *q,
                               const zl_chunk_at *at, float s[][ZL_CHUNK]) {
  const int64_t bytes = zl_kv_bytes(a->kv_dtype), step = 16 * bytes;
  const int E = zl_eights(QB);
  const float *row[4];
  zl_asking next = zl_asking_begin(a, at, fetch, 0);
  ZL_UNROLL
  for (int i = 0; i < QB; i++) row[i] = q[i];
  ZL_NO_UNROLL
  for (int64_t v = 0; v < ZL_CHUNK / 16; v += E / 2) {
    const char *k[2] = {at->k[v], at->k[v + E / 2 - 1]};
    v8f acc[4][4];
    memset(acc, 0, sizeof acc);
    ZL_NO_UNROLL
    for (int64_t pair = 0; pair < a->head_dim; pair += 2) {
      zl_ask_lines(&next, E * bytes / 4);
      ZL_UNROLL
      for (int h = 0; h < 2; h++) {
        const int64_t d = pair + h;
        v8f x[4];
        ZL_UNROLL
        for (int i = 0; i < QB; i++) x[i] = ZL_LO(zl_set(row[i][d]));
        ZL_UNROLL
        for (int e = 0; e < E; e++)
          zl_eight(QB, x, zl_kv_load8(k[e / 2] + d * step + e % 2 * 8 * bytes, a->kv_dtype), acc[e]);
      }
    }
    ZL_UNROLL
    for (int i = 0; i < QB; i++) {
      ZL_UNROLL
      for (int e = 0; e < E; e++) memcpy(s[i] + 16 * v + 8 * e, &acc[e][i], 32);
    }
  }
}

/* zl_weigh of a whole chunk */
ZL_KERNEL void zl_weigh_whole(const zl_attention_shape *a, int QB, int fetch, float s[][ZL_CHUNK], const float *factor,
                              const zl_chunk_at *at, float *const *out) {
  const int64_t bytes = zl_kv_bytes(a->kv_dtype), hd = a->head_dim;
  const int E = zl_eights(QB);
  zl_asking next = zl_asking_begin(a, at, fetch, 1);
  ZL_NO_UNROLL
  for (int64_t d = 0; d < hd; d += 8 * E) {
    v8f acc[4][4];
    ZL_UNROLL
    for (int i = 0; i < QB; i++) {
      ZL_UNROLL
      for (int e = 0; e < E; e++) {
        v8f before;
        memcpy(&before, out[i] + d + 8 * e, 32);
        acc[e][i] = before * factor[i];
      }
    }
    ZL_NO_UNROLL
    for (int64_t v = 0; v < ZL_CHUNK / 16; v++) {
      const char *row = at->v[v] + d * bytes;
      ZL_NO_UNROLL
      for (int64_t pair = 16 * v; pair < 16 * v + 16; pair += 2) {
        zl_ask_lines(&next, E * bytes / 4);
        ZL_UNROLL
        for (int h = 0; h < 2; h++, row += hd * bytes) {
          v8f x[4];
          ZL_UNROLL
          for (int i = 0; i < QB; i++) x[i] = ZL_LO(zl_set(s[i][pair + h]));
          ZL_UNROLL
          for (int e = 0; e < E; e++) zl_eight(QB, x, zl_kv_load8(row + 8 * e * bytes, a->kv_dtype), acc[e]);
        }
      }
    }
    ZL_UNROLL
    for (int i = 0; i < QB; i++) {
      ZL_UNROLL
      for (int e = 0; e < E; e++) memcpy(out[i] + d + 8 * e, &acc[e][i], 32);
    }
  }
}

/* zl_scores of ZL_MANY_QUERIES.  Their sums, one vector of 16 each, fill the registers beside a vector of keys or values.
 * Many queries, as of a prompt, find both in the first caches and ask for nothing.  Twelve chains of multiply-adds do not
 * wait for each other, as the eight of four queries do. */
ZL_KERNEL void zl_scores_many(const zl_attention_shape *a, const float *const *q, const zl_chunk_at *at,
                              int64_t vectors, float s[][ZL_CHUNK]) {
  const int64_t step = 16 * zl_kv_bytes(a->kv_dtype);
  for (int64_t v = 0; v < vectors; v++) {
    const char *k = at->k[v];
    v16f acc[ZL_MANY_QUERIES];
    ZL_UNROLL
    for (int i = 0; i < ZL_MANY_QUERIES; i++) acc[i] = zl_set(0.0f);
    ZL_NO_UNROLL /* else the compiler takes the keys of two elements at once, and has no registers for them */
    for (int64_t d = 0; d < a->head_dim; d++, k += step) {
      const v16f x = zl_kv_load(k, a->kv_dtype);
      ZL_UNROLL
      for (int i = 0; i < ZL_MANY_QUERIES; i++) acc[i] = zl_fma(zl_set(q[i][d]), x, acc[i]);
    }
    ZL_UNROLL
    for (int i = 0; i < ZL_MANY_QUERIES; i++) zl_store(s[i] + 16 * v, acc[i]);
  }
}

/* zl_weigh of ZL_MANY_QUERIES */
ZL_KERNEL void zl_weigh_many(const zl_attention_shape *a, float s[][ZL_CHUNK], const float *factor,
                             const zl_chunk_at *at, int64_t positions, float *const *out) {
  const int64_t bytes = zl_kv_bytes(a->kv_dtype), hd = a->head_dim;
  for (int64_t d = 0; d < hd; d += 16) {
    v16f acc[ZL_MANY_QUERIES];
    ZL_UNROLL
    for (int i = 0; i < ZL_MANY_QUERIES; i++) acc[i] = zl_load(out[i] + d) * factor[i];
    for (int64_t p = 0; p < positions;) {
      const char *row = at->v[p / 16] + d * bytes;
      const int64_t end = p + 16 < positions ? p + 16 : positions;
      ZL_NO_UNROLL
      for (; p < end; p++, row += hd * bytes) {
        const v16f x = zl_kv_load_n(row, a->kv_dtype, hd % 16 ? hd - d : 16);
        ZL_UNROLL
        for (int i = 0; i < ZL_MANY_QUERIES; i++) acc[i] = zl_fma(zl_set(s[i][p]), x, acc[i]);
      }
    }
    ZL_UNROLL
    for (int i = 0; i < ZL_MANY_QUERIES; i++) zl_store(out[i] + d, acc[i]);
  }
}
#endif

#endif
