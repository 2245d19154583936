/* Matrix products with int8 activations: Linear, LinearAdd, ActLinear, GatedLinear and its quantizing form.
 *
 * In: zl_block_dots.h, zl_linear_amx.h, zl_math.h, zl_quantize.h.  Out: zl_dot_int8 (16 outputs for n tokens), the
 * kernels.  Next file: zl_linear_float.h.
 *
 * Work is split into (token tile, group of 16 outputs, piece of the tile) items, in this order.  A token tile's
 * activations stay in L2 while the weights stream past once; a group's weights stay in L1 while the tile's tokens pass,
 * some at a time (zl_many), which share the unpacking of each block, and meanwhile the next group's are asked for
 * (ZL_ASK_TOKENS).  Pieces are what threads share out, so that none waits long for another at a call's end.  A token's
 * sums run over K in the same order in every tile size, and in zl_linear_amx.h, which takes the sixteens of a token tile
 * where the target multiplies matrix tiles.
 */
#ifndef ZL_LINEAR_INT8_H
#define ZL_LINEAR_INT8_H
#include "zl_block_dots.h"
#include "zl_linear_amx.h"
#include "zl_math.h"
#include "zl_quantize.h"

#ifndef ZL_TILE_BYTES
#define ZL_TILE_BYTES (512 * 1024) /* activations of a token tile: half of L2 */
#endif

#ifndef ZL_PREFETCH_BYTES
#define ZL_PREFETCH_BYTES 4096 /* how far ahead of use a product of several tokens asks for weights */
#endif
#ifndef ZL_STREAM_BYTES
#define ZL_STREAM_BYTES 0 /* the same for one or two tokens; 0: the machine's prefetchers do it */
#endif
/* Most tokens of a tile.  Weights are read once for it, which takes long beside VNNI only; sums of matrix tiles are in
 * memory. */
#if defined(__AVX512VNNI__) && !ZL_TILES
#define ZL_TILE_TOKENS 512
#else
#define ZL_TILE_TOKENS 256
#endif
#define ZL_PIECE_TOKENS 64 /* most tokens of an item */
/* Tokens of a tile from which on the next weights are asked for meanwhile, so that the first of the next products need not
 * wait: eight of 72 ask for a line at most with each block (8 bits: 544 bytes).  0: not asked for.  Without VNNI products
 * take so long that nothing waits (Zen 3: asking gained nothing); matrix tiles unpack a panel beforehand. */
#ifndef ZL_ASK_TOKENS
#if defined(__AVX512VNNI__) && !ZL_TILES
#define ZL_ASK_TOKENS 72
#else
#define ZL_ASK_TOKENS 0
#endif
#endif

/* Most tokens that share the unpacking of a block.  With AVX-512 the codes stay in registers, and eight sums beside
 * them.  Without it they go to the first cache and come back for four tokens at a time, so the more tokens the better
 * (Zen 3: a product is 10 to 19 % faster with 32 than with 8). */
#if ZL_AVX512
#define ZL_MANY 8
#else
#define ZL_MANY 32
#endif

/* That, for rows of K activations: the rows' parts have to be in the first cache together, and rows that lie multiples of
 * 4 KB apart share its ways, as on every x86-64 processor whose first cache is found by the bits within a page: eight of
 * them at least. */
ZL_KERNEL int64_t zl_many(int64_t K) {
  const int64_t apart = (K & -K) < 64 ? 64 : (K & -K) < 4096 ? (K & -K) : 4096, fit = 8 * (4096 / apart);
  return fit < ZL_MANY ? fit : ZL_MANY;
}

/* CALL(MT, n, first) for n tokens from `first` on, covering [begin, end): 4, 2 or 1, then MT is n, or a multiple of 8 up
 * to `many`, then MT is 8. */
#define ZL_TOKEN_TILES(many, begin, end, CALL)                                      \
  for (int64_t zl_m = (begin), zl_e = (end); zl_m < zl_e;) {                        \
    if (zl_e - zl_m >= 8) {                                                         \
      const int64_t zl_8 = (many) == 8 || zl_e - zl_m < 16 ? 8                      \
                           : zl_e - zl_m >= (many) ? (many) : (zl_e - zl_m) / 8 * 8; \
      CALL(8, zl_8, zl_m);                                                          \
      zl_m += zl_8;                                                                 \
    } else if (zl_e - zl_m >= 4) {                                                  \
      CALL(4, 4, zl_m);                                                             \
      zl_m += 4;                                                                    \
    } else if (zl_e - zl_m >= 2) {                                                  \
      CALL(2, 2, zl_m);                                                             \
      zl_m += 2;                                                                    \
    } else {                                                                        \
      CALL(1, 1, zl_m);                                                             \
      zl_m += 1;                                                                    \
    }                                                                               \
  }

