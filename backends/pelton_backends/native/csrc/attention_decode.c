/* Paged attention of one token of a row, for all instruction sets: dot products on keys and values where they lie. All heads of
   a task go through a chunk of keys together, for a block holds them side by side: memory is read in one stream. Numbers go
   through a block of two vectors at a time; of bfloat16 these are a block's even and odd numbers, which takes no shuffles. */
#include "attention.h"
#include "fp8.h"

enum { CHUNK = 64, BLOCK = 2 * LANES, KEYS = 4, QUERIES = 3 };

/* A score may be this much above `base` before a row is scaled anew. */
enum { SLACK = 8 };

/* One query's softmax as it is carried along: weights are powers of 2 above `base`. */
struct softmax {
    vec total;
    float base;
};

/* One task's memory. Lines of numbers stand as `load_block` leaves them. */
struct decode {
    float *queries, *sums;   /* [queries, padded] */
    float *scores;           /* [queries, CHUNK] */
    float *partial;          /* [QUERIES, LANES keys, LANES] */
    struct softmax *rows;    /* [queries] */
    float *keys, *values;    /* [CHUNK, padded], where they are not read in place */
    int64_t num_queries, padded;
    int dtype;               /* that keys and values are read in */
};

/* Where a chunk's keys are; whole vectors of keys have addresses. */
struct chunk {
    const char *keys[CHUNK], *values[CHUNK];
    const char *ahead[CHUNK]; /* keys that will be wanted next, of the same head; NULL: none */
    int64_t count;
};

struct block {
    vec first, second;
};

INLINE struct block load_block(const char *from, int dtype) {
    if (dtype == DTYPE_F32)
        return (struct block){vec_load(from), vec_load(from + sizeof(vec))};
    uvec pairs = vec_load_bits(from);
    return (struct block){vec_first(pairs), vec_second(pairs)};
}

/* Lines between the order of numbers and that of `load_block`. */
INLINE void order_line(const float *from, float *to, int64_t padded, int dtype, int is_back) {
    for (int64_t i = 0; i < padded; i++) {
        int64_t in_block = i % BLOCK, place = dtype == DTYPE_F32 ? i : i - in_block + in_block / 2 + in_block % 2 * LANES;
        to[is_back ? i : place] = from[is_back ? place : i];
    }
}

/* ---- scores ---- */

/* NUM queries against KEYS keys: sums of LANES parts each. */
INLINE void score_keys(const struct decode *decode, int64_t query, const char *const *keys, float *partial, int NUM, int dtype) {
    const float *line = decode->queries + query * decode->padded;
    vec sums[QUERIES][KEYS];
#pragma GCC unroll 3
    for (int i = 0; i < NUM; i++)
#pragma GCC unroll 4
        for (int key = 0; key < KEYS; key++)
            sums[i][key] = (vec){0};
    for (int64_t at = 0; at < decode->padded; at += BLOCK) {
#pragma GCC unroll 4
        for (int key = 0; key < KEYS; key++) {
            struct block block = load_block(keys[key] + (size_t)at * size_of(dtype), dtype);
#pragma GCC unroll 4
            for (int i = 0; i < NUM; i++) {
                sums[i][key] += block.first * vec_load(line + i * decode->padded + at);
                sums[i][key] += block.second * vec_load(line + i * decode->padded + at + LANES);
            }
        }
    }
#pragma GCC unroll 3
    for (int i = 0; i < NUM; i++)
#pragma GCC unroll 4
        for (int key = 0; key < KEYS; key++)
            vec_store(partial + (i * LANES + key) * LANES, sums[i][key]);
}

/* Lines of a key and its value, wanted soon. */
INLINE void fetch(const struct attention *op, const char *key) {
    const char *value = (const char *)op->v_cache + (key - (const char *)op->k_cache);
    for (int64_t i = 0; i < op->head_dim * (int64_t)kv_size(op); i += 64) {
        __builtin_prefetch(key + i, 0, 2);
        __builtin_prefetch(value + i, 0, 2);
    }
}

