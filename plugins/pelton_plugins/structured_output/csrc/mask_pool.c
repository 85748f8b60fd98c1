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
} row_t;

typedef struct {
    consume_t consume;
    compute_t compute;
    rollback_t rollback;
    is_stopped_t is_stopped;
    row_t *rows;
    int32_t num_rows, num_threads;
    size_t num_bytes, stride;  // of a mask, and between masks
    atomic_int next, num_busy;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    uint64_t job;
    bool is_closed;
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
        fill_row(pool, &pool->rows[place], pool->num_bytes, pool->stride);
    }
}

static void *run(void *given) {
    pool_t *pool = given;
    uint64_t done = 0;
    pthread_mutex_lock(&pool->lock);
    for (;;) {
        while (pool->job == done && !pool->is_closed)
            pthread_cond_wait(&pool->changed, &pool->lock);
        if (pool->is_closed)
            break;
        done = pool->job;
        atomic_fetch_add(&pool->num_busy, 1);
        pthread_mutex_unlock(&pool->lock);
        take_rows(pool);
        atomic_fetch_sub(&pool->num_busy, 1);
        pthread_mutex_lock(&pool->lock);
    }
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

// num_threads: the caller's among them. NULL where no memory is left.
pool_t *pelton_mask_pool(int32_t num_threads, consume_t consume, compute_t compute, rollback_t rollback, is_stopped_t is_stopped) {
    pool_t *pool = calloc(1, sizeof(pool_t) + (size_t)num_threads * sizeof(pthread_t));
    if (!pool)
        return NULL;
    pool->consume = consume, pool->compute = compute, pool->rollback = rollback, pool->is_stopped = is_stopped;
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->changed, NULL);
    for (int32_t i = 1; i < num_threads; i++)  // with fewer threads than asked for it is slower, and right
        if (pthread_create(&pool->threads[pool->num_threads], NULL, run, pool) == 0)
            pool->num_threads++;
    return pool;
}

// One caller at a time. Returns how many rows failed: their matchers say why.
int32_t pelton_mask_pool_fill(pool_t *pool, row_t *rows, int32_t num_rows, size_t num_bytes, size_t stride) {
    pthread_mutex_lock(&pool->lock);
    wait_until_idle(pool);  // one that woke late counts on with the numbers of the job before
    pool->rows = rows, pool->num_rows = num_rows, pool->num_bytes = num_bytes, pool->stride = stride;
    atomic_store(&pool->next, 0);
    if (pool->num_threads && num_rows > 1) {
        pool->job++;
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
    pool->is_closed = true;
    pthread_cond_broadcast(&pool->changed);
    pthread_mutex_unlock(&pool->lock);
    for (int32_t i = 0; i < pool->num_threads; i++)
        pthread_join(pool->threads[i], NULL);
    pthread_cond_destroy(&pool->changed);
    pthread_mutex_destroy(&pool->lock);
    free(pool);
}
