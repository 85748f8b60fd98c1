// Masks of many matchers in one call: native threads take row after row, and no interpreter lock is held.
//
// The matchers are llguidance's, reached through the addresses of its C functions. A row is served by one thread, from the token that it
// takes in to its last mask, so that its parser is read into one cache.

#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef int32_t (*consume_t)(void *matcher, uint32_t token);
typedef int32_t (*compute_t)(void *matcher, uint32_t *mask, size_t num_bytes);
typedef int32_t (*rollback_t)(void *matcher, size_t num_tokens);
typedef bool (*is_stopped_t)(const void *matcher);

typedef struct {
    void *matcher;
    uint32_t *masks;         // the first of 1 + num_drafts
    const uint32_t *drafts;  // [num_drafts]
    int64_t token;           // to take in first; -1: none
    int32_t num_drafts;
    int32_t failed;          // out
    int64_t cost_ns;         // of the call before, and out of this one
} row_t;

typedef struct {
    consume_t consume;
    compute_t compute;
    rollback_t rollback;
    is_stopped_t is_stopped;
    row_t **order;  // [room]
    int32_t room, num_rows, num_threads;
    size_t num_bytes, stride;  // of a mask, and between masks
    atomic_int next, num_busy;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    atomic_uint_fast64_t job;
    atomic_bool is_closed;
    int32_t num_asleep;
    uint64_t spin_ns;  // how long a thread looks for the next job before it sleeps
    pthread_t threads[];
} pool_t;

static bool allows(const uint32_t *mask, size_t num_bytes, uint32_t token) {
    return token < 8 * num_bytes && mask[token >> 5] >> (token & 31) & 1;
}

static void fill_row(const pool_t *pool, row_t *row, size_t num_bytes, size_t stride) {
    uint32_t *mask = row->masks;
    int32_t num_taken = 0;
    row->failed = (row->token >= 0 && pool->consume(row->matcher, (uint32_t)row->token)) ||
                  pool->compute(row->matcher, mask, num_bytes);
    // Where the text is complete EOS alone may follow, and what is behind that nobody asks.
    while (!row->failed && num_taken < row->num_drafts && !pool->is_stopped(row->matcher) &&
           allows(mask, num_bytes, row->drafts[num_taken])) {
        mask = (uint32_t *)((char *)mask + stride);
        row->failed = pool->consume(row->matcher, row->drafts[num_taken++]) ||
                      pool->compute(row->matcher, mask, num_bytes);
    }
    if (num_taken && !row->failed)
        row->failed = pool->rollback(row->matcher, num_taken);
}

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

// Under the lock, which a thread needs to become busy.
static void wait_until_idle(pool_t *pool) {
    while (atomic_load(&pool->num_busy)) {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    }
}

static void take_rows(pool_t *pool) {
    for (;;) {
        int32_t place = atomic_fetch_add(&pool->next, 1);
        if (place >= pool->num_rows)
            return;
        row_t *row = pool->order[place];
        uint64_t started = now_ns();
        fill_row(pool, row, pool->num_bytes, pool->stride);
        row->cost_ns = (int64_t)(now_ns() - started);
    }
}

static void look_for_job(pool_t *pool, uint64_t done) {
    uint64_t until = now_ns() + pool->spin_ns;
    do {
        for (int i = 0; i < 64; i++) {
            if (atomic_load(&pool->job) != done || atomic_load(&pool->is_closed))
                return;
#if defined(__x86_64__)
            __builtin_ia32_pause();
#endif
        }
    } while (now_ns() < until);
}

