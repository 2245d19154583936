/* The greedy choice without reading the whole output projection: bounds of the logits first, then the few that can win.
 *
 * In: zl_dot_int8.h, zl_linear_bf16.h, zl_linear_float.h.  Out: zl_head_bounds, zl_screened_linear_bf16 and _float.
 * Next file: zl_screen_split.h, the same for a projection of Q8_0.
 *
 * Beside a projection W [N, K] of floats lies a copy in Q8_0 (half the bytes of bf16) with, for each row, the norms of
 * the copy's error and of the row itself.  In a step whose tokens are all the largest logit (zl_task.screened), the copy
 * gives each logit within a bound; of 16 outputs, the largest that one can be and the largest that one must be are kept.
 * Only groups that can reach the best "must be" of the row are then computed, by the kernel that every other step uses;
 * the other logits are -inf.  So the first maximum, its value and its ties are those of the whole projection, always.
 *
 * The bound.  xh: the activations as the exact kernel multiplies them, xq = q * scale their int8 form, f = xh - xq; w a
 * row, v its copy, e = w - v.  Then
 *
 *     w.xh - v.xq = w.f + e.xq,    |w.f + e.xq| <= |w| |f| + |e| (|xh| + |f|)    (Cauchy-Schwarz, Euclidean norms),
 *
 * and a sum of products in any order, each term with at most n roundings, errs by gamma(n) sum|w||x| <= gamma(n) |w| |x|,
 * gamma(n) = n u / (1 - n u), u = 2^-24 (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 3.1).
 * The exact kernels take at most K + 1 roundings to a term (2 K are counted: an instruction need not fuse), zl_dot_int8
 * K / 32 + 1.  vdpbf16ps takes numbers below 2^-126 for zero: 2^-126 |.| sqrt(K) for each side and 2^-126 for each
 * operation.  Norms are summed in double and rounded up.  Where |w| |xh| could leave the range of float, and where any
 * of this is NaN or infinite, the bound is infinite: the group is computed. */
#ifndef ZL_SCREEN_H
#define ZL_SCREEN_H
#include "zl_dot_int8.h"
#include "zl_linear_bf16.h"
#include "zl_linear_float.h"

#define ZL_SCREEN_FORMAT ZL_FMT_Q8_0

/* Factors of a row's bound: error * copy + size * norm + rest; reach * norm is the largest sum of magnitudes. */
typedef struct zl_slack {
  float error, size, rest, reach;
} zl_slack;

/* lanes squared and added to two sums of 8 doubles */
ZL_KERNEL v8d zl_add_squares(v8d sum, v16f x) {
  const v8d a = __builtin_convertvector(ZL_LO(x), v8d), b = __builtin_convertvector(ZL_HI(x), v8d);
  return sum + (a * a + b * b);
}

/* a norm from its squares, rounded up */
ZL_KERNEL double zl_norm_above(v8d squares) {
  double sum = 0.0;
  for (int i = 0; i < 8; i++) sum += squares[i];
  return __builtin_elementwise_sqrt(sum) * (1.0 + 0x1p-20) + 0x1p-126;
}

/* One row of x f32[K] and its int8 form; kind: how the exact kernel takes x. */
ZL_KERNEL zl_slack zl_slack_of(const float *x, const int8_t *q, const float *scale, int64_t K, int kind) {
  v8d all = {0}, rest = {0};
  for (int64_t k = 0; k < K; k += 16) {
    v16s8 bytes;
    memcpy(&bytes, q + k, 16);
    const v16f v = zl_load(x + k), h = kind == ZL_A_BF16 ? zl_round_bf16(v) : v;
    all = zl_add_squares(all, h);
    rest = zl_add_squares(rest, zl_fma(-__builtin_convertvector(bytes, v16f), zl_set(scale[k / 32]), h));
  }
  const double size = zl_norm_above(all), lost = zl_norm_above(rest), n = (double)(2 * K + K / 32 + 16) * 0x1p-24;
  const double gamma = n / (1.0 - n), both = size + lost;
  return (zl_slack){(float)(both * (1.0 + gamma)), (float)(lost + gamma * both + (double)K * 0x1p-126),
                    (float)((double)K * 0x1p-124 * (1.0 + size)), (float)size};
}

/* What the screen keeps in this thread's scratch for ZL_SCREEN_ROWS rows: cpu_rows.scratch_bytes. */
typedef struct zl_screen_space {
  int8_t *q;
  float *scale, *sums;
  zl_tile_word *words;
} zl_screen_space;

ZL_KERNEL zl_screen_space zl_screen_scratch(const zl_task *t, int64_t K) {
  char *p = t->scratch;
  const int64_t n = ZL_SCREEN_ROWS * (K / 32);
  return (zl_screen_space){(int8_t *)p, (float *)(void *)(p + 32 * n), (float *)(void *)(p + 36 * n),
                           (zl_tile_word *)(void *)(p + 44 * n)};
}

