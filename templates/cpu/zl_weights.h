/* Weights in the rows16 layout: one block of 16 rows x 32 columns at a time, as codes, scales and mins.
 *
 * In: zl_simd.h; the layout is described in targets/cpu_layouts.py.  Out: zl_block_load and the geometry of each
 * format; w = scale * code + min, with zero points folded into min.  Next file: zl_block_dots.h.
 *
 * `format` is always a constant, so every `if` below disappears.
 */
#ifndef ZL_WEIGHTS_H
#define ZL_WEIGHTS_H
#include "zl_simd.h"

typedef struct zl_block {
  v64u8 code[8];  /* byte 4 r + i of code[j]: row r, column 4 j + i */
  v16f scale[2];  /* per row; [1] only where a scale covers 16 columns */
  v16f min[2];
} zl_block;

ZL_KERNEL int zl_is_plain(int format) { return format <= ZL_FMT_BF16; }
ZL_KERNEL int zl_is_super(int format) { return format >= ZL_FMT_Q2_K && format <= ZL_FMT_Q6_K; }
/* columns of a block, columns of a scale */
ZL_KERNEL int64_t zl_block_cols(int format) { return zl_is_super(format) ? 256 : 32; }
ZL_KERNEL int64_t zl_scale_cols(int format) {
  return format == ZL_FMT_Q2_K || format == ZL_FMT_Q3_K || format == ZL_FMT_Q6_K ? 16 : 32;
}
/* the largest code; beyond 128 two products of vpmaddubsw could leave int16 */
ZL_KERNEL int zl_most_code(int format) {
  switch (format) {
    case ZL_FMT_Q2_K:
    case ZL_FMT_Q8_LOW: return 3;
    case ZL_FMT_Q3_K: return 7;
    case ZL_FMT_Q5_0:
    case ZL_FMT_Q5_1:
    case ZL_FMT_Q5_K: return 31;
    case ZL_FMT_Q6_K:
    case ZL_FMT_Q8_HIGH: return 63;
    case ZL_FMT_Q8_0:
    case ZL_FMT_IQ4_NL: return 255;
    default: return 15;
  }
}
ZL_KERNEL int zl_wide_codes(int format) { return zl_most_code(format) > 128; }

/* The zero point of formats that have nothing else in their minimum, 0 for the others. */
ZL_KERNEL int32_t zl_zero_point(int format) {
  switch (format) {
    case ZL_FMT_Q4_0: return 8;
    case ZL_FMT_Q5_0: return 16;
    case ZL_FMT_Q8_0:
    case ZL_FMT_IQ4_NL: return 128;
    default: return 0;
  }
}

/* whether a minimum of 32 columns is multiplied by the sum of the activations there */
ZL_KERNEL int zl_has_totals(int format) { return zl_scale_cols(format) == 32 && !zl_zero_point(format); }

/* bytes of 16 rows x zl_block_cols columns; plain formats: of 16 rows x 2 columns */
ZL_KERNEL int64_t zl_block_bytes(int format) {
  switch (format) {
    case ZL_FMT_F32: return 16 * 8;
    case ZL_FMT_F16:
    case ZL_FMT_BF16: return 16 * 4;
    case ZL_FMT_Q4_0:
    case ZL_FMT_IQ4_NL: return 16 * 18;
    case ZL_FMT_Q4_1: return 16 * 20;
    case ZL_FMT_Q5_0: return 16 * 22;
    case ZL_FMT_Q5_1: return 16 * 24;
    case ZL_FMT_Q8_0: return 16 * 34;
    case ZL_FMT_Q8_HIGH: return 16 * 26;
    case ZL_FMT_Q8_LOW: return 16 * 10;
    case ZL_FMT_Q2_K: return 16 * 84;
    case ZL_FMT_Q3_K: return 16 * 110;
    case ZL_FMT_Q4_K: return 16 * 144;
    case ZL_FMT_Q5_K: return 16 * 176;
    default: return 16 * 210; /* Q6_K */
  }
}

