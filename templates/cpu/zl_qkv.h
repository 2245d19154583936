/* QkvRopeCache: the three projections, biases, head norms, rotary embedding and the cache write in one call.
 *
 * In: zl_linear_int8.h, zl_linear_float.h, zl_linear_bf16.h, zl_norm.h, zl_rope.h, zl_attention.h.  Out: the kernels.
 * Next file: zl_attention.h.
 *
 * An item is a head (of q, k or v) for a tile of tokens, with int8 a piece of one: its outputs stay in a small array
 * until they are normalized, turned and stored.
 */
#ifndef ZL_QKV_H
#define ZL_QKV_H
#include "zl_attention.h"
#include "zl_linear_bf16.h"
#include "zl_linear_float.h"
#include "zl_linear_int8.h"
#include "zl_norm.h"
#include "zl_rope.h"

typedef struct zl_qkv {
  const uint8_t *w[3];     /* q, k, v: rows16 [heads*hd, K] */
  const float *bias[3];    /* [heads*hd] or NULL */
  const float *norm[2];    /* q, k: [hd] or NULL */
  const float *cos_t, *sin_t; /* [T, rd/2] or NULL */
  float *q;                /* [T, H*hd] */
  char *k, *v;             /* caches */
  const int32_t *positions;
} zl_qkv;

typedef struct zl_qkv_shape {
  int64_t K, H, KVH, hd, rd, block_size;
  int interleaved, kv_dtype;
  double epsilon;
} zl_qkv_shape;

/* Finishes one head of one token: x[hd] without bias -> q or the cache.  role 0 q, 1 k, 2 v. */
ZL_KERNEL void zl_qkv_finish(const zl_task *t, const zl_qkv *p, const zl_qkv_shape *s, int role, int64_t row,
                             int64_t head, float *x) {
  const int64_t hd = s->hd;
  if (p->bias[role])
    for (int64_t d = 0; d < hd; d += 16) zl_store(x + d, zl_load(x + d) + zl_load(p->bias[role] + head * hd + d));
  if (role < 2) {
    if (p->norm[role]) zl_head_norm_one(x, p->norm[role], x, hd, s->epsilon);
    if (p->cos_t)
      zl_rope_one(x, p->cos_t + row * (s->rd / 2), p->sin_t + row * (s->rd / 2), x, hd, s->rd, s->interleaved);
  }
  if (role == 0) {
    memcpy(p->q + (row * s->H + head) * hd, x, (size_t)hd * 4);
  } else {
    const int64_t pos = p->positions[row];
    char *block = zl_kv_block(t, role == 1 ? p->k : p->v, t->token_seq[row], pos / s->block_size);
    zl_cache_put(x, block, head, pos % s->block_size, hd, s->block_size, role == 1 ? ZL_ROLE_K : ZL_ROLE_V,
                 s->kv_dtype);
  }
}

/* role and head of an item in q heads, k heads, v heads order */
ZL_KERNEL int zl_qkv_role(const zl_qkv_shape *s, int64_t item, int64_t *head) {
  *head = item < s->H ? item : (item - s->H) % s->KVH;
  return item < s->H ? 0 : item < s->H + s->KVH ? 1 : 2;
}

#define ZL_QKV_FLOATS 16384 /* most outputs of a head that are kept until it is finished */
_Static_assert(ZL_QKV_FLOATS / ZL_MAX_HEAD_DIM >= 32, "a rest that is made to sixteen must leave some");
#define ZL_QKV_PIECE (ZL_PIECE_TOKENS * ZL_MAX_HEAD_DIM < ZL_QKV_FLOATS ? ZL_PIECE_TOKENS * ZL_MAX_HEAD_DIM : ZL_QKV_FLOATS)

/* 16 outputs of a head for tokens first .. first + n -> x[n][hd]; w: their group */
ZL_KERNEL void zl_qkv_int8_group(int format, int MT, int64_t n, zl_bundle a, int64_t first, int64_t K, const uint8_t *w,
                                 zl_next next, float *x, int64_t hd) {
  v16f acc[ZL_MANY];
  zl_dot_int8(format, MT, n, a, first, K, w, next, acc);
  for (int64_t i = 0; i < n; i += MT) {
    ZL_UNROLL
    for (int m = 0; m < MT; m++) zl_store(x + (i + m) * hd, acc[i + m]);
  }
}

