/* Paged attention and the KV cache: CacheWrite, PagedAttention, PagedAttentionQuantizeInt8.
 *
 * In: zl_math.h, zl_quantize.h, zl_attention_float.h, zl_attention_bf16.h, zl_attention_q8.h, zl_attention_deal.h.
 * Out: zl_kv_block, zl_cache_put (used by zl_qkv.h), the kernels.  Next file: zl_elementwise.h.
 *
 * One layer's share of a KV block is a row of pieces of 16 positions for each head, KV = f32 or f16 (bf16:
 * zl_attention_bf16.h, q8_0: zl_attention_q8.h):
 *     K  [kv_heads][block_size / 16][head_dim][16]   positions are lanes: q . k for 16 positions is one chain of
 *     V  [kv_heads][block_size / 16][16][head_dim]   multiply-adds with no sum across lanes; elements are lanes
 *
 * A query walks its context in chunks of ZL_CHUNK positions at absolute multiples of ZL_CHUNK with a running maximum
 * (online softmax), restarts the running state where a span ends and merges the spans in order: what is added to what
 * depends on the query's position only, not on the batch, the tile or the threads.
 * Queries that share a KV head (the heads of its group, the tokens of a tile) read K and V together.  Of few tokens, the
 * spans of one context are dealt out to the threads too (zl_attention_deal.h).
 */
#ifndef ZL_ATTENTION_H
#define ZL_ATTENTION_H
#include "zl_math.h"
#include "zl_quantize.h"

#define ZL_CHUNK 64   /* positions scored at a time */
#define ZL_SPAN 512   /* positions between restarts of the running softmax; the first span is cut in halves */
#define ZL_QUERIES 64 /* most queries of a tile */
#define ZL_MANY_QUERIES 6 /* of more than ZL_FETCH_QUERIES, so many at a time without AVX-512 */
#define ZL_FETCH_QUERIES 8 /* a tile of so many at most asks for the next chunk */
#ifndef ZL_MAX_HEAD_DIM
#define ZL_MAX_HEAD_DIM 512
#endif

/* bytes of an element of a float cache; of a head's share of a block in any */
ZL_KERNEL int64_t zl_kv_bytes(int kv_dtype) { return kv_dtype == ZL_KV_F32 ? 4 : 2; }
ZL_KERNEL int64_t zl_kv_head_bytes(int64_t head_dim, int64_t block_size, int kv_dtype) {
  const int64_t n = head_dim * block_size;
  return kv_dtype == ZL_KV_Q8_0 ? n / 16 * 17 : n * zl_kv_bytes(kv_dtype);
}

/* where position p of sequence s is: the block's data of one buffer, and the offset in the block */
ZL_KERNEL char *zl_kv_block(const zl_task *t, char *kv, int64_t seq, int64_t block_index) {
  return kv + (int64_t)t->block_table[seq * t->max_blocks + block_index] * (int64_t)ZL_KV_BLOCK_BYTES;
}
ZL_KERNEL const char *zl_kv_at(const zl_task *t, const char *kv, int64_t seq, int64_t block_index) {
  return zl_kv_block(t, (char *)(uintptr_t)kv, seq, block_index);
}

/* 16 (or the first n) elements of a cache */
ZL_KERNEL v16f zl_kv_load(const char *p, int kv_dtype) {
  return kv_dtype == ZL_KV_F16 ? zl_load_half(p) : zl_load((const float *)(const void *)p);
}
ZL_KERNEL v16f zl_kv_load_n(const char *p, int kv_dtype, int64_t n) {
  if (n >= 16) return zl_kv_load(p, kv_dtype);
  if (kv_dtype == ZL_KV_F32) return zl_load_n((const float *)(const void *)p, n);
  v16u16 h = {0};
  memcpy(&h, p, (size_t)n * 2);
  return zl_load_half(&h);
}

