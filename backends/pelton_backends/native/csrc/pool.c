/* A pool of threads: started when they are first needed, spinning for a short while between runs, asleep otherwise.

   A run has a number that never comes again. Each thread has a share of its tasks and takes them one by one; then it takes from the
   others' shares. A share is one word, the run's number and the next place, so that a late thread's attempt to take fails.
   What a thread is at stands in its slot before it takes. Thus the caller, when all shares are empty, finds in the slots every
   task that may not be done. It waits for these as long as a few tasks take, and then runs them itself if they are repeatable. */
#define _GNU_SOURCE
#include "pool.h"

#if defined(PELTON_OPENMP)
#include "pool_openmp.h"
#else

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <time.h>
#include <unistd.h>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

#if defined(__x86_64__)
#define RELAX() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define RELAX() __asm__ volatile("yield")
#else
#define RELAX() ((void)0)
#endif

enum {
    MOST_THREADS = 256,
    MOST_REPEATABLE = 4096, /* tasks of a run; more of them are long ones anyway */
    PLACE_BITS = 28,        /* of a word that also has a run's number */
    SPIN_NS = 50000,        /* between two runs of a step */
    CONTEXT_WORDS = MOST_CONTEXT_BYTES / 8,
};

#define PLACE_MASK ((1ull << PLACE_BITS) - 1)

/* Phases of a repeatable task; the rest of its word is the run's number. */
enum { UNTOUCHED = 0, WRITING = 1, DONE = 2 };

struct line {
    _Atomic uint64_t word;
    char rest[56];
};

static struct {
    _Atomic uint64_t run; /* number of the run under way; 0: none */
    _Atomic uint32_t bell;
    _Atomic int num_sleeping;
    char rest[48];
    /* The run's description, read by threads that may come too late: they check `run` afterwards. */
    _Atomic uint64_t function, context, num_tasks, context_bytes, has_shares, threads;
    _Atomic uint64_t words[CONTEXT_WORDS]; /* the context of repeatable tasks */
    struct line shares[MOST_THREADS];      /* run | next place */
    struct line slots[MOST_THREADS];       /* run | task + 1; 0: thread is in no run */
    _Atomic uint64_t tasks[MOST_REPEATABLE]; /* run << 2 | phase */
    _Atomic uint64_t given_up;               /* a run of which some thread left a task undone */
    _Atomic int is_taken;                    /* by a caller */
    uint64_t last_run;
    int num_threads, num_started;
} pool = {.num_threads = 1};

static __thread int is_inside;

/* ---- waiting ---- */

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static void sleep_until_rung(uint32_t bell) {
#if defined(__linux__)
    atomic_fetch_add(&pool.num_sleeping, 1);
    syscall(SYS_futex, &pool.bell, FUTEX_WAIT_PRIVATE, bell, NULL, NULL, 0);
    atomic_fetch_sub(&pool.num_sleeping, 1);
#else
    if (atomic_load(&pool.bell) == bell)
        usleep(50);
#endif
}

static void ring(int64_t wanted) {
    atomic_fetch_add(&pool.bell, 1);
#if defined(__linux__)
    if (atomic_load(&pool.num_sleeping) > 0)
        syscall(SYS_futex, &pool.bell, FUTEX_WAKE_PRIVATE, (int)wanted, NULL, NULL, 0);
#else
    (void)wanted;
#endif
}

/* ---- taking tasks ---- */

/* What a thread has of a run. */
struct part {
    struct pool_work work;
    uint64_t run;
    int threads, thread, from, left; /* the share that it takes from, and how many are left */
    struct turn turn;
};

INLINE int64_t share_start(const struct part *part, int thread) {
    return part->work.has_shares ? part->work.num_tasks * thread / part->threads : 0;
}

INLINE int64_t share_size(const struct part *part, int thread) {
    int64_t tasks = part->work.num_tasks, threads = part->threads;
    return part->work.has_shares ? tasks * (thread + 1) / threads - tasks * thread / threads : (tasks - thread + threads - 1) / threads;
}

INLINE int64_t task_at(const struct part *part, int thread, int64_t place) {
    return part->work.has_shares ? share_start(part, thread) + place : place * part->threads + thread;
}

/* -1: none is left, or the run is over. */
static int64_t take(struct part *part) {
    while (part->left > 0) {
        _Atomic uint64_t *share = &pool.shares[part->from].word;
        uint64_t word = atomic_load_explicit(share, memory_order_acquire);
        for (;;) {
            int64_t place = (int64_t)(word & PLACE_MASK);
            if (word >> PLACE_BITS != part->run)
                return -1;
            if (place >= share_size(part, part->from))
                break;
            int64_t task = task_at(part, part->from, place);
            /* Who finds the share taken finds this as well: the exchange releases it. */
            atomic_store_explicit(&pool.slots[part->thread].word, part->run << PLACE_BITS | (uint64_t)(task + 1), memory_order_relaxed);
            if (atomic_compare_exchange_weak_explicit(share, &word, word + 1, memory_order_acq_rel, memory_order_acquire))
                return task;
        }
        part->from = part->from + 1 < part->threads ? part->from + 1 : 0;
        part->left--;
    }
    return -1;
}