/* Head `head` of `role` for the tokens of an item, as many at once as ZL_QKV_PIECE holds: a group's weights stay in the
 * first cache while they pass, the whole head's would not. */
ZL_KERNEL void zl_qkv_int8_item(const zl_task *t, const zl_qkv *p, const zl_qkv_shape *s, int format, int role,
                                const zl_walk *walk, zl_bundle a, int64_t head) {
  _Alignas(64) float x[ZL_QKV_PIECE];
  const int64_t hd = s->hd, groups = hd / 16, bytes = zl_group_bytes(format, s->K), most = ZL_QKV_PIECE / hd / 8 * 8;
  int64_t next_head; /* of the next run; of another format, these are hints to too many bytes or too few */
  const int next_role = zl_qkv_role(s, walk->g + 1 < walk->G ? walk->g + 1 : walk->g, &next_head);
  const uint8_t *next = p->w[next_role] + next_head * groups * bytes;
  for (int64_t t0 = walk->until; t0 < walk->t1; t0 += most) {
    const int64_t t1 = walk->t1 - t0 < most ? walk->t1 : t0 + most;
    for (int64_t g = 0; g < groups; g++) {
      const uint8_t *w = p->w[role] + (head * groups + g) * bytes;
#define ZL_CALL(MT, n, first)                                                                              \
  zl_qkv_int8_group(format, MT, n, a, first, s->K, w,                                                      \
                    zl_walk_next(walk, next, groups * bytes, first, n, g, groups, s->K / 32),              \
                    x + ((first) - t0) * hd + 16 * g, hd)
      ZL_TOKEN_TILES(zl_many(s->K), t0, t1, ZL_CALL)
#undef ZL_CALL
    }
    for (int64_t row = t0; row < t1; row++) zl_qkv_finish(t, p, s, role, row, head, x + (row - t0) * hd);
  }
}

/* Two heads of one format for all MT rows, and their roles. */
ZL_KERNEL void zl_qkv_int8_pair(int MT, int format, const zl_task *t, const zl_qkv *p, const zl_qkv_shape *s,
                                zl_bundle a, const int role[2], const int64_t head[2]) {
  _Alignas(64) float x[2][ZL_STREAM_ROWS][ZL_MAX_HEAD_DIM];
  const int64_t groups = s->hd / 16, bytes = zl_group_bytes(format, s->K);
  const uint8_t *w0 = p->w[role[0]] + head[0] * groups * bytes, *w1 = p->w[role[1]] + head[1] * groups * bytes;
  for (int64_t g = 0; g < groups; g++) {
    v16f acc[2][ZL_STREAM_ROWS];
    zl_dot_int8_two(format, format, MT, a, 0, s->K, w0 + g * bytes, w1 + g * bytes, acc[0], acc[1]);
    ZL_UNROLL
    for (int m = 0; m < MT; m++) {
      zl_store(x[0][m] + 16 * g, acc[0][m]);
      zl_store(x[1][m] + 16 * g, acc[1][m]);
    }
  }
  for (int i = 0; i < 2; i++)
    for (int m = 0; m < MT; m++) zl_qkv_finish(t, p, s, role[i], m, head[i], x[i][m]);
}

/* The same for tokens t0 .. until, which go through tile products. */
ZL_KERNEL void zl_qkv_amx_tile(const zl_task *t, const zl_qkv *p, const zl_qkv_shape *s, int format, int role,
                               zl_bundle a, int64_t t0, int64_t until, int64_t head) {
  _Alignas(64) float x[ZL_QKV_FLOATS];
  const int64_t most = ZL_QKV_FLOATS / s->hd / 16 * 16;
  for (int64_t c0 = t0; c0 < until;) {
    int64_t c1 = until - c0 <= most ? until : c0 + most;
    if (until - c1 < 16 && c1 < until) c1 -= 16; /* tile products take no fewer */
    for (int64_t g = 0; g < s->hd / 16; g++) {
      const int64_t group = head * s->hd / 16 + g;
      zl_dot_amx(format, a, c0, c1, s->K, p->w[role] + group * zl_group_bytes(format, s->K), x + 16 * g, s->hd);
    }
    for (int64_t row = c0; row < c1; row++) zl_qkv_finish(t, p, s, role, row, head, x + (row - c0) * s->hd);
    c0 = c1;
  }
}

