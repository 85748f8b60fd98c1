/* Work that is handed out to this process's computing threads, in small parts. */
#ifndef PELTON_POOL_H
#define PELTON_POOL_H

#include "common.h"

/* One task that a thread has taken. */
struct turn {
    int thread; /* 0 .. pool_num_threads() - 1 */
};

typedef void (*task_fn)(void *context, int64_t task, struct turn *turn);

/* Threads that may take part, the caller's among them. */
int pool_num_threads(void);

/* Run tasks 0 .. num_tasks - 1, each once, and return when all are done. Tasks start in their order. */
void pool_run(int64_t num_tasks, task_fn run, void *context);

/* The same for tasks that another thread may run as well when the first one is held up: they read what the run does not
   change, compute in memory of their own, and write only after `may_write` said yes. */
void pool_run_repeatable(int64_t num_tasks, task_fn run, void *context);

/* Whether this thread's results of the task are the ones to keep. Ask once, right before the first write; the writes that follow
   must be short. */
int may_write(struct turn *turn);

#endif
