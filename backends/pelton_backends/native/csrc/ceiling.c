/* What this machine's cores can do at most, with this library's instruction set: float32 multiplications and additions a second,
   and bytes read from memory a second. Kernels are judged by their share of it. */
#define _GNU_SOURCE
#include <sys/mman.h>
#include <time.h>

#include "pool.h"
#include "vec.h"

enum {
    REPEATS = 7,     /* the best counts: a neighbour only slows */
    TASKS_A_THREAD = 8,
    STEPS = 1 << 18, /* of one task: about a millisecond */
    NUM_SUMS = NUM_REGISTERS == 32 ? 24 : 12, /* more than an FMA's latency times how many start in a cycle */
    PART = 1 << 20,  /* bytes that one task reads */
};

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* A result that the compiler may not leave out. */
static volatile float kept;

static void multiply_and_add(void *context, int64_t task, struct turn *turn) {
    (void)turn;
    vec sums[NUM_SUMS], factor = vec_all(*(float *)context), offset = vec_all((float)task);
#pragma GCC unroll 24
    for (int i = 0; i < NUM_SUMS; i++)
        sums[i] = vec_all((float)i);
    for (int64_t step = 0; step < STEPS; step++) {
#pragma GCC unroll 24
        for (int i = 0; i < NUM_SUMS; i++)
            sums[i] = sums[i] * factor + offset;
    }
#pragma GCC unroll 24
    for (int i = 1; i < NUM_SUMS; i++)
        sums[0] += sums[i];
    kept = sums[0][0];
}

/* GFLOP/s of all threads together. */
EXPORT double pelton_fma_ceiling(void) {
    int64_t tasks = (int64_t)TASKS_A_THREAD * pool_num_threads();
    float factor = 0.5f;
    double best = 0.0;
    for (int repeat = 0; repeat < REPEATS; repeat++) {
        double started = now();
        pool_run(tasks, multiply_and_add, &factor);
        double speed = 2.0 * STEPS * NUM_SUMS * LANES * (double)tasks / (now() - started) * 1e-9;
        best = speed > best ? speed : best;
    }
    return best;
}

static void write_part(void *context, int64_t task, struct turn *turn) {
    (void)turn;
    memset((char *)context + task * PART, 1, PART);
}

static void read_part(void *context, int64_t task, struct turn *turn) {
    (void)turn;
    const char *from = (const char *)context + task * PART;
    uvec sums[4] = {{0}, {0}, {0}, {0}};
    for (int64_t byte = 0; byte < PART; byte += 4 * VEC_BYTES) {
        __builtin_prefetch(from + byte + 4096);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++)
            sums[i] += vec_load_bits(from + byte + i * VEC_BYTES);
    }
    kept = (float)(sums[0] + sums[1] + sums[2] + sums[3])[0];
}

/* GB/s that all threads together read from `bytes` bytes of fresh memory, in pages of 2 MiB where there are any; 0: no memory. */
EXPORT double pelton_read_ceiling(int64_t bytes) {
    int64_t tasks = bytes / PART;
    char *memory = mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        return 0.0;
    madvise(memory, (size_t)bytes, MADV_HUGEPAGE);
    pool_run(tasks, write_part, memory);
    double best = 0.0;
    for (int repeat = 0; repeat < REPEATS; repeat++) {
        double started = now();
        pool_run(tasks, read_part, memory);
        double speed = (double)(tasks * PART) / (now() - started) * 1e-9;
        best = speed > best ? speed : best;
    }
    munmap(memory, (size_t)bytes);
    return best;
}
