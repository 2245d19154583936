/* Integer products of 16 tokens by matrix tiles, for the int8 kernels: the same sums as zl_dot_int8, to the bit.
 *
 * In: zl_tile.h, zl_weights.h.  Out: zl_amx_until, zl_amx_begin, zl_amx_end, zl_amx_group; where the target has no
 * tiles they do nothing.  Next file: zl_tokens.h.
 *
 * A block of 32 columns in the rows16 layout is the second operand of a tile product as it stands: 8 rows (4 columns
 * each) of 16 outputs x 4 bytes.  Activations are the first, straight from the bundle: 16 tokens x 32 bytes.  Every
 * block has scales of its own, so a product ends after 32 columns (16 where a scale covers 16): an integer tile, that
 * goes to memory and is scaled into 16 float sums in registers while the next block's product runs.  The order of the
 * float operations is zl_dot_int8's, so a token's sums do not depend on which of the two it went through.
 *
 * A panel of ZL_AMX_BLOCKS blocks is unpacked once for all tokens of a tile.  A zero point is taken off the codes
 * here, which makes them signed bytes and leaves the integers what they were.
 */
#ifndef ZL_LINEAR_AMX_H
#define ZL_LINEAR_AMX_H
#include "zl_tile.h"
#include "zl_weights.h"

#if ZL_TILES
#define ZL_TILE_STEP 16   /* tokens of a tile are a multiple */
#define ZL_AMX_BLOCKS 32  /* blocks of 32 columns in a panel: its 24 KB and 16 tokens' codes fit in L1 */
#define ZL_AMX_REST 4     /* a rest of fewer tokens costs less by zl_dot_int8 than as a whole tile product */

/* Tokens [t0, result) of a tile [t0, t1) go through tile products: sixteens, and a rest that is worth one more,
 * which overlaps with the sixteen before it. */
ZL_KERNEL int64_t zl_amx_until(int64_t t0, int64_t t1) {
  const int64_t rest = (t1 - t0) % 16;
  if (t1 - t0 < 16) return t0;
  return rest < ZL_AMX_REST ? t1 - rest : t1;
}

/* tiles 0..3 sums of two blocks by two halves; 4, 6 a block's operands; 5, 7 those of half a block */
ZL_KERNEL void zl_amx_begin(int64_t rows) {
  static const zl_tile_config config = {
      .palette = 1,
      .bytes = {64, 64, 64, 64, 32, 16, 64, 64},
      .rows = {16, 16, 16, 16, 16, 16, 8, 4},
  };
  if (rows >= 16) zl_tile_configure(&config);
}

ZL_KERNEL void zl_amx_end(int64_t rows) {
  if (rows >= 16) zl_tile_release();
}

typedef struct zl_amx_panel {
  _Alignas(64) uint8_t code[ZL_AMX_BLOCKS][512];
  v16f scale[ZL_AMX_BLOCKS][2];
  v16f min[ZL_AMX_BLOCKS][2];
} zl_amx_panel;

/* Blocks kb0 .. kb0 + n of the group at w. */
ZL_KERNEL void zl_amx_unpack(int format, const uint8_t *w, int64_t kb0, int64_t n, zl_amx_panel *p) {
  const v64u8 zero = (v64u8){0} + (uint8_t)zl_zero_point(format);
  ZL_NO_UNROLL
  for (int64_t i = 0; i < n; i++) {
    zl_block b;
    zl_block_load(format, w, kb0 + i, &b);
    ZL_UNROLL
    for (int j = 0; j < 8; j++) {
      const v64u8 code = b.code[j] - zero;
      memcpy(p->code[i] + 64 * j, &code, 64);
    }
    p->scale[i][0] = b.scale[0];
    if (!zl_zero_point(format)) p->min[i][0] = b.min[0];
    if (zl_scale_cols(format) == 16) {
      p->scale[i][1] = b.scale[1];
      p->min[i][1] = b.min[1];
    }
  }
}

/* One token's part of a block: acc + scales * sums, as zl_dot_int8 has it.  c: 16 sums of the block, or of its halves
 * 256 apart. */
ZL_KERNEL v16f zl_amx_scale(int format, v16f acc, const int32_t *c, const v16f *scale, const v16f *min, float s,
                            const float *sum, float total) {
  v16i p[2];
  memcpy(&p[0], c, 64);
  v16f f = zl_to_float(p[0]) * scale[0];
  if (zl_scale_cols(format) == 32) {
    acc = zl_fma(f, zl_set(s), acc);
    return zl_has_totals(format) ? zl_fma(min[0], zl_set(total), acc) : acc;
  }
  memcpy(&p[1], c + 256, 64);
  f = zl_fma(zl_to_float(p[1]), scale[1], f);
  acc = zl_fma(f, zl_set(s), acc);
  acc = zl_fma(min[0], zl_set(sum[0]), acc);
  return zl_fma(min[1], zl_set(sum[1]), acc);
}

/* What 16 tokens' sums are made from; all at the first of them. */
typedef struct zl_amx_tokens {
  const int8_t *q;     /* [16, K] */
  const float *scale;  /* [16, K/32] */
  const float *sums;   /* [16, K/16] */
  const float *totals; /* [16, K/32]: pairs of sums added; for formats with a minimum per 32 columns */
} zl_amx_tokens;