/* one head's row x[hd], hd even, into a bf16 cache; base is the head's data in the block */
ZL_KERNEL void zl_cache_put_bf16(const float *x, char *base, int64_t at, int64_t head_dim, int64_t block_size,
                                 int role) {
  for (int64_t d = 0; d < head_dim; d += 16) {
    const int64_t n = head_dim - d < 16 ? head_dim - d : 16;
    const v16u h = (v16u)zl_round_bf16(zl_load_n(x + d, n)) >> 16;
    if (role == ZL_ROLE_V) { /* lanes are elements; the other position of the pair may be another thread's */
      zl_store_halves(base + (at / 2 * head_dim + d) * 4, h, (int)(at % 2), n);
    } else { /* pairs of elements, one lane each: block_size apart */
      const v16u odd = __builtin_shufflevector(h, h, 1, 1, 3, 3, 5, 5, 7, 7, 9, 9, 11, 11, 13, 13, 15, 15);
      const v16u pair = h | odd << 16;
      for (int64_t i = 0; i < n; i += 2) {
        const uint32_t one = pair[i];
        memcpy(base + ((d + i) / 2 * block_size + at) * 4, &one, 4);
      }
    }
  }
}

/* one head's row x[hd], hd a multiple of 32, into a q8_0 cache; base is the head's data in the block.  A scale is
 * max|x| / 127, rounded to f16, and codes are relative to the rounded one.  A scale that is not finite (of NaN, infinity,
 * or more than 127 x 65504) is NaN: a sign of infinity would be lost, and a key with the wrong one weighs nothing. */
ZL_KERNEL void zl_cache_put_q8(const float *x, char *base, int64_t at, int64_t head_dim, int role) {
  char *piece = base + at / 16 * 17 * head_dim;
  const int64_t lane = at % 16;
  for (int64_t d = 0; d < head_dim; d += 32) {
    const v16f two[2] = {zl_load(x + d), zl_load(x + d + 16)};
    const float top = zl_hmax_abs((v16f)__builtin_elementwise_max((v16i)zl_abs(two[0]), (v16i)zl_abs(two[1])));
    const v16u16 half = zl_to_half(zl_set(top / 127.0f));
    const float scale = zl_load_half(&half)[0], inverse = scale > 0.0f && scale < __builtin_inff() ? 1.0f / scale : 0.0f;
    const uint16_t bits = scale < __builtin_inff() ? half[0] : 0x7e00;
    memcpy(piece + 16 * head_dim + (d / 32 * 16 + lane) * 2, &bits, 2);
    int8_t codes[32];
    ZL_UNROLL
    for (int h = 0; h < 2; h++) { /* of denormal scales, few bits are left: their codes may be too large */
      const v16f y = zl_min(zl_max(two[h] * inverse, zl_set(-127.0f)), zl_set(127.0f));
      zl_store_bytes(codes + 16 * h, zl_round_to_int(y));
    }
    if (role == ZL_ROLE_V) /* the other position of the pair may be another thread's */
      for (int64_t i = 0; i < 32; i++) piece[(lane / 2 * head_dim + d + i) * 2 + lane % 2] = codes[i];
    else
      for (int64_t i = 0; i < 32; i += 2) memcpy(piece + ((d + i) / 2 * 16 + lane) * 2, codes + i, 2);
  }
}

