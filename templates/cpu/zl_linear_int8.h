/* Matrix products with int8 activations: Linear, LinearAdd, ActLinear, GatedLinear and its quantizing form.
 *
 * In: zl_dot_int8.h, zl_outputs.h.  Out: zl_walk, the kernels.  Next file: zl_linear_float.h.
 *
 * Work is split into (token tile, group of 16 outputs, piece of the tile) items, in this order (zl_tokens.h says why), and
 * meanwhile the next group's weights are asked for (ZL_ASK_TOKENS).  Pieces are what threads share out, so that none waits
 * long for another at a call's end.
 */
#ifndef ZL_LINEAR_INT8_H
#define ZL_LINEAR_INT8_H
#include "zl_dot_int8.h"
#include "zl_outputs.h"

/* The walk of a thread through its items of a call: a piece of a tile of tokens for one of G runs of outputs at a time. */
typedef struct zl_walk {
  zl_deal deal;
  int64_t rows, G, tile;
  int64_t pieces, tokens; /* of a tile, of a piece */
  int64_t tile0, tile1; /* tokens of the item's tile */
  int64_t t0, t1, g;    /* the item: tokens t0 .. t1 of them, run g */
  int64_t half, other;  /* zl_first_half, and the run that is taken together with g, -1: none */
  int64_t until;        /* tokens t0 .. until go through tile products */
  int64_t words_at;     /* the tile and the format that a bundle's words are for */
  int format;
  _Alignas(64) zl_tile_word words[ZL_TILE_BLOCKS];
} zl_walk;

/* half: zl_first_half of the runs, 0 for a call that takes them one by one, as all do for more rows */
ZL_KERNEL void zl_walk_begin(zl_walk *w, int64_t rows, int64_t K, int64_t G, int64_t half) {
  const int64_t many = zl_many(K);
  w->rows = rows;
  w->G = G;
  w->tile = rows > 0 ? zl_tile_tokens(rows, K) : 1;
  /* matrix tiles unpack weights once for a whole tile */
  w->pieces = ZL_TILES ? 1 : (w->tile + ZL_PIECE_TOKENS - 1) / ZL_PIECE_TOKENS;
  w->tokens = (w->tile + w->pieces - 1) / w->pieces;
  if (w->pieces > 1) w->tokens = (w->tokens + many - 1) / many * many;
  w->half = half;
  w->deal = (zl_deal){half ? half : (rows + w->tile - 1) / w->tile * G * w->pieces, 0, 0, 0};
  w->words_at = -1;
  w->format = -1;
  zl_amx_begin(rows);
}

/* The next item; 0, and the walk is over, where there is none. */
ZL_KERNEL int zl_walk_item(const zl_task *t, zl_walk *w) {
  do { /* a short tile's last pieces are empty */
    int64_t i;
    if (!zl_deal_item(t, &w->deal, &i)) {
      zl_amx_end(w->rows);
      return 0;
    }
    const int64_t run = i / w->pieces;
    w->g = run % w->G;
    w->other = zl_other(w->half, run, w->G);
    w->tile0 = run / w->G * w->tile;
    w->tile1 = w->tile0 + w->tile < w->rows ? w->tile0 + w->tile : w->rows;
    w->t0 = w->tile0 + i % w->pieces * w->tokens;
    w->t1 = w->t0 + w->tokens < w->tile1 ? w->t0 + w->tokens : w->tile1;
  } while (w->t0 >= w->t1);
  w->until = zl_amx_until(w->t0, w->t1);
  return 1;
}

/* The words of the item's tile, for weights of this format, if they are not at hand. */
ZL_KERNEL void zl_walk_words(zl_walk *w, int format, zl_bundle *a, int64_t K) {
  a->words = w->words; /* said each time: that it is not NULL is a constant of the products' code */
  a->words_from = w->tile0;
  if (w->words_at == w->tile0 && w->format == format) return;
  zl_tile_words(w->format = format, a, w->words_at = w->tile0, w->tile1, K, w->words);
}

