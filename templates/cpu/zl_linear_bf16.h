/* Matrix products of bf16 weights with activations rounded to bf16: the same five operators.
 *
 * In: zl_bf16_12.h, zl_math.h, zl_quantize.h, zl_streams.h, zl_tokens.h (ZL_TILE_BYTES).  Out: zl_dot_bf16, the kernels.
 * Next file: zl_qkv.h.
 *
 * One instruction (vdpbf16ps) adds the products of two columns to 16 outputs; a rows16 block of BF16 is its operand as
 * it lies in the file.  zl_dot_pair says in which order, so an output is one chain of multiply-adds over K: the same
 * for every register tile, thread count and instruction set (denormals apart, which the instruction takes for zero).
 *
 * Work is split into (token tile, group of 16 outputs) items.  A token tile is rounded once, into this
 * thread's scratch (cpu_rows.scratch_bytes), and stays in L2 while the weights stream past.  A register tile is two
 * groups by ZL_BF16_ROWS tokens, each broadcast activation serving two products; without AVX-512 one group.
 */
#ifndef ZL_LINEAR_BF16_H
#define ZL_LINEAR_BF16_H
#include "zl_bf16_12.h"
#include "zl_math.h"
#include "zl_quantize.h"
#include "zl_streams.h"
#include "zl_tokens.h"

#if ZL_AVX512
#define ZL_BF16_ROWS 8 /* tokens in a register tile; with two groups, 16 of 32 registers hold sums */
#define ZL_BF16_TURNS(n) (((n) + 7) / 8)
#else
#define ZL_BF16_ROWS 6 /* 12 of 16 for one group at a time, and chains enough that none waits for itself */
#define ZL_BF16_TURNS(n) ((n) / 6 + ((n) % 6 >= 4) + ((n) % 6 % 4 >= 2) + (n) % 2) /* and 4, 2, 1 tokens */
#endif

/* Pairs from one token to the next: an odd multiple of 16, so that the tokens of a register tile do not meet in the
 * same cache sets when K is a power of two. */
ZL_KERNEL int64_t zl_pair_stride(int64_t K) { return ((K + 31) / 32 | 1) * 16; }

/* The most tokens of a tile: within half of ZL_TILE_BYTES (these weights take twice the room), or all of it where each
 * tile has to take its weights apart first, 32 to 256, a multiple of 8. */
ZL_KERNEL int64_t zl_bf16_tokens(int format, int64_t K) {
  const int64_t bytes = format == ZL_FMT_BF16_12 ? ZL_TILE_BYTES : ZL_TILE_BYTES / 2;
  const int64_t most = bytes / ((K + 1) / 2 * (int64_t)sizeof(zl_pair)) / 8 * 8;
  return most < 32 ? 32 : most > 256 ? 256 : most;
}

/* First token of tile i: tiles differ by 8 tokens at most, so that threads with as many tiles have as much to do. */
ZL_KERNEL int64_t zl_bf16_first(int64_t i, int64_t tiles, int64_t rows) {
  const int64_t first = (rows + 7) / 8 * i / tiles * 8;
  return first < rows ? first : rows;
}

/* x f32[T, K], tokens first .. first + n -> scratch pairs[n, stride]; columns past K are zero */
ZL_KERNEL const zl_pair *zl_prepare_bf16(const zl_task *t, const float *x, int64_t first, int64_t n, int64_t K) {
  zl_pair *to = (zl_pair *)(void *)t->scratch;
  for (int64_t m = 0; m < n; m++) {
    const float *from = x + (first + m) * K;
    zl_pair *row = to + m * zl_pair_stride(K);
    int64_t k = 0;
    for (; k + 32 <= K; k += 32) zl_store_pairs(row + k / 2, zl_load(from + k), zl_load(from + k + 16));
    if (k < K) {
      const int64_t left = K - k;
      zl_store_pairs(row + k / 2, zl_load_n(from + k, left),
                     left > 16 ? zl_load_n(from + k + 16, left - 16) : zl_set(0.0f));
    }
  }
  return to;
}

