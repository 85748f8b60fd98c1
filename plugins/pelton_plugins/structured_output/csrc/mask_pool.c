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

typedef struct late late_t;

typedef struct {
    void *matcher;
    uint32_t *masks;         // the first of 1 + num_drafts
    const uint32_t *drafts;  // [num_drafts]
    int64_t token;           // to take in first; below 0: none
    int32_t num_drafts;
    int32_t failed;          // out
    int64_t cost_ns;         // of the call before, and out of this one
    late_t *late;            // out: where the masks will be that the others did not wait for; NULL: they are there
} row_t;

// Masks that are made on after the call; its thread and its owner let go of it, the second frees it.
struct late {
    atomic_int num_owners;
    atomic_bool is_done;
    int32_t failed, num_masks;  // those behind a draft that is not allowed are not made
    uint32_t *masks;
};

enum { IDLE, WORKING, DELIVERING, LATE };
enum {
    MOST_MORE_THREADS = 8,  // in place of those that are held up
    LOOK_NS = 1000000,      // the caller looks so often for threads that are
};

typedef struct pool pool_t;

typedef struct {
    pool_t *pool;
    pthread_t id;
    atomic_int state;
    atomic_uint_fast64_t num_begun;  // rows
    row_t *given;                    // the row at hand
    late_t *late;                    // its own, where it is late
    uint32_t *masks;
    size_t num_bytes;
    // What the caller saw when it looked last:
    uint64_t seen_row, seen_ns, seen_cpu_ns;
} thread_t;

struct pool {
    consume_t consume;
    compute_t compute;
    rollback_t rollback;
    is_stopped_t is_stopped;
    row_t **order;  // [room], the next one last
    int32_t room, num_rows, num_threads, most_threads;
    size_t num_bytes, stride;  // of a mask, and between masks
    atomic_int num_left, num_done;  // rows that no thread has taken, and that are made
    atomic_bool lacks_memory, is_closed;
    pthread_mutex_t lock;
    pthread_cond_t changed, finished;
    int32_t num_asleep;
    uint64_t spin_ns;                // how long a thread looks for the next job before it sleeps
    uint64_t late_ns, late_cpu_ns;   // a row that takes longer, or more of its thread's own time, is late
    thread_t threads[];
};

static bool allows(const uint32_t *mask, size_t num_bytes, uint32_t token) {
    return token < 8 * num_bytes && mask[token >> 5] >> (token & 31) & 1;
}

// Returns how many masks were made.
static int32_t fill_row(const pool_t *pool, row_t *row, uint32_t *masks, size_t num_bytes, size_t stride) {
    uint32_t *mask = masks;
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
    return 1 + num_taken;
}

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void let_go(late_t *late) {
    if (atomic_fetch_sub(&late->num_owners, 1) > 1)
        return;
    free(late->masks);
    free(late);
}

// Memory of the thread's own: masks that are late must not be written where others are by then.
static uint32_t *room_for(thread_t *thread, size_t num_bytes) {
    if (thread->num_bytes < num_bytes) {
        free(thread->masks);
        thread->masks = malloc(num_bytes);
        thread->num_bytes = thread->masks ? num_bytes : 0;
    }
    return thread->masks;
}

// False where the caller has left without the row: its masks go where its owner finds them.
static bool deliver(thread_t *thread, const row_t *row, int32_t num_masks, size_t num_bytes, size_t stride) {
    int expected = WORKING;
    if (atomic_compare_exchange_strong(&thread->state, &expected, DELIVERING)) {
        for (int32_t i = 0; i < num_masks; i++)
            memcpy((char *)row->masks + (size_t)i * stride, (char *)thread->masks + (size_t)i * num_bytes, num_bytes);
        thread->given->failed = row->failed, thread->given->cost_ns = row->cost_ns;
        atomic_store(&thread->state, IDLE);
        return true;
    }
    late_t *late = thread->late;
    late->failed = row->failed, late->num_masks = num_masks, late->masks = thread->masks;
    thread->masks = NULL, thread->num_bytes = 0;
    atomic_store(&thread->state, IDLE);
    atomic_store(&late->is_done, true);
    let_go(late);
    return false;
}

