/* Norms and the quantizer: RMSNormalization, LayerNormalization, HeadNorm, QuantizeInt8 and norm + quantize.
 *
 * In: zl_quantize.h.  Out: the kernels.  Next file: zl_rope.h.
 *
 * Work is split into runs of 32 columns over all rows, so that one row is shared by all threads; each thread
 * finds the statistics of the rows it touches itself, in the same order, instead of waiting for another.
 */
#ifndef ZL_NORM_H
#define ZL_NORM_H
#include "zl_quantize.h"

/* y = (x - shift) * factor * w + b */
typedef struct zl_stats {
  float shift, factor;
} zl_stats;

/* sum over x[C] of (x - shift)^2, or of x where `power` is 1; a constant order, 4 chains */
ZL_KERNEL float zl_row_sum(const float *x, int64_t C, int power, float shift) {
  v16f acc[4] = {{0}, {0}, {0}, {0}};
  int64_t c = 0;
  for (; c + 64 <= C; c += 64) {
    ZL_UNROLL
    for (int j = 0; j < 4; j++) {
      v16f v = zl_load(x + c + 16 * j);
      if (power == 2) v = v - shift;
      acc[j] = power == 2 ? zl_fma(v, v, acc[j]) : acc[j] + v;
    }
  }
  for (; c < C; c += 16) {
    int64_t n = C - c < 16 ? C - c : 16;
    v16f v = zl_load_n(x + c, n);
    if (power == 2) {
      const v16i lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
      v = zl_select((v16i)(lane < (int32_t)n), v - shift, zl_set(0.0f));
    }
    acc[0] = power == 2 ? zl_fma(v, v, acc[0]) : acc[0] + v;
  }
  return zl_hsum((acc[0] + acc[1]) + (acc[2] + acc[3]));
}

ZL_KERNEL float zl_inv_sqrt(float x) { return 1.0f / zl_sqrt(zl_set(x))[0]; }

ZL_KERNEL zl_stats zl_rms_stats(const float *x, int64_t C, double epsilon) {
  return (zl_stats){0.0f, zl_inv_sqrt(zl_row_sum(x, C, 2, 0.0f) / (float)C + (float)epsilon)};
}

ZL_KERNEL zl_stats zl_layer_stats(const float *x, int64_t C, double epsilon) {
  float mean = zl_row_sum(x, C, 1, 0.0f) / (float)C;
  return (zl_stats){mean, zl_inv_sqrt(zl_row_sum(x, C, 2, mean) / (float)C + (float)epsilon)};
}

enum zl_norm { ZL_NORM_NONE, ZL_NORM_RMS, ZL_NORM_LAYER };

ZL_KERNEL zl_stats zl_norm_stats(int norm, const float *x, int64_t C, double epsilon) {
  if (norm == ZL_NORM_RMS) return zl_rms_stats(x, C, epsilon);
  if (norm == ZL_NORM_LAYER) return zl_layer_stats(x, C, epsilon);
  return (zl_stats){0.0f, 1.0f};
}

/* n of 16 normalized values at column c */
ZL_KERNEL v16f zl_norm_at(int norm, zl_stats s, const float *x, const float *w, const float *b, int64_t c, int64_t n) {
  v16f v = zl_load_n(x + c, n);
  if (norm == ZL_NORM_NONE) return v;
  if (norm == ZL_NORM_LAYER) v = v - s.shift;
  v = v * s.factor * zl_load_n(w + c, n);
  return b ? v + zl_load_n(b + c, n) : v;
}

ZL_KERNEL void zl_norm_rows(const zl_task *t, int norm, int64_t rows, const float *x, const float *w, const float *b,
                            float *y, int64_t C, double epsilon) {
  const int64_t parts = (C + 31) / 32;
  int64_t i, end;
  zl_share(t, rows * parts, &i, &end);
  while (i < end) {
    const int64_t row = i / parts, from = i % parts;
    const int64_t to = end - row * parts < parts ? end - row * parts : parts;
    const float *xr = x + row * C;
    const zl_stats s = zl_norm_stats(norm, xr, C, epsilon);
    for (int64_t c = from * 32; c < to * 32 && c < C; c += 16) {
      int64_t n = C - c < 16 ? C - c : 16;
      zl_store_n(y + row * C + c, zl_norm_at(norm, s, xr, w, b, c, n), n);
    }
    i = row * parts + to;
  }
}

