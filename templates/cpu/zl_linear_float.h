/* Matrix products with float32 or bfloat16 activations: the same five operators.
 *
 * In: zl_quantize.h, zl_tokens.h, zl_streams.h, zl_outputs.h.  Out: zl_dot_float, the kernels.  Next file:
 * zl_linear_bf16.h (bf16 weights with bf16 activations).
 *
 * Weights of any format become float32, exactly, in registers or for many tokens in the first cache; activations are
 * float32, for the kind bf16 rounded to bfloat16 first; sums are float32, even and odd columns apart, so that two chains
 * of multiply-adds overlap.  Eight tokens and more keep one of the two in registers where these are few (zl_dot_spans).
 * The rounded and padded activations of a tile of tokens live in this thread's scratch: cpu_rows.scratch_bytes.
 */
#ifndef ZL_LINEAR_FLOAT_H
#define ZL_LINEAR_FLOAT_H
#include "zl_outputs.h"
#include "zl_quantize.h"
#include "zl_streams.h"
#include "zl_tokens.h"

ZL_KERNEL int64_t zl_padded_k(int64_t K) { return (K + 31) / 32 * 32; }

/* x f32[T, K], tokens first .. first + n -> scratch f32[n, padded K], rounded for bf16 */
ZL_KERNEL const float *zl_prepare_float(const zl_task *t, const float *x, int64_t first, int64_t n, int64_t K,
                                        int kind) {
  float *to = (float *)t->scratch;
  for (int64_t m = 0; m < n; m++)
    for (int64_t k = 0; k < zl_padded_k(K); k += 16) {
      int64_t left = K - k < 0 ? 0 : K - k < 16 ? K - k : 16;
      v16f v = zl_load_n(x + (first + m) * K + (left ? k : 0), left);
      zl_store(to + m * zl_padded_k(K) + k, kind == ZL_A_BF16 ? zl_round_bf16(v) : v);
    }
  return to;
}

/* even += w0 x0, odd += w1 x1 for two columns */
ZL_KERNEL void zl_two_columns(int MT, v16f w0, v16f w1, const float *x, int64_t stride, v16f *even, v16f *odd) {
  ZL_UNROLL
  for (int m = 0; m < MT; m++) {
    even[m] = zl_fma(w0, zl_set(x[m * stride]), even[m]);
    odd[m] = zl_fma(w1, zl_set(x[m * stride + 1]), odd[m]);
  }
}

/* Plain formats: w is a group of rows16; columns past K read as zero weights. */
ZL_KERNEL void zl_dot_plain(int format, int MT, const float *x, int64_t K, const uint8_t *w, v16f *even, v16f *odd) {
  const int64_t stride = zl_padded_k(K), step = zl_block_bytes(format);
  ZL_NO_UNROLL
  for (int64_t k = 0; k < K / 2; k++) {
    const uint8_t *p = w + k * step;
    if (MT <= 2) zl_ask_ahead(zl_asks(MT), p, step);
    v16f w0, w1;
    if (format == ZL_FMT_F32) {
      w0 = (v16f)zl_load_bytes(p);
      w1 = (v16f)zl_load_bytes(p + 64);
    } else if (format == ZL_FMT_F16) {
      w0 = zl_load_half(p);
      w1 = zl_load_half(p + 32);
    } else {
      v16u pair = (v16u)zl_load_bytes(p);
      w0 = (v16f)(pair << 16);
      w1 = (v16f)(pair & 0xffff0000u);
    }
    zl_two_columns(MT, w0, w1, x + 2 * k, stride, even, odd);
  }
  if (K % 2) { /* the last column alone */
    const uint8_t *p = w + K / 2 * step;
    v16f w0 = format == ZL_FMT_F32   ? (v16f)zl_load_bytes(p)
              : format == ZL_FMT_F16 ? zl_load_half(p)
                                     : (v16f)((v16u)zl_load_bytes(p) << 16);
    ZL_UNROLL
    for (int m = 0; m < MT; m++) even[m] = zl_fma(w0, zl_set(x[m * stride + K - 1]), even[m]);
  }
}

