/* Paged attention of one or many tokens of a row, for all instruction sets. Queries stand in lanes, a key or a number of a value is
   broadcast: scores come out as the operand that values are multiplied by, and the softmax of LANES queries at a time takes no
   shuffles. A chunk of keys and values is made float32 once for all queries of a task; these go through it strip by strip. */
#include "attention.h"
#include "fp8.h"

/* A product's register block is ROWS keys or numbers by WIDTH vectors of queries: 12 or 24 sums. */
enum { CHUNK = 64, WIDTH = 3, STRIP = WIDTH * LANES, ROWS = NUM_REGISTERS == 32 ? 8 : 4, MOST_ROWS = 8, LINES = CHUNK + MOST_ROWS };

/* What a strip of queries carries along. */
struct strip {
    float base[STRIP], total[STRIP]; /* weights are powers of 2 above `base` */
    int32_t position[STRIP];
};

/* One task's memory. */
struct tile {
    struct strip *strips;
    float *queries, *sums; /* [strips, padded, STRIP] */
    float *keys, *values;  /* [LINES, padded] */
    float *scores;         /* [LINES, STRIP] */
    int64_t m, padded;     /* queries; a head's numbers, in whole vectors and blocks */
};

/* The keys of a chunk that a strip needs, and whether all its queries see all of them. */
struct seen {
    int64_t lower, upper;
    int is_whole;
};

/* C [R, W] = A [R, k] times panel [k, W], where `change` is not NULL plus C times that. */
INLINE void multiply_block(const float *a, int64_t row_step, int64_t k_step, const float *panel, int64_t k, const vec *change, float *c,
                           int R, int W) {
    vec sums[MOST_ROWS][WIDTH];
#pragma GCC unroll 8
    for (int row = 0; row < R; row++)
#pragma GCC unroll 3
        for (int i = 0; i < W; i++)
            sums[row][i] = change == NULL ? (vec){0} : vec_load(c + row * STRIP + i * LANES) * change[i];
    for (; k > 0; k--, a += k_step, panel += STRIP) {
        vec parts[WIDTH];
#pragma GCC unroll 3
        for (int i = 0; i < W; i++)
            parts[i] = vec_load(panel + i * LANES);
#pragma GCC unroll 8
        for (int row = 0; row < R; row++)
#pragma GCC unroll 3
            for (int i = 0; i < W; i++)
                sums[row][i] += parts[i] * a[row * row_step];
    }
#pragma GCC unroll 8
    for (int row = 0; row < R; row++)
#pragma GCC unroll 3
        for (int i = 0; i < W; i++)
            vec_store(c + row * STRIP + i * LANES, sums[row][i]);
}

/* Scores of keys [lower, upper), in whole blocks: a chunk ends with lines of zeros. */
INLINE void score_strip(const struct tile *tile, const float *queries, struct seen seen, int R, int W) {
    for (int64_t key = seen.lower; key < seen.upper; key += R)
        multiply_block(tile->keys + key * tile->padded, tile->padded, 1, queries, tile->padded, NULL, tile->scores + key * STRIP, R, W);
}

INLINE void add_values(const struct tile *tile, float *sums, struct seen seen, const vec *change, int R, int W) {
    for (int64_t i = 0; i < tile->padded; i += R)
        multiply_block(tile->values + seen.lower * tile->padded + i, 1, tile->padded, tile->scores + seen.lower * STRIP,
                       seen.upper - seen.lower, change, sums + i * STRIP, R, W);
}

/* ---- softmax ---- */

/* Which of LANES queries see key number `key` of the row. */
INLINE ivec sees(const struct attention *op, const struct task *task, ivec position, int32_t key) {
    ivec is_seen = task->is_causal ? position >= key : ivec_all(-1);
    if (op->window < 0)
        return is_seen & (position - position % (int32_t)least(-op->window, INT32_MAX) <= key);
    return op->window > 0 ? is_seen & (position - (int32_t)least(op->window, INT32_MAX) < key) : is_seen;
}

