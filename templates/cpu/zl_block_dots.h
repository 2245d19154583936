/* Integer products of one block of weights, 16 rows x 32 columns, with a few tokens.
 *
 * In: zl_weights.h.  Out: zl_block_dots.  Next file: zl_linear_amx.h.
 *
 * With VNNI one instruction multiplies four bytes of each lane and adds them to 32 bits.  Without it vpmaddubsw adds
 * two products into 16 bits and does not go on from there.  But codes of 4 bits leave room: eight of its results
 * (|each| at most 2 x 15 x 128), a block's 32 columns, add up within int16, so there is one widening to 32 bits in a block
 * instead of eight: 38 instructions for a token of a block, not 56.  Larger codes are widened more often; those of 8 bits are
 * multiplied as two nibbles (70 instructions instead of 144 that widen bytes beforehand).  Every sum is exact.
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

#if defined(__AVX512VNNI__)
/* q: 32 columns of token 0, the others K apart -> p[m][half] + sums of 32 columns, or of each 16 where a scale covers 16 */
ZL_KERNEL void zl_block_dots(int format, int MT, const zl_block *b, const int8_t *q, int64_t K, v16i p[][2]) {
  ZL_UNROLL
  for (int j = 0; j < 8; j++) {
    const int half = zl_scale_cols(format) == 32 ? 0 : j / 4;
    ZL_UNROLL
    for (int m = 0; m < MT; m++) p[m][half] = zl_dot4_u8(p[m][half], b->code[j], zl_repeat4(q + m * K + 4 * j));
    if (MT == 8 && zl_scale_cols(format) == 32) ZL_IN_TURN(p[0][0], p[7][0]);
  }
}
#else
/* The same for codes up to `most`, at bit `down` of the block's, times `times`. */
ZL_KERNEL void zl_narrow_dots(int format, int MT, int most, int down, const zl_block *b, const int8_t *q, int64_t K,
                              v16i p[][2]) {
  const int room = 32767 / (2 * 128 * most); /* products of 4 columns that add up within int16 */
  const int run = room >= 8 && zl_scale_cols(format) == 32 ? 8 : room >= 4 ? 4 : 2;
  v32s16 sum[ZL_DOT_TOKENS];
  ZL_UNROLL
  for (int j = 0; j < 8; j++) {
    const int half = zl_scale_cols(format) == 32 ? 0 : j / 4;
    v64u8 code = b->code[j];
    if (zl_wide_codes(format)) code = (down ? zl_shift_right(code, down) : code) & 15;
    ZL_UNROLL
    for (int m = 0; m < MT; m++) {
      const v32s16 two = zl_dot2(code, zl_repeat4(q + m * K + 4 * j));
      sum[m] = zl_in_step(j % run ? sum[m] + two : two);
      if (j % run == run - 1) p[m][half] += zl_widen2(sum[m], (int16_t)(1 << down));
    }
  }
}

ZL_KERNEL void zl_block_dots(int format, int MT, const zl_block *b, const int8_t *q, int64_t K, v16i p[][2]) {
  const int wide = zl_wide_codes(format);
  zl_narrow_dots(format, MT, wide ? 15 : zl_most_code(format), 0, b, q, K, p);
  if (wide) zl_narrow_dots(format, MT, 15, 4, b, q, K, p);
}
#endif

#endif
