/* What this machine can do: the rate of reads from memory and from the last cache, the peak of each multiplication.
 *
 * In: the engine's own thread team.  Out: zl_probe_run, which module.c.jinja exports as zl_probe.  The methods are
 * those of bench/ceilings.c: reads, each thread its own part in one, two or four streams, which some machines read
 * faster side by side; chains of independent multiply-adds in registers.  Each figure is the best of a few short
 * measurements, because other work only ever takes away.  Next file: module.c.jinja.
 */
#ifndef ZL_PROBE_H
#define ZL_PROBE_H
#include "zl_simd.h"
#include "zl_team.h"
#include "zl_tile.h"
#include "zl_trace.h"

enum zl_probe_kind { ZL_PROBE_TOUCH, ZL_PROBE_READ, ZL_PROBE_F32, ZL_PROBE_BF16, ZL_PROBE_INT8 };
#define ZL_PROBE_TRIES 3
#define ZL_PROBE_LOOPS 1000000
#define ZL_PROBE_CACHE_BYTES ((uint64_t)256 << 20) /* read by one measurement of the cache, in rounds */

typedef struct zl_probe_job {
  zl_team *team;
  enum zl_probe_kind kind;
  char *memory;  /* 64-byte aligned */
  uint64_t room; /* its bytes, and how many of them are read */
  uint64_t bytes, rounds, streams;
  struct zl_probe_time {
    _Alignas(64) uint64_t begin, end;
    double amount;
  } *times; /* [n_threads] */
} zl_probe_job;

/* A thread's part of the memory, in units of 512 bytes. */
static char *zl_probe_part(const zl_probe_job *job, int32_t thread, uint64_t *bytes) {
  *bytes = job->room / (uint64_t)job->team->n_threads & ~(uint64_t)511;
  return job->memory + (uint64_t)thread * *bytes;
}

/* Bytes of a stream, and from one to the next: where there is room, 9 pages beyond a multiple of 64 KB, as streams that
 * lie powers of two apart meet in the same sets of the caches (Zen 3: they read a tenth less). */
static void zl_probe_streams(const zl_probe_job *job, uint64_t *piece, uint64_t *apart) {
  const uint64_t n = (uint64_t)job->team->n_threads * job->streams, step = (uint64_t)64 << 10, skew = 9 * 4096;
  const uint64_t each = job->bytes / n & ~(uint64_t)511, room = job->room / n;
  *piece = *apart = each;
  if (room < 4 * step) return;
  const uint64_t wanted = (each + step - 1) / step, most = (room - skew) / step;
  *apart = (wanted < most ? wanted : most) * step + skew;
  if (*piece > *apart) *piece = *apart;
}

static double zl_probe_read(const zl_probe_job *job, int32_t thread) {
  const uint64_t rounds = job->rounds, streams = job->streams;
  uint64_t piece, apart;
  zl_probe_streams(job, &piece, &apart);
  const char *p = job->memory + (uint64_t)thread * streams * apart;
  v16i a[8] = {{0}};
  for (uint64_t r = 0; r < rounds; r++) {
    for (uint64_t i = 0; i < piece; i += 512)
      for (uint64_t s = 0; s < streams; s++)
        for (int k = 0; k < 8; k++) a[k] |= *(const v16i *)(p + s * apart + i + 64 * k);
    __asm__ volatile("" ::: "memory"); /* the next round reads again */
  }
  for (int k = 1; k < 8; k++) a[0] |= a[k];
  int32_t sink[16];
  memcpy(sink, &a[0], sizeof sink);
  __asm__ volatile("" ::"r"(sink) : "memory");
  return (double)(piece * streams * rounds);
}

/* CHAINS accumulators hide the latency and leave registers for the operands. */
#define ZL_PEAK(name, type, chains, operations, instructions)                                      \
  static double name(void) {                                                                       \
    type a[chains], x, y, t;                                                                       \
    memset(a, 0, sizeof a);                                                                        \
    memset(&x, 0, sizeof x);                                                                       \
    memset(&y, 0, sizeof y);                                                                       \
    memset(&t, 0, sizeof t);                                                                       \
    for (int64_t i = 0; i < ZL_PROBE_LOOPS; i++) {                                                 \
      _Pragma("unroll") for (int k = 0; k < chains; k++)                                           \
          __asm__ volatile(instructions : "+v"(a[k]), "+v"(t) : "v"(x), "v"(y));                   \
    }                                                                                              \
    return (double)ZL_PROBE_LOOPS * chains * operations;                                           \
  }
#if defined(__x86_64__)
/* without VNNI a product of bytes and its addition take two instructions (zl_block_dots.h) */
#define ZL_MADDUBS "vpmaddubsw %2, %3, %1\n\tvpaddw %1, %0, %0"
#if ZL_AVX512
typedef __m512i zl_probe_vector;
ZL_PEAK(zl_probe_f32, zl_probe_vector, 24, 32, "vfmadd231ps %3, %2, %0")
#if defined(__AVX512VNNI__)
ZL_PEAK(zl_probe_int8, zl_probe_vector, 24, 128, "vpdpbusd %3, %2, %0")
#else
ZL_PEAK(zl_probe_int8, zl_probe_vector, 24, 128, ZL_MADDUBS)
#endif
#else
typedef __m256i zl_probe_vector;
ZL_PEAK(zl_probe_f32, zl_probe_vector, 12, 16, "vfmadd231ps %3, %2, %0")
ZL_PEAK(zl_probe_int8, zl_probe_vector, 12, 64, ZL_MADDUBS)
#endif
#if defined(__AVX512BF16__)
ZL_PEAK(zl_probe_bf16, zl_probe_vector, 24, 64, "vdpbf16ps %3, %2, %0")
#endif
#endif