/* Tokens per tile: `row_bytes` each, within ZL_TILE_BYTES, a multiple of ZL_TILE_STEP, all tiles of a call about equal. */
ZL_KERNEL int64_t zl_tile_tokens(int64_t rows, int64_t row_bytes) {
  int64_t most = ZL_TILE_BYTES / row_bytes / ZL_TILE_STEP * ZL_TILE_STEP;
  if (most < ZL_TILE_STEP) most = ZL_TILE_STEP;
  if (most > ZL_TILE_TOKENS) most = ZL_TILE_TOKENS;
  int64_t tiles = (rows + most - 1) / most;
  int64_t even = (rows + tiles - 1) / tiles;
  return (even + ZL_TILE_STEP - 1) / ZL_TILE_STEP * ZL_TILE_STEP;
}

/* CALL(MT, ...) for the one row or two of a call that reads two streams; none of that code on other targets. */
#define ZL_FEW_ROWS(rows, CALL, ...)          \
  do {                                        \
    if (ZL_STREAMS == 2 && (rows) == 1)       \
      CALL(1, __VA_ARGS__);                   \
    else if (ZL_STREAMS == 2 && (rows) == 2)  \
      CALL(2, __VA_ARGS__);                   \
  } while (0)

/* What the kernels keep per token and block of 32 columns beside the bundle: zl_tile_words. */
typedef union zl_tile_word {
  int32_t zero; /* -zero point * (sum of q) */
  float total;  /* the two sums of 16 columns added */
} zl_tile_word;

typedef struct zl_bundle {
  const int8_t *q;    /* [T, K] */
  const float *scale; /* [T, K/32] */
  const float *sums;  /* [T, K/16] */
  const zl_tile_word *words; /* [tile, K/32], from token words_from on, zl_tile_words; NULL: there are no totals */
  int64_t words_from;
} zl_bundle;

#define ZL_TILE_BLOCKS (ZL_TILE_BYTES / 32 + ZL_TILE_STEP * 2048) /* blocks of 32 columns in a token tile, K <= 64 Ki */

/* zl_tile_word.zero of eight blocks, whose q they are. */
ZL_KERNEL void zl_zero_words(const int8_t *q, int32_t point, zl_tile_word *words) {
  v8i x[8];
  ZL_UNROLL
  for (int i = 0; i < 8; i++) x[i] = zl_sum4(q + 32 * i);
  const v8i zero = zl_fold8_sum(x) * -point;
  memcpy(words, &zero, sizeof zero);
}

/* Once per tile of tokens [t0, t1), into space: what a block's integer sums start from, so that the zero point needs no
 * multiply-add (the tokens of tile products need none), or the totals for the minimum (with AVX-512 of the tokens of tile
 * products only: a register is there for the others). */
ZL_KERNEL void zl_tile_words(int format, zl_bundle *a, int64_t t0, int64_t t1, int64_t K, zl_tile_word *space) {
  const int64_t from = zl_amx_until(t0, t1), KB = K / 32;
  a->words = space;
  a->words_from = t0;
  if (zl_has_totals(format))
    for (int64_t i = t0 * KB; i < (ZL_AVX512 ? from : t1) * KB; i++) space[i - t0 * KB].total = a->sums[2 * i] + a->sums[2 * i + 1];
  if (!zl_zero_point(format)) return;
  const int32_t point = zl_zero_point(format);
  int64_t i = from * KB;
  for (; i + 8 <= t1 * KB; i += 8) zl_zero_words(a->q + i * 32, point, space + (i - t0 * KB));
  if (i < t1 * KB) {
    int8_t q[8 * 32] = {0};
    zl_tile_word words[8];
    memcpy(q, a->q + i * 32, (size_t)(t1 * KB - i) * 32);
    zl_zero_words(q, point, words);
    memcpy(space + (i - t0 * KB), words, (size_t)(t1 * KB - i) * sizeof *words);
  }
}