#define ZL_AMX_DOT(c, a, b) \
  do {                                                                               \
    if (zl_zero_point(format)) zl_tile_dot_ss(c, a, b); else zl_tile_dot_su(c, a, b); \
  } while (0)

/* Starts the product of block i of the panel in tiles C and C + 1. */
#define ZL_AMX_PRODUCT(C, C1, i)                                   \
  do {                                                             \
    const int8_t *zl_q = x.q + (kb0 + (i)) * 32;                   \
    zl_tile_zero(C);                                               \
    if (zl_scale_cols(format) == 32) {                             \
      zl_tile_load(4, zl_q, K);                                    \
      zl_tile_load(6, p->code[i], 64);                             \
      ZL_AMX_DOT(C, 4, 6);                                         \
    } else {                                                       \
      zl_tile_zero(C1);                                            \
      zl_tile_load(5, zl_q, K);                                    \
      zl_tile_load(7, p->code[i], 64);                             \
      ZL_AMX_DOT(C, 5, 7);                                         \
      zl_tile_load(5, zl_q + 16, K);                               \
      zl_tile_load(7, p->code[i] + 256, 64);                       \
      ZL_AMX_DOT(C1, 5, 7);                                        \
    }                                                              \
  } while (0)

/* Ends it: the sums to memory, and from there scaled into acc. */
#define ZL_AMX_FINISH(C, C1, i)                                                                                   \
  do {                                                                                                            \
    zl_tile_store(C, c, 64);                                                                                      \
    if (zl_scale_cols(format) == 16) zl_tile_store(C1, c + 256, 64);                                              \
    ZL_UNROLL                                                                                                     \
    for (int m = 0; m < 16; m++) {                                                                                \
      const int64_t zl_at = m * KB + kb0 + (i);                                                                   \
      acc[m] = zl_amx_scale(format, acc[m], c + 16 * m, p->scale[i], p->min[i], x.scale[zl_at], x.sums + 2 * zl_at, \
                            zl_has_totals(format) ? x.totals[zl_at] : 0.0f);                                                                    \
    }                                                                                                             \
  } while (0)

/* Adds blocks kb0 .. kb0 + n, which are in the panel, to the sums of 16 tokens at out, `stride` floats apart; the
 * first `done` of them have their sums already. */
ZL_KERNEL void zl_amx_sixteen(int format, zl_amx_tokens x, int done, int64_t K, int64_t kb0, int64_t n,
                              const zl_amx_panel *p, float *out, int64_t stride) {
  const int64_t KB = K / 32;
  _Alignas(64) int32_t c[512];
  v16f acc[16];
  ZL_UNROLL
  for (int m = 0; m < 16; m++) acc[m] = kb0 ? zl_load(out + m * stride) : zl_set(0.0f);
  ZL_AMX_PRODUCT(0, 1, 0);
  ZL_NO_UNROLL
  for (int64_t i = 0; i < n; i += 2) {
    if (i + 1 < n) ZL_AMX_PRODUCT(2, 3, i + 1);
    ZL_AMX_FINISH(0, 1, i);
    if (i + 1 >= n) break;
    if (i + 2 < n) ZL_AMX_PRODUCT(0, 1, i + 2);
    ZL_AMX_FINISH(2, 3, i + 1);
  }
  ZL_UNROLL
  for (int m = 0; m < 16; m++)
    if (m >= done) zl_store(out + m * stride, acc[m]);
}

/* out[t] = 16 outputs of the group at w (rows16) for `tokens` >= 16 tokens, `stride` floats apart */
ZL_KERNEL void zl_amx_group(int format, int64_t tokens, zl_amx_tokens a, int64_t K, const uint8_t *w, float *out,
                            int64_t stride) {
  const int64_t KB = K / 32;
  zl_amx_panel p;
  ZL_NO_UNROLL
  for (int64_t kb0 = 0; kb0 < KB; kb0 += ZL_AMX_BLOCKS) {
    const int64_t n = KB - kb0 < ZL_AMX_BLOCKS ? KB - kb0 : ZL_AMX_BLOCKS;
    zl_amx_unpack(format, w, kb0, n, &p);
    ZL_NO_UNROLL
    for (int64_t t = 0; t < tokens; t += 16) {
      const int64_t first = t + 16 <= tokens ? t : tokens - 16;
      const float *totals = zl_has_totals(format) ? a.totals + first * KB : NULL;
      const zl_amx_tokens x = {a.q + first * K, a.scale + first * KB, a.sums + first * KB * 2, totals};
      zl_amx_sixteen(format, x, (int)(t - first), K, kb0, n, &p, out + first * stride, stride);
    }
  }
}

#else
#define ZL_TILE_STEP 8

typedef struct zl_amx_tokens {
  const int8_t *q;
  const float *scale, *sums, *totals;
} zl_amx_tokens;

ZL_KERNEL int64_t zl_amx_until(int64_t t0, int64_t t1) { return (void)t1, t0; }
ZL_KERNEL void zl_amx_begin(int64_t rows) { (void)rows; }
ZL_KERNEL void zl_amx_end(int64_t rows) { (void)rows; }
ZL_KERNEL void zl_amx_group(int format, int64_t tokens, zl_amx_tokens a, int64_t K, const uint8_t *w, float *out,
                            int64_t stride) {
  (void)format, (void)tokens, (void)a, (void)K, (void)w, (void)out, (void)stride;
}
#endif

#endif
