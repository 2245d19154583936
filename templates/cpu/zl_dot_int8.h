/* 16 outputs of a matrix product with int8 activations, for some tokens or in two streams for one or two.
 *
 * In: zl_block_dots.h, zl_quantize.h, zl_linear_amx.h, zl_tokens.h, zl_streams.h.  Out: zl_bundle, zl_tile_words,
 * zl_dot_int8, zl_dot_int8_two, zl_dot_amx.  Next file: zl_outputs.h.
 *
 * A token's sums run over K in the same order in every form, and in zl_linear_amx.h, which takes the sixteens of a token
 * tile where the target multiplies matrix tiles: the same bits.
 */
#ifndef ZL_DOT_INT8_H
#define ZL_DOT_INT8_H
#include "zl_block_dots.h"
#include "zl_quantize.h"
#include "zl_streams.h"
#include "zl_tokens.h"

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
    for (int64_t i = t0 * KB; i < (ZL_AVX512 ? from : t1) * KB; i++)
      space[i - t0 * KB].total = a->sums[2 * i] + a->sums[2 * i + 1];
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

/* Weights that a product asks for while it computes: from `at` on, `step` 256ths of a byte for each of its blocks.  NULL
 * and 0: none, but the line where it begins again and again, which is cheaper than a branch. */
typedef struct zl_next {
  const uint8_t *at;
  int64_t step;
} zl_next;
#define ZL_NOTHING_NEXT ((zl_next){NULL, 0})

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

/* Block kb of the group at w, ready for products; what lies `ahead` bytes after it is asked for. */
ZL_KERNEL void zl_block_ready(int format, const uint8_t *w, int64_t kb, int64_t ahead, zl_block *b, zl_nibbled *upper) {
  const int64_t bytes = zl_block_bytes(format) * 32 / zl_block_cols(format);
  zl_block_load(format, w, kb, b);
  zl_take_apart(format, b, upper);
  zl_ask_ahead(ahead, w + kb * bytes, bytes);
}

/* acc[m] = 16 outputs of the group at w (rows16) for token first + m, m < n; MT and n as in ZL_TOKEN_TILES.  Columns
 * outside, tokens inside: independent chains hide the latency of the products.  Eights ask for `next`. */
ZL_KERNEL void zl_dot_int8(int format, int MT, int64_t n, zl_bundle a, int64_t first, int64_t K, const uint8_t *w,
                           zl_next next, v16f *acc) {
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
    zl_block_ready(format, w, kb, zl_asks(MT), &b, &upper);
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
  zl_block b;
  zl_nibbled upper;
  zl_block_ready(format, w, kb, ahead, &b, &upper);
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

#endif
