/* Elementary functions on 16 lanes.
 *
 * In: zl_simd.h.  Out: zl_exp, zl_exp2_part, zl_exp2_rough, zl_sigmoid, zl_tanh, zl_normal_cdf, zl_activate,
 * zl_act_times, zl_sincos.  Next file: zl_weights.h.
 *
 * Errors against the exact value, over all finite floats (measured by tests/test_cpu_kernels_layers.py; of zl_exp2_rough
 * by test_cpu_kernels_attention.py):
 * exp <= 2 ulp, tanh <= 4 ulp, sigmoid <= 4 ulp (0 below -88.7), normal cdf <= 16 ulp in the lower tail.  No libm: the
 * same bits on every host.
 */
#ifndef ZL_MATH_H
#define ZL_MATH_H
#include "zl_simd.h"

/* p * 2^n, rounded once; |n| < 250 an integer, or p is NaN (then any n, and any NaN) */
ZL_KERNEL v16f zl_scale2(v16f p, v16f n) {
#if ZL_AVX512
  return (v16f)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  v16i i = zl_to_int(n);
  i = i & ~(v16i)(n != n); /* NaN: p is too, any exponent will do */
  v16i half = i >> 1;     /* in two factors, the first exact: n may be below -126 or above 127 */
  v16f a = (v16f)((half + 127) << 23), b = (v16f)((i - half + 127) << 23);
  return p * a * b;
#endif
}

/* 2^f for |f| <= 1/2, relative error 3e-6; 2^0 is 1 exactly */
ZL_KERNEL v16f zl_exp2_part(v16f f) {
  v16f p = zl_set(0x1.3a02ccp-7f);
  p = zl_fma(p, f, zl_set(0x1.c9fc46p-5f));
  p = zl_fma(p, f, zl_set(0x1.ec0378p-3f));
  p = zl_fma(p, f, zl_set(0x1.62e12cp-1f));
  return zl_fma(p, f, zl_set(1.0f));
}

/* 2^x for x <= 0, relative error 3e-6 (measured by tests/test_cpu_kernels_attention.py), 2^0 is 1; 0 below -126, NaN
 * stays NaN */
ZL_KERNEL v16f zl_exp2_rough(v16f x) {
  const v16f magic = zl_set(0x1.8p23f + 127.0f); /* added: the nearest integer in the low bits, biased as an exponent */
  const v16i seen = ~(v16i)(x < -126.0f);
  const v16f t = zl_max(zl_set(-126.0f), x) + magic, f = zl_max(zl_set(-126.0f), x) - (t - magic);
  return (v16f)((v16i)(zl_exp2_part(f) * (v16f)((v16i)t << 23)) & seen);
}

/* e^x; overflows to infinity, underflows gradually, NaN stays NaN, e^-inf = 0 */
ZL_KERNEL v16f zl_exp(v16f x) {
  x = zl_max(zl_set(-110.0f), zl_min(zl_set(89.5f), x)); /* this order keeps NaN */
  v16f n = zl_round_even(x * 0x1.715476p+0f);
  v16f r = zl_fma(n, zl_set(-0x1.62e4p-1f), x); /* ln 2 in two parts, the first exact times n */
  r = zl_fma(n, zl_set(-0x1.7f7d1cp-20f), r);
  v16f p = zl_set(0x1.6ab8c6p-10f);
  p = zl_fma(p, r, zl_set(0x1.126dbep-7f));
  p = zl_fma(p, r, zl_set(0x1.55589ep-5f));
  p = zl_fma(p, r, zl_set(0x1.55540ap-3f));
  p = zl_fma(p, r, zl_set(0x1.fffffap-2f));
  p = zl_fma(p, r, zl_set(1.0f));
  p = zl_fma(p, r, zl_set(1.0f));
  return zl_scale2(p, n);
}

ZL_KERNEL v16f zl_sigmoid(v16f x) { return 1.0f / (1.0f + zl_exp(-x)); }

ZL_KERNEL v16f zl_tanh(v16f x) {
  v16f a = zl_abs(x), u = x * x;
  v16f p = zl_set(0x1.1e41aep-9f);
  p = zl_fma(p, u, zl_set(-0x1.0e16dap-7f));
  p = zl_fma(p, u, zl_set(0x1.641ff0p-6f));
  p = zl_fma(p, u, zl_set(-0x1.b9ffd2p-5f));
  p = zl_fma(p, u, zl_set(0x1.1110d0p-3f));
  p = zl_fma(p, u, zl_set(-0x1.555556p-2f));
  v16f small = zl_fma(p * u, x, x);
  v16f large = 1.0f - 2.0f / (zl_exp(a + a) + 1.0f);
  v16i sign = (v16i)x & (v16i)zl_set(-0.0f);
  return zl_select((v16i)(a < 0.65f), small, (v16f)((v16i)large | sign));
}

