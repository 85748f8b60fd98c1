/* Paged attention of rows with one token or many, and what stands before it: q/k norm, rope, writing keys and values.

   Work is cut into tasks of one row; threads take them as they come. Here is the path for float32, and for CPUs without AVX-512
   BF16 (attention_avx512.c): a task has one key head and up to TILE_ROWS query rows (tokens times the heads of that key head), and
   walks the row's keys in chunks: scores, softmax carried along in float32, values. Scores and values are products over packed
   panels (tile.h). */
#include "attention.h"
#include "pool.h"
#include "tile.h"

#include <stdatomic.h>

enum { CHUNK = 64, TILE_ROWS = 48, LONG_TILE_ROWS = 192 };

/* One task's memory, cut from the thread's scratch. */
struct tile {
    const void *keys[CHUNK], *values[CHUNK];
    void *query, *key_panel, *value_panel, *weights; /* operands of the engine */
    float *scores, *sums;                            /* [TILE_ROWS, CHUNK], [TILE_ROWS, padded head_dim] */
    float best[TILE_ROWS], total[TILE_ROWS];
};

INLINE size_t place(size_t *end, size_t bytes) {
    size_t start = *end;
    *end = (start + bytes + 63) / 64 * 64;
    return start;
}

static struct tile *make_tile(int64_t head_dim) {
    int64_t padded = round_up(head_dim, PANEL);
    size_t end = 0, item = sizeof(float);
    size_t tile = place(&end, sizeof(struct tile)), query = place(&end, TILE_ROWS * padded * item);
    size_t key_panel = place(&end, CHUNK * padded * item), value_panel = place(&end, CHUNK * padded * item);
    size_t weights = place(&end, TILE_ROWS * CHUNK * item), scores = place(&end, TILE_ROWS * CHUNK * item);
    size_t sums = place(&end, TILE_ROWS * padded * item);
    char *memory = pelton_scratch(end);
    if (memory == NULL)
        return NULL;
    struct tile *made = (struct tile *)(memory + tile);
    made->query = memory + query, made->key_panel = memory + key_panel, made->value_panel = memory + value_panel;
    made->weights = memory + weights, made->scores = (float *)(memory + scores), made->sums = (float *)(memory + sums);
    return made;
}

/* Addresses of keys and values [first, first + count) of a row. */
static void find_keys(const struct attention *op, const int32_t *table, int64_t head, int64_t first, int64_t count,
                      struct tile *tile) {
    size_t item = size_of(op->dtype);
    int64_t block = first / op->block_size, offset = first % op->block_size;
    int64_t start = table[block] * op->block_stride + head * op->head_stride;
    for (int64_t i = 0; i < count; i++) {
        if (offset == op->block_size) {
            offset = 0;
            start = table[++block] * op->block_stride + head * op->head_stride;
        }
        size_t at = (size_t)(start + offset * op->token_stride) * item;
        tile->keys[i] = (const char *)op->k_cache + at;
        tile->values[i] = (const char *)op->v_cache + at;
        offset++;
    }
}

/* Keys [lower, upper) that query row `row` of a task attends to, from `first`, at most `count`. */
struct seen {
    int64_t lower, upper;
};

INLINE struct seen seen_by(const struct attention *op, const struct task *task, int64_t row, int64_t first, int64_t count) {
    int64_t position = task->position + row / op->group;
    int64_t lower = op->window > 0 ? most(position - op->window + 1, 0) : 0;
    int64_t upper = task->is_causal ? position + 1 : task->length;
    struct seen seen = {most(least(lower - first, count), 0), most(least(upper - first, count), 0)};
    return seen;
}

/* Scores of one query row to weights in place, unnormalised; returns what earlier sums are to be multiplied by. */
INLINE float soften(const struct attention *op, float *scores, struct seen seen, int64_t padded, float *best, float *total) {
    float scale = op->scale, cap = op->soft_cap, high = *best, sum = 0.0f;
    for (int64_t i = seen.lower; i < seen.upper; i++) {
        float score = scores[i] * scale;
        scores[i] = cap > 0.0f ? cap * tanhf(score / cap) : score;
    }
    for (int64_t i = seen.lower; i < seen.upper; i++)
        high = scores[i] > high ? scores[i] : high;
    for (int64_t i = 0; i < seen.lower; i++)
        scores[i] = 0.0f;
    for (int64_t i = seen.lower; i < seen.upper; i++) {
        scores[i] = fast_exp(scores[i] - high);
        sum += scores[i];
    }
    for (int64_t i = seen.upper; i < padded; i++)
        scores[i] = 0.0f;
    float change = *best == -INFINITY ? 0.0f : fast_exp(*best - high);
    *total = *total * change + sum;
    *best = high;
    return change;
}

