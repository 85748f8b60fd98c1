/* What csrc/pool.h promises, checked by itself: test_pool.py compiles this with pool.c and each sanitizer. The argument is the check. */
#define _GNU_SOURCE
#include "pool.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

void pelton_set_threads(int count);
void pelton_rest(void);

enum { MOST = 4200 };

#define CHECK(CONDITION)                                            \
    do {                                                            \
        if (!(CONDITION)) {                                         \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #CONDITION); \
            _exit(1);                                               \
        }                                                           \
    } while (0)

static _Atomic int times_run[MOST], times_written[MOST], firsts[64], num_late, num_stalled, is_stalling, num_nested;

static void rest_ms(long ms) {
    struct timespec time = {ms / 1000, ms % 1000 * 1000000};
    nanosleep(&time, NULL);
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static void clear(int64_t count) {
    for (int64_t i = 0; i < count; i++)
        times_run[i] = times_written[i] = 0;
    for (int i = 0; i < 64; i++)
        firsts[i] = 0;
}

struct context {
    int64_t number, given;
    char rest[200];
};

static void count(void *context, int64_t task, struct turn *turn) {
    struct context *own = context;
    CHECK(own->given == 3 * own->number);
    CHECK(turn->thread >= 0 && turn->thread < pool_num_threads());
    times_run[task]++;
    firsts[turn->thread] += turn->is_first;
    if (may_write(turn))
        times_written[task]++;
}

static void check_runs(void) {
    static const int64_t sizes[] = {0, 1, 2, 3, 7, 64, 1000, 4096, 4097};
    for (int threads = 1; threads <= 9; threads += 2) {
        pelton_set_threads(threads);
        CHECK(pool_num_threads() == threads);
        for (int repeat = 0; repeat < 28; repeat++)
            for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
                struct context context = {repeat, 3 * repeat, ""};
                int is_repeatable = repeat % 2;
                int64_t looked_at = sizes[i] + 64; /* some behind the last one */
                clear(looked_at);
                pool_do((struct pool_work){.run = count, .context = &context, .num_tasks = sizes[i], .has_shares = repeat / 2 % 2,
                                           .is_small = repeat % 7 == 3, .context_bytes = is_repeatable ? sizeof context : 0});
                pelton_rest();
                for (int64_t task = 0; task < looked_at; task++) {
                    CHECK(times_written[task] == (task < sizes[i]));
                    CHECK(is_repeatable ? times_run[task] >= (task < sizes[i]) : times_run[task] == (task < sizes[i]));
                }
                for (int thread = 0; thread < 64; thread++)
                    CHECK(firsts[thread] <= 1);
            }
    }
}

/* Tiny runs one after the other: threads come late to most of them. */
static void check_many_runs(void) {
    pelton_set_threads(4);
    for (int64_t run = 0; run < 20000; run++) {
        struct context context = {run, 3 * run, ""};
        pool_run_repeatable(5, count, &context, sizeof context);
    }
    pelton_rest();
    for (int task = 0; task < 5; task++)
        CHECK(times_written[task] == 20000);
}

/* Another thread than the caller's is held up in its first task. */
static void stall(void *context, int64_t task, struct turn *turn) {
    (void)context;
    if (turn->thread > 0 && !atomic_exchange(&is_stalling, 1)) {
        rest_ms(500);
        num_stalled++;
        if (may_write(turn))
            times_written[task]++;
        else
            num_late++;
        return;
    }
    rest_ms(2); /* so that the others get some */
    if (may_write(turn))
        times_written[task]++;
}

static void check_stall(void) {
    pelton_set_threads(3);
    int64_t context = 0, num_tasks = 12;
    double started = now();
    pool_run_repeatable(num_tasks, stall, &context, sizeof context);
    double took = now() - started;
    CHECK(is_stalling && num_stalled == 0 && took < 0.45);
    for (int64_t task = 0; task < num_tasks; task++)
        CHECK(times_written[task] == 1);
    clear(MOST);
    is_stalling = 1;
    pool_run_repeatable(num_tasks, stall, &context, sizeof context); /* while the late one is still at the first run */
    pelton_rest();
    CHECK(num_stalled == 1 && num_late == 1);
    for (int64_t task = 0; task < num_tasks; task++)
        CHECK(times_written[task] == 1);
}

/* Tasks that run once are waited for. */
static void stall_once(void *context, int64_t task, struct turn *turn) {
    (void)context, (void)turn;
    rest_ms(task == 1 ? 100 : 1);
    times_run[task]++;
}

static void check_once(void) {
    pelton_set_threads(3);
    pool_run(9, stall_once, NULL);
    for (int task = 0; task < 9; task++)
        CHECK(times_run[task] == 1);
}

static void give_up(void *context, int64_t task, struct turn *turn) {
    (void)context;
    if (turn->thread > 0)
        return;
    rest_ms(1);
    if (may_write(turn))
        times_written[task]++;
}

static void check_no_memory(void) {
    pelton_set_threads(4);
    int64_t context = 0;
    for (int repeat = 1; repeat <= 20; repeat++) {
        pool_run_repeatable(16, give_up, &context, sizeof context);
        pelton_rest();
        for (int task = 0; task < 16; task++)
            CHECK(times_written[task] == repeat);
    }
}

static void inner(void *context, int64_t task, struct turn *turn) {
    (void)task;
    CHECK(*(pthread_t *)context == pthread_self() && turn->thread == 0 && is_wanted(turn));
    num_nested++;
}

static void outer(void *context, int64_t task, struct turn *turn) {
    (void)context, (void)task, (void)turn;
    pthread_t self = pthread_self();
    pool_run(3, inner, &self);
}

static void check_nested(void) {
    pelton_set_threads(4);
    pool_run(50, outer, NULL);
    CHECK(num_nested == 150);
}

static void check_fork(void) {
    pelton_set_threads(3);
    for (int repeat = 0; repeat < 5; repeat++) {
        struct context context = {repeat, 3 * repeat, ""};
        clear(MOST);
        pool_run(100, count, &context);
        pid_t child = fork();
        CHECK(child >= 0);
        clear(MOST);
        pool_run_repeatable(100, count, &context, sizeof context);
        for (int task = 0; task < 100; task++)
            CHECK(times_written[task] == 1);
        if (child == 0)
            _exit(0);
        int status;
        CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
}

/* Callers beside each other: one has the threads, the others compute alone. */
static void *call_often(void *argument) {
    (void)argument;
    for (int64_t run = 0; run < 2000; run++) {
        struct context context = {run, 3 * run, ""};
        pool_run(8, count, &context);
    }
    return NULL;
}

static void check_callers(void) {
    pthread_t callers[3];
    pelton_set_threads(3);
    for (int i = 0; i < 3; i++)
        CHECK(pthread_create(&callers[i], NULL, call_often, NULL) == 0);
    for (int i = 0; i < 3; i++)
        pthread_join(callers[i], NULL);
    for (int task = 0; task < 8; task++)
        CHECK(times_written[task] == 6000);
}

int main(int argc, char **argv) {
    static const struct {
        const char *name;
        void (*run)(void);
    } checks[] = {{"runs", check_runs}, {"many_runs", check_many_runs}, {"stall", check_stall}, {"once", check_once},
                  {"no_memory", check_no_memory}, {"nested", check_nested}, {"fork", check_fork}, {"callers", check_callers}};
    for (size_t i = 0; argc == 2 && i < sizeof checks / sizeof *checks; i++)
        if (strcmp(argv[1], checks[i].name) == 0) {
            checks[i].run();
            return 0;
        }
    return 2;
}