/* The walk of a thread through its items of a call: a piece of a tile of tokens for one of G runs of outputs at a time. */
typedef struct zl_walk {
  zl_deal deal;
  int64_t rows, G, tile;
  int64_t pieces, tokens; /* of a tile, of a piece */
  int64_t tile0, tile1; /* tokens of the item's tile */
  int64_t t0, t1, g;    /* the item: tokens t0 .. t1 of them, run g */
  int64_t half, other;  /* zl_first_half, and the run that is taken together with g, -1: none */
  int64_t until;        /* tokens t0 .. until go through tile products */
  int64_t words_at;     /* the tile and the format that a bundle's words are for */
  int format;
  _Alignas(64) zl_tile_word words[ZL_TILE_BLOCKS];
} zl_walk;

/* half: zl_first_half of the runs, 0 for a call that takes them one by one, as all do for more rows */
ZL_KERNEL void zl_walk_begin(zl_walk *w, int64_t rows, int64_t K, int64_t G, int64_t half) {
  const int64_t many = zl_many(K);
  w->rows = rows;
  w->G = G;
  w->tile = rows > 0 ? zl_tile_tokens(rows, K) : 1;
  /* matrix tiles unpack weights once for a whole tile */
  w->pieces = ZL_TILES ? 1 : (w->tile + ZL_PIECE_TOKENS - 1) / ZL_PIECE_TOKENS;
  w->tokens = (w->tile + w->pieces - 1) / w->pieces;
  if (w->pieces > 1) w->tokens = (w->tokens + many - 1) / many * many;
  w->half = half;
  w->deal = (zl_deal){half ? half : (rows + w->tile - 1) / w->tile * G * w->pieces, 0, 0, 0};
  w->words_at = -1;
  w->format = -1;
  zl_amx_begin(rows);
}

/* The next item; 0, and the walk is over, where there is none. */
ZL_KERNEL int zl_walk_item(const zl_task *t, zl_walk *w) {
  do { /* a short tile's last pieces are empty */
    int64_t i;
    if (!zl_deal_item(t, &w->deal, &i)) {
      zl_amx_end(w->rows);
      return 0;
    }
    const int64_t run = i / w->pieces;
    w->g = run % w->G;
    w->other = zl_other(w->half, run, w->G);
    w->tile0 = run / w->G * w->tile;
    w->tile1 = w->tile0 + w->tile < w->rows ? w->tile0 + w->tile : w->rows;
    w->t0 = w->tile0 + i % w->pieces * w->tokens;
    w->t1 = w->t0 + w->tokens < w->tile1 ? w->t0 + w->tokens : w->tile1;
  } while (w->t0 >= w->t1);
  w->until = zl_amx_until(w->t0, w->t1);
  return 1;
}

/* The words of the item's tile, for weights of this format, if they are not at hand. */
ZL_KERNEL void zl_walk_words(zl_walk *w, int format, zl_bundle *a, int64_t K) {
  a->words = w->words; /* said each time: that it is not NULL is a constant of the products' code */
  a->words_from = w->tile0;
  if (w->words_at == w->tile0 && w->format == format) return;
  zl_tile_words(w->format = format, a, w->words_at = w->tile0, w->tile1, K, w->words);
}

/* Weights that a product asks for while it computes: from `at` on, `step` 256ths of a byte for each of its blocks.  NULL
 * and 0: none, but the line where it begins again and again, which is cheaper than a branch. */
typedef struct zl_next {
  const uint8_t *at;
  int64_t step;
} zl_next;
#define ZL_NOTHING_NEXT ((zl_next){NULL, 0})

/* What the products of tokens first .. first + n with part number `part` of `parts` of a run ask for: their share of the
 * next run's `bytes` at `next`.  KB: their blocks. */
ZL_KERNEL zl_next zl_walk_next(const zl_walk *w, const uint8_t *next, int64_t bytes, int64_t first, int64_t n, int64_t part,
                               int64_t parts, int64_t KB) {
  const int64_t tokens = w->tile1 - w->tile0, done = (first - w->tile0) * parts + n * part;
  if (!ZL_ASK_TOKENS || tokens < ZL_ASK_TOKENS || w->g + 1 >= w->G) return ZL_NOTHING_NEXT;
  return (zl_next){next + done * bytes / (tokens * parts), n * bytes * 256 / (tokens * parts * KB)};
}