/* one head's row x[hd] into the cache at (block, offset in block) */
ZL_KERNEL void zl_cache_put(const float *x, char *block, int64_t kv_head, int64_t at, int64_t head_dim,
                            int64_t block_size, int role, int kv_dtype) {
  char *base = block + kv_head * zl_kv_head_bytes(head_dim, block_size, kv_dtype);
  if (kv_dtype == ZL_KV_Q8_0) {
    zl_cache_put_q8(x, base, at, head_dim, role);
    return;
  }
  const int64_t bytes = zl_kv_bytes(kv_dtype);
  if (kv_dtype == ZL_KV_BF16) {
    zl_cache_put_bf16(x, base, at, head_dim, block_size, role);
    return;
  }
  base += (role == ZL_ROLE_V ? at * head_dim : at / 16 * 16 * head_dim + at % 16) * bytes;
  for (int64_t d = 0; d < head_dim; d += 16) {
    const int64_t n = head_dim - d < 16 ? head_dim - d : 16;
    v16f v = zl_load_n(x + d, n);
    v16u16 h = zl_to_half(v);
    if (role == ZL_ROLE_V) {
      if (kv_dtype == ZL_KV_F16)
        memcpy(base + d * 2, &h, (size_t)n * 2);
      else
        zl_store_n((float *)(void *)base + d, v, n);
    } else {
      const char *from = kv_dtype == ZL_KV_F16 ? (const char *)&h : (const char *)&v;
      for (int64_t i = 0; i < n; i++)
        memcpy(base + (d + i) * 16 * bytes, from + i * bytes, (size_t)bytes);
    }
  }
}

/* cache (read and written), x f32[T, kvh * hd], positions i32[T], seq_starts, block_table -> cache */
ZL_KERNEL void zl_cache_write(const zl_task *t, int64_t rows, char *cache_in, const float *x,
                              const int32_t *positions, const int32_t *seq_starts, const int32_t *block_table,
                              char *cache, int64_t kv_num_heads, int64_t head_dim, int64_t block_size, int role,
                              int kv_dtype) {
  (void)cache_in; /* the same memory */
  (void)seq_starts;
  (void)block_table;
  int64_t i, end;
  zl_share(t, rows * kv_num_heads, &i, &end);
  for (; i < end; i++) {
    const int64_t row = i / kv_num_heads, head = i % kv_num_heads, p = positions[row];
    zl_cache_put(x + i * head_dim, zl_kv_block(t, cache, t->token_seq[row], p / block_size), head, p % block_size,
                 head_dim, block_size, role, kv_dtype);
  }
}

/* Spans are numbered from a context's first position on: where number n begins, and which one holds position p. */
ZL_KERNEL int64_t zl_span_begin(int64_t n) { return n < 2 ? n * (ZL_SPAN / 2) : (n - 1) * ZL_SPAN; }
ZL_KERNEL int64_t zl_span_of(int64_t p) { return p < ZL_SPAN ? p / (ZL_SPAN / 2) : p / ZL_SPAN + 1; }

/* What one query has seen: maximum, sum of e^(s - max), and the weighted sum of V. */
typedef struct zl_seen {
  float max[ZL_QUERIES], sum[ZL_QUERIES];
  float *out; /* [queries][head_dim padded to 16]: ZL_QUERIES, in a slot the cut's heads, rounded up to 4 */
} zl_seen;

/* The queries of a tile: token i / heads, head i % heads of the tile. */
typedef struct zl_queries {
  const float *q[ZL_QUERIES];        /* [hd] */
  const uint32_t *pairs[ZL_QUERIES]; /* [hd / 2], the same in bf16 or 16-bit integers; bf16 and q8_0 caches only */
  float unit[ZL_QUERIES];            /* what products with those integers are multiplied by */
  int64_t from[ZL_QUERIES];    /* first and last position it attends to */
  int64_t last[ZL_QUERIES];
  int64_t n, seq, kv_head;
} zl_queries;

typedef struct zl_attention_shape {
  int64_t head_dim, kv_heads, block_size, window;
  float scale, softcap;
  int kv_dtype;
} zl_attention_shape;

/* Where a chunk's keys and values are, 16 positions a pointer, and those of the chunk after it (after the last of a
 * head: of the next head's first): decoding asks for these while it computes, each line once.  The pieces of a head are
 * too short for the machine's own prefetchers. */
typedef struct zl_chunk_at {
  const char *k[ZL_CHUNK / 16], *v[ZL_CHUNK / 16];
  const char *next_k[ZL_CHUNK / 16], *next_v[ZL_CHUNK / 16];
} zl_chunk_at;

