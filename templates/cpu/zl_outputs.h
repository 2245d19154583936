/* What becomes of the sums of a matrix product, 16 outputs of a token at a time, whatever its activations are.
 *
 * In: zl_math.h.  Out: zl_ask_outputs, zl_linear_put, zl_gated_join.  Next file: zl_linear_int8.h.
 */
#ifndef ZL_OUTPUTS_H
#define ZL_OUTPUTS_H
#include "zl_math.h"

/* The lines of `to` [T, N] where the outputs of group g go, for several tokens: the sums take longer than the caches
 * take to bring them.  Rows of whole 4 KB share one set of the first cache, which the sums would empty: into the second. */
ZL_KERNEL void zl_ask_outputs(int64_t n, const float *to, int64_t first, int64_t g, int64_t N) {
  if (n <= 2 || !to) return;
  for (int64_t m = 0; m < n; m++) {
    const float *line = to + (first + m) * N + 16 * g;
    if (N % 1024)
      __builtin_prefetch(line, 1, 3);
    else
      __builtin_prefetch(line, 0, 2);
  }
}

/* out[T, N] = residual + act(acc + bias) for MT tokens; residual and bias may be NULL; out may be residual */
ZL_KERNEL void zl_linear_put(int MT, const v16f *acc, int64_t first, int64_t g, const float *bias, const float *residual,
                             float *out, int64_t N, int act) {
  const int64_t n = N - 16 * g < 16 ? N - 16 * g : 16;
  v16f c = bias ? zl_load_n(bias + 16 * g, n) : zl_set(0.0f);
  ZL_UNROLL
  for (int m = 0; m < MT; m++) {
    const int64_t at = (first + m) * N + 16 * g;
    v16f y = bias ? acc[m] + c : acc[m];
    y = zl_activate(act, y);
    if (residual) y = zl_load_n(residual + at, n) + y;
    zl_store_n(out + at, y, n);
  }
}

/* h[m] = act(h[m] + bias) * (u[m] + bias) for 16 outputs of group g */
ZL_KERNEL void zl_gated_join(int MT, v16f *h, v16f *u, int64_t g, const float *bias_gate, const float *bias_up,
                             int64_t N, int act) {
  const int64_t n = N - 16 * g < 16 ? N - 16 * g : 16;
  ZL_UNROLL
  for (int m = 0; m < MT; m++) {
    if (bias_gate) h[m] = h[m] + zl_load_n(bias_gate + 16 * g, n);
    if (bias_up) u[m] = u[m] + zl_load_n(bias_up + 16 * g, n);
    h[m] = zl_act_times(act, h[m], u[m]);
  }
}

#endif
