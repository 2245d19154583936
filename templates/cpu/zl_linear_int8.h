/* Matrix products with int8 activations: Linear, LinearAdd, ActLinear, GatedLinear and its quantizing form.
 *
 * In: zl_weights.h, zl_math.h, zl_quantize.h.  Out: zl_dot_int8 (16 outputs for MT tokens), the kernels.  Next file:
 * zl_linear_float.h.
 *
 * Work is split into (token tile, group of 16 outputs) items.  A token tile's activations stay in L2 while the
 * weights stream past once; a group's weights stay in L1 while the tile's tokens pass in register tiles of ZL_MT,
 * so a block is unpacked once per ZL_MT tokens.  A token's sums run over K in the same order in every tile size.
 */
#ifndef ZL_LINEAR_INT8_H
#define ZL_LINEAR_INT8_H
#include "zl_math.h"
#include "zl_quantize.h"
#include "zl_weights.h"

#ifndef ZL_TILE_BYTES
#define ZL_TILE_BYTES (256 * 1024) /* activations of a token tile: a share of L2 */
#endif
#ifndef ZL_PREFETCH_BYTES
#define ZL_PREFETCH_BYTES 4096 /* how far ahead of use a stream of weights is fetched */
#endif

/* CALL(n, first) for register tiles of 8, 4, 2, 1 tokens covering [begin, end) */
#define ZL_TOKEN_TILES(begin, end, CALL)                    \
  for (int64_t zl_m = (begin), zl_e = (end); zl_m < zl_e;) { \
    if (zl_e - zl_m >= 8) {                                  \
      CALL(8, zl_m);                                         \
      zl_m += 8;                                             \
    } else if (zl_e - zl_m >= 4) {                           \
      CALL(4, zl_m);                                         \
      zl_m += 4;                                             \
    } else if (zl_e - zl_m >= 2) {                           \
      CALL(2, zl_m);                                         \
      zl_m += 2;                                             \
    } else {                                                 \
      CALL(1, zl_m);                                         \
      zl_m += 1;                                             \
    }                                                        \
  }

/* Tokens per tile: `row_bytes` each, within ZL_TILE_BYTES, a multiple of 8, all tiles of a call about equal. */
ZL_KERNEL int64_t zl_tile_tokens(int64_t rows, int64_t row_bytes) {
  int64_t most = ZL_TILE_BYTES / row_bytes / 8 * 8;
  if (most < 8) most = 8;
  if (most > 256) most = 256;
  int64_t tiles = (rows + most - 1) / most;
  int64_t even = (rows + tiles - 1) / tiles;
  return (even + 7) / 8 * 8;
}

typedef struct zl_bundle {
  const int8_t *q;    /* [T, K] */
  const float *scale; /* [T, K/32] */
  const float *sums;  /* [T, K/16] */
  const int32_t *zeros; /* [tile, K/32]: -zero point * (sum of q), from token zeros_from on; zl_tile_zeros */
  int64_t zeros_from;
} zl_bundle;

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

#define ZL_TILE_BLOCKS (ZL_TILE_BYTES / 32 + 8 * 2048) /* blocks of 32 columns in a token tile, K <= 64 Ki */

/* What a block's integer sums start from so that the zero point needs no multiply-add: once per tile of tokens. */
ZL_KERNEL void zl_tile_zeros(int32_t zero_point, zl_bundle *a, int64_t t0, int64_t t1, int64_t K, int32_t *space) {
  if (!zero_point) return;
  const v64u8 point = (v64u8)((v16i){0} + zero_point * 0x01010101);
  for (int64_t i = 0; i < (t1 - t0) * (K / 32); i++) {
    v16i x = {0};
    memcpy(&x, a->q + t0 * K + i * 32, 32);
    space[i] = -__builtin_reduce_add(zl_dot4_u8((v16i){0}, point, x));
  }
  a->zeros = space;
  a->zeros_from = t0;
}

/* Asks for the bytes ZL_PREFETCH_BYTES after block kb: a group is followed by the next one of the share. */
ZL_KERNEL void zl_prefetch_block(int format, const uint8_t *w, int64_t kb) {
  const int64_t bytes = zl_block_bytes(format) * 32 / zl_block_cols(format);
  ZL_UNROLL
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(w + kb * bytes + ZL_PREFETCH_BYTES + i, 0, 3);
}