#if ZL_TILES
/* Whole tiles, 16 x 16 x 64, six sums at a time: more than products whose blocks have scales can use. */
static double zl_probe_tiles(void) {
  static const zl_tile_config config = {
      .palette = 1,
      .bytes = {64, 64, 64, 64, 64, 64, 64, 64},
      .rows = {16, 16, 16, 16, 16, 16, 16, 16},
  };
  zl_tile_configure(&config);
  for (int64_t i = 0; i < ZL_PROBE_LOOPS / 8; i++) {
    zl_tile_dot_su(0, 6, 7);
    zl_tile_dot_su(1, 6, 7);
    zl_tile_dot_su(2, 6, 7);
    zl_tile_dot_su(3, 6, 7);
    zl_tile_dot_su(4, 6, 7);
    zl_tile_dot_su(5, 6, 7);
  }
  zl_tile_release();
  return ZL_PROBE_LOOPS / 8 * 6.0 * 2 * 16 * 16 * 64;
}
#endif

/* Operations done; 0 where the code has no such instruction. */
static double zl_probe_compute(enum zl_probe_kind kind) {
#if defined(__x86_64__)
  if (kind == ZL_PROBE_F32) return zl_probe_f32();
#if ZL_TILES
  if (kind == ZL_PROBE_INT8) return zl_probe_tiles();
#endif
  if (kind == ZL_PROBE_INT8) return zl_probe_int8();
#if defined(__AVX512BF16__)
  if (kind == ZL_PROBE_BF16) return zl_probe_bf16();
#endif
#endif
  (void)kind;
  return 0;
}

static void zl_probe_thread(void *arg, int32_t thread) {
  zl_probe_job *job = (zl_probe_job *)arg;
  struct zl_probe_time *t = &job->times[thread];
  uint64_t bytes = 0;
  char *part = zl_probe_part(job, thread, &bytes);
  zl_team_barrier(job->team);
  t->begin = zl_now();
  if (job->kind == ZL_PROBE_TOUCH)
    memset(part, 1, bytes);
  else if (job->kind == ZL_PROBE_READ)
    t->amount = zl_probe_read(job, thread);
  else
    t->amount = zl_probe_compute(job->kind);
  t->end = zl_now();
  zl_team_barrier(job->team); /* the slower thread is waited for here, not at the job's end, where the team learns */
}

/* 1e9 bytes or operations a second, the best of a few tries: from the first begin to the last end. */
static double zl_probe_rate(zl_probe_job *job) {
  double best = 0;
  for (int try = 0; try < ZL_PROBE_TRIES; try++) {
    zl_team_run(job->team, zl_probe_thread, job);
    double amount = 0;
    uint64_t begin = UINT64_MAX, end = 0;
    for (int32_t i = 0; i < job->team->n_threads; i++) {
      const struct zl_probe_time *t = &job->times[i];
      amount += t->amount;
      if (t->begin < begin) begin = t->begin;
      if (t->end > end) end = t->end;
    }
    const double rate = amount / (double)(end > begin ? end - begin : 1);
    if (rate > best) best = rate;
  }
  return best;
}

/* The best of one, two and four streams. */
static double zl_probe_read_rate(zl_probe_job *job) {
  double best = 0;
  for (job->streams = 1; job->streams <= 4; job->streams *= 2) {
    const double rate = zl_probe_rate(job);
    if (rate > best) best = rate;
  }
  return best;
}

static int32_t zl_probe_run(zl_team *team, char *memory, uint64_t bytes, uint64_t cache_bytes, zl_ceilings *out) {
  zl_probe_job job = {.team = team, .memory = memory, .room = bytes, .bytes = bytes, .rounds = 1};
  const size_t size = (size_t)team->n_threads * sizeof *job.times;
  job.times = (struct zl_probe_time *)aligned_alloc(64, size);
  if (!job.times) return ZL_NO_MEMORY;
  memset(job.times, 0, size);
  job.kind = ZL_PROBE_TOUCH;
  zl_team_run(team, zl_probe_thread, &job); /* pages that were never written are all the same one */
  job.kind = ZL_PROBE_READ;
  out->read_memory = zl_probe_read_rate(&job);
  job.bytes = cache_bytes;
  job.rounds = ZL_PROBE_CACHE_BYTES / cache_bytes + 1;
  out->read_cache = zl_probe_read_rate(&job);
  job.kind = ZL_PROBE_F32;
  out->f32 = zl_probe_rate(&job);
  job.kind = ZL_PROBE_BF16;
  out->bf16 = zl_probe_rate(&job);
  job.kind = ZL_PROBE_INT8;
  out->int8 = zl_probe_rate(&job);
  free(job.times);
  return ZL_OK;
}

#endif
