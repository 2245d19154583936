// How one token's product reads its weights: in one, two or four streams a thread, asking ahead or
// not, beside a program that only reads.  Usage: streams THREADS ROUNDS.  Lines of "what GB/s ...",
// a figure a round; each round measures all of them in an order of its own.
//
// The products are those of the templates (zl_dot_stream), of the format ZL_FMT_BENCH.  A matrix has
// 96 groups of 16 rows a thread and 576 columns, as SmolLM2's; matrices follow each other in memory.
#define _GNU_SOURCE
#include "zl_dot_int8.h"

#include "pinned.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#define MEMORY ((size_t)512 << 20)  // more than most last caches
#define MOST_THREADS 64
#define MOST_ROUNDS 200
enum { K = 576, BLOCKS = K / 32, GROUPS = 96 };
#define FORMAT ZL_FMT_BENCH

static int8_t q[K] __attribute__((aligned(64)));
static float scale[BLOCKS] __attribute__((aligned(64))), sums[2 * BLOCKS] __attribute__((aligned(64)));
static zl_tile_word words[BLOCKS];
static uint8_t *memory;
static float outputs[MOST_THREADS][16 * GROUPS] __attribute__((aligned(64)));

// GROUPS groups in `streams` runs side by side, block by block in turn, asked for `ahead` bytes ahead
ZL_KERNEL void product(int streams, int64_t ahead, const uint8_t *matrix, float *out) {
    const zl_bundle a = {q, scale, sums, words, 0};
    const int64_t bytes = zl_group_bytes(FORMAT, K), run = GROUPS / streams;
    for (int64_t g = 0; g < run; g++) {
        v16f acc[4];
        ZL_UNROLL
        for (int s = 0; s < streams; s++) acc[s] = zl_set(0.0f);
        ZL_NO_UNROLL
        for (int64_t kb = 0; kb < BLOCKS; kb++) {
            ZL_UNROLL
            for (int s = 0; s < streams; s++)
                zl_dot_stream(FORMAT, 1, ahead, a, 0, K, kb, matrix + (g + s * run) * bytes, &acc[s]);
        }
        ZL_UNROLL
        for (int s = 0; s < streams; s++) zl_store(out + 16 * (g + s * run), acc[s]);
    }
}

ZL_KERNEL void only_read(int streams, const uint8_t *matrix, float *out) {
    const int64_t run = GROUPS * zl_group_bytes(FORMAT, K) / streams / 256 * 256;
    v16i a[4] = {{0}};
    for (int64_t i = 0; i < run; i += 256)
        for (int s = 0; s < streams; s++)
            for (int k = 0; k < 4; k++) a[k] |= *(const v16i *)(matrix + s * run + i + 64 * k);
    a[0] |= a[1] | a[2] | a[3];
    memcpy(out, &a[0], sizeof a[0]);
}

#define WAYS(X)                                                                                  \
    X(read_1, only_read(1, m, o)) X(read_2, only_read(2, m, o)) X(read_4, only_read(4, m, o))    \
    X(product_1_0, product(1, 0, m, o)) X(product_1_1536, product(1, 1536, m, o))                \
    X(product_1_4096, product(1, 4096, m, o)) X(product_2_0, product(2, 0, m, o))                \
    X(product_2_512, product(2, 512, m, o)) X(product_2_1024, product(2, 1024, m, o))            \
    X(product_2_1536, product(2, 1536, m, o)) X(product_2_2048, product(2, 2048, m, o))          \
    X(product_2_4096, product(2, 4096, m, o)) X(product_4_0, product(4, 0, m, o))                \
    X(product_4_1536, product(4, 1536, m, o))
#define DEFINE(name, call) \
    __attribute__((noinline)) static void name(const uint8_t *m, float *o) { call; }
WAYS(DEFINE)

typedef void (*way)(const uint8_t *, float *);
#define LIST(name, call) {#name, name},
static const struct {
    const char *name;
    way run;
} ways[] = {WAYS(LIST)};
#define N_WAYS ((int)(sizeof ways / sizeof *ways))

typedef struct {
    int thread, threads;
    way run;
    pthread_barrier_t *together;
    double begin, end;
} job;

static void *enter(void *argument) {
    job *j = argument;
    pin(j->thread);
    const size_t each = (size_t)(GROUPS * zl_group_bytes(FORMAT, K)), all_threads = each * (size_t)j->threads;
    pthread_barrier_wait(j->together);
    j->begin = now();
    for (size_t at = 0; at + all_threads <= MEMORY; at += all_threads)
        j->run(memory + at + each * (size_t)j->thread, outputs[j->thread]);
    j->end = now();
    return NULL;
}

static double rate(way run, int threads) {
    pthread_t ids[MOST_THREADS];
    job jobs[MOST_THREADS];
    pthread_barrier_t together;
    if (pthread_barrier_init(&together, NULL, (unsigned)threads)) exit(1);
    for (int i = 0; i < threads; i++) {
        jobs[i] = (job){i, threads, run, &together, 0, 0};
        if (pthread_create(&ids[i], NULL, enter, &jobs[i])) exit(1);
    }
    double begin = 1e300, end = 0;
    for (int i = 0; i < threads; i++) {
        pthread_join(ids[i], NULL);
        if (jobs[i].begin < begin) begin = jobs[i].begin;
        if (jobs[i].end > end) end = jobs[i].end;
    }
    pthread_barrier_destroy(&together);
    const size_t matrix = (size_t)(GROUPS * zl_group_bytes(FORMAT, K)) * (size_t)threads;
    return (double)(MEMORY / matrix * matrix) / (end - begin) / 1e9;
}

int main(int argc, char **argv) {
    static double found[N_WAYS][MOST_ROUNDS];
    const int threads = argc > 2 ? atoi(argv[1]) : 0, rounds = argc > 2 ? atoi(argv[2]) : 0;
    if (threads < 1 || threads > MOST_THREADS || rounds < 1 || rounds > MOST_ROUNDS) return 2;
    const size_t page = (size_t)2 << 20;
    memory = mmap(NULL, MEMORY + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return 1;
    madvise(memory, MEMORY + page, MADV_HUGEPAGE);
    for (size_t i = 0; i < MEMORY + page; i++) memory[i] = (uint8_t)(i * 7 & 0x3b);  // no scale is NaN
    for (int i = 0; i < K; i++) q[i] = (int8_t)i;
    for (int i = 0; i < BLOCKS; i++) scale[i] = 0.01f;
    int order[N_WAYS];
    for (int i = 0; i < N_WAYS; i++) order[i] = i;
    for (int r = 0; r < rounds; r++) {
        for (int i = N_WAYS - 1; i > 0; i--) {
            const int other = rand() % (i + 1), taken = order[i];
            order[i] = order[other];
            order[other] = taken;
        }
        for (int i = 0; i < N_WAYS; i++) found[order[i]][r] = rate(ways[order[i]].run, threads);
    }
    for (int i = 0; i < N_WAYS; i++) {
        printf("%s", ways[i].name);
        for (int r = 0; r < rounds; r++) printf(" %.2f", found[i][r]);
        printf("\n");
    }
    return 0;
}