/* How far ahead MT tokens ask for weights, 0: not at all.  Several compute longer on a block than the machine's
 * prefetchers look ahead.  One or two read at the memory's rate; whether asking helps or costs is a fact of the target
 * (docs/decisions.md). */
ZL_KERNEL int64_t zl_asks(int MT) { return MT > 2 ? ZL_PREFETCH_BYTES : ZL_STREAM_BYTES; }

/* Asks for `bytes` that come so far after p. */
ZL_KERNEL void zl_ask_ahead(int MT, const uint8_t *p, int64_t bytes) {
  if (!zl_asks(MT)) return;
  ZL_UNROLL
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + zl_asks(MT) + i, 0, 3);
}

/* acc[m] += block kb of a group for MT tokens from `first` on, at most ZL_DOT_TOKENS */
ZL_KERNEL void zl_dot_block(int format, int MT, const zl_block *b, const zl_nibbled *n, zl_bundle a, int64_t first,
                            int64_t K, int64_t kb, v16f *acc) {
  const int64_t KB = K / 32;
  const float *scale = a.scale + first * KB, *sums = a.sums + first * KB * 2;
  const int has_zero = zl_zero_point(format) != 0, has_total = !ZL_AVX512 && zl_has_totals(format) && a.words;
  const zl_tile_word *words = has_zero || has_total ? a.words + (first - a.words_from) * KB : NULL;
  v16i p[ZL_DOT_TOKENS][2];
  ZL_UNROLL
  for (int m = 0; m < MT; m++) {
    p[m][0] = p[m][1] = (v16i){0};
    if (has_zero) p[m][0] = p[m][0] + words[m * KB + kb].zero;
  }
  zl_block_dots(format, MT, b, n, a.q + first * K + kb * 32, K, p);
  ZL_UNROLL
  for (int m = 0; m < MT; m++) {
    const float s = scale[m * KB + kb], *sum = sums + (m * KB + kb) * 2;
    v16f f = zl_to_float(p[m][0]) * b->scale[0];
    if (zl_scale_cols(format) == 32) {
      acc[m] = zl_fma(f, zl_set(s), acc[m]);
      if (!has_zero) acc[m] = zl_fma(b->min[0], zl_set(has_total ? words[m * KB + kb].total : sum[0] + sum[1]), acc[m]);
    } else {
      f = zl_fma(zl_to_float(p[m][1]), b->scale[1], f);
      acc[m] = zl_fma(f, zl_set(s), acc[m]);
      acc[m] = zl_fma(b->min[0], zl_set(sum[0]), acc[m]);
      acc[m] = zl_fma(b->min[1], zl_set(sum[1]), acc[m]);
    }
  }
}

/* acc[m] = 16 outputs of the group at w (rows16) for token first + m, m < n; MT and n as in ZL_TOKEN_TILES.  Columns
 * outside, tokens inside: independent chains hide the latency of the products.  Eights ask for `next`. */
ZL_KERNEL void zl_dot_int8(int format, int MT, int64_t n, zl_bundle a, int64_t first, int64_t K, const uint8_t *w,
                           zl_next next, v16f *acc) {
  const int64_t bytes = zl_block_bytes(format) * 32 / zl_block_cols(format);
  const uint8_t *asks = next.at ? next.at : w;
  int64_t asked = 0;
  for (int64_t i = 0; i < n; i += MT) {
    ZL_UNROLL
    for (int m = 0; m < MT; m++) acc[i + m] = zl_set(0.0f);
  }
  ZL_NO_UNROLL
  for (int64_t kb = 0; kb < K / 32; kb++) {
    zl_block b;
    zl_nibbled upper;
    zl_block_load(format, w, kb, &b);
    zl_take_apart(format, &b, &upper);
    zl_ask_ahead(MT, w + kb * bytes, bytes);
    if (ZL_ASK_TOKENS && MT == 8) {
      __builtin_prefetch(asks + (asked >> 8), 0, 2);
      asked += next.step;
    }
    if (MT <= ZL_DOT_TOKENS) {
      zl_dot_block(format, MT, &b, &upper, a, first, K, kb, acc);
      continue;
    }
    ZL_NO_UNROLL /* codes and sums in memory, and the registers to a part of the tokens at a time */
    for (int64_t m = 0; m < n; m += ZL_DOT_TOKENS)
      zl_dot_block(format, ZL_DOT_TOKENS, &b, &upper, a, first + m, K, kb, acc + m);
  }
}