INLINE void score_queries(const struct attention *op, const struct decode *decode, const struct chunk *chunk, int64_t query, int NUM, int dtype) {
    for (int64_t at = 0; at < chunk->count; at += LANES) {
        for (int64_t key = at; key < at + LANES && query % op->group == 0; key++)
            if (chunk->ahead[key] != NULL)
                fetch(op, chunk->ahead[key]);
        for (int64_t key = 0; key < LANES; key += KEYS)
            score_keys(decode, query, chunk->keys + at + key, decode->partial + key * LANES, NUM, dtype);
#pragma GCC unroll 4
        for (int i = 0; i < NUM; i++) {
            vec parts[LANES];
#pragma GCC unroll 16
            for (int key = 0; key < LANES; key++)
                parts[key] = vec_load(decode->partial + (i * LANES + key) * LANES);
            vec_store(decode->scores + (query + i) * CHUNK + at, sum_each(parts));
        }
    }
}

/* ---- softmax ---- */

static __attribute__((noinline)) void raise(struct softmax *row, float base, float *sums, int64_t padded) {
    vec change = vec_exp2(vec_all(row->base - base));
    row->base = base;
    row->total *= change;
    for (int64_t i = 0; i < padded; i += LANES)
        vec_store(sums + i, vec_load(sums + i) * change);
}

/* One query's scores [CHUNK] to weights, 0 past the chunk's end. */
INLINE void soften(const struct attention *op, const struct chunk *chunk, float *scores, struct softmax *row, float *sums,
                   int64_t padded) {
    vec high = vec_all(LOWEST_SCORE), lowest = vec_all(-INFINITY), total = row->total;
    ivec index;
    for (int i = 0; i < LANES; i++)
        index[i] = i;
    for (int64_t at = 0; at < chunk->count; at += LANES) {
        ivec key = index + (int32_t)at;
        vec score = vec_select(key < (int32_t)chunk->count, scaled(op, vec_load(scores + at)), lowest);
        vec_store(scores + at, score);
        high = vec_max(score, high);
    }
    float highest = vec_highest(high);
    if (highest > row->base + SLACK) {
        raise(row, highest, sums, padded);
        total = row->total;
    }
    for (int64_t at = 0; at < chunk->count; at += LANES) {
        vec weight = vec_exp2(vec_load(scores + at) - row->base);
        vec_store(scores + at, weight);
        total += weight;
    }
    row->total = total;
}

/* ---- values ---- */

/* Sums of NUM queries += weights times values, numbers [first, first + PARTS blocks). */
INLINE void add_values(const struct decode *decode, const struct chunk *chunk, int64_t query, int64_t first, int NUM, int PARTS, int dtype) {
    vec sums[QUERIES][2][2];
    float *lines = decode->sums + query * decode->padded + first;
    const float *weights = decode->scores + query * CHUNK;
#pragma GCC unroll 3
    for (int i = 0; i < NUM; i++)
#pragma GCC unroll 4
        for (int part = 0; part < PARTS; part++) {
            sums[i][part][0] = vec_load(lines + i * decode->padded + part * BLOCK);
            sums[i][part][1] = vec_load(lines + i * decode->padded + part * BLOCK + LANES);
        }
    for (int64_t key = 0; key < chunk->count; key++) {
        const char *value = chunk->values[key] + (size_t)first * size_of(dtype);
#pragma GCC unroll 4
        for (int part = 0; part < PARTS; part++) {
            struct block block = load_block(value + (size_t)(part * BLOCK) * size_of(dtype), dtype);
#pragma GCC unroll 4
            for (int i = 0; i < NUM; i++) {
                sums[i][part][0] += block.first * weights[i * CHUNK + key];
                sums[i][part][1] += block.second * weights[i * CHUNK + key];
            }
        }
    }
#pragma GCC unroll 3
    for (int i = 0; i < NUM; i++)
#pragma GCC unroll 4
        for (int part = 0; part < PARTS; part++) {
            vec_store(lines + i * decode->padded + part * BLOCK, sums[i][part][0]);
            vec_store(lines + i * decode->padded + part * BLOCK + LANES, sums[i][part][1]);
        }
}

INLINE void add_all_values(const struct decode *decode, const struct chunk *chunk, int64_t query, int NUM, int dtype) {
    int64_t first = 0;
    for (; first + 2 * BLOCK <= decode->padded; first += 2 * BLOCK)
        add_values(decode, chunk, query, first, NUM, 2, dtype);
    if (first < decode->padded)
        add_values(decode, chunk, query, first, NUM, 1, dtype);
}