/* code byte i of each lane -> w = scale * code + min */
ZL_KERNEL v16f zl_code_to_float(v64u8 code, int i, v16f scale, v16f min) {
  v16u c = (v16u)code;
  v16i byte = (v16i)(i == 3 ? c >> 24 : (c >> (8 * i)) & 255u);
  return zl_fma(zl_to_float(byte), scale, min);
}

ZL_KERNEL void zl_dot_blocks(int format, int MT, const float *x, int64_t K, const uint8_t *w, v16f *even, v16f *odd) {
  const int64_t stride = zl_padded_k(K), bytes = zl_block_bytes(format) * 32 / zl_block_cols(format);
  ZL_NO_UNROLL
  for (int64_t kb = 0; kb < K / 32; kb++) {
    zl_block b;
    zl_block_load(format, w, kb, &b);
    if (MT <= 2) zl_ask_ahead(zl_asks(MT), w + kb * bytes, bytes);
    ZL_UNROLL
    for (int j = 0; j < 8; j++) {
      const int h = zl_scale_cols(format) == 16 ? j / 4 : 0;
      ZL_UNROLL
      for (int i = 0; i < 4; i += 2)
        zl_two_columns(MT, zl_code_to_float(b.code[j], i, b.scale[h], b.min[h]),
                       zl_code_to_float(b.code[j], i + 1, b.scale[h], b.min[h]), x + kb * 32 + 4 * j + i, stride,
                       even, odd);
    }
  }
}

/* Eight tokens and more, without AVX-512: registers hold the sums of six for even columns alone, or odd ones, beside one
 * column of weights.  So some columns of the group become float32 in the first cache, and all tokens pass them, twice. */
#define ZL_SPANS 0 /* in MT's place: n tokens, 8 to ZL_MANY */
#define ZL_SPAN_COLUMNS 128 /* 8 KB; even */

#if !ZL_AVX512
/* Columns k0 .. k0 + n of the group at w as float32 [n][16]: in `to`, or where they lie. */
ZL_KERNEL const float *zl_float_columns(int format, const uint8_t *w, int64_t k0, int64_t n, float *to) {
  if (format == ZL_FMT_F32) return (const float *)(const void *)(w + 64 * k0);
  if (!zl_is_plain(format)) {
    for (int64_t kb = 0; kb < n / 32; kb++) {
      zl_block b;
      zl_block_load(format, w, k0 / 32 + kb, &b);
      ZL_UNROLL
      for (int i = 0; i < 32; i++) {
        const int h = zl_scale_cols(format) == 16 ? i / 16 : 0;
        zl_store(to + 16 * (32 * kb + i), zl_code_to_float(b.code[i / 4], i % 4, b.scale[h], b.min[h]));
      }
    }
    return to;
  }
  for (int64_t k = 0; k < n; k += 2) { /* of an odd number the last has room beside it, and none in an f16 group */
    const uint8_t *p = w + (k0 + k) * 32;
    if (format == ZL_FMT_F16) {
      zl_store(to + 16 * k, zl_load_half(p));
      if (k + 1 < n) zl_store(to + 16 * k + 16, zl_load_half(p + 32));
    } else {
      const v16u pair = (v16u)zl_load_bytes(p);
      zl_store(to + 16 * k, (v16f)(pair << 16));
      zl_store(to + 16 * k + 16, (v16f)(pair & 0xffff0000u));
    }
  }
  return to;
}

/* even[m], odd[m] += the columns for MT tokens.  No load may move up past the column before it: the compiler would take
 * two at once and keep sums in memory. */
ZL_KERNEL void zl_span_rows(int MT, const float *x, int64_t stride, const float *w, int64_t columns, v16f *even,
                            v16f *odd) {
  for (int64_t h = 0; h < 2; h++) {
    v16f acc[6], *sums = h ? odd : even;
    ZL_UNROLL
    for (int m = 0; m < MT; m++) acc[m] = sums[m];
    ZL_NO_UNROLL
    for (int64_t k = h; k < columns; k += 2) {
      const v16f column = zl_load(w + 16 * k);
      ZL_UNROLL
      for (int m = 0; m < MT; m++) acc[m] = zl_fma(column, zl_set(x[m * stride + k]), acc[m]);
      __asm__ volatile("" ::: "memory");
    }
    ZL_UNROLL
    for (int m = 0; m < MT; m++) sums[m] = acc[m];
  }
}