static void *run(void *given) {
    pool_t *pool = given;
    uint64_t done = 0;
    pthread_mutex_lock(&pool->lock);
    for (;;) {
        if (pool->spin_ns && done) {
            pthread_mutex_unlock(&pool->lock);
            look_for_job(pool, done);
            pthread_mutex_lock(&pool->lock);
        }
        pool->num_asleep++;
        while (atomic_load(&pool->job) == done && !atomic_load(&pool->is_closed))
            pthread_cond_wait(&pool->changed, &pool->lock);
        pool->num_asleep--;
        if (atomic_load(&pool->is_closed))
            break;
        done = atomic_load(&pool->job);
        atomic_fetch_add(&pool->num_busy, 1);
        pthread_mutex_unlock(&pool->lock);
        take_rows(pool);
        atomic_fetch_sub(&pool->num_busy, 1);
        pthread_mutex_lock(&pool->lock);
    }
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

static int by_cost(const void *first, const void *second) {
    int64_t one = (*(row_t *const *)first)->cost_ns, other = (*(row_t *const *)second)->cost_ns;
    return (one < other) - (one > other);
}

// Those that took long come first: what takes long often does so for some tokens, and the others fill the time beside it.
static bool put_in_order(pool_t *pool, row_t *rows, int32_t num_rows) {
    if (num_rows > pool->room) {
        row_t **order = realloc(pool->order, (size_t)num_rows * sizeof(row_t *));
        if (!order)
            return false;
        pool->order = order, pool->room = num_rows;
    }
    for (int32_t place = 0; place < num_rows; place++)
        pool->order[place] = &rows[place];
    if (pool->num_threads)
        qsort(pool->order, (size_t)num_rows, sizeof(row_t *), by_cost);
    return true;
}

// num_threads: the caller's among them. NULL where no memory is left.
pool_t *pelton_mask_pool(int32_t num_threads, uint64_t spin_ns, consume_t consume, compute_t compute, rollback_t rollback, is_stopped_t is_stopped) {
    pool_t *pool = calloc(1, sizeof(pool_t) + (size_t)num_threads * sizeof(pthread_t));
    if (!pool)
        return NULL;
    pool->spin_ns = spin_ns;
    pool->consume = consume, pool->compute = compute, pool->rollback = rollback, pool->is_stopped = is_stopped;
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->changed, NULL);
    for (int32_t i = 1; i < num_threads; i++)  // with fewer threads than asked for it is slower, and right
        if (pthread_create(&pool->threads[pool->num_threads], NULL, run, pool) == 0)
            pool->num_threads++;
    return pool;
}

// One caller at a time. Returns how many rows failed: their matchers say why; -1 where no memory is left.
int32_t pelton_mask_pool_fill(pool_t *pool, row_t *rows, int32_t num_rows, size_t num_bytes, size_t stride) {
    pthread_mutex_lock(&pool->lock);
    wait_until_idle(pool);  // one that woke late counts on with the numbers of the job before
    if (!put_in_order(pool, rows, num_rows)) {
        pthread_mutex_unlock(&pool->lock);
        return -1;
    }
    pool->num_rows = num_rows, pool->num_bytes = num_bytes, pool->stride = stride;
    atomic_store(&pool->next, 0);
    if (pool->num_threads && num_rows > 1) {
        atomic_fetch_add(&pool->job, 1);
        if (pool->num_asleep)
            pthread_cond_broadcast(&pool->changed);
    }
    pthread_mutex_unlock(&pool->lock);
    take_rows(pool);
    pthread_mutex_lock(&pool->lock);
    wait_until_idle(pool);
    pool->num_rows = 0;  // for one that wakes from now on
    pthread_mutex_unlock(&pool->lock);
    int32_t num_failed = 0;
    for (int32_t place = 0; place < num_rows; place++)
        num_failed += rows[place].failed != 0;
    return num_failed;
}

// One row on the caller's thread, whatever the others do.
void pelton_mask_row(const pool_t *pool, row_t *row, size_t num_bytes, size_t stride) { fill_row(pool, row, num_bytes, stride); }

void pelton_mask_pool_close(pool_t *pool) {
    pthread_mutex_lock(&pool->lock);
    atomic_store(&pool->is_closed, true);
    pthread_cond_broadcast(&pool->changed);
    pthread_mutex_unlock(&pool->lock);
    for (int32_t i = 0; i < pool->num_threads; i++)
        pthread_join(pool->threads[i], NULL);
    pthread_cond_destroy(&pool->changed);
    pthread_mutex_destroy(&pool->lock);
    free(pool->order);
    free(pool);
}