/* Which of its token tile's register tiles one is.  One of many asks for its share of the groups that come next, so
 * that the first of them does not wait for memory while the others find the weights in L2.  The only one asks as the
 * target says (zl_asks).  With `room` the first one puts its groups there in 16 bits, where their form is shorter, for all. */
typedef struct zl_turn {
  int64_t number, of;
  char *room;
} zl_turn;

/* The same turn for groups that come after others that have room. */
ZL_KERNEL zl_turn zl_turn_after(zl_turn turn, int64_t groups, int64_t K) {
  if (turn.room) turn.room += groups * zl_group_bytes(ZL_FMT_BF16, K);
  return turn;
}

ZL_KERNEL void zl_no_sums(int NG, int MT, v16f acc[][8]) {
  ZL_UNROLL
  for (int s = 0; s < NG; s++) {
    ZL_UNROLL
    for (int m = 0; m < MT; m++) acc[s][m] = zl_set(0.0f);
  }
}

#if !ZL_AVX512
/* zl_dot_16 of one group for ZL_BF16_ROWS tokens.  Their sums leave registers for one column of weights at a time, so each
 * pair is loaded twice, no load may move up past the column before it, and the code is a function of its own, in which
 * nothing else is live. */
static __attribute__((noinline, unused)) void zl_dot_16_rows(const zl_pair *x, int64_t stride, int64_t pairs,
                                                             const uint8_t *w, const uint8_t *ask, int64_t asked,
                                                             int64_t step, v16f *sums) {
  v16f acc[ZL_BF16_ROWS];
  ZL_UNROLL
  for (int m = 0; m < ZL_BF16_ROWS; m++) acc[m] = zl_set(0.0f);
  ZL_NO_UNROLL
  for (int64_t k = 0; k < pairs; k++, x++, w += 64, asked += step) {
    if (ask) __builtin_prefetch(ask + (asked >> 8), 0, 3);
    const v16f odd = (v16f)((v16u)zl_load_bytes(w) & 0xffff0000u);
    ZL_UNROLL
    for (int m = 0; m < ZL_BF16_ROWS; m++) acc[m] = zl_fma(odd, zl_set(x[m * stride].odd), acc[m]);
    __asm__ volatile("" ::: "memory");
    const v16f even = (v16f)((v16u)zl_load_bytes(w) << 16);
    ZL_UNROLL
    for (int m = 0; m < ZL_BF16_ROWS; m++) acc[m] = zl_fma(even, zl_set(x[m * stride].even), acc[m]);
    __asm__ volatile("" ::: "memory");
  }
  ZL_UNROLL
  for (int m = 0; m < ZL_BF16_ROWS; m++) sums[m] = acc[m];
}
#endif

/* One group of K columns in 16 bits at w[s], while `bytes` of what follows are asked for from ask[s] on. */
ZL_KERNEL void zl_dot_16(int NG, int MT, const zl_pair *x, int64_t K, const uint8_t *const *w,
                         const uint8_t *const *ask, int64_t bytes, zl_turn turn, v16f acc[][8]) {
  const int64_t stride = zl_pair_stride(K), pairs = (K + 1) / 2;
  const int64_t step = bytes * 256 / (pairs * turn.of); /* 256ths of a byte, of a line at most */
  int64_t asked = turn.number * pairs * step;
#if !ZL_AVX512
  if (MT == ZL_BF16_ROWS) {
    zl_dot_16_rows(x, stride, pairs, w[0], turn.of > 1 ? ask[0] : NULL, asked, step, acc[0]);
    return;
  }
#endif
  zl_no_sums(NG, MT, acc);
  ZL_NO_UNROLL
  for (int64_t k = 0; k < pairs; k++, asked += step) {
    zl_pairs16 p[2];
    ZL_UNROLL
    for (int s = 0; s < NG; s++) {
      p[s] = zl_load_pairs16(w[s] + 64 * k);
      if (turn.of > 1)
        __builtin_prefetch(ask[s] + (asked >> 8), 0, 3);
      else if (MT <= 2)
        zl_ask_ahead(zl_asks(MT), w[s] + 64 * k, 64);
    }
    ZL_UNROLL
    for (int m = 0; m < MT; m++) {
      ZL_UNROLL
      for (int s = 0; s < NG; s++) acc[s][m] = zl_dot_pair(acc[s][m], p[s], x[m * stride + k]);
    }
  }
}