#define ZL_FETCH_L2 1
#define ZL_FETCH_L1 2
ZL_KERNEL void zl_fetch(uintptr_t at, int fetch) {
  if (fetch == ZL_FETCH_L2) __builtin_prefetch((const char *)at, 0, 2);
  if (fetch == ZL_FETCH_L1) __builtin_prefetch((const char *)at, 0, 3);
}

/* The chunk at c0 and the one after it, of a context that ends at `end`; past it the nearest positions before it again,
 * masked later.  The next chunk is only asked for: where it is shorter, anything that exists will do. */
ZL_KERNEL void zl_locate_chunk(const zl_task *t, const zl_attention_shape *a, const zl_queries *tile, const char *k,
                               const char *v, int64_t c0, int64_t end, zl_chunk_at *at) {
  const int64_t bs = a->block_size, head_bytes = zl_kv_head_bytes(a->head_dim, bs, a->kv_dtype);
  const int64_t head = tile->kv_head * head_bytes, v_bytes = head_bytes / bs; /* from position to position */
  const int64_t k_bytes = a->kv_dtype == ZL_KV_BF16 ? 4 : v_bytes, unit = a->kv_dtype == ZL_KV_BF16 ? bs : 16;
  const int turn = c0 + ZL_CHUNK > end && tile->kv_head + 1 < a->kv_heads; /* on to the next head */
  const int64_t next_head = head + (turn ? head_bytes : 0);
  const int64_t next_c0 = turn ? tile->from[0] / ZL_CHUNK * ZL_CHUNK : c0 + ZL_CHUNK;
  for (int64_t i = 0; i < ZL_CHUNK / 16; i++) {
    const int64_t p = c0 + (c0 + 16 * i <= end ? 16 * i : 0);
    const int64_t next = (next_c0 + 16 * i) / unit <= end / unit ? next_c0 + 16 * i : p;
    at->k[i] = zl_kv_at(t, k, tile->seq, p / bs) + head + p % bs * k_bytes;
    at->v[i] = zl_kv_at(t, v, tile->seq, p / bs) + head + p % bs * v_bytes;
    at->next_k[i] = zl_kv_at(t, k, tile->seq, next / bs) + next_head + next % bs * k_bytes;
    at->next_v[i] = zl_kv_at(t, v, tile->seq, next / bs) + next_head + next % bs * v_bytes;
  }
}

/* How the chunk after this one is asked for in an f32 or f16 cache: four streams side by side, two of its keys and two of its
 * values, a line of each in turn; while scores are computed the first piece of each two, with the sums of values the
 * second.  A core has some two dozen misses in flight, in which one stream is read at half the rate that its prefetchers
 * bring several at (Zen 3; docs/decisions.md, "One token on AVX2"). */
typedef struct zl_asking {
  uintptr_t from[4]; /* integers: the last line may end past a piece, where there may be no memory to point at */
  int64_t line, lines; /* of all four together */
  int fetch;
} zl_asking;

/* half: 0 for scores, 1 for values */
ZL_KERNEL zl_asking zl_asking_begin(const zl_attention_shape *a, const zl_chunk_at *at, int fetch, int half) {
  const char *const *k = at->next_k + half, *const *v = at->next_v + half;
  return (zl_asking){{(uintptr_t)k[0], (uintptr_t)k[2], (uintptr_t)v[0], (uintptr_t)v[2]},
                     0, 4 * ((zl_kv_head_bytes(a->head_dim, 16, a->kv_dtype) + 63) / 64), fetch};
}

/* The next `n` lines; a loop over a whole chunk asks for as many with each step, over less of one for the rest after it. */
ZL_KERNEL void zl_ask_lines(zl_asking *w, int64_t n) {
  for (const int64_t end = w->line + n; w->fetch && w->line < end; w->line++)
    zl_fetch(w->from[w->line % 4] + (uintptr_t)(w->line / 4 * 64), w->fetch);
}
ZL_KERNEL void zl_ask_rest(zl_asking *w) { zl_ask_lines(w, w->lines - w->line); }