static __attribute__((noinline)) void multiply(const float *a, int64_t lda, const float *panel, float *c, int64_t ldc, int64_t m,
                                               int64_t k) {
    floats_multiply(a, lda, panel, c, ldc, m, k);
}

INLINE void attend_floats(const struct attention *op, const struct task *task, struct tile *tile, int dtype) {
    int64_t dim = op->head_dim, padded = round_up(dim, PANEL), m = task->num_tokens * op->group;
    float *query = tile->query;
    for (int64_t row = 0; row < m; row++) {
        const char *from = (const char *)task->query + (row / op->group * task->query_stride + row % op->group * dim) * size_of(dtype);
        for (int64_t i = 0; i < dim; i++)
            query[row * dim + i] = load(from, i, dtype);
    }
    for (int64_t first = task->first_key; first < task->last_key; first += CHUNK) {
        int64_t count = least(CHUNK, task->last_key - first), width = round_up(count, PANEL);
        find_keys(op, task->table, task->head, first, count, tile);
        for (int64_t i = count; i < width; i++)
            tile->keys[i] = tile->keys[0];
        memset(tile->scores, 0, (size_t)(m * CHUNK) * sizeof(float));
        for (int64_t part = 0; part < width; part += PANEL) {
            floats_pack_rows(tile->keys + part, dim, tile->key_panel, dtype);
            multiply(query, dim, tile->key_panel, tile->scores + part, CHUNK, m, dim);
        }
        for (int64_t row = 0; row < m; row++) {
            struct seen seen = seen_by(op, task, row, first, count);
            if (seen.lower >= seen.upper) {
                memset(tile->scores + row * CHUNK, 0, CHUNK * sizeof(float));
                continue;
            }
            float change = soften(op, tile->scores + row * CHUNK, seen, CHUNK, &tile->best[row], &tile->total[row]);
            float *sums = tile->sums + row * padded;
            for (int64_t i = 0; i < padded; i++)
                sums[i] *= change;
        }
        for (int64_t part = 0; part < dim; part += PANEL) {
            floats_pack_cols(tile->values, count, part, least(PANEL, dim - part), tile->value_panel, dtype);
            multiply(tile->scores, CHUNK, tile->value_panel, tile->sums + part, padded, m, count);
        }
    }
}

static int run_tile(const struct attention *op, const struct task *task) {
    int64_t padded = round_up(op->head_dim, PANEL), m = task->num_tokens * op->group;
    struct tile *tile = make_tile(op->head_dim);
    if (tile == NULL)
        return 1;
    memset(tile->sums, 0, (size_t)(m * padded) * sizeof(float));
    for (int64_t row = 0; row < m; row++)
        tile->best[row] = -INFINITY, tile->total[row] = 0.0f;
    if (op->dtype == DTYPE_BF16)
        attend_floats(op, task, tile, DTYPE_BF16);
    else
        attend_floats(op, task, tile, DTYPE_F32);
    for (int64_t row = 0; row < m; row++) {
        const float *sums = tile->sums + row * padded;
        float factor = 1.0f / tile->total[row];
        int64_t at = row / op->group * op->num_heads * op->head_dim + row % op->group * op->head_dim;
        char *output = (char *)task->output + (size_t)at * size_of(op->dtype);
        for (int64_t i = 0; i < op->head_dim; i++)
            store(output, i, sums[i] * factor, op->dtype);
    }
    return 0;
}

/* ---- a step's tasks ---- */

typedef int (*attend_fn)(const struct attention *, const struct task *);

/* Who runs a step's tasks, and how they are cut. */
struct plan {
    attend_fn one_token, more_tokens;
    int64_t prefix;      /* tokens that all rows share and that are read once */
    float *states;       /* what each row's heads summed up over these */
    int64_t tokens;      /* of a row that one task takes */
    int64_t heads;       /* key heads of a task with one token */
    int64_t num_places;
    struct place {
        int32_t row, token, head, heads;
    } places[];
};

INLINE int64_t tokens_of(const struct step *step, int64_t row) { return step->query_start[row + 1] - step->query_start[row]; }