/* The same of a group in 12 bits: four pairs of columns at a time, in the same order. */
ZL_KERNEL void zl_dot_12(int NG, int MT, const zl_pair *x, int64_t K, const uint8_t *const *w,
                         const uint8_t *const *ask, int64_t bytes, zl_turn turn, v16f acc[][8]) {
  const int64_t stride = zl_pair_stride(K), blocks = K / ZL_12_COLUMNS;
  const int64_t step = bytes * 256 / (blocks * turn.of); /* 256ths of a byte */
  int64_t asked = turn.number * blocks * step;
  zl_12_reader r[2];
  for (int s = 0; s < NG; s++) r[s] = zl_12_begin(w[s], K);
  zl_no_sums(NG, MT, acc);
  ZL_NO_UNROLL
  for (int64_t i = 0; i < blocks; i++, asked += step) {
    v64u8 p[2][4];
    ZL_UNROLL
    for (int s = 0; s < NG; s++) {
      if (turn.of == 1) zl_12_ask(&r[s], MT, i);
      zl_12_load(&r[s], i, p[s]);
      if (turn.of > 1) {
        __builtin_prefetch(ask[s] + (asked >> 8), 0, 3);
        if (step > 64 * 256) __builtin_prefetch(ask[s] + (asked >> 8) + 64, 0, 3);
      }
    }
    ZL_UNROLL
    for (int j = 0; j < 4; j++) {
      ZL_UNROLL
      for (int m = 0; m < MT; m++) {
        ZL_UNROLL
        for (int s = 0; s < NG; s++)
          acc[s][m] = zl_dot_pair(acc[s][m], zl_pairs_of(p[s][j]), x[m * stride + 4 * i + j]);
      }
    }
  }
}

ZL_KERNEL void zl_dot_groups(int format, int NG, int MT, const zl_pair *x, int64_t K, const uint8_t *const *w,
                             const uint8_t *const *ask, zl_turn turn, v16f acc[][8]) {
  const int64_t bytes = zl_group_bytes(format, K);
  if (format != ZL_FMT_BF16_12) {
    zl_dot_16(NG, MT, x, K, w, ask, bytes, turn, acc);
  } else if (!turn.room) {
    zl_dot_12(NG, MT, x, K, w, ask, bytes, turn, acc);
  } else {
    const int64_t whole = zl_group_bytes(ZL_FMT_BF16, K);
    const uint8_t *const in_room[2] = {(uint8_t *)turn.room, (uint8_t *)turn.room + whole};
    if (turn.number == 0) {
      for (int s = 0; s < NG; s++) zl_12_unpack(w[s], K, turn.room + s * whole);
    }
    zl_dot_16(NG, MT, x, K, in_room, ask, bytes, turn, acc);
  }
}

/* acc[s][m] = 16 outputs of group s for token m of the pairs x, NG is 1 or 2; w[s]: a group of rows16, BF16 or BF16_12,
 * `next` bytes before the group that comes next */
ZL_KERNEL void zl_dot_bf16(int format, int NG, int MT, const zl_pair *x, int64_t K, const uint8_t *const *w,
                           int64_t next, zl_turn turn, v16f acc[][8]) {
  const uint8_t *const ask[2] = {w[0] + next, w[NG - 1] + next};
  if (NG == 2 && MT > 2 && !ZL_AVX512) { /* not registers enough for both */
    zl_dot_groups(format, 1, MT, x, K, w, ask, turn, acc);
    zl_dot_groups(format, 1, MT, x, K, w + 1, ask + 1, zl_turn_after(turn, 1, K), acc + 1);
  } else {
    zl_dot_groups(format, NG, MT, x, K, w, ask, turn, acc);
  }
}

