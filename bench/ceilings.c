// What this machine can do, as a compiler sees it: reads from memory and from the last cache, and
// the peak of each multiply instruction. Usage: ceilings [threads]. One JSON object.
#define _GNU_SOURCE
#include "pinned.h"

#include <immintrin.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define MAX_THREADS 64  // their streams of 16 MiB are 64 KB, at least
#define LOOPS 4000000L
#define CHAINS 24  // independent accumulators: hides the latency, leaves registers for operands

typedef double (*work)(int thread, int threads);  // returns operations or bytes
typedef struct {
    int thread, threads;
    work run;
    double amount, start, end;
    pthread_barrier_t *together;
} job;

static char *memory;                             // [BYTES], touched, in huge pages
static const size_t BYTES = (size_t)1 << 30;     // beside room for what lies between streams
static volatile int sink;

static void *enter(void *argument) {
    job *j = argument;
    pin(j->thread);
    pthread_barrier_wait(j->together);
    j->start = now();
    j->amount = j->run(j->thread, j->threads);
    j->end = now();
    return NULL;
}

// 1e9 operations or bytes a second
static double rate(work run, int threads) {
    pthread_t ids[MAX_THREADS];
    job jobs[MAX_THREADS];
    pthread_barrier_t together;
    pthread_barrier_init(&together, NULL, (unsigned)threads);
    for (int i = 0; i < threads; i++) {
        jobs[i] = (job){i, threads, run, 0, 0, 0, &together};
        pthread_create(&ids[i], NULL, enter, &jobs[i]);
    }
    double amount = 0, start = 1e300, end = 0;
    for (int i = 0; i < threads; i++) {
        pthread_join(ids[i], NULL);
        amount += jobs[i].amount;
        if (jobs[i].start < start) start = jobs[i].start;
        if (jobs[i].end > end) end = jobs[i].end;
    }
    return amount / (end - start) / 1e9;
}

// Streams are multiples of 64 KB and 9 pages apart, as those that lie powers of two apart meet in the
// same sets of the caches (Zen 3: they read a tenth less).
#define STEP ((size_t)64 << 10)
#define APART ((size_t)9 * 4096)

// Each thread reads its own part, in as many streams side by side: some machines read several
// faster than one (Zen 3, one thread: by a quarter to a third).
static int streams;
static double read_bytes(size_t bytes, int rounds, int thread, int threads) {
    const size_t piece = bytes / ((size_t)threads * (size_t)streams) / STEP * STEP, apart = piece + APART;
    const char *first = memory + apart * (size_t)streams * (size_t)thread;
    long long total = 0;
#ifdef __AVX512F__
    __m512i a[8];
    for (int k = 0; k < 8; k++) a[k] = _mm512_setzero_si512();
    for (int r = 0; r < rounds; r++)
        for (size_t i = 0; i < piece; i += 512)
            for (int s = 0; s < streams; s++) {
                const char *p = first + apart * (size_t)s + i;
#pragma GCC unroll 8
                for (int k = 0; k < 8; k++)
                    a[k] = _mm512_or_si512(a[k], _mm512_load_si512(p + 64 * k));
            }
    for (int k = 0; k < 8; k++) total |= _mm512_reduce_or_epi64(a[k]);
#else
    __m256i a[8];
    for (int k = 0; k < 8; k++) a[k] = _mm256_setzero_si256();
    for (int r = 0; r < rounds; r++)
        for (size_t i = 0; i < piece; i += 256)
            for (int s = 0; s < streams; s++) {
                const char *p = first + apart * (size_t)s + i;
#pragma GCC unroll 8
                for (int k = 0; k < 8; k++)
                    a[k] = _mm256_or_si256(a[k], _mm256_load_si256((const __m256i *)(p + 32 * k)));
            }
    for (int k = 0; k < 8; k++) total |= _mm256_extract_epi64(a[k], 0);
#endif
    sink = (int)total;
    return (double)piece * streams * rounds;
}
static double read_memory(int t, int n) { return read_bytes(BYTES, 1, t, n); }
static double read_cache(int t, int n) { return read_bytes((size_t)16 << 20, 50, t, n); }