static void set_paths(const struct attention *op, const struct step *step, int64_t threads, struct plan *plan) {
    int64_t num_tokens = step->query_start[step->num_rows] - step->query_start[0];
    plan->prefix = 0, plan->states = NULL;
    plan->one_token = plan->more_tokens = run_tile, plan->tokens = most(TILE_ROWS / op->group, 1), plan->heads = 1;
#if PELTON_ISA >= ISA_AVX512_BF16
    if (op->dtype == DTYPE_BF16 && op->head_dim % 2 == 0) {
        plan->one_token = plan->more_tokens = pelton_prefill_avx512, plan->tokens = most(LONG_TILE_ROWS / op->group, 1);
        if (pelton_decodes_avx512(op)) {
            plan->one_token = pelton_decode_avx512;
            plan->heads = step->num_rows >= 2 * threads ? op->num_kv_heads : 1;
            plan->prefix = step->common_prefix == NULL ? 0 : *step->common_prefix;
        }
    }
#endif
    while (plan->tokens > 16 && num_tokens * op->num_kv_heads < 4 * threads * plan->tokens)
        plan->tokens /= 2;
}

/* Long rows stand last, and a row's last tokens have most keys: these go first. NULL: no memory. */
static struct plan *make_plan(const struct attention *op, const struct step *step, int64_t threads) {
    struct plan paths;
    set_paths(op, step, threads, &paths);
    int64_t most_places = 0;
    for (int64_t row = 0; row < step->num_rows; row++)
        most_places += (tokens_of(step, row) + paths.tokens - 1) / paths.tokens * op->num_kv_heads;
    struct plan *plan = malloc(sizeof *plan + (size_t)most_places * sizeof *plan->places);
    if (plan == NULL)
        return NULL;
    *plan = paths, plan->num_places = 0;
    if (plan->prefix > 0) {
        plan->states = malloc((size_t)(step->num_rows * op->num_heads * PREFIX_STATE(op->head_dim)) * sizeof(float));
        if (plan->states == NULL) {
            free(plan);
            return NULL;
        }
    }
    for (int64_t row = step->num_rows - 1; row >= 0; row--) {
        int64_t count = tokens_of(step, row), heads = count == 1 ? plan->heads : 1;
        for (int64_t token = count > 0 ? (count - 1) / plan->tokens * plan->tokens : -1; token >= 0; token -= plan->tokens)
            for (int64_t head = 0; head < op->num_kv_heads; head += heads)
                plan->places[plan->num_places++] = (struct place){(int32_t)row, (int32_t)token, (int32_t)head, (int32_t)heads};
    }
    return plan;
}

/* Place `index`; query and output point at token 0, `query_stride` numbers are between tokens of the query. */
static int run_place(const struct attention *op, const struct step *step, const struct plan *plan, int64_t index, int64_t threads,
                     const void *query, int64_t query_stride, void *output) {
    struct place place = plan->places[index];
    int64_t start = step->query_start[place.row], row_tokens = tokens_of(step, place.row), length = step->seq_lens[place.row];
    int64_t head = place.head * op->group * op->head_dim, token = start + place.token;
    size_t item = size_of(op->dtype);
    struct task task = {
        .table = step->block_table + place.row * step->table_stride,
        .head = place.head,
        .num_heads = place.heads,
        .num_tokens = least(plan->tokens, row_tokens - place.token),
        .position = length - row_tokens + place.token,
        .length = length,
        .is_causal = step->is_causal,
        .query = (const char *)query + (size_t)(token * query_stride + head) * item,
        .query_stride = query_stride,
        .output = (char *)output + (size_t)(token * op->num_heads * op->head_dim + head) * item,
    };
    task.first_key = op->window > 0 ? most(task.position - op->window + 1, 0) : 0;
    task.last_key = step->is_causal ? task.position + task.num_tokens : length;
    if (plan->prefix > 0) {
        task.first_key = plan->prefix;
        task.states = plan->states + (place.row * op->num_heads + place.head * op->group) * PREFIX_STATE(op->head_dim);
    }
    if (index + threads < plan->num_places) {
        int32_t row = plan->places[index + threads].row;
        task.next_table = step->block_table + row * step->table_stride;
        task.next_length = step->seq_lens[row];
        task.next_key = op->window > 0 ? most(task.next_length - op->window, 0) : plan->prefix;
    }
    return (row_tokens == 1 ? plan->one_token : plan->more_tokens)(op, &task);
}