/* acc[m] = 16 outputs of the group at w (rows16) for token first + m, m < MT */
ZL_KERNEL void zl_dot_int8(int format, int MT, zl_bundle a, int64_t first, int64_t K, const uint8_t *w, v16f *acc) {
  const int64_t KB = K / 32;
  const int8_t *q = a.q + first * K;
  const float *scale = a.scale + first * KB, *sums = a.sums + first * KB * 2;
  const int has_zero = zl_zero_point(format) != 0;
  const int32_t *zeros = has_zero ? a.zeros + (first - a.zeros_from) * KB : NULL;
  ZL_UNROLL
  for (int m = 0; m < MT; m++) acc[m] = zl_set(0.0f);
  ZL_NO_UNROLL
  for (int64_t kb = 0; kb < KB; kb++) {
    zl_block b;
    zl_block_load(format, w, kb, &b);
    zl_prefetch_block(format, w, kb);
    /* columns outside, tokens inside: MT independent chains hide the latency of the products */
    v16i p[8][2];
    ZL_UNROLL
    for (int m = 0; m < MT; m++) {
      p[m][0] = p[m][1] = (v16i){0};
      if (has_zero) p[m][0] = p[m][0] + zeros[m * KB + kb];
    }
    ZL_UNROLL
    for (int j = 0; j < 8; j++) {
      const int half = zl_scale_cols(format) == 32 ? 0 : j / 4;
      ZL_UNROLL
      for (int m = 0; m < MT; m++)
        p[m][half] = zl_dot4(format, p[m][half], b.code[j], zl_repeat4(q + m * K + kb * 32 + 4 * j));
    }
    ZL_UNROLL
    for (int m = 0; m < MT; m++) {
      const float s = scale[m * KB + kb], *sum = sums + (m * KB + kb) * 2;
      v16f f = zl_to_float(p[m][0]) * b.scale[0];
      if (zl_scale_cols(format) == 32) {
        acc[m] = zl_fma(f, zl_set(s), acc[m]);
        if (!has_zero) acc[m] = zl_fma(b.min[0], zl_set(sum[0] + sum[1]), acc[m]);
      } else {
        f = zl_fma(zl_to_float(p[m][1]), b.scale[1], f);
        acc[m] = zl_fma(f, zl_set(s), acc[m]);
        acc[m] = zl_fma(b.min[0], zl_set(sum[0]), acc[m]);
        acc[m] = zl_fma(b.min[1], zl_set(sum[1]), acc[m]);
      }
    }
  }
}

