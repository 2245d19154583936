// Shared by ceilings.c and streams.c: time, and a thread's CPU.  Next file: ceilings.c.
#ifndef PINNED_H
#define PINNED_H
#include <pthread.h>
#include <sched.h>
#include <time.h>

// seconds, monotonic
static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// Binds the calling thread to the CPU of this number among those that the process may use.
static void pin(int number) {
    cpu_set_t all, one;
    sched_getaffinity(0, sizeof all, &all);
    for (int cpu = 0, left = number; cpu < CPU_SETSIZE; cpu++)
        if (CPU_ISSET(cpu, &all) && left-- == 0) {
            CPU_ZERO(&one);
            CPU_SET(cpu, &one);
            pthread_setaffinity_np(pthread_self(), sizeof one, &one);
            break;
        }
}
#endif
