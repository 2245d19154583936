/* Rotary position embedding: RopeTable and Rope.
 *
 * In: zl_math.h.  Out: the kernels and zl_rope_one (one head), which zl_qkv.h uses.  Next file: zl_qkv.h.
 */
#ifndef ZL_ROPE_H
#define ZL_ROPE_H
#include "zl_math.h"

/* positions i32[T], inv_freq f32[rd/2] -> cos, sin f32[T, rd/2], both times factor.  The angle is the float32
 * product, as the graph defines it; its sine and cosine are right for any angle below 2^31. */
ZL_KERNEL void zl_rope_table(const zl_task *t, int64_t rows, const int32_t *positions, const float *inv_freq,
                             float *cos_t, float *sin_t, int64_t rotary_dim, double factor) {
  const int64_t half = rotary_dim / 2;
  int64_t i, end;
  zl_share(t, rows * half, &i, &end);
  for (; i < end; i++) {
    float s, c;
    zl_sincos((float)positions[i / half] * inv_freq[i % half], &s, &c);
    cos_t[i] = c * (float)factor;
    sin_t[i] = s * (float)factor;
  }
}

/* x[hd] -> y[hd] (may be x): the first rotary_dim elements turned by cos, sin [rd/2], the others copied */
ZL_KERNEL void zl_rope_one(const float *x, const float *cos_t, const float *sin_t, float *y, int64_t head_dim,
                           int64_t rotary_dim, int interleaved) {
  const int64_t half = rotary_dim / 2;
  int64_t i = 0;
  if (!interleaved) {
    for (; i < half; i += 16) {
      const int64_t n = half - i < 16 ? half - i : 16;
      v16f a = zl_load_n(x + i, n), b = zl_load_n(x + half + i, n);
      v16f c = zl_load_n(cos_t + i, n), s = zl_load_n(sin_t + i, n);
      zl_store_n(y + i, a * c - b * s, n);
      zl_store_n(y + half + i, a * s + b * c, n);
    }
  } else {
    for (; i < half; i++) {
      float a = x[2 * i], b = x[2 * i + 1];
      y[2 * i] = a * cos_t[i] - b * sin_t[i];
      y[2 * i + 1] = a * sin_t[i] + b * cos_t[i];
    }
  }
  if (x != y)
    for (i = rotary_dim; i < head_dim; i++) y[i] = x[i];
}

/* x f32[T, num_heads * head_dim], cos, sin f32[T, rd/2] -> y same shape; y may be x */
ZL_KERNEL void zl_rope(const zl_task *t, int64_t rows, const float *x, const float *cos_t, const float *sin_t,
                       float *y, int64_t num_heads, int64_t head_dim, int64_t rotary_dim, int interleaved) {
  int64_t i, end;
  zl_share(t, rows * num_heads, &i, &end);
  for (; i < end; i++) {
    const int64_t row = i / num_heads;
    zl_rope_one(x + i * head_dim, cos_t + row * (rotary_dim / 2), sin_t + row * (rotary_dim / 2), y + i * head_dim,
                head_dim, rotary_dim, interleaved);
  }
}

#endif