/* Scratch after the token tile, for some groups in 16 bits; NULL where they are so already, or too many for L2. */
ZL_KERNEL char *zl_bf16_room(const zl_task *t, int format, int64_t groups, int64_t K) {
  if (format != ZL_FMT_BF16_12 || (groups > 2 && groups * 32 * K > ZL_TILE_BYTES)) return NULL;
  return t->scratch + zl_bf16_tokens(format, K) * zl_pair_stride(K) * (int64_t)sizeof(zl_pair);
}

/* CALL(NG, MT, row, px, turn, item) for all register tiles of this thread's share: items item .. item + NG for tokens
 * row .. row + MT, whose pairs begin at px.  Up to `most` items (1 or 2) are taken together; for one token never,
 * because neighbouring groups are read faster as one stream (far ones: ZL_BF16_HALVES).  room: zl_turn's, for more than
 * one register tile. */
#define ZL_BF16_TILES(format, rows, x, K, items, most, room, CALL)                                        \
  do {                                                                                            \
    if ((rows) <= 0) break;                                                                       \
    const int64_t zl_tiles = ((rows) + zl_bf16_tokens(format, K) - 1) / zl_bf16_tokens(format, K);                \
    const zl_pair *zl_x = NULL;                                                                   \
    int64_t zl_at = -1;                                                                           \
    zl_deal zl_d = {zl_tiles * (items), 0, 0, 0};                                                 \
    while (zl_d.next < zl_d.end || zl_deal_more(t, &zl_d)) {                                      \
      const int64_t zl_t = zl_d.next / (items), zl_item = zl_d.next % (items);                    \
      const int64_t zl_t0 = zl_bf16_first(zl_t, zl_tiles, rows);                                  \
      const int64_t zl_t1 = zl_bf16_first(zl_t + 1, zl_tiles, rows);                              \
      const int zl_two = (most) > 1 && (rows) > 1 && zl_item + 1 < (items);                       \
      const int zl_both = zl_two && zl_d.next + 1 < zl_d.end;                                     \
      if (zl_t0 != zl_at) zl_x = zl_prepare_bf16(t, x, zl_at = zl_t0, zl_t1 - zl_t0, K);          \
      if (zl_both) {                                                                              \
        ZL_BF16_ROW_TILES(2, zl_x, K, zl_t0, zl_t1, zl_item, room, CALL)                          \
      } else {                                                                                    \
        ZL_BF16_ROW_TILES(1, zl_x, K, zl_t0, zl_t1, zl_item, room, CALL)                          \
      }                                                                                           \
      zl_d.next += 1 + zl_both;                                                                   \
    }                                                                                             \
  } while (0)
#define ZL_BF16_ROW_TILES(NG, px, K, t0, t1, item, room, CALL)                           \
  for (int64_t zl_m = (t0), zl_left, zl_i = 0; (zl_left = (t1) - zl_m) > 0; zl_i++) {    \
    const zl_pair *zl_p = (px) + (zl_m - (t0)) * zl_pair_stride(K);                      \
    const int64_t zl_of = ZL_BF16_TURNS((t1) - (t0));                                    \
    const int zl_put = ZL_AVX512 ? zl_of > 1 : (t1) - (t0) >= 5;                         \
    const int64_t zl_number = ZL_AVX512 ? (zl_m - (t0)) / ZL_BF16_ROWS : zl_i;           \
    const zl_turn zl_turn_ = {zl_number, zl_of, zl_put ? (room) : NULL};                 \
    if (zl_left >= ZL_BF16_ROWS) {                                                       \
      CALL(NG, ZL_BF16_ROWS, zl_m, zl_p, zl_turn_, item);                                \
      zl_m += ZL_BF16_ROWS;                                                              \
    } else if (zl_left >= 4) {                                                           \
      CALL(NG, 4, zl_m, zl_p, zl_turn_, item);                                           \
      zl_m += 4;                                                                         \
    } else if (zl_left >= 2) {                                                           \
      CALL(NG, 2, zl_m, zl_p, zl_turn_, item);                                           \
      zl_m += 2;                                                                         \
    } else {                                                                             \
      CALL(NG, 1, zl_m, zl_p, zl_turn_, item);                                           \
      zl_m += 1;                                                                         \
    }                                                                                    \
  }