#if defined(__AVX512BF16__)
#include "zl_attention_bf16.h"
#endif
#include "zl_attention_float.h"
#include "zl_attention_q8.h"

/* QB queries from index i of the tile, one chunk, of which `positions` exist; fetch: asks for the next chunk too */
ZL_KERNEL void zl_chunk(const zl_attention_shape *a, int QB, int fetch, const zl_queries *tile, int64_t i, int64_t c0,
                        int64_t positions, const zl_chunk_at *at, zl_seen *seen) {
#if defined(__AVX512BF16__)
  if (a->kv_dtype == ZL_KV_BF16) {
    zl_chunk_bf16(a, QB, fetch, tile, i, c0, positions, at, seen);
    return;
  }
#endif
  if (a->kv_dtype == ZL_KV_Q8_0) {
    zl_chunk_q8(a, QB, fetch, tile, i, c0, positions, at, seen);
    return;
  }
  _Alignas(64) float s[4][ZL_CHUNK];
  float factor[4];
  float *out[4];
  const int64_t vectors = (positions + 15) / 16, stride = (a->head_dim + 15) / 16 * 16;
  for (int m = 0; m < QB; m++) out[m] = seen->out + (i + m) * stride;
#if !ZL_AVX512
  if (zl_takes_whole(a, positions)) {
    zl_scores_whole(a, QB, fetch, tile->q + i, at, s);
    zl_softmax_chunk(a, QB, s, vectors, c0, tile->from + i, tile->last + i, seen->max + i, seen->sum + i, factor);
    zl_weigh_whole(a, QB, fetch, s, factor, at, out);
    return;
  }
#endif
  zl_scores(a, QB, fetch, tile->q + i, at, vectors, s);
  zl_softmax_chunk(a, QB, s, vectors, c0, tile->from + i, tile->last + i, seen->max + i, seen->sum + i, factor);
  zl_weigh(a, QB, fetch, s, factor, at, positions, out);
}

#if !ZL_AVX512
/* zl_chunk of ZL_MANY_QUERIES, as far as one of them attends. */
ZL_KERNEL void zl_chunk_many(const zl_attention_shape *a, const zl_queries *tile, int64_t i, int64_t c0,
                             int64_t positions, const zl_chunk_at *at, zl_seen *seen) {
  int64_t last = tile->last[i];
  for (int m = 1; m < ZL_MANY_QUERIES; m++)
    if (tile->last[i + m] > last) last = tile->last[i + m];
  if (last - c0 + 1 < positions) positions = last - c0 + 1;
  if (positions < 1) return;
  if (a->kv_dtype == ZL_KV_Q8_0) {
    zl_chunk_q8(a, ZL_MANY_QUERIES, 0, tile, i, c0, positions, at, seen);
    return;
  }
  _Alignas(64) float s[ZL_MANY_QUERIES][ZL_CHUNK];
  float factor[ZL_MANY_QUERIES];
  float *out[ZL_MANY_QUERIES];
  const int64_t stride = (a->head_dim + 15) / 16 * 16;
  const int64_t vectors = (positions + 15) / 16;
  zl_scores_many(a, tile->q + i, at, vectors, s);
  zl_softmax_chunk(a, ZL_MANY_QUERIES, s, vectors, c0, tile->from + i, tile->last + i, seen->max + i, seen->sum + i,
                   factor);
  for (int m = 0; m < ZL_MANY_QUERIES; m++) out[m] = seen->out + (i + m) * stride;
  zl_weigh_many(a, s, factor, at, positions, out);
}
#endif

/* All queries of a tile, one chunk: 4 at a time (many, without AVX-512: 6), the rest together, each number a constant of
 * its own code, which keeps sums in registers.  Few queries have as much to read as to compute: the first of them ask for
 * the next chunk. */
