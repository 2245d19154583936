/* From logits to a token: greedy argmax shared by all threads, or sampling as zl_abi.h specifies it.
 *
 * In: zl_math.h, zl_abi.h.  Out: zl_argmax_part + zl_sample (a barrier between), ZL_SAMPLE_BYTES.  Next file:
 * zl_validate.h.
 *
 * NaN logits count as minus infinity.  Ties go to the lowest id, at every cut.  Nothing depends on the number of threads:
 * sums run in id order.  Thresholds are found by bisection over the bits of non-negative floats, so no sort
 * and no memory beyond one row's probabilities.
 */
#ifndef ZL_SAMPLE_H
#define ZL_SAMPLE_H
#include "zl_math.h"

/* per-thread work memory of zl_sample: a probability, an id and a bit per token */
#define ZL_SAMPLE_BYTES(vocab) (((int64_t)(vocab) * 8 + ((int64_t)(vocab) + 31) / 32 * 4 + 127) / 64 * 64)

typedef struct zl_best {
  float value; /* -inf if every logit was NaN or -inf */
  int32_t id;  /* -1 for an empty share */
} zl_best;

ZL_KERNEL zl_best zl_argmax(const float *x, int64_t begin, int64_t end) {
  const v16i lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  zl_best best = {-__builtin_inff(), begin < end ? (int32_t)begin : -1};
  v16f top = zl_set(-__builtin_inff());
  v16i at = lane * 0 + INT32_MAX;
  int64_t i = begin;
  for (; i + 16 <= end; i += 16) { /* per lane: the first maximum of that lane */
    v16f v = zl_load(x + i);
    v16i more = (v16i)(v > top);
    top = zl_select(more, v, top);
    at = (more & (lane + (int32_t)i)) | (~more & at);
  }
  float tops[16];
  int32_t ids[16];
  memcpy(tops, &top, 64);
  memcpy(ids, &at, 64);
  for (int l = 0; l < 16; l++)
    if (ids[l] != INT32_MAX && (tops[l] > best.value || (tops[l] == best.value && ids[l] < best.id)))
      best = (zl_best){tops[l], ids[l]};
  for (; i < end; i++)
    if (x[i] > best.value) best = (zl_best){x[i], (int32_t)i};
  return best;
}

/* logits f32[R, V] -> parts[R, n_threads]: the best of this thread's share of every row */
ZL_KERNEL void zl_argmax_part(const zl_task *t, int64_t rows, const float *logits, zl_best *parts, int64_t V) {
  int64_t begin, end;
  zl_share(t, V, &begin, &end);
  for (int64_t r = 0; r < rows; r++) parts[r * t->n_threads + t->thread] = zl_argmax(logits + r * V, begin, end);
}

ZL_KERNEL zl_best zl_argmax_join(const zl_best *parts, int32_t n) {
  zl_best best = {-__builtin_inff(), -1};
  for (int32_t i = 0; i < n; i++) /* shares are in id order: an equal later one loses */
    if (parts[i].id >= 0 && (best.id < 0 || parts[i].value > best.value)) best = parts[i];
  if (best.id < 0) best.id = 0;
  return best;
}

