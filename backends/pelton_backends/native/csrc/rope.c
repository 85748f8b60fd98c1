/* What stands before attention: q/k norm, rope, writing keys and values. Queries are rotated where they are taken up, so that
   what a step's tasks read stays as it is. */
#include "fp8.h"

/* RMS norm of one head, rounded as the reference rounds. */
static void norm_line(float *line, int64_t dim, const void *norm, float eps, int unit_offset, int dtype) {
    vec squares = {0};
    int64_t i = 0;
    for (; i + LANES <= dim; i += LANES)
        squares += vec_load(line + i) * vec_load(line + i);
    float sum = vec_sum(squares);
    for (; i < dim; i++)
        sum += line[i] * line[i];
    float factor = 1.0f / sqrtf(sum / (float)dim + eps);
    for (i = 0; i + LANES <= dim; i += LANES) {
        vec weight = load_lanes(norm, i, dtype), number = vec_load(line + i) * factor;
        number = unit_offset ? number * (1.0f + weight) : vec_round(number, dtype) * weight;
        vec_store(line + i, vec_round(number, dtype));
    }
    for (; i < dim; i++) {
        float weight = load(norm, i, dtype), number = line[i] * factor;
        line[i] = round_to(unit_offset ? number * (1.0f + weight) : round_to(number, dtype) * weight, dtype);
    }
}

/* Pairs (i, i + half). */
static void turn_pairs(float *line, int64_t half, const float *cos_sin) {
    int64_t i = 0;
    for (; i + LANES <= half; i += LANES) {
        vec first = vec_load(line + i), second = vec_load(line + half + i);
        vec cos = vec_load(cos_sin + i), sin = vec_load(cos_sin + half + i);
        vec_store(line + i, first * cos - second * sin);
        vec_store(line + half + i, second * cos + first * sin);
    }
    for (; i < half; i++) {
        float first = line[i], second = line[half + i];
        line[i] = first * cos_sin[i] - second * cos_sin[half + i];
        line[half + i] = second * cos_sin[i] + first * cos_sin[half + i];
    }
}

/* One head of a token at `position`: norm, then rotation of its first rotary_dim numbers. */
static void turn_head(const struct rope *op, int is_key, int64_t position, float *line) {
    const void *norm = is_key ? op->k_norm : op->q_norm;
    if (norm != NULL)
        norm_line(line, op->head_dim, norm, is_key ? op->k_eps : op->q_eps, is_key ? op->k_unit_offset : op->q_unit_offset, op->dtype);
    if (op->rotary_dim > 0)
        turn_pairs(line, op->rotary_dim / 2, op->cos_sin + position * op->rotary_dim);
}

/* A head without a norm, half of whose pairs fill vectors: nothing is put down in between. */
INLINE void turn_vectors(const struct rope *op, const void *from, int64_t position, void *to, int dtype) {
    int64_t half = op->rotary_dim / 2;
    const float *cos_sin = op->cos_sin + position * op->rotary_dim;
    for (int64_t i = 0; i < half; i += LANES) {
        vec first = load_lanes(from, i, dtype), second = load_lanes(from, half + i, dtype);
        vec cos = vec_load(cos_sin + i), sin = vec_load(cos_sin + half + i);
        store_lanes(to, i, first * cos - second * sin, dtype);
        store_lanes(to, half + i, second * cos + first * sin, dtype);
    }
    size_t item = size_of(dtype), turned = (size_t)op->rotary_dim * item;
    memcpy((char *)to + turned, (const char *)from + turned, (size_t)op->head_dim * item - turned);
}

static void move_head(const struct rope *op, int is_key, const void *from, int64_t position, void *to) {
    if ((is_key ? op->k_norm : op->q_norm) == NULL && op->rotary_dim % (2 * LANES) == 0) {
        if (op->dtype == DTYPE_BF16)
            turn_vectors(op, from, position, to, DTYPE_BF16);
        else
            turn_vectors(op, from, position, to, DTYPE_F32);
        return;
    }
    float line[op->head_dim];
    widen_line(from, line, op->head_dim, op->head_dim, op->dtype);
    turn_head(op, is_key, position, line);
    narrow_line(line, to, op->head_dim, op->dtype);
}

static const char *query_at(const struct attention *op, const struct task *task, int64_t token, int64_t index) {
    return (const char *)task->query + (size_t)(token * task->query_stride + index * op->head_dim) * size_of(op->dtype);
}