ZL_KERNEL void zl_chunk_tile(const zl_attention_shape *a, const zl_queries *tile, int64_t c0, int64_t positions,
                             const zl_chunk_at *at, zl_seen *seen) {
  int fetch = tile->n <= ZL_FETCH_QUERIES ? ZL_FETCH_L2 : 0;
  int64_t i = 0;
#if !ZL_AVX512
  if (tile->n > ZL_FETCH_QUERIES)
    for (; i + ZL_MANY_QUERIES <= tile->n; i += ZL_MANY_QUERIES) zl_chunk_many(a, tile, i, c0, positions, at, seen);
#endif
  for (; i + 4 <= tile->n; i += 4, fetch = 0) zl_chunk(a, 4, fetch, tile, i, c0, positions, at, seen);
  if (tile->n - i == 3) zl_chunk(a, 3, fetch, tile, i, c0, positions, at, seen);
  if (tile->n - i == 2) zl_chunk(a, 2, fetch, tile, i, c0, positions, at, seen);
  if (tile->n - i == 1) zl_chunk(a, 1, fetch, tile, i, c0, positions, at, seen);
}

/* all queries of the tile over positions [begin, end], within one span of a context that ends at context_end; `seen`
 * starts empty */
ZL_KERNEL void zl_span(const zl_task *t, const zl_attention_shape *a, const zl_queries *tile, char *k, char *v,
                       int64_t begin, int64_t end, int64_t context_end, zl_seen *seen) {
  int64_t c0 = begin / ZL_CHUNK * ZL_CHUNK;
#if defined(__AVX512BF16__)
  if (a->kv_dtype == ZL_KV_BF16 && tile->n > ZL_FETCH_QUERIES) {
    zl_span_bf16(t, a, tile, k, v, c0, end, context_end, seen);
    return;
  }
#endif
  for (; c0 <= end; c0 += ZL_CHUNK) {
    zl_chunk_at at;
    zl_locate_chunk(t, a, tile, k, v, c0, context_end, &at);
    zl_chunk_tile(a, tile, c0, end - c0 + 1 < ZL_CHUNK ? end - c0 + 1 : ZL_CHUNK, &at, seen);
  }
}

ZL_KERNEL void zl_seen_reset(zl_seen *s, int64_t n, int64_t stride) {
  for (int64_t i = 0; i < n; i++) {
    s->max[i] = -__builtin_inff();
    s->sum[i] = 0.0f;
  }
  memset(s->out, 0, (size_t)(n * stride) * 4);
}

/* total = total merged with part, query by query */
ZL_KERNEL void zl_seen_merge(const zl_attention_shape *a, zl_seen *total, const zl_seen *part, int64_t n) {
  const float unit = a->kv_dtype == ZL_KV_BF16 ? 0x1.62e43p-1f : 1.0f; /* of maxima; ln 2 */
  const int64_t stride = (a->head_dim + 15) / 16 * 16;
  float by_total[16], by_part[16];
  for (int64_t i = 0; i < n; i++) {
    if (i % 16 == 0) {
      const v16f before = zl_load_n(total->max + i, n - i), more = zl_load_n(part->max + i, n - i);
      const v16f top = zl_max(before, more);
      const v16f base = zl_max(zl_set(-0x1.fffffep127f), top); /* -inf, nothing seen: the least finite score */
      const v16f ft = zl_exp((before - base) * unit), fp = zl_exp((more - base) * unit);
      zl_store(by_total, ft);
      zl_store(by_part, fp);
      zl_store_n(total->max + i, top, n - i);
      zl_store_n(total->sum + i, zl_load_n(total->sum + i, n - i) * ft + zl_load_n(part->sum + i, n - i) * fp, n - i);
    }
    for (int64_t d = 0; d < stride; d += 16) {
      float *o = total->out + i * stride + d;
      zl_store(o, zl_load(o) * by_total[i % 16] + zl_load(part->out + i * stride + d) * by_part[i % 16]);
    }
  }
}