SHARED int may_write(struct turn *turn) {
    if (turn->run == 0)
        return 1;
    turn->has_asked = 1;
    _Atomic uint64_t *task = &pool.tasks[turn->task];
    uint64_t word = atomic_load(task);
    turn->writes = word >> 2 != turn->run && atomic_load(&pool.run) == turn->run &&
                   atomic_compare_exchange_strong(task, &word, turn->run << 2 | WRITING);
    return turn->writes;
}

SHARED int is_wanted(const struct turn *turn) { return turn->run == 0 || atomic_load(&pool.run) == turn->run; }

static void run_task(struct part *part, int64_t task) {
    struct turn *turn = &part->turn;
    turn->thread = part->thread, turn->task = task, turn->writes = turn->has_asked = 0;
    turn->run = part->work.context_bytes ? part->run : 0;
    part->work.run(part->work.context, task, turn);
    turn->is_first = 0;
    if (turn->run != 0 && !turn->has_asked)
        atomic_store(&pool.given_up, part->run);
    if (turn->writes)
        atomic_store_explicit(&pool.tasks[task], part->run << 2 | DONE, memory_order_release);
}

static void run_tasks(struct part *part) {
    for (int64_t task; (task = take(part)) >= 0;)
        run_task(part, task);
}

/* ---- the threads ---- */

/* Take part in the run under way, if any. */
static void join(int thread) {
    uint64_t copy[CONTEXT_WORDS], run = atomic_load(&pool.run);
    _Atomic uint64_t *slot = &pool.slots[thread].word;
    if (run == 0)
        return;
    atomic_store(slot, run << PLACE_BITS);
    struct part part = {.run = run, .thread = thread, .from = thread, .turn = {.is_first = 1}};
    part.work.run = (task_fn)(uintptr_t)atomic_load_explicit(&pool.function, memory_order_relaxed);
    part.work.context = (void *)(uintptr_t)atomic_load_explicit(&pool.context, memory_order_relaxed);
    part.work.num_tasks = (int64_t)atomic_load_explicit(&pool.num_tasks, memory_order_relaxed);
    part.work.context_bytes = (size_t)atomic_load_explicit(&pool.context_bytes, memory_order_relaxed);
    part.threads = part.left = (int)atomic_load_explicit(&pool.threads, memory_order_relaxed);
    part.work.has_shares = (int)atomic_load_explicit(&pool.has_shares, memory_order_relaxed);
    if (part.work.context_bytes) {
        for (size_t i = 0; i < (part.work.context_bytes + 7) / 8; i++)
            copy[i] = atomic_load_explicit(&pool.words[i], memory_order_relaxed);
        part.work.context = copy;
    }
    atomic_thread_fence(memory_order_acquire);
    if (atomic_load(&pool.run) == run)
        run_tasks(&part);
    atomic_store(slot, 0);
}

static void *work_on(void *argument) {
    int thread = (int)(intptr_t)argument;
    uint32_t bell = atomic_load(&pool.bell);
    is_inside = 1;
    for (;;) {
        join(thread);
        int64_t until = now_ns() + SPIN_NS;
        while (atomic_load_explicit(&pool.bell, memory_order_acquire) == bell) {
            for (int i = 0; i < 32 && atomic_load_explicit(&pool.bell, memory_order_relaxed) == bell; i++)
                RELAX();
            if (now_ns() > until)
                sleep_until_rung(bell);
        }
        bell = atomic_load(&pool.bell);
    }
    return NULL;
}

