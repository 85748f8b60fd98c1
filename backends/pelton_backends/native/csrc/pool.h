/* Work that is handed out to this process's computing threads, in small parts.

   A thread that computes may lose its core to another program for some milliseconds, a hundred times as long as a task takes.
   Nothing waits for it that another thread can do: who finds no task left takes over what a thread that is held up has begun,
   where tasks may be run twice (`pool_run_repeatable`). */
#ifndef PELTON_POOL_H
#define PELTON_POOL_H

#include "common.h"

/* One task that a thread has taken. */
struct turn {
    int thread;   /* 0 .. pool_num_threads() - 1 */
    int is_first; /* of the tasks of this run that this thread has taken */
    int64_t task;
    uint64_t run; /* 0: there is nobody else */
    int has_asked, writes;
};

typedef void (*task_fn)(void *context, int64_t task, struct turn *turn);

enum { MOST_CONTEXT_BYTES = 1024, TASKS_EACH = 3 };

struct pool_work {
    task_fn run;
    void *context;
    int64_t num_tasks;
    size_t context_bytes; /* 0: tasks run once. Otherwise they may run twice, and read this many bytes of the context in a copy */
    int is_small;         /* not worth a second thread */
    int has_shares;       /* a thread's tasks follow each other: they read memory in one stream. Otherwise they start in their order */
};

/* Threads that may take part, the caller's among them. */
int pool_num_threads(void);

/* The same of a run that is started here: within a task that is the task's own thread alone. */
int pool_num_free(void);

/* Run all tasks and return when they are done. Within a task it runs on that task's thread alone. */
void pool_do(struct pool_work work);

/* Run tasks 0 .. num_tasks - 1, each once, and return when all are done. Tasks start in their order. */
INLINE void pool_run(int64_t num_tasks, task_fn run, void *context) {
    pool_do((struct pool_work){.run = run, .context = context, .num_tasks = num_tasks});
}

/* The same for tasks that another thread may run as well when the first one is held up. The late one may go on while later runs
   are under way, and even when their caller's memory is gone. So a task
   - finds a copy of the context, `bytes` long, and nothing else of the caller's stack
   - reads only memory that stays mapped: weights and caches (`pelton_rest` is called before they are freed), `pelton_scratch` of
     any thread. What it reads there may be another run's by then: before it uses something as an address or a size, it copies
     that and asks `is_wanted`
   - computes in its own thread's scratch, and writes results only after `may_write` said yes. A thread that has no memory returns
     without asking: the caller's thread runs the task, and has made sure of its own. */
INLINE void pool_run_repeatable(int64_t num_tasks, task_fn run, void *context, size_t bytes) {
    pool_do((struct pool_work){.run = run, .context = context, .num_tasks = num_tasks, .context_bytes = bytes});
}

/* Into how many tasks to cut `count` equal pieces of work: up to `together` of them each, and some tasks for every thread. Taking and
   finishing a task are locked instructions, for which reads from memory wait: with a task for every panel of a weight (36 KiB) one
   row took 7 % longer (EPYC 9004). */
INLINE int64_t pool_cut(int64_t count, int64_t together) {
    int64_t threads = pool_num_free(), tasks = most((count + together - 1) / together, TASKS_EACH * threads);
    return least(round_up(tasks, threads), count);
}

/* The first of `count` pieces that belongs to a task. */
INLINE int64_t first_piece(int64_t count, int64_t num_tasks, int64_t task) { return count * task / num_tasks; }

/* Whether this thread's results of the task are the ones to keep. Ask once, right before the first write; the writes that follow
   must be short. */
int may_write(struct turn *turn);

/* Whether the task's run is still under way: what was copied before is the run's own. */
int is_wanted(const struct turn *turn);

#endif