/* acc[m] += block kb of the group at w for one or two tokens, and what comes `ahead` bytes after it in the stream is asked
 * for, 0: nothing */
ZL_KERNEL void zl_dot_stream(int format, int MT, int64_t ahead, zl_bundle a, int64_t first, int64_t K, int64_t kb,
                             const uint8_t *w, v16f *acc) {
  const int64_t bytes = zl_block_bytes(format) * 32 / zl_block_cols(format);
  zl_block b;
  zl_nibbled upper;
  zl_block_load(format, w, kb, &b);
  zl_take_apart(format, &b, &upper);
  ZL_UNROLL
  for (int64_t i = 0; ahead && i < bytes; i += 64) __builtin_prefetch(w + kb * bytes + ahead + i, 0, 3);
  zl_dot_block(format, MT, &b, &upper, a, first, K, kb, acc);
}

/* Two groups for one or two tokens, the bits of zl_dot_int8, block by block in turn: two streams (zl_first_half).  The
 * formats share the bundle's words. */
ZL_KERNEL void zl_dot_int8_two(int format0, int format1, int MT, zl_bundle a, int64_t first, int64_t K,
                               const uint8_t *w0, const uint8_t *w1, v16f *acc0, v16f *acc1) {
  ZL_UNROLL
  for (int m = 0; m < MT; m++) acc0[m] = acc1[m] = zl_set(0.0f);
  ZL_NO_UNROLL
  for (int64_t kb = 0; kb < K / 32; kb++) {
    zl_dot_stream(format0, MT, zl_asks(MT), a, first, K, kb, w0, acc0);
    zl_dot_stream(format1, MT, zl_asks(MT), a, first, K, kb, w1, acc1);
  }
}

/* The same by tile products: out[t] for tokens t0 .. until, `stride` floats apart. */
ZL_KERNEL void zl_dot_amx(int format, zl_bundle a, int64_t t0, int64_t until, int64_t K, const uint8_t *w, float *out,
                          int64_t stride) {
  const float *totals = zl_has_totals(format) ? &a.words[(t0 - a.words_from) * (K / 32)].total : NULL;
  const zl_amx_tokens x = {a.q + t0 * K, a.scale + t0 * (K / 32), a.sums + t0 * (K / 16), totals};
  zl_amx_group(format, until - t0, x, K, w, out, stride);
}

/* The lines of `to` [T, N] where the outputs of group g go, for several tokens: the sums take longer than the caches
 * take to bring them.  Rows of whole 4 KB share one set of the first cache, which the sums would empty: into the second. */
ZL_KERNEL void zl_ask_outputs(int64_t n, const float *to, int64_t first, int64_t g, int64_t N) {
  if (n <= 2 || !to) return;
  for (int64_t m = 0; m < n; m++) {
    const float *line = to + (first + m) * N + 16 * g;
    if (N % 1024)
      __builtin_prefetch(line, 1, 3);
    else
      __builtin_prefetch(line, 0, 2);
  }
}

/* out[T, N] = residual + act(acc + bias) for MT tokens; residual and bias may be NULL; out may be residual */
ZL_KERNEL void zl_linear_int8_put(int MT, const v16f *acc, int64_t first, int64_t g, const float *bias,
                                  const float *residual, float *out, int64_t N, int act) {
  const int64_t n = N - 16 * g < 16 ? N - 16 * g : 16;
  v16f c = bias ? zl_load_n(bias + 16 * g, n) : zl_set(0.0f);
  ZL_UNROLL
  for (int m = 0; m < MT; m++) {
    const int64_t at = (first + m) * N + 16 * g;
    v16f y = bias ? acc[m] + c : acc[m];
    y = zl_activate(act, y);
    if (residual) y = zl_load_n(residual + at, n) + y;
    zl_store_n(out + at, y, n);
  }
}