/* Tokens t0 .. t1 of one sequence x heads h0 .. h0 + heads of one KV head: what a tile is made of.  parts > 1: one
 * token, and of the `parts` spans that it attends to only number `part`. */
typedef struct zl_cut {
  int64_t t0, t1, h0, heads;
  int64_t part, parts;
  char *slots;          /* [parts, zl_slot_bytes(heads)] */
  _Atomic int32_t *met; /* parts that are done */
} zl_cut;

/* Attention of a tile, or of its part; results, not yet divided by sum, in `total`. */
ZL_KERNEL void zl_attend(const zl_task *t, const zl_attention_shape *a, const zl_queries *tile, const zl_cut *cut,
                         char *k, char *v, zl_seen *total, zl_seen *part) {
  const int64_t stride = (a->head_dim + 15) / 16 * 16;
  int64_t from = tile->from[0], last = tile->last[0];
  for (int64_t i = 1; i < tile->n; i++) {
    if (tile->from[i] < from) from = tile->from[i];
    if (tile->last[i] > last) last = tile->last[i];
  }
  int64_t span = zl_span_of(from) + cut->part, stop = cut->parts > 1 ? span + 1 : zl_span_of(last) + 1;
  zl_seen *seen = total; /* the first span needs no merging */
  for (; span < stop; span++, seen = part) {
    const int64_t begin = zl_span_begin(span), end = zl_span_begin(span + 1) - 1;
    zl_seen_reset(seen, (tile->n + 3) / 4 * 4, stride);
    zl_span(t, a, tile, k, v, begin > from ? begin : from, end < last ? end : last, last, seen);
    if (seen == part) zl_seen_merge(a, total, part, tile->n);
  }
}

typedef struct zl_attention_io {
  const float *q;           /* [T, H*hd] */
  char *k, *v;
  const int32_t *positions; /* [T] */
  float *y;                 /* [T, H*hd], or NULL and the bundle: */
  int8_t *q8;
  float *scale, *sums;
  int64_t H, group;
} zl_attention_io;

/* the first position that a query at p attends to */
ZL_KERNEL int64_t zl_first(const zl_attention_shape *a, int64_t p) {
  return a->window > 0 && p - a->window + 1 > 0 ? p - a->window + 1 : 0;
}

ZL_KERNEL void zl_fill_tile(zl_queries *tile, const zl_task *t, const zl_attention_shape *a, const zl_attention_io *io,
                            const zl_cut *cut) {
  tile->n = 0;
  tile->seq = t->token_seq[cut->t0];
  tile->kv_head = cut->h0 / io->group;
  for (int64_t row = cut->t0; row < cut->t1; row++)
    for (int64_t h = cut->h0; h < cut->h0 + cut->heads; h++) {
      const int64_t i = tile->n++, p = io->positions[row];
      tile->q[i] = io->q + (row * io->H + h) * a->head_dim;
      tile->from[i] = zl_first(a, p);
      tile->last[i] = p;
    }
  for (int64_t i = tile->n; i % 4; i++) { /* fills the last four; what comes out is not read */
    tile->q[i] = tile->q[0];
    tile->from[i] = tile->from[0];
    tile->last[i] = tile->last[0];
  }
}

/* Results of `some` tokens (1 or 8) of a head, heads * stride floats apart, divided by their sums -> the bundle, rows
 * `row` apart. */
