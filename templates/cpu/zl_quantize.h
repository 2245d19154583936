/* The int8 activation bundle: how 32 floats become q, scale and sums.
 *
 * In: zl_simd.h.  Out: zl_quantize32, the same for eight at once, zl_quantize32_rows.  Next file: zl_weights.h.
 */
#ifndef ZL_QUANTIZE_H
#define ZL_QUANTIZE_H
#include "zl_simd.h"

/* x * inverse as 16 int8 in int32 lanes.  |x * inverse| <= 127 (1 + 2^-22) needs no clamp; NaN and infinity become
 * INT32_MIN, of which zl_store_bytes keeps 0. */
ZL_KERNEL v16i zl_quantize16(v16f x, float inverse) { return zl_round_to_int(x * inverse); }

ZL_KERNEL void zl_store_bytes(int8_t *q, v16i i) {
  v16s8 bytes = __builtin_convertvector(i, v16s8);
  memcpy(q, &bytes, 16);
}

/* a, b: 32 columns -> q i8[32], scale f32[1], sums f32[2].  scale = max|x| / 127,
 * q = round_half_even(x * (1 / scale)), 0 where scale is below the normal range; sums = scale * (sum of q over 16
 * columns).  A NaN or infinity makes scale NaN or infinite. */
ZL_KERNEL void zl_quantize32(v16f a, v16f b, int8_t *q, float *scale, float *sums) {
  float s = zl_hmax_abs((v16f)zl_select((v16i)((v16i)zl_abs(a) > (v16i)zl_abs(b)), a, b)) / 127.0f;
  float inverse = s < 0x1p-126f ? 0.0f : 1.0f / s;
  v16f x[2] = {a, b};
  *scale = s;
  ZL_UNROLL
  for (int h = 0; h < 2; h++) {
    v16i i = zl_quantize16(x[h], inverse);
    zl_store_bytes(q + 16 * h, i);
    sums[h] = s * (float)__builtin_reduce_add(i);
  }
}

/* lane i: OP over the lanes of m[i].  Pairs of vectors are folded together, so that eight cost little more than three
 * each alone. */
#define ZL_FOLD8(name, OP)                                                                         \
  ZL_KERNEL v8i name(const v8i *m) {                                                               \
    v8i p[4], r[2];                                                                                \
    ZL_UNROLL                                                                                      \
    for (int i = 0; i < 4; i++)                                                                    \
      p[i] = OP(__builtin_shufflevector(m[2 * i], m[2 * i + 1], 0, 8, 1, 9, 4, 12, 5, 13),         \
                __builtin_shufflevector(m[2 * i], m[2 * i + 1], 2, 10, 3, 11, 6, 14, 7, 15));      \
    ZL_UNROLL                                                                                      \
    for (int i = 0; i < 2; i++)                                                                    \
      r[i] = OP(__builtin_shufflevector(p[2 * i], p[2 * i + 1], 0, 1, 8, 9, 4, 5, 12, 13),         \
                __builtin_shufflevector(p[2 * i], p[2 * i + 1], 2, 3, 10, 11, 6, 7, 14, 15));      \
    return OP(__builtin_shufflevector(r[0], r[1], 0, 1, 2, 3, 8, 9, 10, 11),                       \
              __builtin_shufflevector(r[0], r[1], 4, 5, 6, 7, 12, 13, 14, 15));                    \
  }                                                                                                \
  ZL_KERNEL v8i name##_wide(const v16i *x) { /* the same of vectors of 16 */                       \
    v8i m[8];                                                                                      \
    ZL_UNROLL                                                                                      \
    for (int i = 0; i < 8; i++) m[i] = OP(ZL_LO(x[i]), ZL_HI(x[i]));                               \
    return name(m);                                                                                \
  }
#define ZL_SUM(a, b) ((a) + (b))
ZL_FOLD8(zl_fold8_max, __builtin_elementwise_max)
ZL_FOLD8(zl_fold8_sum, ZL_SUM)

/* zl_quantize32 of a[i], b[i] for i < 8, the same bits; results q_step, scale_step, sums_step elements apart */
ZL_KERNEL void zl_quantize32_eight(const v16f *a, const v16f *b, int8_t *q, int64_t q_step, float *scale,
                                   int64_t scale_step, float *sums, int64_t sums_step) {
  v16i top[8], i0[8], i1[8];
  ZL_UNROLL
  for (int m = 0; m < 8; m++) top[m] = __builtin_elementwise_max((v16i)zl_abs(a[m]), (v16i)zl_abs(b[m]));
  const v8f s = (v8f)zl_fold8_max_wide(top) / 127.0f;
  const v8i normal = ~(v8i)(s < 0x1p-126f); /* NaN is not below */
  const v8f inverse = (v8f)((v8i)(1.0f / s) & normal);
  ZL_UNROLL
  for (int m = 0; m < 8; m++) {
    i0[m] = zl_quantize16(a[m], inverse[m]);
    i1[m] = zl_quantize16(b[m], inverse[m]);
    zl_store_bytes(q + m * q_step, i0[m]);
    zl_store_bytes(q + m * q_step + 16, i1[m]);
    scale[m * scale_step] = s[m];
  }
  const v8f s0 = s * __builtin_convertvector(zl_fold8_sum_wide(i0), v8f), s1 = s * __builtin_convertvector(zl_fold8_sum_wide(i1), v8f);
  ZL_UNROLL
  for (int m = 0; m < 8; m++) {
    sums[m * sums_step] = s0[m];
    sums[m * sums_step + 1] = s1[m];
  }
}

/* Columns 32 g .. 32 g + 32 of MT rows of a bundle [T, N], from row `first` on. */
ZL_KERNEL void zl_quantize32_rows(int MT, const v16f *a, const v16f *b, int64_t first, int64_t g, int64_t N, int8_t *q,
                                  float *scale, float *sums) {
  q += first * N + 32 * g;
  scale += first * (N / 32) + g;
  sums += first * (N / 16) + 2 * g;
  if (MT == 8)
    zl_quantize32_eight(a, b, q, N, scale, N / 32, sums, N / 16);
  else
    for (int m = 0; m < MT; m++) zl_quantize32(a[m], b[m], q + m * N, scale + m * (N / 32), sums + m * (N / 16));
}

#endif
