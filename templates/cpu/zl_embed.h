/* Embed: rows of a rows16 weight, decoded.
 *
 * In: zl_weights.h.  Out: the kernel.  Next file: zl_norm.h.
 *
 * The table shares the layout of Linear's weights so that a tied output projection is stored once; a row is
 * one lane of its group, so 16 rows are decoded and one is kept: nothing next to the step's other work.
 */
#ifndef ZL_EMBED_H
#define ZL_EMBED_H
#include "zl_weights.h"

ZL_KERNEL float zl_half_to_float(uint16_t h) {
  v16u16 all = {h};
  return zl_load_half(&all)[0];
}

/* element k of row `lane` of a plain group */
ZL_KERNEL float zl_plain_at(int format, const uint8_t *w, int64_t k, int64_t lane) {
  uint32_t u = 0;
  if (format == ZL_FMT_F32) {
    memcpy(&u, w + (k * 16 + lane) * 4, 4);
  } else if (format == ZL_FMT_F16) {
    uint16_t h;
    memcpy(&h, w + (k * 16 + lane) * 2, 2);
    return zl_half_to_float(h);
  } else {
    memcpy((uint8_t *)&u + 2, w + (k / 2 * 32 + lane * 2 + k % 2) * 2, 2);
  }
  float f;
  memcpy(&f, &u, 4);
  return f;
}

/* Columns 32 kb .. 32 kb + 31 of row `lane` of a group of a block format. */
ZL_KERNEL void zl_block_row(int format, const uint8_t *group, int64_t kb, int64_t lane, float *to) {
  zl_block b;
  zl_block_load(format, group, kb, &b);
  ZL_UNROLL
  for (int j = 0; j < 8; j++) {
    const int h = zl_scale_cols(format) == 16 ? j / 4 : 0;
    uint8_t code[64];
    float s[16], m[16];
    memcpy(code, &b.code[j], 64);
    memcpy(s, &b.scale[h], 64);
    memcpy(m, &b.min[h], 64);
    for (int k = 0; k < 4; k++) to[4 * j + k] = __builtin_fmaf((float)code[4 * lane + k], s[lane], m[lane]);
  }
}

/* tokens i32[T], W rows16 [vocab, C] -> y f32[T, C] = scale * W[token] */
ZL_KERNEL void zl_embed(const zl_task *t, int64_t rows, const int32_t *tokens, const uint8_t *w, float *y, int64_t C,
                        double scale, int format) {
  const int64_t parts = (C + 31) / 32;
  int64_t i, end;
  zl_share(t, rows * parts, &i, &end);
  for (; i < end; i++) {
    const int64_t row = i / parts, kb = i % parts, token = tokens[row], lane = token % 16;
    const uint8_t *group = w + token / 16 * zl_group_bytes(format, C);
    float *to = y + row * C + kb * 32;
    if (zl_is_plain(format)) {
      const int64_t n = C - kb * 32 < 32 ? C - kb * 32 : 32;
      for (int64_t k = 0; k < n; k++) to[k] = zl_plain_at(format, group, kb * 32 + k, lane);
    } else {
      zl_block_row(format, group, kb, lane, to);
    }
    if (scale != 1.0)
      for (int64_t k = 0; k < 32 && kb * 32 + k < C; k++) to[k] = to[k] * (float)scale;
  }
}

/* tokens i32[T], the halves rows16 [vocab, C] of Q8_0 -> y f32[T, C] = scale * W[token]: zl_embed of Q8_0, to the bit */
ZL_KERNEL void zl_split_embed(const zl_task *t, int64_t rows, const int32_t *tokens, const uint8_t *high,
                              const uint8_t *low, float *y, int64_t C, double scale) {
  const int64_t parts = C / 32;
  int64_t i, end;
  zl_share(t, rows * parts, &i, &end);
  for (; i < end; i++) {
    const int64_t row = i / parts, kb = i % parts, token = tokens[row], lane = token % 16;
    float *to = y + row * C + kb * 32, rest[32];
    zl_block_row(ZL_FMT_Q8_HIGH, high + token / 16 * zl_group_bytes(ZL_FMT_Q8_HIGH, C), kb, lane, to);
    zl_block_row(ZL_FMT_Q8_LOW, low + token / 16 * zl_group_bytes(ZL_FMT_Q8_LOW, C), kb, lane, rest);
    for (int64_t k = 0; k < 32; k++) to[k] = (to[k] + rest[k]) * (float)scale; /* exact before the scale */
  }
}

#endif