/* Functions of their own: nothing else is live in them, and all kernels share them. */
#define ZL_SPAN_ROWS(MT)                                                                                            \
  static __attribute__((noinline, unused)) void zl_span_rows_##MT(const float *x, int64_t stride, const float *w,   \
                                                                  int64_t columns, v16f *even, v16f *odd) {         \
    zl_span_rows(MT, x, stride, w, columns, even, odd);                                                             \
  }
ZL_SPAN_ROWS(6)
ZL_SPAN_ROWS(4)
ZL_SPAN_ROWS(2)
ZL_SPAN_ROWS(1)

ZL_KERNEL void zl_dot_spans(int format, int64_t n, const float *x, int64_t K, const uint8_t *w, v16f *acc) {
  const int64_t stride = zl_padded_k(K);
  _Alignas(64) float span[ZL_SPAN_COLUMNS * 16];
  v16f even[ZL_MANY], odd[ZL_MANY];
  for (int64_t m = 0; m < n; m++) even[m] = odd[m] = zl_set(0.0f);
  for (int64_t k0 = 0; k0 < K; k0 += ZL_SPAN_COLUMNS) {
    const int64_t columns = K - k0 < ZL_SPAN_COLUMNS ? K - k0 : ZL_SPAN_COLUMNS;
    const float *p = zl_float_columns(format, w, k0, columns, span);
    int64_t m = 0;
    for (; m + 6 <= n; m += 6) zl_span_rows_6(x + m * stride + k0, stride, p, columns, even + m, odd + m);
    if (m + 4 <= n) {
      zl_span_rows_4(x + m * stride + k0, stride, p, columns, even + m, odd + m);
      m += 4;
    }
    if (m + 2 <= n) {
      zl_span_rows_2(x + m * stride + k0, stride, p, columns, even + m, odd + m);
      m += 2;
    }
    if (m < n) zl_span_rows_1(x + m * stride + k0, stride, p, columns, even + m, odd + m);
  }
  for (int64_t m = 0; m < n; m++) acc[m] = even[m] + odd[m];
}
#endif

/* acc[m] = 16 outputs of the group at w for row m of x f32[n, padded K]; MT and n as in ZL_FLOAT_CALLS */
ZL_KERNEL void zl_dot_float(int format, int MT, int64_t n, const float *x, int64_t K, const uint8_t *w, v16f *acc) {
#if !ZL_AVX512
  if (MT == ZL_SPANS) {
    zl_dot_spans(format, n, x, K, w, acc);
    return;
  }
#endif
  (void)n;
  v16f even[8], odd[8];
  ZL_UNROLL
  for (int m = 0; m < MT; m++) even[m] = odd[m] = zl_set(0.0f);
  if (zl_is_plain(format))
    zl_dot_plain(format, MT, x, K, w, even, odd);
  else
    zl_dot_blocks(format, MT, x, K, w, even, odd);
  ZL_UNROLL
  for (int m = 0; m < MT; m++) acc[m] = even[m] + odd[m];
}

/* Tokens prepared at a time: their floats stay in L2 while the weights pass (cpu_rows.scratch_bytes agrees). */
ZL_KERNEL int64_t zl_float_tokens(int64_t K) {
  int64_t n = 65536 / zl_padded_k(K) / 8 * 8;
  return n < 8 ? 8 : n > 64 ? 64 : n;
}

/* CALL(MT, n, first, x, g) for groups begin .. end and all tokens, n at a time; x is the tile's prepared rows.  MT is n, or
 * ZL_SPANS.
 * Every thread prepares all tokens and owns a share of the outputs, so weights are read once per token tile. */