ZL_KERNEL void zl_quantize_results(int some, const zl_attention_io *io, const float *out, const float *sum,
                                   int64_t heads, int64_t stride, int64_t at, int64_t row, int64_t hd) {
  float by[8];
  ZL_UNROLL
  for (int m = 0; m < some; m++) by[m] = 1.0f / sum[m * heads];
  for (int64_t d = 0; d < hd; d += 32) {
    v16f a[8], b[8];
    ZL_UNROLL
    for (int m = 0; m < some; m++) {
      a[m] = zl_load(out + m * heads * stride + d) * by[m];
      b[m] = zl_load(out + m * heads * stride + d + 16) * by[m];
    }
    int8_t *q = io->q8 + at + d;
    float *scale = io->scale + (at + d) / 32, *sums = io->sums + (at + d) / 16;
    if (some == 8)
      zl_quantize32_eight(a, b, q, row, scale, row / 32, sums, row / 16);
    else
      zl_quantize32(a[0], b[0], q, scale, sums);
  }
}

/* Results of a tile, divided by their sums.  Eight tokens of a head are quantized together. */
ZL_KERNEL void zl_results(const zl_attention_io *io, const zl_seen *total, const zl_cut *cut, int64_t hd) {
  const int64_t stride = (hd + 15) / 16 * 16, row = io->H * hd;
  const int64_t heads = cut->heads, tokens = cut->t1 - cut->t0;
  for (int64_t h = 0; h < heads; h++) {
    const float *out = total->out + h * stride, *sum = total->sum + h; /* of the first token; the next is heads on */
    const int64_t at = cut->t0 * row + (cut->h0 + h) * hd;
    int64_t t = 0;
    if (io->y) {
      for (; t < tokens; t++)
        for (int64_t d = 0; d < hd; d += 16)
          zl_store_n(io->y + at + t * row + d, zl_load(out + t * heads * stride + d) * (1.0f / sum[t * heads]),
                     hd - d < 16 ? hd - d : 16);
    } else {
      for (; t + 8 <= tokens; t += 8)
        zl_quantize_results(8, io, out + t * heads * stride, sum + t * heads, heads, stride, at + t * row, row, hd);
      for (; t < tokens; t++)
        zl_quantize_results(1, io, out + t * heads * stride, sum + t * heads, heads, stride, at + t * row, row, hd);
    }
  }
}

#include "zl_attention_deal.h"

/* q f32[T, H*hd], k_cache, v_cache, positions i32[T], seq_starts, block_table -> y f32[T, H*hd] */
ZL_KERNEL void zl_paged_attention(const zl_task *t, int64_t rows, const float *q, char *k_cache, char *v_cache,
                                  const int32_t *positions, const int32_t *seq_starts, const int32_t *block_table,
                                  float *y, int64_t num_heads, int64_t kv_num_heads, int64_t head_dim, double scale,
                                  double softcap, int64_t window, int64_t block_size, int kv_dtype) {
  (void)seq_starts;
  (void)block_table;
  zl_attention_shape a = {head_dim, kv_num_heads, block_size, window, (float)scale, (float)softcap, kv_dtype};
  zl_attention_io io = {q, k_cache, v_cache, positions, y, NULL, NULL, NULL, num_heads, num_heads / kv_num_heads};
  zl_attention_all(t, rows, &io, &a);
}

/* the same -> q i8[T, H*hd], scale f32[T, H*hd/32], sums f32[T, H*hd/16] */
ZL_KERNEL void zl_paged_attention_quantize(const zl_task *t, int64_t rows, const float *q, char *k_cache,
                                           char *v_cache, const int32_t *positions, const int32_t *seq_starts,
                                           const int32_t *block_table, int8_t *q8, float *q8_scale, float *q8_sums,
                                           int64_t num_heads, int64_t kv_num_heads, int64_t head_dim, double scale,
                                           double softcap, int64_t window, int64_t block_size, int kv_dtype) {
  (void)seq_starts;
  (void)block_table;
  zl_attention_shape a = {head_dim, kv_num_heads, block_size, window, (float)scale, (float)softcap, kv_dtype};
  zl_attention_io io = {q,  k_cache,  v_cache, positions, NULL,
                        q8, q8_scale, q8_sums, num_heads, num_heads / kv_num_heads};
  zl_attention_all(t, rows, &io, &a);
}

#endif