ZL_KERNEL void zl_qkv_int8_all(const zl_task *t, int64_t rows, const zl_qkv *p, const zl_qkv_shape *s, zl_bundle a,
                               int format_q, int format_k, int format_v) {
  const int one_format = format_q == format_k && format_k == format_v;
  const int64_t heads = s->H + 2 * s->KVH;
  zl_walk walk;
  /* heads of several formats are not read side by side */
  zl_walk_begin(&walk, rows, s->K, heads, one_format ? zl_first_half(t->n_threads, rows, heads) : 0);
  while (zl_walk_item(t, &walk)) {
    int64_t head;
    const int role = zl_qkv_role(s, walk.g, &head), by_tiles = walk.until > walk.t0;
    zl_walk_words(&walk, role == 0 ? format_q : role == 1 ? format_k : format_v, &a, s->K);
    if (ZL_STREAMS == 2 && walk.other >= 0) {
      int64_t both[2] = {head, 0};
      const int roles[2] = {role, zl_qkv_role(s, walk.other, &both[1])};
      ZL_FEW_ROWS(rows, zl_qkv_int8_pair, format_q, t, p, s, a, roles, both);
      continue;
    }
    /* equal formats share one body: the role only chooses pointers */
#define ZL_ROLE(fixed_format, fixed_role)                                                                 \
  do {                                                                                                    \
    const int zl_format = fixed_format, zl_role = fixed_role;                                             \
    if (by_tiles) zl_qkv_amx_tile(t, p, s, zl_format, zl_role, a, walk.t0, walk.until, head);             \
    zl_qkv_int8_item(t, p, s, zl_format, zl_role, &walk, a, head);                                        \
  } while (0)
    if (one_format)
      ZL_ROLE(format_q, role);
    else if (role == 0)
      ZL_ROLE(format_q, 0);
    else if (role == 1)
      ZL_ROLE(format_k, 1);
    else
      ZL_ROLE(format_v, 2);
#undef ZL_ROLE
  }
}

ZL_KERNEL void zl_qkv_float_tile(const zl_task *t, const zl_qkv *p, const zl_qkv_shape *s, int format, int role,
                                 int MT, int64_t n, const float *in, int64_t first, int64_t head) {
  _Alignas(64) float x[ZL_MANY][ZL_MAX_HEAD_DIM];
  for (int64_t g = 0; g < s->hd / 16; g++) {
    v16f acc[ZL_MANY];
    const int64_t group = head * s->hd / 16 + g;
    zl_dot_float(format, MT, n, in, s->K, p->w[role] + group * zl_group_bytes(format, s->K), acc);
    for (int64_t m = 0; m < n; m++) zl_store(x[m] + 16 * g, acc[m]);
  }
  for (int64_t m = 0; m < n; m++) zl_qkv_finish(t, p, s, role, first + m, head, x[m]);
}

ZL_KERNEL void zl_qkv_float_all(const zl_task *t, int64_t rows, const zl_qkv *p, const zl_qkv_shape *s,
                                const float *in, int format_q, int format_k, int format_v, int kind) {
  int64_t begin, end;
  zl_share(t, s->H + 2 * s->KVH, &begin, &end);
#define ZL_CALL(MT, n, first, px, g)                                      \
  do {                                                                    \
    int64_t head;                                                         \
    const int role = zl_qkv_role(s, g, &head);                            \
    if (format_q == format_k && format_k == format_v)                     \
      zl_qkv_float_tile(t, p, s, format_q, role, MT, n, px, first, head); \
    else if (role == 0)                                                   \
      zl_qkv_float_tile(t, p, s, format_q, 0, MT, n, px, first, head);    \
    else if (role == 1)                                                   \
      zl_qkv_float_tile(t, p, s, format_k, 1, MT, n, px, first, head);    \
    else                                                                  \
      zl_qkv_float_tile(t, p, s, format_v, 2, MT, n, px, first, head);    \
  } while (0)
  ZL_FLOAT_TILES(rows, in, s->K, kind, begin, end, ZL_CALL)
#undef ZL_CALL
}