#define ZL_FLOAT_TILES(rows, x, K, kind, begin, end, CALL)                               \
  for (int64_t zl_f = 0; zl_f < (rows); zl_f += zl_float_tokens(K)) {                    \
    const int64_t zl_left = (rows) - zl_f;                                               \
    const int64_t zl_n = zl_left < zl_float_tokens(K) ? zl_left : zl_float_tokens(K);    \
    const float *zl_x = zl_prepare_float(t, x, zl_f, zl_n, K, kind);                     \
    for (int64_t g = (begin); g < (end); g++) {                                          \
      ZL_FLOAT_CALLS(zl_f, zl_n, zl_x, K, g, CALL)                                       \
    }                                                                                    \
  }
#define ZL_FLOAT_CALL(MT, n, first, px, K, g, CALL) CALL(MT, n, (first) + zl_m, (px) + zl_m * zl_padded_k(K), g)
#define ZL_FLOAT_CALLS(first, total, px, K, g, CALL)                        \
  for (int64_t zl_m = 0, zl_rest; (zl_rest = (total) - zl_m) > 0;) {        \
    if (!ZL_AVX512 && zl_rest >= 8) {                                       \
      const int64_t zl_n = zl_rest < ZL_MANY ? zl_rest : ZL_MANY;           \
      ZL_FLOAT_CALL(ZL_SPANS, zl_n, first, px, K, g, CALL);                 \
      zl_m += zl_n;                                                         \
    } else if (ZL_AVX512 && zl_rest >= 8) {                                 \
      ZL_FLOAT_CALL(8, 8, first, px, K, g, CALL);                           \
      zl_m += 8;                                                            \
    } else if (zl_rest >= 4) {                                              \
      ZL_FLOAT_CALL(4, 4, first, px, K, g, CALL);                           \
      zl_m += 4;                                                            \
    } else if (zl_rest >= 2) {                                              \
      ZL_FLOAT_CALL(2, 2, first, px, K, g, CALL);                           \
      zl_m += 2;                                                            \
    } else {                                                                \
      ZL_FLOAT_CALL(1, 1, first, px, K, g, CALL);                           \
      zl_m += 1;                                                            \
    }                                                                       \
  }

ZL_KERNEL void zl_linear_float_tile(int format, int MT, int64_t n, const float *x, int64_t first, int64_t g,
                                    const uint8_t *w, const float *bias, const float *residual, float *out, int64_t N,
                                    int64_t K, int act) {
  v16f acc[ZL_MANY];
  zl_dot_float(format, MT, n, x, K, w + g * zl_group_bytes(format, K), acc);
  if (MT != ZL_SPANS)
    zl_linear_put(MT, acc, first, g, bias, residual, out, N, act);
  else
    for (int64_t m = 0; m < n; m++) zl_linear_put(1, acc + m, first + m, g, bias, residual, out, N, act);
}

ZL_KERNEL void zl_linear_float_all(const zl_task *t, int64_t rows, const float *x, const uint8_t *w,
                                   const float *bias, const float *residual, float *out, int64_t N, int64_t K,
                                   int act, int format, int kind) {
  int64_t begin, end;
  zl_share(t, (N + 15) / 16, &begin, &end);
#define ZL_CALL(MT, n, first, px, g) \
  zl_linear_float_tile(format, MT, n, px, first, g, w, bias, residual, out, N, K, act)
  ZL_FLOAT_TILES(rows, x, K, kind, begin, end, ZL_CALL)
#undef ZL_CALL
}

/* x f32[T,K], W rows16 [N,K], bias f32[N] or NULL -> out f32[T,N] */
ZL_KERNEL void zl_linear_float(const zl_task *t, int64_t rows, const float *x, const uint8_t *w, const float *bias,
                               float *out, int64_t N, int64_t K, int format, int kind) {
  zl_linear_float_all(t, rows, x, w, bias, NULL, out, N, K, ZL_ACT_NONE, format, kind);
}

/* x, W, residual f32[T,N], bias? -> out f32[T,N] = residual + linear; out may be residual */
ZL_KERNEL void zl_linear_add_float(const zl_task *t, int64_t rows, const float *x, const uint8_t *w,
                                   const float *residual, const float *bias, float *out, int64_t N, int64_t K,
                                   int format, int kind) {
  zl_linear_float_all(t, rows, x, w, bias, residual, out, N, K, ZL_ACT_NONE, format, kind);
}

