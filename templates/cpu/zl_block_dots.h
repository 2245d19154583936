/* Integer products of one block of weights, 16 rows x 32 columns, with a few tokens.
 *
 * In: zl_weights.h.  Out: ZL_DOT_TOKENS, zl_nibbled, zl_take_apart, zl_block_dots.  Next file: zl_linear_amx.h.
 *
 * With VNNI one instruction multiplies four bytes of each lane and adds them to 32 bits.  Without it vpmaddubsw adds
 * two products into 16 bits and does not go on from there.  But codes of 4 bits leave room: eight of its results
 * (|each| at most 2 x 15 x 128), a block's 32 columns, add up within int16, so there is one widening to 32 bits in a
 * block instead of eight.  Larger codes are widened more often; those of 8 bits are multiplied as two nibbles.  Every
 * sum is exact.  docs/decisions.md, "Where the int8 products stand", counts the instructions.
 */
#ifndef ZL_BLOCK_DOTS_H
#define ZL_BLOCK_DOTS_H
#include "zl_weights.h"

/* Tokens whose sums fit in the vector registers beside the codes. */
#if ZL_AVX512
#define ZL_DOT_TOKENS 8
#else
#define ZL_DOT_TOKENS 4
#endif

/* What a block's products need besides its codes: of codes of 8 bits, without VNNI, the upper nibbles; the lower ones
 * take the codes' place. */
typedef struct zl_nibbled {
  v64u8 upper[8];
} zl_nibbled;

#if defined(__AVX512VNNI__)
ZL_KERNEL void zl_take_apart(int format, zl_block *b, zl_nibbled *n) { (void)format, (void)b, (void)n; }

/* q: 32 columns of token 0, the others K apart -> p[m][half] + sums of 32 columns, or of each 16 where a scale covers
 * 16 */
ZL_KERNEL void zl_block_dots(int format, int MT, const zl_block *b, const zl_nibbled *n, const int8_t *q, int64_t K,
                             v16i p[][2]) {
  (void)n;
  ZL_UNROLL
  for (int j = 0; j < 8; j++) {
    const int half = zl_scale_cols(format) == 32 ? 0 : j / 4;
    ZL_UNROLL
    for (int m = 0; m < MT; m++) p[m][half] = zl_dot4_u8(p[m][half], b->code[j], zl_repeat4(q + m * K + 4 * j));
    if (MT == 8 && zl_scale_cols(format) == 32) ZL_IN_TURN(p[0][0], p[7][0]);
  }
}
#else
ZL_KERNEL void zl_take_apart(int format, zl_block *b, zl_nibbled *n) {
  if (!zl_wide_codes(format)) return;
  ZL_UNROLL
  for (int j = 0; j < 8; j++) {
    n->upper[j] = zl_shift_right(b->code[j], 4) & 15;
    b->code[j] = b->code[j] & 15;
  }
}

/* The same for codes up to `most`, `times` the sums. */
ZL_KERNEL void zl_narrow_dots(int format, int MT, int most, int16_t times, const v64u8 code[8], const int8_t *q,
                              int64_t K, v16i p[][2]) {
  const int room = 32767 / (2 * 128 * most); /* products of 4 columns that add up within int16 */
  const int run = room >= 8 && zl_scale_cols(format) == 32 ? 8 : room >= 4 ? 4 : room >= 2 ? 2 : 1;
  v32s16 sum[ZL_DOT_TOKENS];
  ZL_UNROLL
  for (int j = 0; j < 8; j++) {
    const int half = zl_scale_cols(format) == 32 ? 0 : j / 4;
    ZL_UNROLL
    for (int m = 0; m < MT; m++) {
      const v32s16 two = zl_dot2(code[j], zl_repeat4(q + m * K + 4 * j));
      sum[m] = zl_in_step(j % run ? sum[m] + two : two);
      if (j % run == run - 1) p[m][half] += zl_widen2(sum[m], times);
    }
  }
}

ZL_KERNEL void zl_block_dots(int format, int MT, const zl_block *b, const zl_nibbled *n, const int8_t *q, int64_t K,
                             v16i p[][2]) {
  const int wide = zl_wide_codes(format);
  zl_narrow_dots(format, MT, wide ? 15 : zl_most_code(format), 1, b->code, q, K, p);
  if (wide) zl_narrow_dots(format, MT, 15, 16, n->upper, q, K, p);
}
#endif

#endif