ZL_KERNEL void zl_linear_int8_tile(int format, int MT, int64_t n, zl_bundle a, int64_t first, int64_t g,
                                   const uint8_t *w, zl_next next, const float *bias, const float *residual,
                                   float *out, int64_t N, int64_t K, int act) {
  v16f acc[ZL_MANY];
  zl_ask_outputs(n, residual ? residual : out, first, g, N);
  zl_dot_int8(format, MT, n, a, first, K, w + g * zl_group_bytes(format, K), next, acc);
  for (int64_t m = 0; m < n; m += MT) zl_linear_int8_put(MT, acc + m, first + m, g, bias, residual, out, N, act);
}

/* All MT rows of groups g and other. */
ZL_KERNEL void zl_linear_int8_pair(int MT, int format, zl_bundle a, int64_t g, int64_t other, const uint8_t *w,
                                   const float *bias, const float *residual, float *out, int64_t N, int64_t K,
                                   int act) {
  v16f acc[2][ZL_STREAM_ROWS];
  const int64_t bytes = zl_group_bytes(format, K);
  zl_dot_int8_two(format, format, MT, a, 0, K, w + g * bytes, w + other * bytes, acc[0], acc[1]);
  zl_linear_int8_put(MT, acc[0], 0, g, bias, residual, out, N, act);
  zl_linear_int8_put(MT, acc[1], 0, other, bias, residual, out, N, act);
}

/* Tokens t0 .. until, which go through tile products. */
ZL_KERNEL void zl_linear_amx_tile(int format, zl_bundle a, int64_t t0, int64_t until, int64_t g, const uint8_t *w,
                                  const float *bias, const float *residual, float *out, int64_t N, int64_t K, int act) {
  _Alignas(64) float sums[ZL_TILE_TOKENS * 16];
  zl_dot_amx(format, a, t0, until, K, w + g * zl_group_bytes(format, K), sums, 16);
  for (int64_t t = t0; t < until; t++) {
    const v16f acc = zl_load(sums + 16 * (t - t0));
    zl_linear_int8_put(1, &acc, t, g, bias, residual, out, N, act);
  }
}

ZL_KERNEL void zl_linear_int8_all(const zl_task *t, int64_t rows, zl_bundle a, const uint8_t *w, const float *bias,
                                  const float *residual, float *out, int64_t N, int64_t K, int act, int format) {
  zl_walk walk;
  zl_walk_begin(&walk, rows, K, (N + 15) / 16, zl_first_half(t->n_threads, rows, (N + 15) / 16));
  while (zl_walk_item(t, &walk)) {
    const int64_t g = walk.g, t0 = walk.t0, until = walk.until, bytes = zl_group_bytes(format, K);
    zl_walk_words(&walk, format, &a, K);
    if (ZL_STREAMS == 2 && walk.other >= 0) {
      ZL_FEW_ROWS(rows, zl_linear_int8_pair, format, a, g, walk.other, w, bias, residual, out, N, K, act);
      continue;
    }
    if (until > t0) zl_linear_amx_tile(format, a, t0, until, g, w, bias, residual, out, N, K, act);
#define ZL_CALL(MT, n, first)                                                                            \
  zl_linear_int8_tile(format, MT, n, a, first, g, w,                                                     \
                      zl_walk_next(&walk, w + (g + 1) * bytes, bytes, first, n, 0, 1, K / 32), bias,     \
                      residual, out, N, K, act)
    ZL_TOKEN_TILES(zl_many(K), until, walk.t1, ZL_CALL)
#undef ZL_CALL
  }
}

/* q i8[T,K], scale f32[T,K/32], sums f32[T,K/16], W rows16 [N,K], bias f32[N] or NULL -> out f32[T,N] */
ZL_KERNEL void zl_linear_int8(const zl_task *t, int64_t rows, const int8_t *q, const float *scale, const float *sums,
                              const uint8_t *w, const float *bias, float *out, int64_t N, int64_t K, int format) {
  zl_bundle a = {q, scale, sums, NULL, 0};
  zl_linear_int8_all(t, rows, a, w, bias, NULL, out, N, K, ZL_ACT_NONE, format);
}

/* ..., residual f32[T,N], bias? -> out f32[T,N] = residual + linear; out may be residual */
ZL_KERNEL void zl_linear_add_int8(const zl_task *t, int64_t rows, const int8_t *q, const float *scale,
                                  const float *sums, const uint8_t *w, const float *residual, const float *bias,
                                  float *out, int64_t N, int64_t K, int format) {
  zl_bundle a = {q, scale, sums, NULL, 0};
  zl_linear_int8_all(t, rows, a, w, bias, residual, out, N, K, ZL_ACT_NONE, format);
}