/* As many as are wanted, or as the system gives. */
static void start_threads(void) {
    sigset_t all, before;
    pthread_attr_t attributes;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are the program's own threads' */
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    while (pool.num_started < pool.num_threads - 1) {
        pthread_t thread;
        if (pthread_create(&thread, &attributes, work_on, (void *)(intptr_t)(pool.num_started + 1)))
            pool.num_threads = pool.num_started + 1;
        else
            pool.num_started++;
    }
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* A child of fork has the calling thread only. */
static void forget_threads(void) {
    pool.num_started = 0;
    atomic_store(&pool.run, 0);
    atomic_store(&pool.is_taken, 0);
    atomic_store(&pool.num_sleeping, 0);
    for (int i = 0; i < MOST_THREADS; i++)
        atomic_store(&pool.slots[i].word, 0);
}

/* ---- the caller ---- */

SHARED int pool_num_threads(void) { return pool.num_threads; }

SHARED int pool_num_free(void) { return is_inside ? 1 : pool.num_threads; }

static int is_done(const struct part *part, int64_t task) {
    return atomic_load_explicit(&pool.tasks[task], memory_order_acquire) == (part->run << 2 | DONE);
}

/* Wait until thread `other` holds nothing of the run that is not done. */
static void finish(struct part *part, int other, int64_t patience_ns) {
    _Atomic uint64_t *slot = &pool.slots[other].word;
    int64_t until = 0;
    for (int64_t turns = 0;; turns++) {
        uint64_t word = atomic_load(slot);
        int64_t task = (int64_t)(word & PLACE_MASK) - 1;
        if (word >> PLACE_BITS != part->run)
            return;
        if (part->work.context_bytes && (task < 0 || is_done(part, task)))
            return;
        RELAX();
        if (turns % 16)
            continue;
        int64_t now = now_ns();
        until = until ? until : now + patience_ns;
        if (now < until)
            continue;
        if (part->work.context_bytes && atomic_load(&pool.tasks[task]) >> 2 != part->run) {
            run_task(part, task);
        } else if (now > until + SPIN_NS) {
            struct timespec moment = {0, 20000};
            nanosleep(&moment, NULL); /* it may wait for this thread's core */
        }
    }
}

static void run_alone(struct pool_work work) {
    struct turn turn = {.is_first = 1};
    for (int64_t task = 0; task < work.num_tasks; task++) {
        work.run(work.context, task, &turn);
        turn.is_first = 0;
    }
}

SHARED void pool_do(struct pool_work work) {
    if (pool.num_threads == 1 || work.num_tasks <= 1 || work.is_small || is_inside || work.num_tasks >= (int64_t)PLACE_MASK ||
        atomic_exchange(&pool.is_taken, 1)) {
        run_alone(work);
        return;
    }
    if (pool.num_started < pool.num_threads - 1)
        start_threads();
    if (work.num_tasks > MOST_REPEATABLE || work.context_bytes > MOST_CONTEXT_BYTES)
        work.context_bytes = 0;
    uint64_t run = pool.last_run = pool.last_run % (UINT64_MAX >> PLACE_BITS) + 1;
    int threads = pool.num_threads;
    struct part part = {.work = work, .run = run, .threads = threads, .left = threads, .turn = {.is_first = 1}};
    atomic_thread_fence(memory_order_release);
    atomic_store_explicit(&pool.function, (uint64_t)(uintptr_t)work.run, memory_order_relaxed);
    atomic_store_explicit(&pool.context, (uint64_t)(uintptr_t)work.context, memory_order_relaxed);
    atomic_store_explicit(&pool.num_tasks, (uint64_t)work.num_tasks, memory_order_relaxed);
    atomic_store_explicit(&pool.context_bytes, work.context_bytes, memory_order_relaxed);
    atomic_store_explicit(&pool.has_shares, (uint64_t)work.has_shares, memory_order_relaxed);
    atomic_store_explicit(&pool.threads, (uint64_t)threads, memory_order_relaxed);
    for (size_t at = 0; at < work.context_bytes; at += 8) {
        uint64_t word = 0;
        memcpy(&word, (const char *)work.context + at, work.context_bytes - at < 8 ? work.context_bytes - at : 8);
        atomic_store_explicit(&pool.words[at / 8], word, memory_order_relaxed);
    }
    for (int i = 0; i < threads; i++)
        atomic_store_explicit(&pool.shares[i].word, run << PLACE_BITS, memory_order_relaxed);
    atomic_store(&pool.run, run);
    ring(least(threads, work.num_tasks) - 1);
    is_inside = 1;
    int64_t started = now_ns();
    run_tasks(&part);
    int64_t ended = now_ns(), task_ns = (ended - started) * threads / work.num_tasks;
    if (!work.context_bytes)
        atomic_store(&pool.run, 0); /* nobody enters any more */
    for (int other = 1; other < threads; other++)
        finish(&part, other, 2 * task_ns + 1000);
    for (int64_t task = 0; task < work.num_tasks && atomic_load(&pool.given_up) == run; task++)
        if (!is_done(&part, task))
            run_task(&part, task);
    atomic_store(&pool.run, 0);
    is_inside = 0;
    atomic_store(&pool.is_taken, 0);
}

/* Threads that later runs have, the caller's among them. */
EXPORT void pelton_set_threads(int count) {
    static int has_handler;
    while (atomic_exchange(&pool.is_taken, 1))
        RELAX();
    if (!has_handler)
        has_handler = !pthread_atfork(NULL, NULL, forget_threads);
    pool.num_threads = (int)most(least(count, MOST_THREADS), 1);
    atomic_store(&pool.is_taken, 0);
}

/* Wait until no thread is at a task any more, not even of a run that is over: memory that tasks read may be freed then. */
EXPORT void pelton_rest(void) {
    for (int thread = 1; thread <= pool.num_started; thread++)
        while (atomic_load(&pool.slots[thread].word)) {
            struct timespec moment = {0, 20000};
            nanosleep(&moment, NULL);
        }
}

#endif
