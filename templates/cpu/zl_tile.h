/* Matrix tiles: eight registers of up to 16 rows x 64 bytes, and the products of int8 tiles (AMX).
 *
 * In: zl_task.h.  Out: ZL_TILES, 1 where the target has them, the zl_tile_* operations and zl_tiles_allowed.  Next
 * file: zl_linear_amx.h.
 *
 * A tile's number is part of the instruction, so these are macros.  Defining ZL_TILE_MODEL as a header's name puts
 * that header's definitions in their place: how the kernels are tested on machines without tiles.
 */
#ifndef ZL_TILE_H
#define ZL_TILE_H
#include "zl_task.h"

#if defined(ZL_TILE_MODEL) || (defined(__AMX_TILE__) && defined(__AMX_INT8__))
#define ZL_TILES 1
#else
#define ZL_TILES 0
#endif

#if ZL_TILES
/* The operand of ldtilecfg.  Palette 1: eight tiles of at most 16 rows x 64 bytes. */
typedef struct zl_tile_config {
  uint8_t palette, start_row, reserved[14];
  uint16_t bytes[16]; /* per row, by tile */
  uint8_t rows[16];
} zl_tile_config;
#endif

#if defined(ZL_TILE_MODEL)
#include ZL_TILE_MODEL
#elif ZL_TILES
#include <immintrin.h>

#define zl_tile_configure(config) _tile_loadconfig(config) /* all tiles become 0 */
#define zl_tile_release() _tile_release()                  /* the thread has no tile state to save any more */
#define zl_tile_zero(t) _tile_zero(t)
#define zl_tile_load(t, base, stride) _tile_loadd(t, base, (size_t)(stride))
#define zl_tile_store(t, base, stride) _tile_stored(t, base, (size_t)(stride))
/* c[m][n] += sum over i of a[m][4 k + i] * b[k][4 n + i]: a signed, b signed or unsigned bytes */
#define zl_tile_dot_ss(c, a, b) _tile_dpbssd(c, a, b)
#define zl_tile_dot_su(c, a, b) _tile_dpbsud(c, a, b)

/* Linux gives a process the tiles' registers when it asks, for all its threads.  0 when it refuses: before 5.16, under
 * a filter of system calls, with an alternative signal stack that is too small for them. */
static inline int zl_tiles_allowed(void) {
  const long request = 0x1023, tile_data = 18; /* ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA */
  return syscall(SYS_arch_prctl, request, tile_data) == 0;
}
#endif

#endif