// the best of one, two and four streams
static double read_rate(work run, int threads) {
    double best = 0;
    for (streams = 1; streams <= 4; streams *= 2) {
        const double found = rate(run, threads);
        if (found > best) best = found;
    }
    return best;
}

#define PEAK(name, type, zero, instruction, operations)                                        \
    static double name(int thread, int threads) {                                              \
        type a[CHAINS], x = zero, y = zero;                                                    \
        for (int k = 0; k < CHAINS; k++) a[k] = zero;                                          \
        for (long i = 0; i < LOOPS; i++) {                                                     \
            _Pragma("GCC unroll 24") for (int k = 0; k < CHAINS; k++)                          \
                __asm__ volatile(instruction " %2, %1, %0" : "+v"(a[k]) : "v"(x), "v"(y));     \
        }                                                                                      \
        (void)thread, (void)threads;                                                           \
        return (double)LOOPS * CHAINS * operations;                                            \
    }
#ifdef __AVX512F__
PEAK(fp32, __m512, _mm512_setzero_ps(), "vfmadd231ps", 32)
#else
#undef CHAINS
#define CHAINS 12
PEAK(fp32, __m256, _mm256_setzero_ps(), "vfmadd231ps", 16)
#endif
#ifdef __AVX512BF16__
PEAK(bf16, __m512, _mm512_setzero_ps(), "vdpbf16ps", 64)
#endif
#ifdef __AVX512VNNI__
PEAK(int8, __m512i, _mm512_setzero_si512(), "vpdpbusd", 128)
#else
// products of bytes and their sums in 16 bits: the least that a multiply-add of bytes takes without
// AVX-512 VNNI, the only VNNI that a target has
static double int8(int thread, int threads) {
#ifdef __AVX512BW__
    __m512i a[CHAINS], x = _mm512_setzero_si512(), t = x;
#else
    __m256i a[CHAINS], x = _mm256_setzero_si256(), t = x;
#endif
    for (int k = 0; k < CHAINS; k++) a[k] = x;
    for (long i = 0; i < LOOPS; i++) {
        _Pragma("GCC unroll 24") for (int k = 0; k < CHAINS; k++)
            __asm__ volatile("vpmaddubsw %2, %2, %1\n\tvpaddw %1, %0, %0" : "+v"(a[k]), "=v"(t) : "v"(x));
    }
    (void)thread, (void)threads;
    return (double)LOOPS * CHAINS * 2 * sizeof x;
}
#endif

// dependent additions: one a cycle
static double clock_rate(int thread, int threads) {
    long x = thread;
    for (long i = 0; i < 5000000L; i++)
        __asm__ volatile("add $1,%0\nadd $1,%0\nadd $1,%0\nadd $1,%0\nadd $1,%0\n"
                         "add $1,%0\nadd $1,%0\nadd $1,%0\nadd $1,%0\nadd $1,%0"
                         : "+r"(x));
    sink = (int)x;
    return 5e7 / threads;
}

int main(int argc, char **argv) {
    int threads = argc > 1 ? atoi(argv[1]) : 1;
    if (threads < 1 || threads > MAX_THREADS) {
        fprintf(stderr, "ceilings: threads are 1 to %d\n", MAX_THREADS);
        return 2;
    }
    const size_t all = BYTES + (size_t)MAX_THREADS * 4 * APART;
    memory = mmap(NULL, all, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return 1;
    madvise(memory, all, MADV_HUGEPAGE);
    memset(memory, 1, all);
    printf("{\"threads\": %d, \"clock_ghz\": %.3f", threads, rate(clock_rate, threads));
    printf(", \"read_memory\": %.2f", read_rate(read_memory, threads));
    printf(", \"read_cache\": %.2f", read_rate(read_cache, threads));
    printf(", \"fp32\": %.1f", rate(fp32, threads));
#ifdef __AVX512BF16__
    printf(", \"bf16\": %.1f", rate(bf16, threads));
#endif
    printf(", \"int8\": %.1f", rate(int8, threads));
    printf("}\n");
    return 0;
}