/* x, W, bias? -> out f32[T,N] = act(linear) */
ZL_KERNEL void zl_act_linear_float(const zl_task *t, int64_t rows, const float *x, const uint8_t *w,
                                   const float *bias, float *out, int64_t N, int64_t K, int activation, int format,
                                   int kind) {
  zl_linear_float_all(t, rows, x, w, bias, NULL, out, N, K, activation, format, kind);
}

ZL_KERNEL void zl_gated_float_tile(int format, int MT, int64_t n, const float *x, int64_t g, const uint8_t *gate,
                                   const uint8_t *up, const float *bias_gate, const float *bias_up, int64_t N,
                                   int64_t K, int act, v16f *h) {
  v16f a[ZL_MANY], u[ZL_MANY];
  const int64_t at = g * zl_group_bytes(format, K);
  zl_dot_float(format, MT, n, x, K, gate + at, a);
  zl_dot_float(format, MT, n, x, K, up + at, u);
  if (MT != ZL_SPANS)
    zl_gated_join(MT, a, u, g, bias_gate, bias_up, N, act);
  else
    for (int64_t m = 0; m < n; m++) zl_gated_join(1, a + m, u + m, g, bias_gate, bias_up, N, act);
  for (int64_t m = 0; m < n; m++) h[m] = a[m];
}

/* x, Wgate, Wup rows16 [N,K], bias_gate?, bias_up? -> out f32[T,N] = act(gate) * up */
ZL_KERNEL void zl_gated_linear_float(const zl_task *t, int64_t rows, const float *x, const uint8_t *gate,
                                     const uint8_t *up, const float *bias_gate, const float *bias_up, float *out,
                                     int64_t N, int64_t K, int activation, int format, int kind) {
  int64_t begin, end;
  zl_share(t, (N + 15) / 16, &begin, &end);
#define ZL_CALL(MT, n_tokens, first, px, g)                                                                     \
  do {                                                                                                          \
    v16f h[ZL_MANY];                                                                                            \
    const int64_t n = N - 16 * g < 16 ? N - 16 * g : 16;                                                        \
    zl_gated_float_tile(format, MT, n_tokens, px, g, gate, up, bias_gate, bias_up, N, K, activation, h);        \
    for (int64_t m = 0; m < (n_tokens); m++) zl_store_n(out + ((first) + m) * N + 16 * g, h[m], n);             \
  } while (0)
  ZL_FLOAT_TILES(rows, x, K, kind, begin, end, ZL_CALL)
#undef ZL_CALL
}

/* the same, N a multiple of 32 -> q i8[T,N], scale f32[T,N/32], sums f32[T,N/16] */
ZL_KERNEL void zl_gated_linear_quantize_float(const zl_task *t, int64_t rows, const float *x, const uint8_t *gate,
                                              const uint8_t *up, const float *bias_gate, const float *bias_up,
                                              int8_t *out_q, float *out_scale, float *out_sums, int64_t N, int64_t K,
                                              int activation, int format, int kind) {
  int64_t begin, end;
  zl_share(t, N / 32, &begin, &end);
#define ZL_CALL(MT, n, first, px, g)                                                                            \
  do {                                                                                                          \
    v16f h[2][ZL_MANY];                                                                                         \
    for (int64_t s = 0; s < 2; s++)                                                                             \
      zl_gated_float_tile(format, MT, n, px, 2 * g + s, gate, up, bias_gate, bias_up, N, K, activation, h[s]);  \
    int64_t m = 0;                                                                                              \
    for (; m + 8 <= (n); m += 8) zl_quantize32_rows(8, h[0] + m, h[1] + m, (first) + m, g, N, out_q, out_scale, out_sums); \
    for (; m < (n); m++) zl_quantize32_rows(1, h[0] + m, h[1] + m, (first) + m, g, N, out_q, out_scale, out_sums);         \
  } while (0)
  ZL_FLOAT_TILES(rows, x, K, kind, begin, end, ZL_CALL)
#undef ZL_CALL
}

#endif