/* CALL as above for the one row or two of a call whose items are paired: items item and item + half, NG is 2, or the last
 * of the first half alone. */
#define ZL_BF16_HALVES(rows, x, K, items, half, CALL)                \
  do {                                                               \
    const zl_pair *zl_x = zl_prepare_bf16(t, x, 0, rows, K);         \
    const zl_turn zl_only = {0, 1, NULL};                            \
    zl_deal zl_d = {half, 0, 0, 0};                                  \
    int64_t zl_i;                                                    \
    while (zl_deal_item(t, &zl_d, &zl_i)) {                          \
      if (zl_other(half, zl_i, items) >= 0)                          \
        ZL_FEW_ROWS(rows, ZL_BF16_BOTH, CALL, zl_x, zl_only, zl_i);  \
      else                                                           \
        ZL_FEW_ROWS(rows, ZL_BF16_ALONE, CALL, zl_x, zl_only, zl_i); \
    }                                                                \
  } while (0)
#define ZL_BF16_BOTH(MT, CALL, px, turn, item) CALL(2, MT, 0, px, turn, item)
#define ZL_BF16_ALONE(MT, CALL, px, turn, item) CALL(1, MT, 0, px, turn, item)

/* Groups g and, where NG is 2, g + apart. */
ZL_KERNEL void zl_linear_bf16_tile(int format, int NG, int MT, const zl_pair *x, zl_turn turn, int64_t first, int64_t g,
                                   int64_t apart, const uint8_t *w, const float *bias, const float *residual,
                                   float *out, int64_t N, int64_t K, int act) {
  v16f acc[2][8];
  const int64_t bytes = zl_group_bytes(format, K);
  const uint8_t *const group[2] = {w + g * bytes, w + (g + apart) * bytes};
  zl_dot_bf16(format, NG, MT, x, K, group, NG * bytes, turn, acc);
  ZL_UNROLL
  for (int s = 0; s < NG; s++) {
    const int64_t o = 16 * (g + s * apart), n = N - o < 16 ? N - o : 16;
    v16f c = bias ? zl_load_n(bias + o, n) : zl_set(0.0f);
    ZL_UNROLL
    for (int m = 0; m < MT; m++) {
      const int64_t at = (first + m) * N + o;
      v16f y = zl_activate(act, bias ? acc[s][m] + c : acc[s][m]);
      if (residual) y = zl_load_n(residual + at, n) + y;
      zl_store_n(out + at, y, n);
    }
  }
}

ZL_KERNEL void zl_linear_bf16_all(const zl_task *t, int64_t rows, const float *x, const uint8_t *w, const float *bias,
                                  const float *residual, float *out, int64_t N, int64_t K, int act, int format) {
  const int64_t G = (N + 15) / 16, half = zl_first_half(t->n_threads, rows, G);
#define ZL_CALL(NG, MT, row, px, turn, g) \
  zl_linear_bf16_tile(format, NG, MT, px, turn, row, g, half ? half : 1, w, bias, residual, out, N, K, act)
  if (half) {
    ZL_BF16_HALVES(rows, x, K, G, half, ZL_CALL);
    return;
  }
  ZL_BF16_TILES(format, rows, x, K, G, 2, zl_bf16_room(t, format, 2, K), ZL_CALL);
#undef ZL_CALL
}

/* x f32[T,K], W rows16 BF16 or BF16_12 [N,K], bias f32[N] or NULL -> out f32[T,N] */
ZL_KERNEL void zl_linear_bf16(const zl_task *t, int64_t rows, const float *x, const uint8_t *w, const float *bias,
                              float *out, int64_t N, int64_t K, int format) {
  zl_linear_bf16_all(t, rows, x, w, bias, NULL, out, N, K, ZL_ACT_NONE, format);
}

/* x, W, residual f32[T,N], bias? -> out f32[T,N] = residual + linear; out may be residual */
ZL_KERNEL void zl_linear_add_bf16(const zl_task *t, int64_t rows, const float *x, const uint8_t *w,
                                  const float *residual, const float *bias, float *out, int64_t N, int64_t K,
                                  int format) {
  zl_linear_bf16_all(t, rows, x, w, bias, residual, out, N, K, ZL_ACT_NONE, format);
}