/* The same for weights of bf16 and pairs x. */
ZL_KERNEL void zl_qkv_bf16_tile(const zl_task *t, const zl_qkv *p, const zl_qkv_shape *s, int format, int MT,
                                const zl_pair *in, zl_turn turn, int64_t first, int64_t item) {
  _Alignas(64) float x[8][ZL_MAX_HEAD_DIM];
  int64_t head;
  const int role = zl_qkv_role(s, item, &head);
  const int64_t groups = s->hd / 16, bytes = zl_group_bytes(format, s->K);
  for (int64_t g = 0; g < groups;) {
    v16f acc[2][8];
    const uint8_t *w = p->w[role] + (head * groups + g) * bytes, *const group[2] = {w, w + bytes};
    const int both = MT > 1 && g + 1 < groups; /* one token: one stream of weights */
    if (both)
      zl_dot_bf16(format, 2, MT, in, s->K, group, 2 * bytes, zl_turn_after(turn, g, s->K), acc);
    else
      zl_dot_bf16(format, 1, MT, in, s->K, group, bytes, zl_turn_after(turn, g, s->K), acc);
    ZL_UNROLL
    for (int m = 0; m < MT; m++) {
      zl_store(x[m] + 16 * g, acc[0][m]);
      if (both) zl_store(x[m] + 16 * g + 16, acc[1][m]);
    }
    g += 1 + both;
  }
  for (int m = 0; m < MT; m++) zl_qkv_finish(t, p, s, role, first + m, head, x[m]);
}

/* Items item and, where NG is 2, item + half: whole heads. */
ZL_KERNEL void zl_qkv_bf16_two(const zl_task *t, const zl_qkv *p, const zl_qkv_shape *s, int format, int NG, int MT,
                               const zl_pair *in, zl_turn turn, int64_t item, int64_t half) {
  _Alignas(64) float x[2][ZL_STREAM_ROWS][ZL_MAX_HEAD_DIM];
  const int64_t groups = s->hd / 16, bytes = zl_group_bytes(format, s->K);
  const uint8_t *w[2] = {NULL, NULL};
  int64_t head[2];
  int role[2];
  for (int i = 0; i < NG; i++) {
    role[i] = zl_qkv_role(s, item + i * half, &head[i]);
    w[i] = p->w[role[i]] + head[i] * groups * bytes;
  }
  for (int64_t g = 0; g < groups; g++) {
    v16f acc[2][8];
    const uint8_t *const group[2] = {w[0] + g * bytes, w[NG - 1] + g * bytes};
    zl_dot_bf16(format, NG, MT, in, s->K, group, bytes, turn, acc);
    ZL_UNROLL
    for (int i = 0; i < NG; i++) {
      ZL_UNROLL
      for (int m = 0; m < MT; m++) zl_store(x[i][m] + 16 * g, acc[i][m]);
    }
  }
  for (int i = 0; i < NG; i++)
    for (int m = 0; m < MT; m++) zl_qkv_finish(t, p, s, role[i], m, head[i], x[i][m]);
}

ZL_KERNEL void zl_qkv_bf16_all(const zl_task *t, int64_t rows, const zl_qkv *p, const zl_qkv_shape *s,
                               const float *in, int format) {
  const int64_t heads = s->H + 2 * s->KVH, half = zl_first_half(t->n_threads, rows, heads);
  if (half) {
#define ZL_CALL(NG, MT, first, px, turn, item) zl_qkv_bf16_two(t, p, s, format, NG, MT, px, turn, item, half)
    ZL_BF16_HALVES(rows, in, s->K, heads, half, ZL_CALL);
#undef ZL_CALL
    return;
  }
#define ZL_CALL(NG, MT, first, px, turn, item) zl_qkv_bf16_tile(t, p, s, format, MT, px, turn, first, item)
  ZL_BF16_TILES(format, rows, in, s->K, heads, 1, zl_bf16_room(t, format, s->hd / 16, s->K), ZL_CALL);
#undef ZL_CALL
}