/* bytes of what a group of BF16_12 begins with */
ZL_KERNEL int64_t zl_12_header(int64_t K) { return 64 * (1 + (K + 1023) / 1024); }

/* bytes of a group of 16 rows of K columns */
ZL_KERNEL int64_t zl_group_bytes(int format, int64_t K) {
  if (format == ZL_FMT_BF16_12) return zl_12_header(K) + K * 24;
  if (format == ZL_FMT_BF16) return (K + 1) / 2 * 64;
  if (zl_is_plain(format)) return K * zl_block_bytes(format) / 2;
  return K / zl_block_cols(format) * zl_block_bytes(format);
}

/* bytes of the header of a super-block, and of each of its 8 blocks of codes */
ZL_KERNEL int64_t zl_super_header(int format) {
  switch (format) {
    case ZL_FMT_Q2_K: return 64 + 256;
    case ZL_FMT_Q3_K: return 32 + 192;
    case ZL_FMT_Q6_K: return 32 + 256;
    default: return 64 + 192; /* Q4_K, Q5_K */
  }
}
ZL_KERNEL int64_t zl_super_codes(int format) { return (zl_block_bytes(format) - zl_super_header(format)) / 8; }

ZL_KERNEL v64u8 zl_shift_right(v64u8 x, int n) { return (v64u8)((v32u16)x >> n); }
ZL_KERNEL v64u8 zl_shift_left(v64u8 x, int n) { return (v64u8)((v32u16)x << n); }
ZL_KERNEL v16f zl_bytes_to_float(v16u8 x) { return __builtin_convertvector(x, v16f); }

/* p: 4 x 64 bytes -> code[8] */
ZL_KERNEL void zl_nibbles(const uint8_t *p, v64u8 code[8]) {
  ZL_UNROLL
  for (int v = 0; v < 4; v++) {
    v64u8 x = zl_load_bytes(p + 64 * v);
    code[2 * v] = x & 15;
    code[2 * v + 1] = zl_shift_right(x, 4) & 15;
  }
}

/* p: 2 x 64 bytes -> 2 bits at bit `at` of code[8] */
ZL_KERNEL void zl_crumbs(const uint8_t *p, v64u8 code[8], int at, int add) {
  ZL_UNROLL
  for (int j = 0; j < 8; j++) {
    v64u8 x = zl_load_bytes(p + 64 * (j / 4));
    int down = 2 * (j % 4) - at; /* within a byte, so the neighbour's bits fall outside the mask */
    v64u8 y = (down >= 0 ? zl_shift_right(x, down) : zl_shift_left(x, -down)) & (uint8_t)(3 << at);
    code[j] = add ? code[j] | y : y;
  }
}

/* p: 64 bytes -> bit `at` of code[8] */
ZL_KERNEL void zl_bits(const uint8_t *p, v64u8 code[8], int at) {
  v64u8 x = zl_load_bytes(p);
  ZL_UNROLL
  for (int j = 0; j < 8; j++) {
    int down = j - at;
    code[j] |= (down >= 0 ? zl_shift_right(x, down) : zl_shift_left(x, -down)) & (uint8_t)(1 << at);
  }
}

/* value g (of `groups`) of a six-bit plane pair at p, 16 rows */
ZL_KERNEL v16u8 zl_six_bits(const uint8_t *p, int g, int groups) {
  int half = groups / 2, quarter = groups / 4;
  v16u8 low = (zl_load_u8(p + 16 * (g % half)) >> (uint8_t)(4 * (g / half))) & 15;
  v16u8 high = (zl_load_u8(p + 16 * half + 16 * (g % quarter)) >> (uint8_t)(2 * (g / quarter))) & 3;
  return low | (high << 4);
}