/* One vector of queries of a strip: scores to weights. Returns what earlier sums are to be multiplied by. */
INLINE vec soften(const struct attention *op, const struct task *task, int64_t first, struct strip *strip, float *scores, struct seen seen,
                  int at) {
    ivec position;
    memcpy(&position, strip->position + at, sizeof position);
    vec base = vec_load(strip->base + at), lowest = vec_all(-INFINITY), high = base, total = {0};
    int is_plain = seen.is_whole && !(op->soft_cap > 0.0f);
    vec factor = vec_all(op->scale * 1.44269504f);
    for (int64_t key = seen.lower; is_plain && key < seen.upper; key++) {
        vec score = vec_load(scores + key * STRIP + at) * factor;
        vec_store(scores + key * STRIP + at, score);
        high = vec_max(score, high);
    }
    for (int64_t key = seen.lower; !is_plain && key < seen.upper; key++) {
        vec score = scaled(op, vec_load(scores + key * STRIP + at));
        if (!seen.is_whole)
            score = vec_select(sees(op, task, position, (int32_t)(first + key)), score, lowest);
        vec_store(scores + key * STRIP + at, score);
        high = vec_max(score, high);
    }
    for (int64_t key = seen.lower; key < seen.upper; key++) {
        vec weight = vec_exp2(vec_load(scores + key * STRIP + at) - high);
        vec_store(scores + key * STRIP + at, weight);
        total += weight;
    }
    vec change = vec_exp2(base - high);
    vec_store(strip->base + at, high);
    vec_store(strip->total + at, vec_load(strip->total + at) * change + total);
    return change;
}

/* ---- a strip ---- */

INLINE void attend_strip(const struct attention *op, const struct task *task, const struct tile *tile, int64_t first, int64_t index,
                         struct seen seen, int R, int W) {
    struct strip *strip = tile->strips + index;
    int64_t start = index * tile->padded * STRIP;
    vec change[WIDTH];
    score_strip(tile, tile->queries + start, seen, R, W);
    for (int i = 0; i < W; i++)
        change[i] = soften(op, task, first, strip, tile->scores, seen, i * LANES);
    add_values(tile, tile->sums + start, seen, change, R, W);
}

static __attribute__((noinline)) void attend_strip_1(const struct attention *op, const struct task *task, const struct tile *tile,
                                                     int64_t first, int64_t index, struct seen seen) {
    attend_strip(op, task, tile, first, index, seen, MOST_ROWS, 1);
}

static __attribute__((noinline)) void attend_strip_2(const struct attention *op, const struct task *task, const struct tile *tile,
                                                     int64_t first, int64_t index, struct seen seen) {
    attend_strip(op, task, tile, first, index, seen, ROWS, 2);
}

static __attribute__((noinline)) void attend_strip_3(const struct attention *op, const struct task *task, const struct tile *tile,
                                                     int64_t first, int64_t index, struct seen seen) {
    attend_strip(op, task, tile, first, index, seen, ROWS, 3);
}

/* What the queries of a strip see of the chunk of `count` keys that starts at `first`. */
static struct seen seen_by(const struct attention *op, const struct task *task, const struct tile *tile, int64_t index, int64_t first,
                           int64_t count) {
    int64_t low = tile->strips[index].position[0], high = tile->strips[index].position[least(STRIP, tile->m - index * STRIP) - 1];
    int64_t lower = most(first_seen(op, low) - first, 0), upper = least((task->is_causal ? high + 1 : task->length) - first, count);
    int is_whole = first_seen(op, high) <= first && (!task->is_causal || low + 1 >= first + upper);
    return (struct seen){lower, upper, is_whole};
}

/* Keys and values that are wanted next: lines of `bytes` that lie `step` bytes apart, of one block. */
struct soon {
    const char *keys, *values;
    int64_t count;
    size_t step, bytes;
};

/* Behind the chunk that starts at `first`: the next one, or the first of the task that this thread is likely to take next. */
static struct soon find_soon(const struct attention *op, const struct task *task, int64_t first) {
    const int32_t *table = task->table;
    int64_t head = task->head, key = first + CHUNK, last = task->last_key;
    size_t item = kv_size(op);
    if (key >= last)
        table = task->next_table, head = task->next_head, key = task->next_key, last = task->next_length;
    if (table == NULL || key >= last)
        return (struct soon){.count = 0};
    size_t at = (size_t)key_at(op, table, head, key) * item;
    int64_t count = least(least(last - key, CHUNK), op->block_size - key % op->block_size);
    return (struct soon){(const char *)op->k_cache + at, (const char *)op->v_cache + at, count, (size_t)op->token_stride * item,
                         (size_t)op->head_dim * item};
}

INLINE void fetch_soon(const struct soon *soon, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++)
        for (size_t byte = 0; byte < soon->bytes; byte += 64) {
            __builtin_prefetch(soon->keys + (size_t)i * soon->step + byte, 0, 2);
            __builtin_prefetch(soon->values + (size_t)i * soon->step + byte, 0, 2);
        }
}