// Take a row and make its masks; false when none is left. What is read of the pool stays as it is until the row is delivered.
static bool take_row(thread_t *thread) {
    pool_t *pool = thread->pool;
    int32_t place = atomic_load(&pool->num_left) > 0 ? atomic_fetch_sub(&pool->num_left, 1) - 1 : -1;
    if (place < 0)
        return false;
    row_t *given = pool->order[place], row = *given;
    size_t num_bytes = pool->num_bytes, stride = pool->stride, all_bytes = num_bytes * (1 + (size_t)row.num_drafts);
    int32_t num_rows = pool->num_rows, num_masks = 0;
    uint64_t started = now_ns();
    thread->given = given;
    atomic_fetch_add(&thread->num_begun, 1);
    atomic_store(&thread->state, WORKING);
    if (room_for(thread, all_bytes + 4 * (size_t)row.num_drafts)) {
        if (row.num_drafts)  // the caller's may be gone
            row.drafts = memcpy((char *)thread->masks + all_bytes, row.drafts, 4 * (size_t)row.num_drafts);
        num_masks = fill_row(pool, &row, thread->masks, num_bytes, num_bytes);
    } else {
        row.failed = 1;
        atomic_store(&pool->lacks_memory, true);
    }
    row.cost_ns = (int64_t)(now_ns() - started);
    if (deliver(thread, &row, num_masks, num_bytes, stride) && atomic_fetch_add(&pool->num_done, 1) + 1 == num_rows) {
        pthread_mutex_lock(&pool->lock);
        pthread_cond_signal(&pool->finished);
        pthread_mutex_unlock(&pool->lock);
    }
    return true;
}

static void pause_for_64(const atomic_int *number, int32_t until) {
    for (int i = 0; i < 64 && atomic_load(number) < until; i++) {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    }
}

static void look_for_job(pool_t *pool) {
    uint64_t until = now_ns() + pool->spin_ns;
    while (atomic_load(&pool->num_left) <= 0 && !atomic_load(&pool->is_closed) && now_ns() < until)
        pause_for_64(&pool->num_left, 1);
}

static void *run(void *given) {
    thread_t *thread = given;
    pool_t *pool = thread->pool;
    for (;;) {
        bool has_worked = false;
        while (take_row(thread))
            has_worked = true;
        if (pool->spin_ns && has_worked)
            look_for_job(pool);
        pthread_mutex_lock(&pool->lock);
        pool->num_asleep++;
        while (atomic_load(&pool->num_left) <= 0 && !atomic_load(&pool->is_closed))
            pthread_cond_wait(&pool->changed, &pool->lock);
        pool->num_asleep--;
        bool is_closed = atomic_load(&pool->is_closed);
        pthread_mutex_unlock(&pool->lock);
        if (is_closed)
            break;
    }
    free(thread->masks);
    return NULL;
}

static void add_thread(pool_t *pool) {
    if (pool->num_threads == pool->most_threads)
        return;
    thread_t *thread = &pool->threads[pool->num_threads];
    thread->pool = pool;
    if (pthread_create(&thread->id, NULL, run, thread) == 0)
        pool->num_threads++;
}

static int by_cost(const void *first, const void *second) {
    int64_t one = (*(row_t *const *)first)->cost_ns, other = (*(row_t *const *)second)->cost_ns;
    return (one > other) - (one < other);
}

// Those that took long come first: what takes long often does so for some tokens, and the others fill the time beside it.
static bool put_in_order(pool_t *pool, row_t *rows, int32_t num_rows) {
    if (num_rows > pool->room) {
        row_t **order = realloc(pool->order, (size_t)num_rows * sizeof(row_t *));
        if (!order)
            return false;
        pool->order = order, pool->room = num_rows;
    }
    for (int32_t place = 0; place < num_rows; place++) {
        pool->order[place] = &rows[num_rows - 1 - place];
        rows[place].late = NULL;
    }
    if (pool->num_threads > 1)
        qsort(pool->order, (size_t)num_rows, sizeof(row_t *), by_cost);
    return true;
}

