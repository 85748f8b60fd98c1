/* What pool.h offers over OpenMP, in place of what pool.c has: only to be compared with it (compare_pools.py). */
#include "pool.h"

#include <omp.h>

static int num_threads = 1;
static __thread int is_inside;

SHARED int pool_num_threads(void) { return num_threads; }

SHARED int pool_num_free(void) { return is_inside ? 1 : num_threads; }

SHARED int may_write(struct turn *turn) {
    (void)turn;
    return 1;
}

SHARED int is_wanted(const struct turn *turn) {
    (void)turn;
    return 1;
}

static void run_alone(struct pool_work work) {
    struct turn turn = {.is_first = 1};
    for (int64_t task = 0; task < work.num_tasks; task++, turn.is_first = 0)
        work.run(work.context, task, &turn);
}

SHARED void pool_do(struct pool_work work) {
    if (num_threads == 1 || work.num_tasks <= 1 || work.is_small || is_inside) {
        run_alone(work);
        return;
    }
#pragma omp parallel num_threads(num_threads)
    {
        struct turn turn = {.thread = omp_get_thread_num(), .is_first = 1};
        is_inside = 1;
        if (work.has_shares) {
#pragma omp for schedule(static)
            for (int64_t task = 0; task < work.num_tasks; task++) {
                work.run(work.context, task, &turn);
                turn.is_first = 0;
            }
        } else {
#pragma omp for schedule(dynamic)
            for (int64_t task = 0; task < work.num_tasks; task++) {
                work.run(work.context, task, &turn);
                turn.is_first = 0;
            }
        }
        is_inside = 0;
    }
}

EXPORT void pelton_set_threads(int count) { num_threads = count; }

EXPORT void pelton_rest(void) {}