static void attend_chunk(const struct attention *op, const struct task *task, const struct tile *tile, int64_t first, int64_t count) {
    struct soon soon = find_soon(op, task, first);
    int64_t strips = (tile->m + STRIP - 1) / STRIP;
    for (int64_t index = 0; index < strips; index++) {
        fetch_soon(&soon, soon.count * index / strips, soon.count * (index + 1) / strips);
        struct seen seen = seen_by(op, task, tile, index, first, count);
        if (seen.lower >= seen.upper)
            continue;
        int64_t width = (tile->m - index * STRIP + LANES - 1) / LANES;
        if (width == 1)
            attend_strip_1(op, task, tile, first, index, seen);
        else if (width == 2)
            attend_strip_2(op, task, tile, first, index, seen);
        else
            attend_strip_3(op, task, tile, first, index, seen);
    }
}

/* ---- a task ---- */

static void widen_chunk(const struct attention *op, const struct task *task, const struct tile *tile, int64_t first, int64_t count) {
    size_t item = kv_size(op), step = (size_t)op->token_stride * item;
    for (int64_t i = 0; i < count;) { /* a block at a time */
        size_t at = (size_t)key_at(op, task->table, task->head, first + i) * item;
        for (int64_t end = least(count, i + op->block_size - (first + i) % op->block_size); i < end; i++, at += step) {
            widen_cache_line(op, (const char *)op->k_cache + at, tile->keys + i * tile->padded, tile->padded);
            widen_cache_line(op, (const char *)op->v_cache + at, tile->values + i * tile->padded, tile->padded);
        }
    }
    memset(tile->keys + count * tile->padded, 0, (size_t)(MOST_ROWS * tile->padded) * sizeof(float));
}

/* 0: no memory. */
static int make_tile(const struct attention *op, const struct task *task, struct tile *tile) {
    int64_t m = task->num_tokens * op->group, strips = (m + STRIP - 1) / STRIP, padded = round_up(op->head_dim, most(LANES, MOST_ROWS));
    int64_t lines = strips * padded * STRIP;
    size_t numbers = (size_t)(2 * lines + 2 * LINES * padded + LINES * STRIP);
    float *memory = pelton_scratch(numbers * sizeof *memory + (size_t)strips * sizeof *tile->strips);
    if (memory == NULL)
        return 0;
    *tile = (struct tile){.queries = memory, .sums = memory + lines, .keys = memory + 2 * lines, .m = m, .padded = padded};
    tile->values = tile->keys + LINES * padded;
    tile->scores = tile->values + LINES * padded;
    tile->strips = (struct strip *)(tile->scores + LINES * STRIP);
    return 1;
}

/* Lines [LANES, padded] to columns of a strip, or back. */
INLINE void turn_lines(float *lines, float *columns, int64_t padded, int is_back) {
    for (int64_t i = 0; i < padded; i += LANES) {
        vec parts[LANES];
#pragma GCC unroll 16
        for (int lane = 0; lane < LANES; lane++)
            parts[lane] = vec_load(is_back ? columns + (i + lane) * STRIP : lines + lane * padded + i);
        vec_transpose(parts);
#pragma GCC unroll 16
        for (int lane = 0; lane < LANES; lane++)
            vec_store(is_back ? lines + lane * padded + i : columns + (i + lane) * STRIP, parts[lane]);
    }
}

/* Queries that are ready as they lie, whole vectors of float32: they need no lines. */
INLINE int has_plain_lines(const struct attention *op, const struct tile *tile) {
    return op->dtype == DTYPE_F32 && op->head_dim == tile->padded;
}

/* Of LANES queries from `row` on; behind the last one it is repeated. */
static void turn_queries(const struct attention *op, const struct task *task, const struct tile *tile, int64_t row, float *columns) {
    const float *from[LANES];
    for (int lane = 0; lane < LANES; lane++) {
        int64_t query = least(row + lane, tile->m - 1), token = op->group == 1 ? query : query / op->group;
        from[lane] = (const float *)task->query + token * task->query_stride + (query - token * op->group) * op->head_dim;
    }
    for (int64_t i = 0; i < tile->padded; i += LANES) {
        vec parts[LANES];
#pragma GCC unroll 16
        for (int lane = 0; lane < LANES; lane++)
            parts[lane] = vec_load(from[lane] + i);
        vec_transpose(parts);
#pragma GCC unroll 16
        for (int lane = 0; lane < LANES; lane++)
            vec_store(columns + (i + lane) * STRIP, parts[lane]);
    }
}