/* Logits y of group g in one row, each within b -> the row's bounds of the group.  NaN: nothing is known. */
ZL_KERNEL void zl_bounds_put(v16f y, v16f b, int64_t r, int64_t g, float *bounds, int64_t N) {
  const v16i lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const int64_t G = (N + 15) / 16, n = N - 16 * g < 16 ? N - 16 * g : 16;
  const v16f least = zl_set(-__builtin_inff());
  v16f upper = y + b, lower = y - b;
  upper = zl_select((v16i)(upper == upper), upper, zl_set(__builtin_inff()));
  lower = zl_select((v16i)(lower == lower), lower, least);
  if (n < 16) {
    const v16i real = (v16i)(lane < (int32_t)n);
    upper = zl_select(real, upper, least);
    lower = zl_select(real, lower, least);
  }
  bounds[2 * r * G + g] = zl_hmax(upper);
  bounds[(2 * r + 1) * G + g] = zl_hmax(lower);
}

/* acc: 16 products of group g for MT rows from `first` on -> their bounds */
ZL_KERNEL void zl_head_bounds_put(int MT, const v16f *acc, int64_t first, int64_t g, const float *norms,
                                  const zl_slack *slack, float *bounds, int64_t N) {
  const int64_t n = N - 16 * g < 16 ? N - 16 * g : 16;
  const v16f error = zl_load_n(norms + 16 * g, n), size = zl_load_n(norms + N + 16 * g, n);
  ZL_UNROLL
  for (int m = 0; m < MT; m++) {
    const zl_slack s = slack[first + m];
    v16f b = zl_fma(error, zl_set(s.error), zl_fma(size, zl_set(s.size), zl_set(s.rest)));
    b = zl_fma(zl_abs(acc[m]), zl_set(0x1p-22f), b * (1.0f + 0x1p-18f)); /* and what is rounded here */
    b = zl_select((v16i)(size * s.reach < 0x1p124f), b, zl_set(__builtin_inff()));
    zl_bounds_put(acc[m], b, first + m, g, bounds, N);
  }
}

ZL_KERNEL void zl_bounds_tile(int MT, zl_bundle a, int64_t first, int64_t g, const uint8_t *w, const float *norms,
                              const zl_slack *slack, float *bounds, int64_t N, int64_t K) {
  v16f acc[8];
  zl_dot_int8(ZL_SCREEN_FORMAT, MT, MT, a, first, K, w + g * zl_group_bytes(ZL_SCREEN_FORMAT, K), ZL_NOTHING_NEXT, acc);
  zl_head_bounds_put(MT, acc, first, g, norms, slack, bounds, N);
}

/* All MT rows of groups g and other. */
ZL_KERNEL void zl_bounds_pair(int MT, zl_bundle a, int64_t g, int64_t other, const uint8_t *w, const float *norms,
                              const zl_slack *slack, float *bounds, int64_t N, int64_t K) {
  const int64_t bytes = zl_group_bytes(ZL_SCREEN_FORMAT, K);
  v16f acc[2][ZL_STREAM_ROWS];
  zl_dot_int8_two(ZL_SCREEN_FORMAT, ZL_SCREEN_FORMAT, MT, a, 0, K, w + g * bytes, w + other * bytes, acc[0], acc[1]);
  zl_head_bounds_put(MT, acc[0], 0, g, norms, slack, bounds, N);
  zl_head_bounds_put(MT, acc[1], 0, other, norms, slack, bounds, N);
}

/* x f32[R,K], copy rows16 Q8_0 [N,K], norms f32[2,N] -> bounds f32[R,2,G]: for each group of 16 outputs the largest that
 * one can be, then the largest that one must be */
ZL_KERNEL void zl_head_bounds(const zl_task *t, int64_t rows, const float *x, const uint8_t *copy, const float *norms,
                              float *bounds, int64_t N, int64_t K, int kind) {
  if (!t->screened) return;
  const zl_screen_space s = zl_screen_scratch(t, K);
  zl_slack slack[ZL_SCREEN_ROWS];
  zl_bundle a = {s.q, s.scale, s.sums, NULL, 0};
  const int64_t G = (N + 15) / 16, half = zl_first_half(t->n_threads, rows, G);
  zl_deal deal = {half ? half : G, 0, 0, 0};
  int64_t g;
  for (int64_t r = 0; r < rows; r++) { /* each thread for itself: shorter than a barrier */
    const float *row = x + r * K;
    for (int64_t b = 0; b < K / 32; b++)
      zl_quantize32(zl_load(row + 32 * b), zl_load(row + 32 * b + 16), s.q + r * K + 32 * b, s.scale + r * (K / 32) + b,
                    s.sums + 2 * (r * (K / 32) + b));
    slack[r] = zl_slack_of(row, s.q + r * K, s.scale + r * (K / 32), K, kind);
  }
  zl_tile_words(ZL_SCREEN_FORMAT, &a, 0, rows, K, s.words);
  while (zl_deal_item(t, &deal, &g)) {
    if (zl_other(half, g, G) >= 0) {
      ZL_FEW_ROWS(rows, zl_bounds_pair, a, g, g + half, copy, norms, slack, bounds, N, K);
      continue;
    }
#define ZL_CALL(MT, n, first) zl_bounds_tile(MT, a, first, g, copy, norms, slack, bounds, N, K)
    ZL_TOKEN_TILES(8, 0, rows, ZL_CALL)
#undef ZL_CALL
  }
}

