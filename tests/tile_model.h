/* A model of the tile instructions in plain C, for tests on machines without them.
 *
 * In: zl_tile.h includes it where ZL_TILE_MODEL names it.  Out: the zl_tile_* operations of zl_tile.h and, for the
 * tests, what the threads did with them.  Next file: test_tiles.py, which states the same instructions in numpy.
 *
 * Written from the operation sections of Intel's Software Developer's Manual (LDTILECFG, TILELOADD, TILESTORED,
 * TILEZERO, TDPBSSD/TDPBSUD, TILERELEASE).  Where the processor raises #UD or #GP the model stops the process.
 */
#include <stdatomic.h>
#include <stdlib.h>

typedef struct tile_model {
  int configured;
  zl_tile_config config;
  uint8_t tile[8][16][64];
} tile_model;
static _Thread_local tile_model tm;
static _Atomic int tiles_open_count;
static _Atomic long tile_products_count;

static void tile_fault(int bad) {
  if (bad) abort();
}

static inline int zl_tiles_allowed(void) { return getenv("ZL_TILE_MODEL_REFUSES") == NULL; }

static inline void zl_tile_configure(const zl_tile_config *c) {
  tile_fault(c->palette != 1 || c->start_row != 0);
  for (int i = 0; i < 14; i++) tile_fault(c->reserved[i] != 0);
  for (int t = 0; t < 16; t++) {
    tile_fault(t >= 8 && (c->rows[t] || c->bytes[t]));
    tile_fault(c->rows[t] > 16 || c->bytes[t] > 64 || !c->rows[t] != !c->bytes[t]);
  }
  memset(&tm, 0, sizeof tm);
  tm.config = *c;
  tm.configured = 1;
  tiles_open_count++;
}

static inline void zl_tile_release(void) {
  tile_fault(!tm.configured); /* the processor would allow it; the kernels do it once for each configuration */
  memset(&tm, 0, sizeof tm);
  tiles_open_count--;
}

static inline void tile_use(int t) { tile_fault(!tm.configured || t < 0 || t > 7 || !tm.config.rows[t]); }

static inline void zl_tile_zero(int t) {
  tile_use(t);
  memset(tm.tile[t], 0, sizeof tm.tile[t]);
}

static inline void zl_tile_load(int t, const void *base, int64_t stride) {
  tile_use(t);
  memset(tm.tile[t], 0, sizeof tm.tile[t]);
  for (int r = 0; r < tm.config.rows[t]; r++)
    memcpy(tm.tile[t][r], (const char *)base + r * stride, tm.config.bytes[t]);
}

static inline void zl_tile_store(int t, void *base, int64_t stride) {
  tile_use(t);
  for (int r = 0; r < tm.config.rows[t]; r++) memcpy((char *)base + r * stride, tm.tile[t][r], tm.config.bytes[t]);
}

static inline void tile_dot(int c, int a, int b, int b_signed) {
  tile_use(a), tile_use(b), tile_use(c);
  const zl_tile_config *s = &tm.config;
  tile_fault(a == b || a == c || b == c);
  tile_fault(s->bytes[c] != s->bytes[b] || s->rows[c] != s->rows[a] || s->bytes[a] / 4 != s->rows[b]);
  tile_fault(s->bytes[a] % 4 || s->bytes[b] % 4 || s->bytes[c] % 4);
  for (int m = 0; m < s->rows[c]; m++) {
    uint32_t row[16];
    memcpy(row, tm.tile[c][m], 64);
    for (int k = 0; k < s->bytes[a] / 4; k++)
      for (int n = 0; n < s->bytes[c] / 4; n++)
        for (int i = 0; i < 4; i++) {
          const int32_t x = (int8_t)tm.tile[a][m][4 * k + i];
          const uint8_t y = tm.tile[b][k][4 * n + i];
          row[n] += (uint32_t)(x * (b_signed ? (int8_t)y : (int32_t)y));
        }
    for (int n = s->bytes[c] / 4; n < 16; n++) row[n] = 0;
    memcpy(tm.tile[c][m], row, 64);
  }
  for (int m = s->rows[c]; m < 16; m++) memset(tm.tile[c][m], 0, 64);
  tile_products_count++;
}
static inline void zl_tile_dot_ss(int c, int a, int b) { tile_dot(c, a, b, 1); }
static inline void zl_tile_dot_su(int c, int a, int b) { tile_dot(c, a, b, 0); }

/* For the tests: threads that hold a configuration, products since the last call. */
int tiles_open(void) { return tiles_open_count; }
long tile_products(void) { return atomic_exchange(&tile_products_count, 0); }

/* c += a b in tiles of the shapes that `config` gives to 0, 1 and 2; strides of 64 bytes. */
void tile_once(const zl_tile_config *config, int b_signed, const uint8_t *a, const uint8_t *b, uint8_t *c) {
  zl_tile_configure(config);
  zl_tile_load(0, c, 64);
  zl_tile_load(1, a, 64);
  zl_tile_load(2, b, 64);
  if (b_signed) zl_tile_dot_ss(0, 1, 2); else zl_tile_dot_su(0, 1, 2);
  zl_tile_store(0, c, 64);
  zl_tile_release();
}