static void start_rows(const struct attention *op, const struct task *task, const struct tile *tile) {
    float lines[LANES * tile->padded];
    int64_t end = round_up(tile->m, LANES), token = 0, index = 0;
    int is_plain = task->rope == NULL && has_plain_lines(op, tile);
    memset(tile->sums, 0, (size_t)(round_up(end, STRIP) * tile->padded) * sizeof(float));
    for (int64_t row = 0; row < end; row++) {
        struct strip *strip = tile->strips + row / STRIP;
        int64_t at = row % STRIP, lane = row % LANES;
        float *line = lines + lane * tile->padded, *columns = tile->queries + row / STRIP * tile->padded * STRIP + at - lane;
        if (is_plain && lane == 0)
            turn_queries(op, task, tile, row, columns);
        else if (!is_plain && row < tile->m)
            pelton_take_query(op, task, token, index, line, tile->padded);
        else if (!is_plain)
            memset(line, 0, (size_t)tile->padded * sizeof(float));
        strip->base[at] = LOWEST_SCORE, strip->total[at] = 0.0f;
        strip->position[at] = (int32_t)(kept_of(task->step, task->position + token + 1) - 1);
        if (!is_plain && lane == LANES - 1)
            turn_lines(lines, columns, tile->padded, 0);
        if (++index == op->group)
            index = 0, token++;
    }
}

/* Of LANES queries from `row` on, to where they go. */
static void put_queries(const struct attention *op, const struct task *task, const struct tile *tile, int64_t row) {
    const struct strip *strip = tile->strips + row / STRIP;
    int64_t at = row % STRIP, count = least(LANES, tile->m - row);
    const float *columns = tile->sums + row / STRIP * tile->padded * STRIP + at;
    float factors[LANES] = {0}, *to[LANES];
    for (int64_t lane = 0; lane < count; lane++) {
        int64_t token = op->group == 1 ? row + lane : (row + lane) / op->group, index = row + lane - token * op->group;
        int64_t place = token * op->num_heads + index;
        factors[lane] = finish_query(op, task, task->head * op->group + index, place, strip->base[at + lane], strip->total[at + lane]);
        to[lane] = (float *)task->output + place * op->head_dim;
    }
    vec factor = vec_load(factors);
    for (int64_t i = 0; i < tile->padded; i += LANES) {
        vec parts[LANES];
#pragma GCC unroll 16
        for (int lane = 0; lane < LANES; lane++)
            parts[lane] = vec_load(columns + (i + lane) * STRIP) * factor;
        vec_transpose(parts);
#pragma GCC unroll 16
        for (int lane = 0; lane < LANES; lane++)
            if (lane < count)
                vec_store(to[lane] + i, parts[lane]);
    }
}

static void finish_rows(const struct attention *op, const struct task *task, const struct tile *tile) {
    float lines[LANES * tile->padded];
    if (task->states == NULL && has_plain_lines(op, tile)) {
        for (int64_t row = 0; row < tile->m; row += LANES)
            put_queries(op, task, tile, row);
        return;
    }
    for (int64_t row = 0; row < tile->m; row++) {
        const struct strip *strip = tile->strips + row / STRIP;
        int64_t at = row % STRIP, lane = row % LANES, place = row / op->group * op->num_heads + row % op->group;
        float *line = lines + lane * tile->padded;
        if (lane == 0)
            turn_lines(lines, tile->sums + row / STRIP * tile->padded * STRIP + at, tile->padded, 1);
        if (task->states != NULL)
            leave_state(op, task->states + place * STATE(op->head_dim), strip->base[at], strip->total[at], line);
        else
            put_line(op, line, finish_query(op, task, task->head * op->group + row % op->group, place, strip->base[at], strip->total[at]),
                     (char *)task->output + (size_t)(place * op->head_dim) * size_of(op->dtype));
    }
}

int pelton_prefill(const struct attention *op, const struct task *task, struct turn *turn) {
    struct tile tile;
    if (!make_tile(op, task, &tile))
        return 1;
    start_rows(op, task, &tile);
    for (int64_t first = task->first_key; first < task->last_key; first += CHUNK) {
        int64_t count = least(CHUNK, task->last_key - first);
        widen_chunk(op, task, &tile, first, count);
        attend_chunk(op, task, &tile, first, count);
    }
    if (may_write(turn))
        finish_rows(op, task, &tile);
    return 0;
}