/* Rows that share a prefix go through it together, PREFIX_ROWS at a time and one key head each. */
enum { PREFIX_ROWS = 32 };

static int run_prefix(const struct attention *op, const struct step *step, const struct plan *plan, int64_t index, const void *query,
                      int64_t query_stride) {
#if PELTON_ISA >= ISA_AVX512_BF16
    int64_t head = index % op->num_kv_heads, row = index / op->num_kv_heads * PREFIX_ROWS, first = row * op->num_heads + head * op->group;
    struct task task = {
        .table = step->block_table,
        .head = head,
        .num_heads = 1,
        .num_tokens = least(PREFIX_ROWS, step->num_rows - row),
        .length = plan->prefix,
        .last_key = plan->prefix,
        .query = (const char *)query + (size_t)(row * query_stride + head * op->group * op->head_dim) * size_of(op->dtype),
        .query_stride = query_stride,
        .states = plan->states + first * PREFIX_STATE(op->head_dim),
    };
    return pelton_prefix_avx512(op, &task);
#else
    (void)op, (void)step, (void)plan, (void)index, (void)query, (void)query_stride;
    return 1;
#endif
}

/* ---- q/k norm, rope, writing keys and values ---- */

/* One head: norm, then rotation of its first rotary_dim numbers, pairs (i, i + rotary_dim / 2). In place if from == to. */
INLINE void rotate_head(const struct rope *op, const void *from, void *to, const void *norm, float eps, int unit_offset,
                        const float *cos_sin, int dtype) {
    int64_t dim = op->head_dim, half = op->rotary_dim / 2;
    float line[dim];
    for (int64_t i = 0; i < dim; i++)
        line[i] = load(from, i, dtype);
    if (norm != NULL) {
        float sum = 0.0f;
        for (int64_t i = 0; i < dim; i++)
            sum += line[i] * line[i];
        float factor = 1.0f / sqrtf(sum / (float)dim + eps);
        for (int64_t i = 0; i < dim; i++) {
            float weight = load(norm, i, dtype);
            line[i] = unit_offset ? line[i] * factor * (1.0f + weight) : round_to(line[i] * factor, dtype) * weight;
            line[i] = round_to(line[i], dtype);
        }
    }
    for (int64_t i = 0; i < half; i++) {
        float first = line[i], second = line[half + i];
        line[i] = first * cos_sin[i] - second * cos_sin[half + i];
        line[half + i] = second * cos_sin[i] + first * cos_sin[half + i];
    }
    for (int64_t i = 0; i < dim; i++)
        store(to, i, line[i], dtype);
}

/* All heads of a token: query heads to `query`, key heads and values into the cache. */
INLINE void rope_token(const struct rope *op, const struct attention *cache, const struct written *step, char *qkv, char *query,
                       int64_t token, int dtype) {
    size_t head_bytes = (size_t)op->head_dim * size_of(dtype);
    const float *cos_sin = op->rotary_dim ? op->cos_sin + step->positions[token] * op->rotary_dim : NULL;
    int64_t slot = step->slots[token], start = slot / cache->block_size * cache->block_stride + slot % cache->block_size * cache->token_stride;
    int64_t num_heads = op->num_heads, last = num_heads + (slot >= 0 && op->writes_kv ? op->num_kv_heads : 0);
    for (int64_t head = 0; head < last; head++) { /* one call for both kinds: it is compiled in place, for every path */
        int is_key = head >= num_heads;
        size_t at = (size_t)(start + (head - num_heads) * cache->head_stride) * size_of(dtype);
        rotate_head(op, qkv + head * head_bytes, is_key ? (char *)cache->k_cache + at : query + head * head_bytes,
                    is_key ? op->k_norm : op->q_norm, is_key ? op->k_eps : op->q_eps,
                    is_key ? op->k_unit_offset : op->q_unit_offset, cos_sin, dtype);
        if (is_key)
            memcpy((char *)cache->v_cache + at, qkv + (head + op->num_kv_heads) * head_bytes, head_bytes);
    }
}