SHARED void pelton_take_query(const struct attention *op, const struct task *task, int64_t token, int64_t index, float *line, int64_t padded) {
    const char *from = query_at(op, task, token, index);
    widen_line(from, line, op->head_dim, padded, op->dtype);
    if (task->rope == NULL)
        return;
    turn_head(task->rope, 0, task->positions[token], line);
    for (int64_t i = 0; i < padded; i += LANES)
        vec_store(line + i, vec_round(vec_load(line + i), op->dtype));
}

void pelton_copy_query(const struct attention *op, const struct task *task, int64_t token, int64_t index, void *line) {
    const char *from = query_at(op, task, token, index);
    if (task->rope == NULL)
        memcpy(line, from, (size_t)op->head_dim * size_of(op->dtype));
    else
        move_head(task->rope, 0, from, task->positions[token], line);
}

/* One head's key, rounded to the model's dtype first, and the value that stands `value` bytes behind it, in place of number `at`. */
static __attribute__((noinline)) void write_fp8(const struct rope *op, const struct attention *cache, const char *key, size_t value,
                                                int64_t position, int64_t at) {
    float line[op->head_dim]; /* room for either dtype */
    uint8_t *keys = (uint8_t *)cache->k_cache + at, *values = (uint8_t *)cache->v_cache + at;
    move_head(op, 1, key, position, line);
    if (cache->kv_dtype == DTYPE_E4M3) {
        narrow_fp8_line(line, keys, op->head_dim, op->dtype, DTYPE_E4M3);
        narrow_fp8_line(key + value, values, op->head_dim, op->dtype, DTYPE_E4M3);
    } else {
        narrow_fp8_line(line, keys, op->head_dim, op->dtype, DTYPE_E5M2);
        narrow_fp8_line(key + value, values, op->head_dim, op->dtype, DTYPE_E5M2);
    }
}

void pelton_write_keys(const struct rope *op, const struct attention *cache, const struct written *step, const void *qkv, int64_t token) {
    int64_t slot = step->slots[token], heads = op->num_heads, kv_heads = op->num_kv_heads;
    if (slot < 0 || !op->writes_kv)
        return;
    size_t item = size_of(op->dtype), head_bytes = (size_t)op->head_dim * item;
    const char *keys = (const char *)qkv + (size_t)(token * (heads + 2 * kv_heads) + heads) * head_bytes;
    int64_t start = slot / cache->block_size * cache->block_stride + slot % cache->block_size * cache->token_stride;
    for (int64_t head = 0; head < kv_heads && cache->kv_dtype >= DTYPE_E4M3; head++)
        write_fp8(op, cache, keys + (size_t)head * head_bytes, (size_t)kv_heads * head_bytes, step->positions[token], start + head * cache->head_stride);
    for (int64_t head = 0; head < kv_heads && cache->kv_dtype < DTYPE_E4M3; head++) {
        size_t at = (size_t)(start + head * cache->head_stride) * item;
        move_head(op, 1, keys + (size_t)head * head_bytes, step->positions[token], (char *)cache->k_cache + at);
        memcpy((char *)cache->v_cache + at, keys + (size_t)(head + kv_heads) * head_bytes, head_bytes);
    }
}

/* ---- a step by itself ---- */

struct write {
    const struct rope *op;
    const struct attention *cache;
    const struct written *step;
    const char *qkv;
    char *query;
    int64_t query_stride;
};

enum { TOKENS = 16 }; /* of a task */

static void write_tokens(void *context, int64_t part, struct turn *turn) {
    const struct write *write = context;
    const struct rope *op = write->op;
    size_t item = size_of(op->dtype);
    for (int64_t token = part * TOKENS; token < least((part + 1) * TOKENS, write->step->num_tokens); token++) {
        for (int64_t head = 0; head < op->num_heads; head++) {
            int64_t from = (token * (op->num_heads + 2 * op->num_kv_heads) + head) * op->head_dim;
            int64_t to = token * write->query_stride + head * op->head_dim;
            move_head(op, 0, write->qkv + (size_t)from * item, write->step->positions[token], write->query + (size_t)to * item);
        }
        pelton_write_keys(op, write->cache, write->step, write->qkv, token);
    }
    (void)turn;
}

/* query: [T, num_heads head_dim] with query_stride numbers between tokens. */
EXPORT void pelton_rope_write(const struct rope *op, const struct attention *cache, const struct written *step, const void *qkv,
                              void *query, int64_t query_stride) {
    struct write write = {op, cache, step, qkv, query, query_stride};
    pool_run((step->num_tokens + TOKENS - 1) / TOKENS, write_tokens, &write);
}