/* What the products of tokens first .. first + n with part number `part` of `parts` of a run ask for: their share of the
 * next run's `bytes` at `next`.  KB: their blocks. */
ZL_KERNEL zl_next zl_walk_next(const zl_walk *w, const uint8_t *next, int64_t bytes, int64_t first, int64_t n, int64_t part,
                               int64_t parts, int64_t KB) {
  const int64_t tokens = w->tile1 - w->tile0, done = (first - w->tile0) * parts + n * part;
  if (!ZL_ASK_TOKENS || tokens < ZL_ASK_TOKENS || w->g + 1 >= w->G) return ZL_NOTHING_NEXT;
  return (zl_next){next + done * bytes / (tokens * parts), n * bytes * 256 / (tokens * parts * KB)};
}

ZL_KERNEL void zl_linear_int8_tile(int format, int MT, int64_t n, zl_bundle a, int64_t first, int64_t g,
                                   const uint8_t *w, zl_next next, const float *bias, const float *residual,
                                   float *out, int64_t N, int64_t K, int act) {
  v16f acc[ZL_MANY];
  zl_ask_outputs(n, residual ? residual : out, first, g, N);
  zl_dot_int8(format, MT, n, a, first, K, w + g * zl_group_bytes(format, K), next, acc);
  for (int64_t m = 0; m < n; m += MT) zl_linear_put(MT, acc + m, first + m, g, bias, residual, out, N, act);
}

/* All MT rows of groups g and other. */
ZL_KERNEL void zl_linear_int8_pair(int MT, int format, zl_bundle a, int64_t g, int64_t other, const uint8_t *w,
                                   const float *bias, const float *residual, float *out, int64_t N, int64_t K,
                                   int act) {
  v16f acc[2][ZL_STREAM_ROWS];
  const int64_t bytes = zl_group_bytes(format, K);
  zl_dot_int8_two(format, format, MT, a, 0, K, w + g * bytes, w + other * bytes, acc[0], acc[1]);
  zl_linear_put(MT, acc[0], 0, g, bias, residual, out, N, act);
  zl_linear_put(MT, acc[1], 0, other, bias, residual, out, N, act);
}

/* Tokens t0 .. until, which go through tile products. */
ZL_KERNEL void zl_linear_amx_tile(int format, zl_bundle a, int64_t t0, int64_t until, int64_t g, const uint8_t *w,
                                  const float *bias, const float *residual, float *out, int64_t N, int64_t K, int act) {
  _Alignas(64) float sums[ZL_TILE_TOKENS * 16];
  zl_dot_amx(format, a, t0, until, K, w + g * zl_group_bytes(format, K), sums, 16);
  for (int64_t t = t0; t < until; t++) {
    const v16f acc = zl_load(sums + 16 * (t - t0));
    zl_linear_put(1, &acc, t, g, bias, residual, out, N, act);
  }
}