static void rope_one(const struct rope *op, const struct attention *cache, const struct written *step, void *all_qkv, void *all_queries,
                     int64_t query_stride, int64_t token) {
    size_t item = size_of(op->dtype);
    int64_t row = (op->num_heads + 2 * op->num_kv_heads) * op->head_dim;
    char *qkv = (char *)all_qkv + (size_t)(token * row) * item, *query = (char *)all_queries + (size_t)(token * query_stride) * item;
#if PELTON_ISA >= ISA_AVX512_BF16
    if (pelton_rope_avx512(op, cache, step, qkv, query, token))
        return;
#endif
    if (op->dtype == DTYPE_BF16)
        rope_token(op, cache, step, qkv, query, token, DTYPE_BF16);
    else
        rope_token(op, cache, step, qkv, query, token, DTYPE_F32);
}

struct rope_call {
    const struct rope *op;
    const struct attention *cache;
    const struct written *step;
    void *qkv, *query;
    int64_t query_stride;
};

static void run_rope(void *context, int64_t token, struct turn *turn) {
    const struct rope_call *call = context;
    (void)turn;
    rope_one(call->op, call->cache, call->step, call->qkv, call->query, call->query_stride, token);
}

/* query: [T, num_heads head_dim] with query_stride numbers between tokens; may be qkv itself, rotated in place. */
EXPORT void pelton_rope_write(const struct rope *op, const struct attention *cache, const struct written *step, void *qkv,
                              void *query, int64_t query_stride) {
    struct rope_call call = {op, cache, step, qkv, query, query_stride};
    pool_do((struct pool_work){.run = run_rope, .context = &call, .num_tasks = step->num_tokens, .is_small = step->num_tokens <= 8, .has_shares = 1});
}

/* ---- both ---- */

enum { FEW_KEYS = 256 }; /* times heads: one thread is as fast */

struct attend_call {
    const struct attention *op;
    const struct step *step;
    const struct plan *plan;
    int64_t threads, query_stride;
    const void *query;
    void *output;
    _Atomic int failed;
};

static void run_prefix_part(void *context, int64_t index, struct turn *turn) {
    struct attend_call *call = context;
    (void)turn;
    if (run_prefix(call->op, call->step, call->plan, index, call->query, call->query_stride))
        call->failed = 1;
}

static void run_row_part(void *context, int64_t index, struct turn *turn) {
    struct attend_call *call = context;
    (void)turn;
    if (run_place(call->op, call->step, call->plan, index, call->threads, call->query, call->query_stride, call->output))
        call->failed = 1;
}

static int attend(const struct rope *rope, const struct attention *op, const struct written *written, const struct step *step,
                  void *query, int64_t query_stride, void *output) {
    int64_t num_keys = 0;
    for (int64_t row = 0; row < step->num_rows; row++)
        num_keys += step->seq_lens[row];
    int is_small = num_keys * op->num_heads <= FEW_KEYS;
    int64_t threads = is_small ? 1 : pool_num_threads();
    struct plan *plan = make_plan(op, step, threads);
    if (plan == NULL)
        return 1;
    if (rope != NULL) { /* all keys are there before any is read */
        struct rope_call call = {rope, op, written, query, query, query_stride};
        pool_do((struct pool_work){.run = run_rope, .context = &call, .num_tasks = written->num_tokens, .is_small = is_small, .has_shares = 1});
    }
    struct attend_call call = {op, step, plan, threads, query_stride, query, output, 0};
    if (plan->prefix > 0) {
        int64_t parts = (step->num_rows + PREFIX_ROWS - 1) / PREFIX_ROWS * op->num_kv_heads;
        pool_do((struct pool_work){.run = run_prefix_part, .context = &call, .num_tasks = parts, .is_small = is_small});
    }
    pool_do((struct pool_work){.run = run_row_part, .context = &call, .num_tasks = plan->num_places, .is_small = is_small});
    free(plan->states);
    free(plan);
    return call.failed;
}

/* 0, or 1 when memory ran out. query and output point at token 0; query_stride: numbers between tokens of the query. */
EXPORT int pelton_attend(const struct attention *op, const struct step *step, void *query, int64_t query_stride, void *output) {
    return attend(NULL, op, NULL, step, query, query_stride, output);
}

/* Both, for a whole step: queries are rotated where they stand in qkv. */
EXPORT int pelton_rope_attend(const struct rope *rope, const struct attention *op, const struct written *written,
                              const struct step *step, void *qkv, void *output) {
    return attend(rope, op, written, step, qkv, (op->num_heads + 2 * op->num_kv_heads) * op->head_dim, output);
}