static inline uint64_t zl_mix(uint64_t z) { /* the finalizer of splitmix64 */
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

/* uniform in [0, 1), 53 bits, a pure function of (seed, draw) */
static inline double zl_uniform(uint64_t seed, uint64_t draw) {
  uint64_t z = zl_mix(zl_mix(seed + 0x9e3779b97f4a7c15u) + (draw + 1u) * 0x9e3779b97f4a7c15u);
  return (double)(z >> 11) * 0x1p-53;
}

static inline float zl_from_bits(uint32_t u) {
  float f;
  memcpy(&f, &u, 4);
  return f;
}

/* The candidates left of one row, in ascending id order. */
typedef struct zl_candidates {
  float *p;    /* [n], unnormalized, in (0, 1] */
  int32_t *id; /* [n] */
  int64_t n;
} zl_candidates;

static inline int64_t zl_count_from(const zl_candidates *c, float from) {
  int64_t n = 0;
  for (int64_t i = 0; i < c->n; i++) n += c->p[i] >= from;
  return n;
}

static inline double zl_mass_from(const zl_candidates *c, float from) {
  double sum[8] = {0}; /* 8 chains of additions, always the same ones */
  int64_t i = 0;
  for (; i + 8 <= c->n; i += 8)
    for (int j = 0; j < 8; j++) sum[j] += c->p[i + j] >= from ? (double)c->p[i + j] : 0.0;
  for (; i < c->n; i++) sum[0] += c->p[i] >= from ? (double)c->p[i] : 0.0;
  return ((sum[0] + sum[1]) + (sum[2] + sum[3])) + ((sum[4] + sum[5]) + (sum[6] + sum[7]));
}

/* keeps what is above `from`, and of what equals it the first `equal` */
static inline void zl_keep(zl_candidates *c, float from, int64_t equal) {
  int64_t n = 0;
  for (int64_t i = 0; i < c->n; i++) {
    const int same = c->p[i] == from;
    const int keep = c->p[i] > from || (same && equal > 0);
    equal -= same;
    c->p[n] = c->p[i];
    c->id[n] = c->id[i];
    n += keep;
  }
  c->n = n;
}

static inline void zl_top_k(zl_candidates *c, int64_t k) {
  if (k <= 0 || k >= c->n) return;
  uint32_t lo = 0, hi = 0x3f800001u; /* count_from(lo) >= k > count_from(hi): hi is just above 1 */
  while (hi - lo > 1) {
    uint32_t mid = lo + (hi - lo) / 2;
    if (zl_count_from(c, zl_from_bits(mid)) >= k)
      lo = mid;
    else
      hi = mid;
  }
  zl_keep(c, zl_from_bits(lo), k - zl_count_from(c, zl_from_bits(hi)));
}

/* the fewest most probable candidates whose mass reaches top_p of the total */
static inline void zl_top_p(zl_candidates *c, float top_p) {
  if (!(top_p < 1.0f) || c->n < 2) return;
  const double total = zl_mass_from(c, 0.0f), goal = (top_p > 0.0f ? (double)top_p : 0.0) * total;
  /* candidates below (1 - p) total / n cannot be needed: together they weigh less than 1 - p */
  zl_candidates all = *c;
  float floor = (float)((total - goal) / (double)all.n * 0.999);
  zl_keep(c, floor, floor > 0.0f ? 0 : c->n);
  uint32_t lo = 0, hi = 0x3f800001u; /* mass_from(lo) >= goal > mass_from(hi) */
  while (hi - lo > 1) {
    uint32_t mid = lo + (hi - lo) / 2;
    if (zl_mass_from(c, zl_from_bits(mid)) >= goal && zl_count_from(c, zl_from_bits(mid)) > 0)
      lo = mid;
    else
      hi = mid;
  }
  const float from = zl_from_bits(lo);
  double mass = zl_mass_from(c, zl_from_bits(hi));
  int64_t equal = 0;
  for (int64_t i = 0; i < c->n && (mass < goal || equal == 0); i++)
    if (c->p[i] == from) {
      mass += (double)from;
      equal++;
    }
  zl_keep(c, from, equal);
}

/* whether the row has a repetition penalty; then a bit of seen[(V + 31) / 32] for each token of its history */
static inline int zl_mark_seen(const zl_sampling *s, int64_t V, uint32_t *seen) {
  const float penalty = s->repetition_penalty;
  if (!(penalty > 0.0f) || penalty == 1.0f || s->n_history <= 0 || !s->history) return 0;
  memset(seen, 0, (size_t)((V + 31) / 32) * 4);
  for (int32_t i = 0; i < s->n_history; i++)
    if (s->history[i] >= 0 && s->history[i] < V) seen[s->history[i] / 32] |= 1u << (s->history[i] % 32);
  return 1;
}

static inline float zl_penalized(float x, int64_t id, const uint32_t *seen, float penalty) {
  if (!(seen[id / 32] >> (id % 32) & 1u)) return x;
  return x > 0.0f ? x / penalty : x * penalty;
}

/* logits f32[V] -> candidates with p = e^(x - max): penalty and temperature applied */
ZL_KERNEL void zl_probabilities(const float *x, int64_t V, const zl_sampling *s, uint32_t *seen, zl_candidates *c) {
  const float penalty = s->repetition_penalty, temperature = s->temperature;
  const int penal = zl_mark_seen(s, V, seen);
  float top = -__builtin_inff();
  v16f tops = zl_set(top);
  for (int64_t i = 0; i < V; i += 16) {
    const int64_t n = V - i < 16 ? V - i : 16;
    v16f v = n == 16 ? zl_load(x + i) : zl_load_n(x + i, n);
    v = zl_select((v16i)(v == v), v, zl_set(-__builtin_inff()));
    zl_store_n(c->p + i, v, n);
    for (int64_t j = 0; penal && j < n; j++) c->p[i + j] = zl_penalized(c->p[i + j], i + j, seen, penalty);
    if (n == 16) tops = zl_max(tops, zl_load(c->p + i));
  }
  top = zl_hmax(tops);
  for (int64_t i = V / 16 * 16; i < V; i++) top = c->p[i] > top ? c->p[i] : top;
  c->n = 0;
  if (top == -__builtin_inff()) return;
  const int infinite = top == __builtin_inff(); /* only the infinite ones are possible */
  for (int64_t i = 0; i < V; i += 16) {
    const int64_t n = V - i < 16 ? V - i : 16;
    v16f v = zl_load_n(c->p + i, n), e;
    if (infinite)
      e = zl_select((v16i)(v == top), zl_set(1.0f), zl_set(0.0f));
    else
      e = zl_exp((v - top) / temperature);
    float p[16];
    memcpy(p, &e, 64);
    for (int64_t j = 0; j < n; j++) { /* c->n <= i + j: a write never passes what is still to be read */
      c->id[c->n] = (int32_t)(i + j);
      c->p[c->n] = p[j];
      c->n += p[j] > 0.0f;
    }
  }
}

/* One row.  work: ZL_SAMPLE_BYTES(V). */
ZL_KERNEL int32_t zl_sample_row(const float *logits, int64_t V, const zl_sampling *s, char *work) {
  zl_candidates c = {(float *)(void *)work, (int32_t *)(void *)(work + V * 4), 0};
  zl_probabilities(logits, V, s, (uint32_t *)(void *)(work + V * 8), &c);
  if (c.n == 0) return 0;
  zl_top_k(&c, s->top_k);
  zl_top_p(&c, s->top_p);
  float most = 0.0f;
  for (int64_t i = 0; i < c.n; i++) most = c.p[i] > most ? c.p[i] : most;
  if (s->min_p > 0.0f) zl_keep(&c, (s->min_p < 1.0f ? s->min_p : 1.0f) * most, c.n);
  const double goal = zl_uniform(s->seed, s->draw) * zl_mass_from(&c, 0.0f);
  double sum = 0.0;
  for (int64_t i = 0; i < c.n; i++) {
    sum += (double)c.p[i];
    if (sum > goal) return c.id[i];
  }
  return c.id[c.n - 1];
}

/* greedy with a repetition penalty still has to look at every logit */
ZL_KERNEL int32_t zl_greedy_penalized(const float *x, int64_t V, const zl_sampling *s, char *work) {
  const uint32_t *seen = (const uint32_t *)(const void *)work;
  const int penal = zl_mark_seen(s, V, (uint32_t *)(void *)work);
  zl_best best = {-__builtin_inff(), 0};
  for (int64_t i = 0; i < V; i++) {
    const float v = penal ? zl_penalized(x[i], i, seen, s->repetition_penalty) : x[i];
    if (v > best.value) best = (zl_best){v, (int32_t)i};
  }
  return best.id;
}

/* whether a row's token is the first of its largest logits as they are */
static inline int zl_is_argmax(const zl_sampling *s) {
  if (!s) return 1;
  return !(s->temperature > 0.0f) &&
         !(s->repetition_penalty > 0.0f && s->repetition_penalty != 1.0f && s->n_history > 0);
}

/* logits f32[R, V], parts from zl_argmax_part (after a barrier), sampling [R] or NULL -> next i32[R] */
ZL_KERNEL void zl_sample(const zl_task *t, int64_t rows, const float *logits, const zl_best *parts,
                         const zl_sampling *sampling, int32_t *next, char *work, int64_t V) {
  for (int64_t r = t->thread; r < rows; r += t->n_threads) {
    const zl_sampling *s = sampling ? sampling + r : NULL;
    if (zl_is_argmax(s))
      next[r] = zl_argmax_join(parts + r * t->n_threads, t->n_threads).id;
    else if (s->temperature > 0.0f)
      next[r] = zl_sample_row(logits + r * V, V, s, work);
    else
      next[r] = zl_greedy_penalized(logits + r * V, V, s, work);
  }
}

#endif
