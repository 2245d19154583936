/* Attention over an f32 or f16 cache: one chunk of positions at a time, in float32.
 *
 * In: zl_attention.h's types.  Out: zl_scores, zl_mask_scores, zl_softmax_chunk, zl_weigh, and without AVX-512
 * zl_scores_many and zl_weigh_many.  Next file: zl_attention.h.
 *
 * The next chunk is asked for line by line in the order of its addresses, each line once and evenly over the loops: a core
 * has some two dozen misses in flight at most, and what is asked for beyond them waits or is lost (Zen 3: a tenth of the
 * time of one token's attention, against asking for each row as its counterpart is read).  A context's last chunk may be
 * short; it asks for as much.
 */
#ifndef ZL_ATTENTION_FLOAT_H
#define ZL_ATTENTION_FLOAT_H

/* Vectors of 16 sums that QB queries keep at a time: four each, or with half the registers of half the length, four in
 * all at most.  Eight chains of multiply-adds hide their latency. */
ZL_KERNEL int zl_sums_at_once(int QB) { return ZL_AVX512 || QB == 1 ? 4 : QB == 2 ? 2 : 1; }

/* Asks for the keys of 16 positions, number i of a chunk, two elements a call.  Their rows are those of the block, which
 * other vectors share: each has an equal share of the rows, to the block's end.  Addresses are integers: past the
 * positions that exist there may be no memory to point at. */
ZL_KERNEL void zl_fetch_keys(const zl_attention_shape *a, const char *k, int64_t i, int64_t element, int fetch) {
  const int64_t bytes = zl_kv_bytes(a->kv_dtype), step = a->block_size * bytes;
  const int64_t run = (a->block_size < ZL_CHUNK ? a->block_size : ZL_CHUNK) * bytes, among = i % (run / (16 * bytes));
  for (int64_t l = 0; l < 32 * bytes; l += 64) {
    const int64_t from = (among * a->head_dim + element) * 16 * bytes + l;
    zl_fetch((uintptr_t)k + (uintptr_t)(from / run * step + from % run - among * 16 * bytes), fetch);
  }
}

/* s[i][16 v ..] = scores of QB queries for the 16 positions at at->k[v], which points at K[0][offset], rows block_size
 * apart. */
ZL_KERNEL void zl_scores(const zl_attention_shape *a, int QB, int fetch, const float *const *q,
                         const zl_chunk_at *at, int64_t vectors, float s[][ZL_CHUNK]) {
  const int64_t bytes = zl_kv_bytes(a->kv_dtype), step = a->block_size * bytes;
  const int VB = zl_sums_at_once(QB);
  const int64_t turns = (vectors + VB - 1) / VB * VB;
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
      ZL_UNROLL
      for (int w = 0; w < VB; w++) {
        for (int64_t i = v + w; fetch && i < ZL_CHUNK / 16; i += turns) zl_fetch_keys(a, at->next_k[i], i, pair, fetch);
      }
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
 * accumulated before.  c0 is the chunk's first position.  Each step is made for all queries before the next one:
 * alone, a query would wait for its maximum, its factor and its sum. */
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
      const v16f e = zl_exp(zl_load(s[i] + 16 * v) - base[i]);
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
  const int64_t step = 16 * WB * bytes; /* of 16 positions' V, which lie together, a step of the loop asks for so many */
  for (int64_t d = 0; d < hd; d += 16 * WB) {
    const int64_t left = (hd - d + 15) / 16, width = left < WB ? left : WB;
    v16f acc[4][4];
    ZL_UNROLL
    for (int i = 0; i < QB; i++) {
      ZL_UNROLL
      for (int w = 0; w < WB; w++)
        acc[i][w] = w < width ? zl_load(out[i] + d + 16 * w) * factor[i] : zl_set(0.0f);
    }
    const int64_t turn = d / (16 * WB) * 16;
    ZL_NO_UNROLL
    for (int64_t pair = 0; pair < positions; pair += 2) {
      for (int64_t i = pair / 16; fetch && i < ZL_CHUNK / 16; i += (positions + 15) / 16)
        for (int64_t l = 0; l < 2 * step; l += 64)
          zl_fetch((uintptr_t)at->next_v[i] + (uintptr_t)((turn + pair % 16) * step + l), fetch);
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
}

#if !ZL_AVX512
/* zl_scores of ZL_MANY_QUERIES.  Their sums, one vector of 16 each, fill the registers beside a vector of keys or values.
 * Many queries, as of a prompt, find both in the first caches and ask for nothing.  Twelve chains of multiply-adds do not
 * wait for each other, as the eight of four queries do. */
ZL_KERNEL void zl_scores_many(const zl_attention_shape *a, const float *const *q, const zl_chunk_at *at,
                              int64_t vectors, float s[][ZL_CHUNK]) {
  const int64_t step = a->block_size * zl_kv_bytes(a->kv_dtype);
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