/* x, W, bias? -> out f32[T,N] = act(linear) */
ZL_KERNEL void zl_act_linear_bf16(const zl_task *t, int64_t rows, const float *x, const uint8_t *w, const float *bias,
                                  float *out, int64_t N, int64_t K, int activation, int format) {
  zl_linear_bf16_all(t, rows, x, w, bias, NULL, out, N, K, activation, format);
}

/* h[m] = act(gate + bias) * (up + bias) for 16 outputs of group g */
ZL_KERNEL void zl_gated_bf16_tile(int format, int MT, const zl_pair *x, zl_turn turn, int64_t g, const uint8_t *gate,
                                  const uint8_t *up, const float *bias_gate, const float *bias_up, int64_t N,
                                  int64_t K, int act, v16f *h) {
  v16f acc[2][8];
  const int64_t n = N - 16 * g < 16 ? N - 16 * g : 16, bytes = zl_group_bytes(format, K);
  const uint8_t *const group[2] = {gate + g * bytes, up + g * bytes};
  zl_dot_bf16(format, 2, MT, x, K, group, bytes, turn, acc);
  ZL_UNROLL
  for (int m = 0; m < MT; m++) {
    v16f a = acc[0][m], b = acc[1][m];
    if (bias_gate) a = a + zl_load_n(bias_gate + 16 * g, n);
    if (bias_up) b = b + zl_load_n(bias_up + 16 * g, n);
    h[m] = zl_act_times(act, a, b);
  }
}

/* x, Wgate, Wup rows16 BF16 or BF16_12 [N,K], bias_gate?, bias_up? -> out f32[T,N] = act(gate) * up */
ZL_KERNEL void zl_gated_linear_bf16(const zl_task *t, int64_t rows, const float *x, const uint8_t *gate,
                                    const uint8_t *up, const float *bias_gate, const float *bias_up, float *out,
                                    int64_t N, int64_t K, int activation, int format) {
#define ZL_CALL(NG, MT, row, px, turn, g)                                                   \
  do {                                                                                      \
    v16f h[8];                                                                              \
    const int64_t n = N - 16 * (g) < 16 ? N - 16 * (g) : 16;                                \
    zl_gated_bf16_tile(format, MT, px, turn, g, gate, up, bias_gate, bias_up, N, K, activation, h); \
    for (int m = 0; m < MT; m++) zl_store_n(out + ((row) + m) * N + 16 * (g), h[m], n);     \
  } while (0)
  ZL_BF16_TILES(format, rows, x, K, (N + 15) / 16, 1, zl_bf16_room(t, format, 2, K), ZL_CALL);
#undef ZL_CALL
}

/* the same, N a multiple of 32 -> q i8[T,N], scale f32[T,N/32], sums f32[T,N/16] */
ZL_KERNEL void zl_gated_linear_quantize_bf16(const zl_task *t, int64_t rows, const float *x, const uint8_t *gate,
                                             const uint8_t *up, const float *bias_gate, const float *bias_up,
                                             int8_t *out_q, float *out_scale, float *out_sums, int64_t N, int64_t K,
                                             int activation, int format) {
#define ZL_CALL(NG, MT, row, px, turn, g)                                                                  \
  do {                                                                                                     \
    v16f h[2][8];                                                                                          \
    for (int64_t s = 0; s < 2; s++)                                                                        \
      zl_gated_bf16_tile(format, MT, px, zl_turn_after(turn, 2 * s, K), 2 * (g) + s, gate, up, bias_gate,  \
                         bias_up, N, K, activation, h[s]);                                                 \
    zl_quantize32_rows(MT, h[0], h[1], row, g, N, out_q, out_scale, out_sums);                             \
  } while (0)
  ZL_BF16_TILES(format, rows, x, K, N / 32, 1, zl_bf16_room(t, format, 4, K), ZL_CALL);
#undef ZL_CALL
}

#endif