/* ..., bias? -> out f32[T,N] = act(linear) */
ZL_KERNEL void zl_act_linear_int8(const zl_task *t, int64_t rows, const int8_t *q, const float *scale,
                                  const float *sums, const uint8_t *w, const float *bias, float *out, int64_t N,
                                  int64_t K, int activation, int format) {
  zl_bundle a = {q, scale, sums, NULL, 0};
  zl_linear_int8_all(t, rows, a, w, bias, NULL, out, N, K, activation, format);
}

/* h[m] = act(h[m] + bias) * (u[m] + bias) for 16 outputs of group g */
ZL_KERNEL void zl_gated_join(int MT, v16f *h, v16f *u, int64_t g, const float *bias_gate, const float *bias_up,
                             int64_t N, int act) {
  const int64_t n = N - 16 * g < 16 ? N - 16 * g : 16;
  ZL_UNROLL
  for (int m = 0; m < MT; m++) {
    if (bias_gate) h[m] = h[m] + zl_load_n(bias_gate + 16 * g, n);
    if (bias_up) u[m] = u[m] + zl_load_n(bias_up + 16 * g, n);
    h[m] = zl_act_times(act, h[m], u[m]);
  }
}

/* h = 16 outputs of group g for tokens first .. first + n; it is number `part` of the run's `parts` groups */
ZL_KERNEL void zl_gated_int8_tile(int format, int MT, int64_t n, zl_bundle a, const zl_walk *walk, int64_t first,
                                  int64_t g, int64_t part, int64_t parts, const uint8_t *gate, const uint8_t *up,
                                  const float *bias_gate, const float *bias_up, int64_t N, int64_t K, int act,
                                  v16f *h) {
  v16f sums[ZL_MANY], u[ZL_MANY]; /* not h: sums behind a pointer would live in memory */
  const int64_t bytes = zl_group_bytes(format, K), at = g * bytes, next = (g - part + parts) * bytes;
  if (ZL_STREAMS == 2 && MT <= ZL_STREAM_ROWS && walk->rows <= ZL_STREAM_ROWS) {
    zl_dot_int8_two(format, format, MT, a, first, K, gate + at, up + at, sums, u);
  } else {
    zl_dot_int8(format, MT, n, a, first, K, gate + at,
                zl_walk_next(walk, gate + next, parts * bytes, first, n, part, parts, K / 32), sums);
    zl_dot_int8(format, MT, n, a, first, K, up + at,
                zl_walk_next(walk, up + next, parts * bytes, first, n, part, parts, K / 32), u);
  }
  for (int64_t i = 0; i < n; i += MT) {
    zl_gated_join(MT, sums + i, u + i, g, bias_gate, bias_up, N, act);
    ZL_UNROLL
    for (int m = 0; m < MT; m++) h[i + m] = sums[i + m];
  }
}

/* Sums of `groups` groups from g on, of gate and up, for tokens t0 .. until: [groups][2][ZL_TILE_TOKENS][16] */
ZL_KERNEL void zl_gated_amx_sums(int format, zl_bundle a, int64_t t0, int64_t until, int64_t g, int64_t groups,
                                 const uint8_t *gate, const uint8_t *up, int64_t K, float *sums) {
  ZL_NO_UNROLL
  for (int64_t i = 0; i < 2 * groups; i++)
    zl_dot_amx(format, a, t0, until, K, (i % 2 ? up : gate) + (g + i / 2) * zl_group_bytes(format, K),
               sums + i * ZL_TILE_TOKENS * 16, 16);
}

/* One token of them: h as zl_gated_join makes it. */
ZL_KERNEL v16f zl_gated_amx_one(const float *sums, int64_t m, int64_t g, const float *bias_gate, const float *bias_up,
                                int64_t N, int act) {
  v16f h = zl_load(sums + 16 * m), u = zl_load(sums + 16 * (ZL_TILE_TOKENS + m));
  zl_gated_join(1, &h, &u, g, bias_gate, bias_up, N, act);
  return h;
}