/* Block formats of 32 columns: p is the block. */
ZL_KERNEL void zl_small_load(int format, const uint8_t *p, zl_block *b) {
  v16f d = zl_load_half(p);
  b->scale[0] = d;
  p += 32;
  if (format == ZL_FMT_Q4_1 || format == ZL_FMT_Q5_1) {
    b->min[0] = zl_load_half(p);
    p += 32;
  } else {
    b->min[0] = d * (format == ZL_FMT_Q4_0    ? -8.0f
                     : format == ZL_FMT_Q5_0    ? -16.0f
                     : format == ZL_FMT_Q8_HIGH ? -126.5f
                     : format == ZL_FMT_Q8_LOW  ? -1.5f
                                                : -128.0f);
  }
  if (format == ZL_FMT_Q8_LOW) {
    zl_crumbs(p, b->code, 0, 0);
    return;
  }
  if (format == ZL_FMT_Q8_0) {
    ZL_UNROLL
    for (int j = 0; j < 8; j++) b->code[j] = zl_load_bytes(p + 64 * j);
    return;
  }
  zl_nibbles(p, b->code);
  if (format == ZL_FMT_Q5_0 || format == ZL_FMT_Q5_1) zl_bits(p + 256, b->code, 4);
  if (format == ZL_FMT_Q8_HIGH) { /* below 64: code / 4 */
    zl_crumbs(p + 256, b->code, 4, 1);
    b->scale[0] = d * 4.0f;
  }
  if (format == ZL_FMT_IQ4_NL) { /* the table of values + 128 */
    const v16u8 table = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
    ZL_UNROLL
    for (int j = 0; j < 8; j++) b->code[j] = zl_table16(table, b->code[j]);
  }
}

/* Super-blocks of 256 columns: p is the super-block, s in 0..8 the block of 32 columns wanted. */
ZL_KERNEL void zl_super_load(int format, const uint8_t *p, int s, zl_block *b) {
  const uint8_t *codes = p + zl_super_header(format) + s * zl_super_codes(format);
  v16f d = zl_load_half(p);
  if (format == ZL_FMT_Q4_K || format == ZL_FMT_Q5_K) {
    b->scale[0] = d * zl_bytes_to_float(zl_six_bits(p + 64, s, 8));
    b->min[0] = -(zl_load_half(p + 32) * zl_bytes_to_float(zl_six_bits(p + 64 + 96, s, 8)));
    zl_nibbles(codes, b->code);
    if (format == ZL_FMT_Q5_K) zl_bits(codes + 256, b->code, 4);
    return;
  }
  ZL_UNROLL
  for (int h = 0; h < 2; h++) {
    int g = 2 * s + h;
    if (format == ZL_FMT_Q2_K) {
      v16u8 both = zl_load_u8(p + 64 + 16 * g);
      b->scale[h] = d * zl_bytes_to_float(both & 15);
      b->min[h] = -(zl_load_half(p + 32) * zl_bytes_to_float(both >> 4));
    } else if (format == ZL_FMT_Q3_K) {
      b->scale[h] = d * (zl_bytes_to_float(zl_six_bits(p + 32, g, 16)) - 32.0f);
      b->min[h] = b->scale[h] * -4.0f;
    } else { /* Q6_K */
      b->scale[h] = d * __builtin_convertvector((v16s8)zl_load_u8(p + 32 + 16 * g), v16f);
      b->min[h] = b->scale[h] * -32.0f;
    }
  }
  if (format == ZL_FMT_Q6_K) {
    zl_nibbles(codes, b->code);
    zl_crumbs(codes + 256, b->code, 4, 1);
  } else {
    zl_crumbs(codes, b->code, 0, 0);
    if (format == ZL_FMT_Q3_K) zl_bits(codes + 128, b->code, 2);
  }
}

/* Block kb (32 columns) of the group at w. */
ZL_KERNEL void zl_block_load(int format, const uint8_t *w, int64_t kb, zl_block *b) {
  if (zl_is_super(format))
    zl_super_load(format, w + (kb >> 3) * zl_block_bytes(format), (int)(kb & 7), b);
  else
    zl_small_load(format, w + kb * zl_block_bytes(format), b);
}

#endif
