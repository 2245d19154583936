/* Screening a projection of Q8_0 by its own upper bits: nothing is stored twice.
 *
 * In: zl_linear_int8.h, zl_screen.h.  Out: zl_split_bounds_int8, zl_screened_split_linear_int8.  Next file: zl_sample.h.
 *
 * Q8_0's codes lie in two matrices: the upper six bits (Q8_HIGH) and the lower two (Q8_LOW), each with the scales; their
 * values add up to Q8_0's, so every logit is a product with the one plus a product with the other.  In a screened step
 * the upper bits alone give each logit within a bound, and the lower are read for the groups of 16 that can hold a
 * row's first maximum: a quarter of the projection's bytes stay unread (zl_screen.h says what is kept and why the choice
 * is that of all logits).
 *
 * The bound.  x: the int8 activations' values, l a row of Q8_LOW, s any positive numbers, one for each column.  Then
 *
 *     |l.x| <= |l / s| |s x|    (Cauchy-Schwarz, Euclidean norms),
 *
 * whatever s is; it is close where s is about 1 / sqrt(x), and the compiler chooses s by what is known of x without
 * running the model: the gain of the norm before and the sizes of the columns (passes/screen.py).
 * The kernel that computes a logit makes the product with Q8_HIGH by the same operations as the bounds: the same bits.
 * Its product with Q8_LOW errs by at most gamma(n) times the sum of magnitudes, n = K / 16 + 8 (zl_dot_int8: two
 * multiply-adds for 32 columns); as that takes l = scale * code - 1.5 scale apart, with code up to 3 and |l| at least
 * scale / 2, the magnitudes are at most 7 |l| |x| (9 are counted).  The last addition and those here: relative to what is
 * added.  Numbers below 2^-126, which s x and the products can fall to: 2^-125 for each column in the norm, 2^-120 in the
 * bound.  A bound of 2^120 and more, whose sums could leave the range of float, is taken for infinite, which computes the
 * group; where the product with Q8_HIGH itself overflows, so does the logit's, which is made of it. */
#ifndef ZL_SCREEN_SPLIT_H
#define ZL_SCREEN_SPLIT_H
#include "zl_linear_int8.h"
#include "zl_screen.h"

/* |s x| of one row of the bundle, with what the product with Q8_LOW can err by, rounded up */
ZL_KERNEL float zl_spread_norm(zl_bundle a, int64_t row, const float *spread, int64_t K) {
  v8d squares = {0};
  for (int64_t k = 0; k < K; k += 16) {
    v16s8 bytes;
    memcpy(&bytes, a.q + row * K + k, 16);
    const v16f x = __builtin_convertvector(bytes, v16f) * zl_set(a.scale[(row * K + k) / 32]);
    squares = zl_add_squares(squares, x * zl_load(spread + k));
  }
  const double n = (double)(K / 16 + 8) * 0x1p-24;
  return (float)((zl_norm_above(squares) + (double)K * 0x1p-125) * (1.0 + 10.0 * n / (1.0 - n)));
}

/* acc: 16 products with the upper bits of group g for MT rows from `first` on -> their bounds */
ZL_KERNEL void zl_split_bounds_put(int MT, const v16f *acc, int64_t first, int64_t g, const float *norms,
                                   const float *size, float *bounds, int64_t N, int64_t K) {
  const int64_t n = N - 16 * g < 16 ? N - 16 * g : 16;
  const v16f norm = zl_load_n(norms + 16 * g, n);
  ZL_UNROLL
  for (int m = 0; m < MT; m++) {
    v16f b = zl_fma(norm, zl_set(size[first + m]), zl_set((float)K * 0x1p-120f));
    b = zl_fma(zl_abs(acc[m]), zl_set(0x1p-22f), b * (1.0f + 0x1p-18f));
    b = zl_select((v16i)(b < 0x1p120f), b, zl_set(__builtin_inff())); /* sums that could leave the range of float */
    zl_bounds_put(acc[m], b, first + m, g, bounds, N);
  }
}

ZL_KERNEL void zl_split_bounds_tile(int MT, zl_bundle a, int64_t first, int64_t g, const uint8_t *high,
                                    const float *norms, const float *size, float *bounds, int64_t N, int64_t K) {
  v16f acc[8];
  zl_dot_int8(ZL_FMT_Q8_HIGH, MT, MT, a, first, K, high + g * zl_group_bytes(ZL_FMT_Q8_HIGH, K), ZL_NOTHING_NEXT,
              acc);
  zl_split_bounds_put(MT, acc, first, g, norms, size, bounds, N, K);
}

/* All MT rows of groups g and other. */
ZL_KERNEL void zl_split_bounds_pair(int MT, zl_bundle a, int64_t g, int64_t other, const uint8_t *high,
                                    const float *norms, const float *size, float *bounds, int64_t N, int64_t K) {
  const int64_t bytes = zl_group_bytes(ZL_FMT_Q8_HIGH, K);
  v16f acc[2][ZL_STREAM_ROWS];
  zl_dot_int8_two(ZL_FMT_Q8_HIGH, ZL_FMT_Q8_HIGH, MT, a, 0, K, high + g * bytes, high + other * bytes, acc[0], acc[1]);
  zl_split_bounds_put(MT, acc[0], 0, g, norms, size, bounds, N, K);
  zl_split_bounds_put(MT, acc[1], 0, other, norms, size, bounds, N, K);
}