/* A, Wgate, Wup rows16 [N,K], bias_gate?, bias_up? f32[N] -> out f32[T,N] = act(gate) * up */
ZL_KERNEL void zl_gated_linear_int8(const zl_task *t, int64_t rows, const int8_t *q, const float *scale,
                                    const float *sums, const uint8_t *gate, const uint8_t *up, const float *bias_gate,
                                    const float *bias_up, float *out, int64_t N, int64_t K, int activation,
                                    int format) {
  zl_bundle a = {q, scale, sums, NULL, 0};
  zl_walk walk;
  zl_walk_begin(&walk, rows, K, (N + 15) / 16, 0); /* gate and up are two streams */
  while (zl_walk_item(t, &walk)) {
    const int64_t g = walk.g, t0 = walk.t0, until = walk.until;
    zl_walk_words(&walk, format, &a, K);
    const int64_t n = N - 16 * g < 16 ? N - 16 * g : 16;
    if (until > t0) {
      _Alignas(64) float sums[2 * ZL_TILE_TOKENS * 16];
      zl_gated_amx_sums(format, a, t0, until, g, 1, gate, up, K, sums);
      for (int64_t m = 0; m < until - t0; m++)
        zl_store_n(out + (t0 + m) * N + 16 * g, zl_gated_amx_one(sums, m, g, bias_gate, bias_up, N, activation), n);
    }
#define ZL_CALL(MT, n_tokens, first)                                                                             \
  do {                                                                                                           \
    v16f h[ZL_MANY];                                                                                             \
    zl_gated_int8_tile(format, MT, n_tokens, a, &walk, first, g, 0, 1, gate, up, bias_gate, bias_up, N, K,       \
                       activation, h);                                                                           \
    for (int64_t m = 0; m < (n_tokens); m++) zl_store_n(out + ((first) + m) * N + 16 * g, h[m], n);               \
  } while (0)
    ZL_TOKEN_TILES(zl_many(K), until, walk.t1, ZL_CALL)
#undef ZL_CALL
  }
}

/* the same, N a multiple of 32 -> q i8[T,N], scale f32[T,N/32], sums f32[T,N/16] */
ZL_KERNEL void zl_gated_linear_quantize_int8(const zl_task *t, int64_t rows, const int8_t *q, const float *scale,
                                             const float *sums, const uint8_t *gate, const uint8_t *up,
                                             const float *bias_gate, const float *bias_up, int8_t *out_q,
                                             float *out_scale, float *out_sums, int64_t N, int64_t K, int activation,
                                             int format) {
  zl_bundle a = {q, scale, sums, NULL, 0};
  zl_walk walk;
  zl_walk_begin(&walk, rows, K, N / 32, 0);
  while (zl_walk_item(t, &walk)) {
    const int64_t g = walk.g, t0 = walk.t0, until = walk.until;
    zl_walk_words(&walk, format, &a, K);
    if (until > t0) {
      _Alignas(64) float sums[4 * ZL_TILE_TOKENS * 16];
      zl_gated_amx_sums(format, a, t0, until, 2 * g, 2, gate, up, K, sums);
      for (int64_t m = 0; m < until - t0; m++) {
        const int64_t row = t0 + m;
        v16f h[2];
        for (int64_t s = 0; s < 2; s++)
          h[s] = zl_gated_amx_one(sums + s * 2 * ZL_TILE_TOKENS * 16, m, 2 * g + s, bias_gate, bias_up, N, activation);
        zl_quantize32(h[0], h[1], out_q + row * N + 32 * g, out_scale + row * (N / 32) + g,
                      out_sums + row * (N / 16) + 2 * g);
      }
    }
#define ZL_CALL(MT, n, first)                                                                                          \
  do {                                                                                                                 \
    v16f h[2][ZL_MANY];                                                                                                \
    for (int64_t s = 0; s < 2; s++)                                                                                    \
      zl_gated_int8_tile(format, MT, n, a, &walk, first, 2 * g + s, s, 2, gate, up, bias_gate, bias_up, N, K,          \
                         activation, h[s]);                                                                            \
    for (int64_t m = 0; m < (n); m += MT)                                                                              \
      zl_quantize32_rows(MT, h[0] + m, h[1] + m, (first) + m, g, N, out_q, out_scale, out_sums);                       \
  } while (0)
    ZL_TOKEN_TILES(zl_many(K), until, walk.t1, ZL_CALL)
#undef ZL_CALL
  }
}

#endif
