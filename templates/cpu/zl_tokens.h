/* How many tokens at a time a matrix product takes.
 *
 * In: zl_linear_amx.h (ZL_TILE_STEP).  Out: the sizes of token tiles and pieces, zl_many, ZL_TOKEN_TILES, zl_tile_tokens.
 * Next file: zl_streams.h.
 *
 * A token tile's activations stay in L2 while the weights stream past once; a group's weights stay in L1 while the tile's
 * tokens pass, some at a time (zl_many), which share the unpacking of each block.  Pieces are what threads share out.
 */
#ifndef ZL_TOKENS_H
#define ZL_TOKENS_H
#include "zl_linear_amx.h"

#ifndef ZL_TILE_BYTES
#define ZL_TILE_BYTES (512 * 1024) /* activations of a token tile: half of L2 */
#endif

/* Most tokens of a tile.  Weights are read once for it, which takes long beside VNNI only; sums of matrix tiles are in
 * memory. */
#if defined(__AVX512VNNI__) && !ZL_TILES
#define ZL_TILE_TOKENS 512
#else
#define ZL_TILE_TOKENS 256
#endif
#define ZL_PIECE_TOKENS 64 /* most tokens of an item */
/* Tokens of a tile from which on the next weights are asked for meanwhile, so that the first of the next products need not
 * wait: eight of 72 ask for a line at most with each block (8 bits: 544 bytes).  0: not asked for.  Without VNNI products
 * take so long that nothing waits (Zen 3: asking gained nothing); matrix tiles unpack a panel beforehand. */
#ifndef ZL_ASK_TOKENS
#if defined(__AVX512VNNI__) && !ZL_TILES
#define ZL_ASK_TOKENS 72
#else
#define ZL_ASK_TOKENS 0
#endif
#endif

/* Most tokens that share the unpacking of a block.  With AVX-512 the codes stay in registers, and eight sums beside
 * them.  Without it they go to the first cache and come back for four tokens at a time, so the more tokens the better
 * (Zen 3: a product is 10 to 19 % faster with 32 than with 8). */
#if ZL_AVX512
#define ZL_MANY 8
#else
#define ZL_MANY 32
#endif

/* That, for rows of K activations: the rows' parts have to be in the first cache together, and rows that lie multiples of
 * 4 KB apart share its ways, as on every x86-64 processor whose first cache is found by the bits within a page: eight of
 * them at least. */
ZL_KERNEL int64_t zl_many(int64_t K) {
  const int64_t apart = (K & -K) < 64 ? 64 : (K & -K) < 4096 ? (K & -K) : 4096, fit = 8 * (4096 / apart);
  return fit < ZL_MANY ? fit : ZL_MANY;
}

/* CALL(MT, n, first) for n tokens from `first` on, covering [begin, end): 4, 2 or 1, then MT is n, or a multiple of 8 up
 * to `many`, then MT is 8. */
#define ZL_TOKEN_TILES(many, begin, end, CALL)                                      \
  for (int64_t zl_m = (begin), zl_e = (end); zl_m < zl_e;) {                        \
    if (zl_e - zl_m >= 8) {                                                         \
      const int64_t zl_8 = (many) == 8 || zl_e - zl_m < 16 ? 8                      \
                           : zl_e - zl_m >= (many) ? (many) : (zl_e - zl_m) / 8 * 8; \
      CALL(8, zl_8, zl_m);                                                          \
      zl_m += zl_8;                                                                 \
    } else if (zl_e - zl_m >= 4) {                                                  \
      CALL(4, 4, zl_m);                                                             \
      zl_m += 4;                                                                    \
    } else if (zl_e - zl_m >= 2) {                                                  \
      CALL(2, 2, zl_m);                                                             \
      zl_m += 2;                                                                    \
    } else {                                                                        \
      CALL(1, 1, zl_m);                                                             \
      zl_m += 1;                                                                    \
    }                                                                               \
  }

/* Tokens per tile: `row_bytes` each, within ZL_TILE_BYTES, a multiple of ZL_TILE_STEP, all tiles of a call about equal. */
ZL_KERNEL int64_t zl_tile_tokens(int64_t rows, int64_t row_bytes) {
  int64_t most = ZL_TILE_BYTES / row_bytes / ZL_TILE_STEP * ZL_TILE_STEP;
  if (most < ZL_TILE_STEP) most = ZL_TILE_STEP;
  if (most > ZL_TILE_TOKENS) most = ZL_TILE_TOKENS;
  int64_t tiles = (rows + most - 1) / most;
  int64_t even = (rows + tiles - 1) / tiles;
  return (even + ZL_TILE_STEP - 1) / ZL_TILE_STEP * ZL_TILE_STEP;
}

#endif