/* q i8[R,K], scale f32[R,K/32], sums f32[R,K/16], rows16 Q8_HIGH [N,K], norms f32[N] of the rows l / s, s f32[K] ->
 * bounds f32[R,2,G] as zl_head_bounds */
ZL_KERNEL void zl_split_bounds_int8(const zl_task *t, int64_t rows, const int8_t *q, const float *scale,
                                   const float *sums, const uint8_t *high, const float *norms, const float *spread,
                                   float *bounds, int64_t N, int64_t K) {
  if (!t->screened) return;
  const zl_bundle a = {q, scale, sums, NULL, 0};
  float size[ZL_SCREEN_ROWS];
  const int64_t G = (N + 15) / 16, half = zl_first_half(t->n_threads, rows, G);
  zl_deal deal = {half ? half : G, 0, 0, 0};
  int64_t g;
  for (int64_t r = 0; r < rows; r++) size[r] = zl_spread_norm(a, r, spread, K);
  while (zl_deal_item(t, &deal, &g)) {
    if (zl_other(half, g, G) >= 0) {
      ZL_FEW_ROWS(rows, zl_split_bounds_pair, a, g, g + half, high, norms, size, bounds, N, K);
      continue;
    }
#define ZL_CALL(MT, n, first) zl_split_bounds_tile(MT, a, first, g, high, norms, size, bounds, N, K)
    ZL_TOKEN_TILES(8, 0, rows, ZL_CALL)
#undef ZL_CALL
  }
}

/* All MT rows of group g: the two parts are two streams. */
ZL_KERNEL void zl_split_linear_few(int MT, zl_bundle a, int64_t g, const uint8_t *high, const uint8_t *low, float *out,
                                   int64_t N, int64_t K) {
  v16f acc[2][ZL_STREAM_ROWS];
  zl_dot_int8_two(ZL_FMT_Q8_HIGH, ZL_FMT_Q8_LOW, MT, a, 0, K, high + g * zl_group_bytes(ZL_FMT_Q8_HIGH, K),
                  low + g * zl_group_bytes(ZL_FMT_Q8_LOW, K), acc[0], acc[1]);
  ZL_UNROLL
  for (int m = 0; m < MT; m++) acc[0][m] = acc[0][m] + acc[1][m];
  zl_linear_put(MT, acc[0], 0, g, NULL, NULL, out, N, ZL_ACT_NONE);
}

/* q i8[R,K], scale f32[R,K/32], sums f32[R,K/16], rows16 Q8_HIGH and Q8_LOW [N,K], bounds of zl_split_bounds_int8 ->
 * out f32[R,N]: all outputs, or in a screened step those of the groups that can hold a row's first maximum.  A product
 * with the upper bits, then the lower ones' added. */
ZL_KERNEL void zl_screened_split_linear_int8(const zl_task *t, int64_t rows, const int8_t *q, const float *scale,
                                             const float *sums, const uint8_t *high, const uint8_t *low,
                                             const float *bounds, float *out, int64_t N, int64_t K) {
  zl_bundle a = {q, scale, sums, NULL, 0};
  float best[ZL_SCREEN_ROWS];
  zl_walk walk;
  if (t->screened) zl_screen_best(bounds, rows, (N + 15) / 16, best);
  zl_walk_begin(&walk, rows, K, (N + 15) / 16, 0); /* the few rows of a screened step are one tile */
  while (zl_walk_item(t, &walk)) {
    const int64_t g = walk.g, t0 = walk.t0, until = walk.until;
    if (t->screened && zl_screen_skips(bounds, best, rows, out, N, g)) continue;
    zl_walk_words(&walk, ZL_FMT_Q8_LOW, &a, K); /* totals: the same for both */
    if (ZL_STREAMS == 2 && rows <= ZL_STREAM_ROWS) {
      ZL_FEW_ROWS(rows, zl_split_linear_few, a, g, high, low, out, N, K);
      continue;
    }
    if (until > t0) {
      zl_linear_amx_tile(ZL_FMT_Q8_HIGH, a, t0, until, g, high, NULL, NULL, out, N, K, ZL_ACT_NONE);
      zl_linear_amx_tile(ZL_FMT_Q8_LOW, a, t0, until, g, low, NULL, out, out, N, K, ZL_ACT_NONE);
    }
#define ZL_CALL(MT, n, first)                                                                          \
  do {                                                                                                 \
    zl_linear_int8_tile(ZL_FMT_Q8_HIGH, MT, n, a, first, g, high, ZL_NOTHING_NEXT, NULL, NULL, out,    \
                        N, K, ZL_ACT_NONE);                                                            \
    zl_linear_int8_tile(ZL_FMT_Q8_LOW, MT, n, a, first, g, low, ZL_NOTHING_NEXT, NULL, out, out, N, K, \
                        ZL_ACT_NONE);                                                                  \
  } while (0)
    ZL_TOKEN_TILES(zl_many(K), until, walk.t1, ZL_CALL)
#undef ZL_CALL
  }
}

#endif