/* A (q, scale, sums), Wq, Wk, Wv, bq?, bk?, bv?, qnorm?, knorm?, cos?, sin?, k_cache, v_cache, positions, seq_starts,
 * block_table -> q f32[T, H*hd], k_cache, v_cache (the same memory as the inputs) */
ZL_KERNEL void zl_qkv_rope_cache_int8(
    const zl_task *t, int64_t rows, const int8_t *aq, const float *ascale, const float *asums, const uint8_t *wq,
    const uint8_t *wk, const uint8_t *wv, const float *bq, const float *bk, const float *bv, const float *qnorm,
    const float *knorm, const float *cos_t, const float *sin_t, char *k_in, char *v_in, const int32_t *positions,
    const int32_t *seq_starts, const int32_t *block_table, float *q, char *k_cache, char *v_cache, int64_t K,
    int64_t num_heads, int64_t kv_num_heads, int64_t head_dim, int64_t rotary_dim, int interleaved, double epsilon,
    int64_t block_size, int kv_dtype, int format_q, int format_k, int format_v) {
  (void)k_in, (void)v_in, (void)seq_starts, (void)block_table;
  zl_bundle a = {aq, ascale, asums, NULL, 0};
  zl_qkv p = {{wq, wk, wv}, {bq, bk, bv}, {qnorm, knorm}, cos_t, sin_t, q, k_cache, v_cache, positions};
  zl_qkv_shape s = {K, num_heads, kv_num_heads, head_dim, rotary_dim, block_size, interleaved, kv_dtype, epsilon};
  zl_qkv_int8_all(t, rows, &p, &s, a, format_q, format_k, format_v);
}

/* the same with x f32[T, K] */
ZL_KERNEL void zl_qkv_rope_cache_float(
    const zl_task *t, int64_t rows, const float *x, const uint8_t *wq, const uint8_t *wk, const uint8_t *wv,
    const float *bq, const float *bk, const float *bv, const float *qnorm, const float *knorm, const float *cos_t,
    const float *sin_t, char *k_in, char *v_in, const int32_t *positions, const int32_t *seq_starts,
    const int32_t *block_table, float *q, char *k_cache, char *v_cache, int64_t K, int64_t num_heads,
    int64_t kv_num_heads, int64_t head_dim, int64_t rotary_dim, int interleaved, double epsilon, int64_t block_size,
    int kv_dtype, int format_q, int format_k, int format_v, int kind) {
  (void)k_in, (void)v_in, (void)seq_starts, (void)block_table;
  zl_qkv p = {{wq, wk, wv}, {bq, bk, bv}, {qnorm, knorm}, cos_t, sin_t, q, k_cache, v_cache, positions};
  zl_qkv_shape s = {K, num_heads, kv_num_heads, head_dim, rotary_dim, block_size, interleaved, kv_dtype, epsilon};
  zl_qkv_float_all(t, rows, &p, &s, x, format_q, format_k, format_v, kind);
}

/* the same for weights of bf16 */
ZL_KERNEL void zl_qkv_rope_cache_bf16(
    const zl_task *t, int64_t rows, const float *x, const uint8_t *wq, const uint8_t *wk, const uint8_t *wv,
    const float *bq, const float *bk, const float *bv, const float *qnorm, const float *knorm, const float *cos_t,
    const float *sin_t, char *k_in, char *v_in, const int32_t *positions, const int32_t *seq_starts,
    const int32_t *block_table, float *q, char *k_cache, char *v_cache, int64_t K, int64_t num_heads,
    int64_t kv_num_heads, int64_t head_dim, int64_t rotary_dim, int interleaved, double epsilon, int64_t block_size,
    int kv_dtype, int format) {
  (void)k_in, (void)v_in, (void)seq_starts, (void)block_table;
  zl_qkv p = {{wq, wk, wv}, {bq, bk, bv}, {qnorm, knorm}, cos_t, sin_t, q, k_cache, v_cache, positions};
  zl_qkv_shape s = {K, num_heads, kv_num_heads, head_dim, rotary_dim, block_size, interleaved, kv_dtype, epsilon};
  zl_qkv_bf16_all(t, rows, &p, &s, x, format);
}

#endif
