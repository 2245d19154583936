/* What the test library exports besides the kernels; cpu_harness.py includes it after the kernel headers. */
typedef struct job { zl_task base; int64_t rows; void *const *p; const int64_t *i; const double *d; char *scratch; } job;
int64_t items_dealt; /* by the last call of several threads, at least what it had */
int slots_used; /* by the last call, whether spans of attention met; -1: a counter was not 0 afterwards */
typedef struct state { int32_t n_threads, n_seqs, max_blocks; const int32_t *token_seq, *positions, *seq_starts, *block_table; int32_t screened; } state;
static int call(zl_team_fn fn, const state *s, int64_t rows, void *const *p, const int64_t *i, const double *d) {
  zl_team *team = NULL;
  int32_t status = zl_team_create(s->n_threads, NULL, 0, &team);
  if (status) return status;
  job j = {{0, s->n_threads, s->n_seqs, s->max_blocks, s->token_seq, s->positions, s->seq_starts, s->block_table, NULL, NULL, team, s->screened, 0}, rows, p, i, d, NULL};
  j.scratch = aligned_alloc(64, (size_t)ZL_SCRATCH_BYTES * (size_t)s->n_threads);
  char *shared = j.base.shared = aligned_alloc(64, ZL_SHARED_BYTES);
  if (!j.scratch || !shared) return 5;
  memset(shared, 0, ZL_MEETINGS * 64);
  memset(shared + ZL_MEETINGS * 64, 0xff, ZL_SLOTS_BYTES); /* NaN */
  zl_team_run(team, fn, &j);
  items_dealt = 0;
  for (int32_t i = 0; i < s->n_threads; i++) items_dealt += team->cursors[i].taken;
  slots_used = 0;
  for (int64_t n = ZL_MEETINGS * 64; n < (int64_t)ZL_SHARED_BYTES; n++) slots_used |= shared[n] != (char)0xff;
  for (int64_t n = 0; n < ZL_MEETINGS * 64; n++) if (shared[n]) slots_used = -1;
  free(shared);
  free(j.scratch);
  zl_team_destroy(team);
  return 0;
}
int validate(const zl_module_info *info, uint64_t kv_blocks, const zl_batch *b) { return zl_validate_batch(info, kv_blocks, b); }
int64_t first_half(int32_t n_threads, int64_t rows, int64_t items) { return zl_first_half(n_threads, rows, items); }
double uniform(uint64_t seed, uint64_t draw) { return zl_uniform(seed, draw); }
void exp_all(const float *x, float *y, int64_t n) { for (int64_t i = 0; i < n; i += 16) zl_store_n(y + i, zl_exp(zl_load_n(x + i, n - i)), n - i); }
void silu_times_all(const float *x, const float *u, float *y, int64_t n) { for (int64_t i = 0; i < n; i += 16) zl_store_n(y + i, zl_act_times(ZL_ACT_SILU, zl_load_n(x + i, n - i), zl_load_n(u + i, n - i)), n - i); }
#if defined(ZL_ATTENTION_BF16_H) /* zl_attention.h is among the headers, and its bf16 part */
void exp2_low_all(const float *x, float *y, int64_t n) { for (int64_t i = 0; i < n; i += 16) zl_store_n(y + i, zl_exp2_low(zl_load_n(x + i, n - i)), n - i); }
#endif
void exp2_rough_all(const float *x, float *y, int64_t n) { for (int64_t i = 0; i < n; i += 16) zl_store_n(y + i, zl_exp2_rough(zl_load_n(x + i, n - i)), n - i); }
void sincos_all(const float *x, float *s, float *c, int64_t n) { for (int64_t i = 0; i < n; i++) zl_sincos(x[i], s + i, c + i); }
void dots(const uint8_t *u, const int8_t *s, int32_t *to) {
  v64u8 a = zl_load_bytes(u); v16i b; memcpy(&b, s, 64);
  v16i w = zl_dot4_u8((v16i){0}, a, b);
  memcpy(to, &w, 64);
}
typedef struct rounds { zl_team *team; int64_t n; int64_t *counts; _Atomic int64_t errors; } rounds;
static void count_rounds(void *arg, int32_t thread) {
  rounds *r = arg;
  for (int64_t i = 0; i < r->n; i++) {
    r->counts[thread * 8] = i + 1;
    zl_team_barrier(r->team);
    for (int32_t k = 0; k < r->team->n_threads; k++) if (r->counts[k * 8] != i + 1) r->errors++;
    zl_team_barrier(r->team);
  }
}
int64_t team_errors(int32_t n_threads, int64_t n, int64_t runs, const int32_t *cpus, int32_t n_cpus) {
  zl_team *team = NULL;
  if (zl_team_create(n_threads, cpus, n_cpus, &team)) return -1;
  rounds r = {team, n, calloc((size_t)n_threads * 8, 8), 0};
  for (int64_t i = 0; i < runs; i++) zl_team_run(team, count_rounds, &r);
  zl_team_destroy(team);
  free(r.counts);
  return r.errors;
}
