/* The int8 activation bundle: how 32 floats become q, scale and sums.
 *
 * In: zl_simd.h.  Out: zl_quantize32.  Next file: zl_linear_int8.h.
 */
#ifndef ZL_QUANTIZE_H
#define ZL_QUANTIZE_H
#include "zl_simd.h"

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
    v16f y = zl_round_even(x[h] * inverse);
    v16i i = zl_to_int(zl_max(zl_min(y, zl_set(127.0f)), zl_set(-127.0f))); /* for NaN and infinity */
    v16s8 bytes = __builtin_convertvector(i, v16s8);
    memcpy(q + 16 * h, &bytes, 16);
    sums[h] = s * (float)__builtin_reduce_add(i);
  }
}

#endif