ZL_KERNEL void zl_linear_int8_all(const zl_task *t, int64_t rows, zl_bundle a, const uint8_t *w, const float *bias,
                                  const float *residual, float *out, int64_t N, int64_t K, int act, int format) {
  zl_walk walk;
  zl_walk_begin(&walk, rows, K, (N + 15) / 16, zl_first_half(t->n_threads, rows, (N + 15) / 16));
  while (zl_walk_item(t, &walk)) {
    const int64_t g = walk.g, t0 = walk.t0, until = walk.until, bytes = zl_group_bytes(format, K);
    zl_walk_words(&walk, format, &a, K);
    if (ZL_STREAMS == 2 && walk.other >= 0) {
      ZL_FEW_ROWS(rows, zl_linear_int8_pair, format, a, g, walk.other, w, bias, residual, out, N, K, act);
      continue;
    }
    if (until > t0) zl_linear_amx_tile(format, a, t0, until, g, w, bias, residual, out, N, K, act);
#define ZL_CALL(MT, n, first)                                                                            \
  zl_linear_int8_tile(format, MT, n, a, first, g, w,                                                     \
                      zl_walk_next(&walk, w + (g + 1) * bytes, bytes, first, n, 0, 1, K / 32), bias,     \
                      residual, out, N, K, act)
    ZL_TOKEN_TILES(zl_many(K), until, walk.t1, ZL_CALL)
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

/* h = 16 outputs of group g for tokens first .. first + n; it is number `part` of the run's `parts` groups */
ZL_KERNEL void zl_gated_int8_tile(int format, int MT, int64_t n, zl_bundle a, const zl_walk *walk, int64_t first,
                                  int64_t g, int64_t part, int64_t parts, const uint8_t *gate, const uint8_t *up,
                                  const float *bias_gate, const float *bias_up, int64_t N, int64_t K, int act,
                                  v16f *h) {
  v16f sums[ZL_MANY], u[ZL_MANY]; /* not h: sums behind a pointer would live in memory */
  const int64_t bytes = zl_group_bytes(format, K), at = g * bytes, next = (g - part + parts) * bytes;
  if (ZL_STREAMS == 2 && MT <= ZL_STREAM_ROWS && walk->rows <= ZL_STREAM_ROWS) {
    zl_dot_int8_two(format, format, MT, a, first, K, gate + at, up + at, sums, u);
  } else {
    zl_dot_int8(format, MT, n, a, first, K, gate + at,
                zl_walk_next(walk, gate + next, parts * bytes, first, n, part, parts, K / 32), sums);
    zl_dot_int8(format, MT, n, a, first, K, up + at,
                zl_walk_next(walk, up + next, parts * bytes, first, n, part, parts, K / 32), u);
  }
  for (int64_t i = 0; i < n; i += MT) {
    zl_gated_join(MT, sums + i, u + i, g, bias_gate, bias_up, N, act);
    ZL_UNROLL
    for (int m = 0; m < MT; m++) h[i + m] = sums[i + m];
  }
}

/* Sums of `groups` groups from g on, of gate and up, for tokens t0 .. until: [groups][2][ZL_TILE_TOKENS][16] */
ZL_KERNEL void zl_gated_amx_sums(int format, zl_bundle a, int64_t t0, int64_t until, int64_t g, int64_t groups,
                                 const uint8_t *gate, const uint8_t *up, int64_t K, float *sums) {
  ZL_NO_UNROLL
  for (int64_t i = 0; i < 2 * groups; i++)
    zl_dot_amx(format, a, t0, until, K, (i % 2 ? up : gate) + (g + i / 2) * zl_group_bytes(format, K),
               sums + i * ZL_TILE_TOKENS * 16, 16);
}

/* One token of them: h as zl_gated_join makes it. */
ZL_KERNEL v16f zl_gated_amx_one(const float *sums, int64_t m, int64_t g, const float *bias_gate, const float *bias_up,
                                int64_t N, int act) {
  v16f h = zl_load(sums + 16 * m), u = zl_load(sums + 16 * (ZL_TILE_TOKENS + m));
  zl_gated_join(1, &h, &u, g, bias_gate, bias_up, N, act);
  return h;
}

/* A, Wgate, Wup rows16 [N,K], bias_gate?, bias_up? f32[N] -> out f32[T,N] = act(gate) * up */
ZL_KERNEL void zl_gated_linear_int8(const zl_task *t, int64_t rows, const int8_t *q, const float *scale,
                                    const float *sums, const uint8_t *gate, const uint8_t *up, const float *bias_gate,
                                    const float *bias_up, float *out, int64_t N, int64_t K, int activation,
                                    int format) {
  zl_bundle a = {q, scale, sums, NULL, 0};
  zl_walk walk;
  zl_walk_begin(&walk, rows, K, (N + 15) / 16, 0); /* gate and up are two streams */
  while (zl_walk_item(t, &walk)) {
    const int64_t g = walk.g, t0 = walk.t0, until = walk.until;
    zl_walk_words(&walk, format, &a, K);
    const int64_t n = N - 16 * g < 16 ? N - 16 * g : 16;
    if (until > t0) {
      _Alignas(64) float sums[2 * ZL_TILE_TOKENS * 16];
      zl_gated_amx_sums(format, a, t0, until, g, 1, gate, up, K, sums);
      for (int64_t m = 0; m < until - t0; m++)
        zl_store_n(out + (t0 + m) * N + 16 * g, zl_gated_amx_one(sums, m, g, bias_gate, bias_up, N, activation), n);
    }
#define ZL_CALL(MT, n_tokens, first)                                                                             \
  do {                                                                                                           \
    v16f h[ZL_MANY];                                                                                             \
    zl_gated_int8_tile(format, MT, n_tokens, a, &walk, first, g, 0, 1, gate, up, bias_gate, bias_up, N, K,       \
                       activation, h);                                                                           \
    for (int64_t m = 0; m < (n_tokens); m++) zl_store_n(out + ((first) + m) * N + 16 * g, h[m], n);               \
  } while (0)
    ZL_TOKEN_TILES(zl_many(K), until, walk.t1, ZL_CALL)
#undef ZL_CALL
  }
}

/* the same, N a multiple of 32 -> q i8[T,N], scale f32[T,N/32], sums f32[T,N/16] */
ZL_KERNEL void zl_gated_linear_quantize_int8(const zl_task *t, int64_t rows, const int8_t *q, const float *scale,
                                             const float *sums, const uint8_t *gate, const uint8_t *up,
                                             const float *bias_gate, const float *bias_up, int8_t *out_q,
                                             float *out_scale, float *out_sums, int64_t N, int64_t K, int activation,
                                             int format) {
  zl_bundle a = {q, scale, sums, NULL, 0};
  zl_walk walk;
  zl_walk_begin(&walk, rows, K, N / 32, 0);
  while (zl_walk_item(t, &walk)) {
    const int64_t g = walk.g, t0 = walk.t0, until = walk.until;
    zl_walk_words(&walk, format, &a, K);
    if (until > t0) {
      _Alignas(64) float sums[4 * ZL_TILE_TOKENS * 16];
      zl_gated_amx_sums(format, a, t0, until, 2 * g, 2, gate, up, K, sums);
      for (int64_t m = 0; m < until - t0; m++) {
        const int64_t row = t0 + m;
        v16f h[2];
        for (int64_t s = 0; s < 2; s++)
          h[s] = zl_gated_amx_one(sums + s * 2 * ZL_TILE_TOKENS * 16, m, 2 * g + s, bias_gate, bias_up, N, activation);
        zl_quantize32(h[0], h[1], out_q + row * N + 32 * g, out_scale + row * (N / 32) + g,
                      out_sums + row * (N / 16) + 2 * g);
      }
    }
#define ZL_CALL(MT, n, first)                                                                                          \
  do {                                                                                                                 \
    v16f h[2][ZL_MANY];                                                                                                \
    for (int64_t s = 0; s < 2; s++)                                                                                    \
      zl_gated_int8_tile(format, MT, n, a, &walk, first, 2 * g + s, s, 2, gate, up, bias_gate, bias_up, N, K,          \
                         activation, h[s]);                                                                            \
    for (int64_t m = 0; m < (n); m += MT)                                                                              \
      zl_quantize32_rows(MT, h[0] + m, h[1] + m, (first) + m, g, N, out_q, out_scale, out_sums);                       \
  } while (0)
    ZL_TOKEN_TILES(zl_many(K), until, walk.t1, ZL_CALL)
#undef ZL_CALL
  }
}

#endif