/* The cumulative normal distribution, (1 + erf(x / sqrt 2)) / 2, relative error small in both tails. */
ZL_KERNEL v16f zl_normal_cdf(v16f x) {
  v16f z = zl_abs(x) * 0x1.6a09e6p-1f;
  v16f t = 1.0f / zl_fma(zl_set(0.4f), z, zl_set(1.0f));
  v16f p = zl_set(-0x1.483afap-6f); /* erfc(z) e^(z^2) / t */
  p = zl_fma(p, t, zl_set(0x1.664faep-4f));
  p = zl_fma(p, t, zl_set(-0x1.a1b9bep-4f));
  p = zl_fma(p, t, zl_set(-0x1.c86324p-5f));
  p = zl_fma(p, t, zl_set(0x1.0b264cp-3f));
  p = zl_fma(p, t, zl_set(-0x1.825e14p-6f));
  p = zl_fma(p, t, zl_set(0x1.4cc69ep-3f));
  p = zl_fma(p, t, zl_set(0x1.480c7ep-3f));
  p = zl_fma(p, t, zl_set(0x1.ad250ap-3f));
  p = zl_fma(p, t, zl_set(0x1.cdcf7ap-3f));
  p = zl_fma(p, t, zl_set(0x1.ce3306p-3f));
  v16f zz = x * x * 0.5f; /* z^2, from x: z is rounded */
  v16f low = zl_fma(x, x, -(x * x)) * 0.5f;
  zz = zl_min(zl_set(200.0f), zz);
  low = zl_select((v16i)(zl_abs(low) < 1.0f), low, zl_set(0.0f));
  v16f tail = 0.5f * p * t * (zl_exp(-zz) * (1.0f - low));
  v16f y = zl_select((v16i)(x < 0.0f), tail, 1.0f - tail);
  return zl_select((v16i)(x != x), x, y);
}

/* y = act(x); act is a constant */
ZL_KERNEL v16f zl_activate(int act, v16f x) {
  switch (act) {
    case ZL_ACT_SILU: return x * zl_sigmoid(x);
    case ZL_ACT_GELU_TANH: { /* 0.5 x (1 + tanh u) = x sigmoid(2 u): no cancellation for negative x */
      v16f u = 0x1.988454p-1f * zl_fma(0.044715f * x * x, x, x);
      return x * zl_sigmoid(u + u);
    }
    case ZL_ACT_GELU_ERF: return x * zl_normal_cdf(x);
    case ZL_ACT_RELU: return zl_select((v16i)(x < 0.0f), zl_set(0.0f), x);
    case ZL_ACT_TANH: return zl_tanh(x);
    case ZL_ACT_SIGMOID: return zl_sigmoid(x);
    default: return x;
  }
}

/* act(x) * u, of a gated product.  silu with fewer operations than zl_activate: relative error below 5e-7 + 8e-8 |x|,
 * far below what the 8 bits that follow in most programs keep; x / (1 + e^-x) first, so that no product overflows. */
ZL_KERNEL v16f zl_act_times(int act, v16f x, v16f u) {
  if (act != ZL_ACT_SILU) return zl_activate(act, x) * u;
  const v16f t = zl_max(zl_set(-200.0f), zl_min(zl_set(200.0f), x * -0x1.715476p+0f)); /* this order keeps NaN */
  const v16f n = zl_round_even(t), f = t - n;
  v16f p = zl_set(0x1.23a604p-10f); /* 2^f, f in [-0.5, 0.5]: minimax, relative error 4.3e-7, exact at 0 */
  p = zl_fma(p, f, zl_set(0x1.3cbea8p-7f));
  p = zl_fma(p, f, zl_set(0x1.c74322p-5f));
  p = zl_fma(p, f, zl_set(0x1.ebfa4ep-3f));
  p = zl_fma(p, f, zl_set(0x1.62e39ep-1f));
  p = zl_fma(p, f, zl_set(1.0f));
  return x / (1.0f + zl_scale2(p, n)) * u;
}

/* sin and cos of x as rounded from double precision, |x| < 2^31 */
ZL_KERNEL void zl_sincos(float x, float *sin_x, float *cos_x) {
  double v = (double)x;
  double n = __builtin_roundeven(v * 0x1.45f306dc9c883p-1); /* 2 / pi */
  double r = __builtin_fma(n, -0x1.921fb54442d18p+0, v);
  r = __builtin_fma(n, -0x1.1a62633145c07p-54, r);
  double u = r * r; /* |r| <= pi/4: Taylor terms up to r^15, r^16 are below 2^-53 */
  double s = -1.0 / 1307674368000.0;
  s = __builtin_fma(s, u, 1.0 / 6227020800.0);
  s = __builtin_fma(s, u, -1.0 / 39916800.0);
  s = __builtin_fma(s, u, 1.0 / 362880.0);
  s = __builtin_fma(s, u, -1.0 / 5040.0);
  s = __builtin_fma(s, u, 1.0 / 120.0);
  s = __builtin_fma(s, u, -1.0 / 6.0);
  s = __builtin_fma(s * u, r, r);
  double c = 1.0 / 20922789888000.0;
  c = __builtin_fma(c, u, -1.0 / 87178291200.0);
  c = __builtin_fma(c, u, 1.0 / 479001600.0);
  c = __builtin_fma(c, u, -1.0 / 3628800.0);
  c = __builtin_fma(c, u, 1.0 / 40320.0);
  c = __builtin_fma(c, u, -1.0 / 720.0);
  c = __builtin_fma(c, u, 1.0 / 24.0);
  c = __builtin_fma(c, u, -0.5);
  c = __builtin_fma(c, u, 1.0);
  int64_t quadrant = (int64_t)n & 3;
  double sq = quadrant & 1 ? c : s, cq = quadrant & 1 ? s : c;
  *sin_x = (float)(quadrant & 2 ? -sq : sq);
  *cos_x = (float)(quadrant == 1 || quadrant == 2 ? -cq : cq);
}

#endif