/* best[r]: what the largest logit of row r must be at least */
ZL_KERNEL void zl_screen_best(const float *bounds, int64_t rows, int64_t G, float *best) {
  for (int64_t r = 0; r < rows; r++) {
    const float *lower = bounds + (2 * r + 1) * G;
    v16f top = zl_set(-__builtin_inff());
    int64_t g = 0;
    for (; g + 16 <= G; g += 16) top = zl_max(zl_load(lower + g), top);
    best[r] = zl_hmax(top);
    for (; g < G; g++) best[r] = lower[g] > best[r] ? lower[g] : best[r];
  }
}

/* whether group g can hold the first maximum of any row */
ZL_KERNEL int zl_screen_wants(const float *bounds, int64_t rows, int64_t G, int64_t g, const float *best) {
  int wanted = 0;
  for (int64_t r = 0; r < rows; r++) wanted |= !(bounds[2 * r * G + g] < best[r]);
  return wanted;
}

/* For tests and measuring: how many groups a step with these bounds computes. */
ZL_KERNEL int64_t zl_screen_count(const float *bounds, int64_t rows, int64_t N) {
  const int64_t G = (N + 15) / 16;
  float best[ZL_SCREEN_ROWS];
  int64_t n = 0;
  zl_screen_best(bounds, rows, G, best);
  for (int64_t g = 0; g < G; g++) n += zl_screen_wants(bounds, rows, G, g, best);
  return n;
}

/* Whether group g cannot win; then it becomes -inf. */
ZL_KERNEL int zl_screen_skips(const float *bounds, const float *best, int64_t rows, float *out, int64_t N, int64_t g) {
  const int64_t n = N - 16 * g < 16 ? N - 16 * g : 16;
  if (zl_screen_wants(bounds, rows, (N + 15) / 16, g, best)) return 0;
  for (int64_t r = 0; r < rows; r++) zl_store_n(out + r * N + 16 * g, zl_set(-__builtin_inff()), n);
  return 1;
}

/* The next group to compute of this thread's share. */
ZL_KERNEL int zl_screen_next(const zl_task *t, zl_deal *deal, const float *bounds, const float *best, int64_t rows,
                             float *out, int64_t N, int64_t *g) {
  while (zl_deal_item(t, deal, g))
    if (!zl_screen_skips(bounds, best, rows, out, N, *g)) return 1;
  return 0;
}

/* x f32[R,K], W rows16 BF16 [N,K], bounds of zl_head_bounds -> out f32[R,N]: zl_linear_bf16 of the groups that can hold a
 * row's first maximum, of all in a step that is not screened */
ZL_KERNEL void zl_screened_linear_bf16(const zl_task *t, int64_t rows, const float *x, const uint8_t *w,
                                       const float *bounds, float *out, int64_t N, int64_t K) {
  if (!t->screened) {
    zl_linear_bf16(t, rows, x, w, NULL, out, N, K, ZL_FMT_BF16);
    return;
  }
  float best[ZL_SCREEN_ROWS];
  zl_deal deal = {(N + 15) / 16, 0, 0, 0};
  const zl_pair *pairs = NULL;
  int64_t g;
  zl_screen_best(bounds, rows, (N + 15) / 16, best);
  while (zl_screen_next(t, &deal, bounds, best, rows, out, N, &g)) {
    if (!pairs) pairs = zl_prepare_bf16(t, x, 0, rows, K);
#define ZL_CALL(NG, MT, row, px, turn, item) \
  zl_linear_bf16_tile(ZL_FMT_BF16, NG, MT, px, turn, row, item, 1, w, NULL, NULL, out, N, K, ZL_ACT_NONE)
    ZL_BF16_ROW_TILES(1, pairs, K, 0, rows, g, NULL, ZL_CALL)
#undef ZL_CALL
  }
}

/* the same for W of any plain format with float32 or rounded activations: zl_linear_float */
ZL_KERNEL void zl_screened_linear_float(const zl_task *t, int64_t rows, const float *x, const uint8_t *w,
                                        const float *bounds, float *out, int64_t N, int64_t K, int format, int kind) {
  if (!t->screened) {
    zl_linear_float(t, rows, x, w, NULL, out, N, K, format, kind);
    return;
  }
  float best[ZL_SCREEN_ROWS];
  zl_deal deal = {(N + 15) / 16, 0, 0, 0};
  const float *padded = NULL;
  int64_t g;
  zl_screen_best(bounds, rows, (N + 15) / 16, best);
  while (zl_screen_next(t, &deal, bounds, best, rows, out, N, &g)) {
    if (!padded) padded = zl_prepare_float(t, x, 0, rows, K, kind);
#define ZL_CALL(MT, n, first, px, item) \
  zl_linear_float_tile(format, MT, n, px, first, item, w, NULL, NULL, out, N, K, ZL_ACT_NONE)
    ZL_FLOAT_CALLS(0, rows, padded, K, g, ZL_CALL)
#undef ZL_CALL
  }
}

#endif