static uint64_t cpu_ns(const thread_t *thread) {
    clockid_t clock;
    struct timespec now;
    if (pthread_getcpuclockid(thread->id, &clock) || clock_gettime(clock, &now))
        return 0;
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

// Whether the thread has been at one row for too long, as far as can be said since the caller looked first.
static bool is_held_up(const pool_t *pool, thread_t *thread) {
    uint64_t row = atomic_load(&thread->num_begun), now = now_ns();
    if (atomic_load(&thread->state) != WORKING)
        return false;
    if (row != thread->seen_row) {
        thread->seen_row = row, thread->seen_ns = now, thread->seen_cpu_ns = cpu_ns(thread);
        return false;
    }
    return now - thread->seen_ns > pool->late_ns || cpu_ns(thread) - thread->seen_cpu_ns > pool->late_cpu_ns;
}

static bool make_late(const pool_t *pool, thread_t *thread) {
    late_t *late = calloc(1, sizeof(late_t));
    int expected = WORKING;
    if (!late)
        return false;
    atomic_store(&late->num_owners, 2);
    thread->late = late;
    if (!atomic_compare_exchange_strong(&thread->state, &expected, LATE)) {
        free(late);
        return false;
    }
    thread->given->late = late, thread->given->failed = 0, thread->given->cost_ns = (int64_t)pool->late_ns;
    return true;
}

// Threads that are held up get others in their place. When only such are left, their rows are late.
static void look_for_late(pool_t *pool, int32_t num_rows) {
    int32_t num_held_up = 0, num_away = 0, num_threads = pool->num_threads;
    for (int32_t i = 0; i < num_threads; i++) {
        num_held_up += is_held_up(pool, &pool->threads[i]);
        num_away += atomic_load(&pool->threads[i].state) == LATE;
    }
    if (num_held_up + num_away == num_threads && atomic_load(&pool->num_left) > 0)
        add_thread(pool);
    else if (num_held_up && atomic_load(&pool->num_left) <= 0 && atomic_load(&pool->num_done) + num_held_up == num_rows)
        for (int32_t i = 0; i < num_threads; i++)
            if (is_held_up(pool, &pool->threads[i]) && make_late(pool, &pool->threads[i])) {
                atomic_fetch_add(&pool->num_done, 1);
                add_thread(pool);
            }
}

// num_threads: the caller's is not among them, as it may not be held up. NULL where no memory is left, or no thread.
pool_t *pelton_mask_pool(int32_t num_threads, uint64_t spin_ns, uint64_t late_ns, uint64_t late_cpu_ns, consume_t consume, compute_t compute,
                         rollback_t rollback, is_stopped_t is_stopped) {
    int32_t most_threads = num_threads + MOST_MORE_THREADS;
    pool_t *pool = calloc(1, sizeof(pool_t) + (size_t)most_threads * sizeof(thread_t));
    if (!pool)
        return NULL;
    pool->most_threads = most_threads;
    pool->spin_ns = spin_ns, pool->late_ns = late_ns, pool->late_cpu_ns = late_cpu_ns;
    pool->consume = consume, pool->compute = compute, pool->rollback = rollback, pool->is_stopped = is_stopped;
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->changed, NULL);
    pthread_cond_init(&pool->finished, &clock);
    for (int32_t i = 0; i < num_threads; i++)  // with fewer threads than asked for it is slower, and right
        add_thread(pool);
    if (pool->num_threads)
        return pool;
    free(pool);
    return NULL;
}

static void wait_a_while(pool_t *pool, int32_t num_rows) {
    uint64_t until = now_ns() + pool->spin_ns;
    while (atomic_load(&pool->num_done) < num_rows && now_ns() < until)
        pause_for_64(&pool->num_done, num_rows);
    until = now_ns() + LOOK_NS;
    struct timespec end = {(time_t)(until / 1000000000u), (long)(until % 1000000000u)};
    pthread_mutex_lock(&pool->lock);
    while (atomic_load(&pool->num_done) < num_rows && pthread_cond_timedwait(&pool->finished, &pool->lock, &end) == 0) {
    }
    pthread_mutex_unlock(&pool->lock);
}

// One caller at a time. Returns how many rows failed: their matchers say why; -1 where no memory is left.
int32_t pelton_mask_pool_fill(pool_t *pool, row_t *rows, int32_t num_rows, size_t num_bytes, size_t stride) {
    if (!num_rows)
        return 0;
    if (!put_in_order(pool, rows, num_rows))
        return -1;
    pool->num_rows = num_rows, pool->num_bytes = num_bytes, pool->stride = stride;
    atomic_store(&pool->lacks_memory, false);
    atomic_store(&pool->num_done, 0);
    pthread_mutex_lock(&pool->lock);
    atomic_store(&pool->num_left, num_rows);
    if (pool->num_asleep)
        pthread_cond_broadcast(&pool->changed);
    pthread_mutex_unlock(&pool->lock);
    for (;;) {
        wait_a_while(pool, num_rows);
        if (atomic_load(&pool->num_done) == num_rows)
            break;
        look_for_late(pool, num_rows);
    }
    if (atomic_load(&pool->lacks_memory))
        return -1;
    int32_t num_failed = 0;
    for (int32_t place = 0; place < num_rows; place++)
        num_failed += rows[place].failed != 0;
    return num_failed;
}

// One row on the caller's thread, whatever the others do.
void pelton_mask_row(const pool_t *pool, row_t *row, size_t num_bytes, size_t stride) {
    fill_row(pool, row, row->masks, num_bytes, stride);
}

bool pelton_late_is_done(late_t *late) { return atomic_load(&late->is_done); }

// Of one that is done: copy its masks, `num_bytes` each, to `to`. Returns whether it failed.
int32_t pelton_late_take(const late_t *late, char *to, size_t num_bytes) {
    if (late->masks)
        memcpy(to, late->masks, num_bytes * (size_t)late->num_masks);
    return late->failed;
}

void pelton_late_let_go(late_t *late) { let_go(late); }

void pelton_mask_pool_close(pool_t *pool) {
    pthread_mutex_lock(&pool->lock);
    atomic_store(&pool->is_closed, true);
    pthread_cond_broadcast(&pool->changed);
    pthread_mutex_unlock(&pool->lock);
    for (int32_t i = 0; i < pool->num_threads; i++)
        pthread_join(pool->threads[i].id, NULL);
    pthread_cond_destroy(&pool->changed);
    pthread_cond_destroy(&pool->finished);
    pthread_mutex_destroy(&pool->lock);
    free(pool->order);
    free(pool);
}