/* ---- a chunk ---- */

/* One key head's queries, from number `query` of the task on, against a chunk. */
INLINE void attend_chunk(const struct attention *op, const struct decode *decode, const struct chunk *chunk, int64_t query, int NUM,
                         int dtype) {
    score_queries(op, decode, chunk, query, NUM, dtype);
    for (int64_t i = query; i < query + NUM; i++)
        soften(op, chunk, decode->scores + i * CHUNK, decode->rows + i, decode->sums + i * decode->padded, decode->padded);
    add_all_values(decode, chunk, query, NUM, dtype);
}

#define ATTEND_CHUNK(NUM, TYPE)                                                                                                  \
    static __attribute__((noinline)) void attend_chunk_##NUM##TYPE(const struct attention *op, const struct decode *decode,          \
                                                                   const struct chunk *chunk, int64_t query) {                   \
        attend_chunk(op, decode, chunk, query, NUM, DTYPE_##TYPE);                                                                 \
    }
ATTEND_CHUNK(1, F32)
ATTEND_CHUNK(2, F32)
ATTEND_CHUNK(3, F32)
#if PELTON_ISA < ISA_AVX512_BF16
ATTEND_CHUNK(1, BF16)
ATTEND_CHUNK(2, BF16)
ATTEND_CHUNK(3, BF16)
#endif

typedef void (*chunk_fn)(const struct attention *, const struct decode *, const struct chunk *, int64_t);

/* As few rounds as can be, and as even: four queries go two by two. */
static void attend_head(const struct attention *op, const struct decode *decode, const struct chunk *chunk, int64_t query) {
    static const chunk_fn fns[2][3] = {
        {attend_chunk_1F32, attend_chunk_2F32, attend_chunk_3F32},
#if PELTON_ISA < ISA_AVX512_BF16
        {attend_chunk_1BF16, attend_chunk_2BF16, attend_chunk_3BF16},
#endif
    };
    int64_t rounds = (op->group + 2) / 3;
    for (int64_t left = op->group; rounds > 0; rounds--) {
        int64_t num = (left + rounds - 1) / rounds;
        fns[decode->dtype == DTYPE_BF16][num - 1](op, decode, chunk, query);
        query += num, left -= num;
    }
}

/* ---- a task ---- */

/* Addresses of a head's keys [first, first + count). */
static void find_keys(const struct attention *op, const int32_t *table, int64_t head, int64_t first, int64_t count, const char **keys) {
    size_t item = kv_size(op);
    int64_t block = first / op->block_size, offset = first % op->block_size;
    const char *cache = op->k_cache;
    for (int64_t i = 0; i < count; block++, offset = 0) {
        const char *at = cache + (size_t)(table[block] * op->block_stride + head * op->head_stride) * item;
        for (; offset < op->block_size && i < count; offset++, i++)
            keys[i] = at + (size_t)(offset * op->token_stride) * item;
    }
}

/* The chunk at `first`; keys past its end are its last once more. For each of its keys one is fetched that stands CHUNK keys later,
   where the next row's keys follow this row's. */
static void find_chunk(const struct attention *op, const struct task *task, int64_t head, int64_t first, struct chunk *chunk) {
    int64_t next = first + CHUNK, padded = round_up(chunk->count, LANES), own = least(most(task->last_key - next, 0), padded);
    int64_t later = task->next_key + most(next - task->last_key, 0);
    int64_t num_later = task->next_table == NULL ? 0 : least(most(task->next_length - later, 0), padded - own);
    find_keys(op, task->table, head, first, chunk->count, chunk->keys);
    for (int64_t i = chunk->count; i < padded; i++)
        chunk->keys[i] = chunk->keys[chunk->count - 1];
    for (int64_t i = 0; i < padded; i++)
        chunk->values[i] = (const char *)op->v_cache + (chunk->keys[i] - (const char *)op->k_cache);
    find_keys(op, task->table, head, next, own, chunk->ahead);
    find_keys(op, task->next_table, head, later, num_later, chunk->ahead + own);
    for (int64_t i = own + num_later; i < padded; i++)
        chunk->ahead[i] = NULL;
}

static void widen_chunk(const struct attention *op, const struct decode *decode, struct chunk *chunk) {
    for (int64_t i = 0; i < round_up(chunk->count, LANES); i++) {
        float *key = decode->keys + i * decode->padded, *value = decode->values + i * decode->padded;
        widen_cache_line(op, chunk->keys[i], key, decode->padded);
        widen_cache_line(op, chunk->values[i], value, decode->padded);
        chunk->keys[i] = (const char *)key, chunk->values[i] = (const char *)value;
    }
}

/* Whether keys are read where they lie, not made float32 first, as those of 8 bits are, once for all queries. Bfloat16 that attention_avx512.c does not take is rare there. */
INLINE int reads_in_place(const struct attention *op) {
    return op->head_dim % BLOCK == 0 && (op->kv_dtype == DTYPE_F32 || (op->kv_dtype == DTYPE_BF16 && PELTON_ISA < ISA_AVX512_BF16));
}

/* 0: no memory. */
static int make_decode(const struct attention *op, const struct task *task, struct decode *decode) {
    int64_t queries = task->num_heads * op->group, padded = round_up(op->head_dim, BLOCK);
    int is_in_place = reads_in_place(op);
    int64_t line = 2 * padded + CHUNK, fixed = QUERIES * LANES * LANES + (is_in_place ? 0 : 2 * CHUNK * padded);
    struct softmax *rows = pelton_scratch((size_t)queries * sizeof *rows + (size_t)(queries * line + fixed) * sizeof(float));
    if (rows == NULL)
        return 0;
    float *memory = (float *)(rows + queries);
    *decode = (struct decode){
        .queries = memory,
        .sums = memory + queries * padded,
        .scores = memory + 2 * queries * padded,
        .partial = memory + queries * line,
        .rows = rows,
        .keys = memory + queries * line + QUERIES * LANES * LANES,
        .values = memory + queries * line + QUERIES * LANES * LANES + CHUNK * padded,
        .num_queries = queries,
        .padded = padded,
        .dtype = is_in_place ? op->dtype : DTYPE_F32,
    };
    return 1;
}

static void start_rows(const struct attention *op, const struct task *task, const struct decode *decode) {
    float line[decode->padded];
    for (int64_t i = 0; i < decode->num_queries; i++) {
        float *sums = decode->sums + i * decode->padded;
        pelton_take_query(op, task, 0, i, line, decode->padded);
        order_line(line, decode->queries + i * decode->padded, decode->padded, decode->dtype, 0);
        decode->rows[i] = (struct softmax){.base = LOWEST_SCORE};
        if (task->given == NULL) {
            memset(sums, 0, (size_t)decode->padded * sizeof(float));
            continue;
        }
        const float *state = task->given + i * STATE(op->head_dim);
        decode->rows[i].base = state[0], decode->rows[i].total[0] = state[1];
        memset(line, 0, sizeof line);
        memcpy(line, state + STATE(0), (size_t)op->head_dim * sizeof(float));
        order_line(line, sums, decode->padded, decode->dtype, 0);
    }
}

static void finish_rows(const struct attention *op, const struct task *task, const struct decode *decode) {
    float line[decode->padded];
    for (int64_t i = 0; i < decode->num_queries; i++) {
        float total = vec_sum(decode->rows[i].total);
        order_line(decode->sums + i * decode->padded, line, decode->padded, decode->dtype, 1);
        if (task->states != NULL)
            leave_state(op, task->states + i * STATE(op->head_dim), decode->rows[i].base, total, line);
        else
            put_line(op, line, finish_query(op, task, task->head * op->group + i, i, decode->rows[i].base, total),
                     (char *)task->output + (size_t)(i * op->head_dim) * size_of(op->dtype));
    }
}

int pelton_decode(const struct attention *op, const struct task *task, struct turn *turn) {
    struct decode decode;
    struct chunk chunk;
    if (!make_decode(op, task, &decode))
        return 1;
    start_rows(op, task, &decode);
    for (int64_t first = task->first_key; first < task->last_key; first += CHUNK) {
        chunk.count = least(CHUNK, task->last_key - first);
        for (int64_t head = 0; head < task->num_heads; head++) {
            find_chunk(op, task, task->head + head, first, &chunk);
            if (!reads_in_place(op))
                widen_chunk(op, &decode, &chunk);
            attend_head(op, &decode, &chunk, head * op->group);
        }
    }
    if (may_write(turn))
        finish_rows(op, task, &decode);
    return 0;
}