/* out[T, N] = residual + act(A W^T + bias); residual and bias may be NULL; out may be residual */
ZL_KERNEL void zl_linear_int8_tile(int format, int MT, zl_bundle a, int64_t first, int64_t g, const uint8_t *w,
                                   const float *bias, const float *residual, float *out, int64_t N, int64_t K,
                                   int act) {
  v16f acc[8];
  const int64_t n = N - 16 * g < 16 ? N - 16 * g : 16;
  zl_dot_int8(format, MT, a, first, K, w + g * zl_group_bytes(format, K), acc);
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

ZL_KERNEL void zl_linear_int8_all(const zl_task *t, int64_t rows, zl_bundle a, const uint8_t *w, const float *bias,
                                  const float *residual, float *out, int64_t N, int64_t K, int act, int format) {
  if (rows <= 0) return;
  const int64_t tile = zl_tile_tokens(rows, K), tiles = (rows + tile - 1) / tile, G = (N + 15) / 16;
  int64_t i, end, at = -1;
  _Alignas(64) int32_t zeros[ZL_TILE_BLOCKS];
  zl_share(t, tiles * G, &i, &end);
  for (; i < end; i++) {
    const int64_t t0 = i / G * tile, t1 = t0 + tile < rows ? t0 + tile : rows, g = i % G;
    if (t0 != at) zl_tile_zeros(zl_zero_point(format), &a, at = t0, t1, K, zeros);
#define ZL_CALL(MT, first) zl_linear_int8_tile(format, MT, a, first, g, w, bias, residual, out, N, K, act)
    ZL_TOKEN_TILES(t0, t1, ZL_CALL)
#undef ZL_CALL
  }
}

/* q i8[T,K], scale f32[T,K/32], sums f32[T,K/16], W rows16 [N,K], bias f32[N] or NULL -> out f32[T,N] */
ZL_KERNEL void zl_linear_int8(const zl_task *t, int64_t rows, const int8_t *q, const float *scale, const float *sums,
                              const uint8_t *w, const float *bias, float *out, int64_t N, int64_t K, int format) {
  zl_bundle a = {q, scale, sums, NULL, 0};
  zl_linear_int8_all(t, rows, a, w, bias, NULL, out, N, K, ZL_ACT_NONE, format);
}

/* ..., residual f32[T,N], bias? -> out f32[T,N] = residual + linear; out may be residual */
ZL_KERNEL void zl_linear_add_int8(const zl_task *t, int64_t rows, const int8_t *q, const float *scale,
                                  const float *sums, const uint8_t *w, const float *residual, const float *bias,
                                  float *out, int64_t N, int64_t K, int format) {
  zl_bundle a = {q, scale, sums, NULL, 0};
  zl_linear_int8_all(t, rows, a, w, bias, residual, out, N, K, ZL_ACT_NONE, format);
}

/* ..., bias? -> out f32[T,N] = act(linear) */
ZL_KERNEL void zl_act_linear_int8(const zl_task *t, int64_t rows, const int8_t *q, const float *scale,
                                  const float *sums, const uint8_t *w, const float *bias, float *out, int64_t N,
                                  int64_t K, int activation, int format) {
  zl_bundle a = {q, scale, sums, NULL, 0};
  zl_linear_int8_all(t, rows, a, w, bias, NULL, out, N, K, activation, format);
}

/* h[m] = act(gate + bias) * (up + bias) for 16 outputs of group g */
ZL_KERNEL void zl_gated_int8_tile(int format, int MT, zl_bundle a, int64_t first, int64_t g, const uint8_t *gate,
                                  const uint8_t *up, const float *bias_gate, const float *bias_up, int64_t N,
                                  int64_t K, int act, v16f *h) {
  v16f u[8];
  const int64_t n = N - 16 * g < 16 ? N - 16 * g : 16, at = g * zl_group_bytes(format, K);
  zl_dot_int8(format, MT, a, first, K, gate + at, h);
  zl_dot_int8(format, MT, a, first, K, up + at, u);
  ZL_UNROLL
  for (int m = 0; m < MT; m++) {
    if (bias_gate) h[m] = h[m] + zl_load_n(bias_gate + 16 * g, n);
    if (bias_up) u[m] = u[m] + zl_load_n(bias_up + 16 * g, n);
    h[m] = zl_activate(act, h[m]) * u[m];
  }
}

/* A, Wgate, Wup rows16 [N,K], bias_gate?, bias_up? f32[N] -> out f32[T,N] = act(gate) * up */
ZL_KERNEL void zl_gated_linear_int8(const zl_task *t, int64_t rows, const int8_t *q, const float *scale,
                                    const float *sums, const uint8_t *gate, const uint8_t *up, const float *bias_gate,
                                    const float *bias_up, float *out, int64_t N, int64_t K, int activation,
                                    int format) {
  if (rows <= 0) return;
  zl_bundle a = {q, scale, sums, NULL, 0};
  const int64_t tile = zl_tile_tokens(rows, K), tiles = (rows + tile - 1) / tile, G = (N + 15) / 16;
  int64_t i, end, at = -1;
  _Alignas(64) int32_t zeros[ZL_TILE_BLOCKS];
  zl_share(t, tiles * G, &i, &end);
  for (; i < end; i++) {
    const int64_t t0 = i / G * tile, t1 = t0 + tile < rows ? t0 + tile : rows, g = i % G;
    if (t0 != at) zl_tile_zeros(zl_zero_point(format), &a, at = t0, t1, K, zeros);
    const int64_t n = N - 16 * g < 16 ? N - 16 * g : 16;
#define ZL_CALL(MT, first)                                                                                 \
  do {                                                                                                     \
    v16f h[8];                                                                                             \
    zl_gated_int8_tile(format, MT, a, first, g, gate, up, bias_gate, bias_up, N, K, activation, h);        \
    for (int m = 0; m < MT; m++) zl_store_n(out + ((first) + m) * N + 16 * g, h[m], n);                    \
  } while (0)
    ZL_TOKEN_TILES(t0, t1, ZL_CALL)
#undef ZL_CALL
  }
}

/* the same, N a multiple of 32 -> q i8[T,N], scale f32[T,N/32], sums f32[T,N/16] */
ZL_KERNEL void zl_gated_linear_quantize_int8(const zl_task *t, int64_t rows, const int8_t *q, const float *scale,
                                             const float *sums, const uint8_t *gate, const uint8_t *up,
                                             const float *bias_gate, const float *bias_up, int8_t *out_q,
                                             float *out_scale, float *out_sums, int64_t N, int64_t K, int activation,
                                             int format) {
  if (rows <= 0) return;
  zl_bundle a = {q, scale, sums, NULL, 0};
  const int64_t tile = zl_tile_tokens(rows, K), tiles = (rows + tile - 1) / tile, G = N / 32;
  int64_t i, end, at = -1;
  _Alignas(64) int32_t zeros[ZL_TILE_BLOCKS];
  zl_share(t, tiles * G, &i, &end);
  for (; i < end; i++) {
    const int64_t t0 = i / G * tile, t1 = t0 + tile < rows ? t0 + tile : rows, g = i % G;
    if (t0 != at) zl_tile_zeros(zl_zero_point(format), &a, at = t0, t1, K, zeros);
#define ZL_CALL(MT, first)                                                                                      \
  do {                                                                                                          \
    v16f h[2][8];                                                                                               \
    for (int64_t s = 0; s < 2; s++)                                                                             \
      zl_gated_int8_tile(format, MT, a, first, 2 * g + s, gate, up, bias_gate, bias_up, N, K, activation, h[s]); \
    for (int m = 0; m < MT; m++) {                                                                              \
      const int64_t row = (first) + m;                                                                          \
      zl_quantize32(h[0][m], h[1][m], out_q + row * N + 32 * g, out_scale + row * (N / 32) + g,                  \
                    out_sums + row * (N / 16) + 2 * g);                                                         \
    }                                                                                                           \
  } while (0)
    ZL_TOKEN_TILES(t0, t1, ZL_CALL)
#undef ZL_CALL
  }
}

#endif