ZL_KERNEL void zl_norm_quantize_rows(const zl_task *t, int norm, int64_t rows, const float *x, const float *w,
                                     const float *b, int8_t *q, float *scale, float *sums, int64_t C,
                                     double epsilon) {
  const int64_t parts = C / 32;
  int64_t i, end;
  zl_share(t, rows * parts, &i, &end);
  while (i < end) {
    const int64_t row = i / parts, from = i % parts;
    const int64_t to = end - row * parts < parts ? end - row * parts : parts;
    const float *xr = x + row * C;
    const zl_stats s = zl_norm_stats(norm, xr, C, epsilon);
    int64_t p = from;
    for (; p + 8 <= to; p += 8) {
      v16f a[8], c[8];
      ZL_UNROLL
      for (int64_t m = 0; m < 8; m++) {
        a[m] = zl_norm_at(norm, s, xr, w, b, 32 * (p + m), 16);
        c[m] = zl_norm_at(norm, s, xr, w, b, 32 * (p + m) + 16, 16);
      }
      zl_quantize32_eight(a, c, q + row * C + 32 * p, 32, scale + row * parts + p, 1, sums + 2 * (row * parts + p), 2);
    }
    for (; p < to; p++)
      zl_quantize32(zl_norm_at(norm, s, xr, w, b, 32 * p, 16), zl_norm_at(norm, s, xr, w, b, 32 * p + 16, 16),
                    q + row * C + 32 * p, scale + row * parts + p, sums + 2 * (row * parts + p));
    i = row * parts + to;
  }
}

/* x f32[T,C], w f32[C] -> y f32[T,C] = x / sqrt(mean(x^2) + epsilon) * w; y is not x */
ZL_KERNEL void zl_rms_norm(const zl_task *t, int64_t rows, const float *x, const float *w, float *y, int64_t C,
                           double epsilon) {
  zl_norm_rows(t, ZL_NORM_RMS, rows, x, w, NULL, y, C, epsilon);
}

/* x f32[T,C], w f32[C], b f32[C] or NULL -> y f32[T,C]; y is not x */
ZL_KERNEL void zl_layer_norm(const zl_task *t, int64_t rows, const float *x, const float *w, const float *b, float *y,
                             int64_t C, double epsilon) {
  zl_norm_rows(t, ZL_NORM_LAYER, rows, x, w, b, y, C, epsilon);
}

/* x f32[T,C] -> q i8[T,C], scale f32[T,C/32], sums f32[T,C/16] */
ZL_KERNEL void zl_quantize_int8(const zl_task *t, int64_t rows, const float *x, int8_t *q, float *scale, float *sums,
                                int64_t C) {
  zl_norm_quantize_rows(t, ZL_NORM_NONE, rows, x, NULL, NULL, q, scale, sums, C, 0.0);
}

/* x f32[T,C], w f32[C] -> the bundle of rms_norm(x) */
ZL_KERNEL void zl_rms_norm_quantize(const zl_task *t, int64_t rows, const float *x, const float *w, int8_t *q,
                                    float *scale, float *sums, int64_t C, double epsilon) {
  zl_norm_quantize_rows(t, ZL_NORM_RMS, rows, x, w, NULL, q, scale, sums, C, epsilon);
}

/* x f32[T,C], w f32[C], b f32[C] or NULL -> the bundle of layer_norm(x) */
ZL_KERNEL void zl_layer_norm_quantize(const zl_task *t, int64_t rows, const float *x, const float *w, const float *b,
                                      int8_t *q, float *scale, float *sums, int64_t C, double epsilon) {
  zl_norm_quantize_rows(t, ZL_NORM_LAYER, rows, x, w, b, q, scale, sums, C, epsilon);
}

/* one head in place or to y: y[hd] = rms_norm(x[hd]) * w[hd] */
ZL_KERNEL void zl_head_norm_one(const float *x, const float *w, float *y, int64_t head_dim, double epsilon) {
  const zl_stats s = zl_rms_stats(x, head_dim, epsilon);
  for (int64_t c = 0; c < head_dim; c += 16) {
    int64_t n = head_dim - c < 16 ? head_dim - c : 16;
    zl_store_n(y + c, zl_norm_at(ZL_NORM_RMS, s, x, w, NULL, c, n), n);
  }
}

/* x f32[T, num_heads * head_dim], w f32[head_dim] -> y, each head normalized; y may be x */
ZL_KERNEL void zl_head_norm(const zl_task *t, int64_t rows, const float *x, const float *w, float *y,
                            int64_t num_heads, int64_t head_dim, double epsilon) {
  int64_t i, end;
  zl_share(t, rows * num_heads, &i, &end);
  for (; i < end; i++) zl_head_norm_one(x + i * head_dim, w, y + i * head_dim, head_dim, epsilon);
}

#endif
