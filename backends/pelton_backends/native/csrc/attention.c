/* Paged attention of rows with one token or many, and what stands before it: q/k norm, rope, writing keys and values.

   Work is cut into tasks of one row, one key head and up to TILE_ROWS query rows (tokens times the heads of that key head);
   threads take tasks as they come. A task walks the row's keys in chunks: scores, softmax carried along in float32, values.
   Scores and values are products over packed panels (tile.h). */
#include "attention.h"
#include "tile.h"

#ifdef _OPENMP
#include <omp.h>
#endif

enum { CHUNK = 64, TILE_ROWS = 48 };

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

INLINE void attend_floats(const struct attention *op, const struct task *task, struct tile *tile, int dtype,
                          floats_multiply_fn multiply) {
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

static __attribute__((noinline)) void multiply_plain(const float *a, int64_t lda, const float *panel, float *c,
                                                   int64_t ldc, int64_t m, int64_t k) {
    floats_multiply(a, lda, panel, c, ldc, m, k);
}

static void attend_plain(const struct attention *op, const struct task *task, struct tile *tile) {
    if (op->dtype == DTYPE_BF16)
        attend_floats(op, task, tile, DTYPE_BF16, multiply_plain);
    else
        attend_floats(op, task, tile, DTYPE_F32, multiply_plain);
}

#if PELTON_X86

TARGET_AVX2 static __attribute__((noinline)) void multiply_avx2(const float *a, int64_t lda, const float *panel, float *c,
                                                   int64_t ldc, int64_t m, int64_t k) {
    floats_multiply(a, lda, panel, c, ldc, m, k);
}

TARGET_AVX2 static void attend_avx2(const struct attention *op, const struct task *task, struct tile *tile) {
    if (op->dtype == DTYPE_BF16)
        attend_floats(op, task, tile, DTYPE_BF16, multiply_avx2);
    else
        attend_floats(op, task, tile, DTYPE_F32, multiply_avx2);
}

/* As `soften`, without a soft cap; weights go to `weights` [CHUNK] bfloat16. */
TARGET_AVX512 INLINE float soften_avx512(float scale, const float *scores, struct seen seen, int64_t width, float *best,
                                         float *total, bf16 *weights) {
    __m512 parts[CHUNK / 16], lowest = _mm512_set1_ps(-INFINITY), high = lowest, sum = _mm512_setzero_ps();
    __m512i place = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    __m512i lower = _mm512_set1_epi32((int)seen.lower), upper = _mm512_set1_epi32((int)seen.upper);
    for (int i = 0; i < CHUNK / 16; i++) {
        if (i * 16 >= width)
            break;
        __m512i at = _mm512_add_epi32(place, _mm512_set1_epi32(i * 16));
        __mmask16 mask = _mm512_cmplt_epi32_mask(at, upper) & _mm512_cmpge_epi32_mask(at, lower);
        parts[i] = _mm512_mask_mul_ps(lowest, mask, _mm512_loadu_ps(scores + i * 16), _mm512_set1_ps(scale));
        high = _mm512_max_ps(high, parts[i]);
    }
    float highest = _mm512_reduce_max_ps(high);
    highest = highest > *best ? highest : *best;
    for (int i = 0; i < CHUNK / 16; i++) {
        if (i * 16 >= width)
            break;
        __m512 weight = avx512_exp(_mm512_sub_ps(parts[i], _mm512_set1_ps(highest)));
        sum = _mm512_add_ps(sum, weight);
        _mm256_storeu_si256((__m256i *)(weights + i * 16), (__m256i)_mm512_cvtneps_pbh(weight));
    }
    float change = *best == -INFINITY ? 0.0f : fast_exp(*best - highest);
    *total = *total * change + _mm512_reduce_add_ps(sum);
    *best = highest;
    return change;
}

/* Ask for keys and values [first, last) of a row: a chunk ahead, for blocks lie anywhere and the hardware follows a stream only
   within one. */
static void fetch_chunk(const struct attention *op, const int32_t *table, int64_t head, int64_t first, int64_t last) {
    int64_t token_bytes = op->token_stride * (int64_t)sizeof(bf16), line_bytes = op->head_dim * (int64_t)sizeof(bf16);
    while (first < last) {
        int64_t offset = first % op->block_size, count = least(op->block_size - offset, last - first);
        int64_t at = table[first / op->block_size] * op->block_stride + head * op->head_stride + offset * op->token_stride;
        const char *keys = (const char *)((const bf16 *)op->k_cache + at), *values = (const char *)((const bf16 *)op->v_cache + at);
        for (int64_t token = 0; token < count; token++)
            for (int64_t byte = 0; byte < line_bytes; byte += 64) {
                _mm_prefetch(keys + token * token_bytes + byte, _MM_HINT_T1);
                _mm_prefetch(values + token * token_bytes + byte, _MM_HINT_T1);
            }
        first += count;
    }
}

/* bfloat16, head_dim even. Weights are rounded to bfloat16 before they meet the values; their sum is not. */
TARGET_AVX512 static void attend_avx512(const struct attention *op, const struct task *task, struct tile *tile) {
    int64_t dim = op->head_dim, padded = round_up(dim, PANEL), m = task->num_tokens * op->group;
    bf16 *query = tile->query, *weights = tile->weights, *panel = tile->key_panel;
    for (int64_t row = 0; row < m; row++)
        memcpy(query + row * dim, (const bf16 *)task->query + row / op->group * task->query_stride + row % op->group * dim,
               (size_t)dim * sizeof(bf16));
    for (int64_t first = task->first_key; first < task->last_key; first += CHUNK) {
        int64_t count = least(CHUNK, task->last_key - first), width = round_up(count, PANEL);
        find_keys(op, task->table, task->head, first, count, tile);
        for (int64_t i = count; i < width; i++)
            tile->keys[i] = tile->keys[0];
        memset(tile->scores, 0, (size_t)(m * CHUNK) * sizeof(float));
        if (first + CHUNK < task->last_key)
            fetch_chunk(op, task->table, task->head, first + CHUNK, least(task->last_key, first + 2 * CHUNK));
        else if (task->head + 1 < op->num_kv_heads)
            fetch_chunk(op, task->table, task->head + 1, task->first_key, least(task->last_key, task->first_key + CHUNK));
        else if (task->next_table != NULL)
            fetch_chunk(op, task->next_table, 0, task->next_key, least(task->next_length, task->next_key + CHUNK));
        for (int64_t part = 0; part < width; part += PANEL) {
            avx512_pack_rows(tile->keys + part, dim, panel);
            avx512_multiply(query, dim, panel, tile->scores + part, CHUNK, m, dim);
        }
        for (int64_t row = 0; row < m; row++) {
            struct seen seen = seen_by(op, task, row, first, count);
            float *scores = tile->scores + row * CHUNK, change;
            if (seen.lower >= seen.upper) {
                memset(weights + row * CHUNK, 0, CHUNK * sizeof(bf16));
                continue;
            }
            if (op->soft_cap > 0.0f) {
                change = soften(op, scores, seen, CHUNK, &tile->best[row], &tile->total[row]);
                for (int64_t i = 0; i < CHUNK; i++)
                    weights[row * CHUNK + i] = to_bf16(scores[i]);
            } else {
                change = soften_avx512(op->scale, scores, seen, width, &tile->best[row], &tile->total[row], weights + row * CHUNK);
            }
            if (change != 1.0f)
                for (int64_t i = 0; i < padded; i += 16) {
                    float *sums = tile->sums + row * padded + i;
                    _mm512_storeu_ps(sums, _mm512_mul_ps(_mm512_loadu_ps(sums), _mm512_set1_ps(change)));
                }
        }
        for (int64_t part = 0; part < dim; part += PANEL) {
            avx512_pack_cols(tile->values, count, part, least(PANEL, dim - part), tile->value_panel);
            avx512_multiply(weights, CHUNK, tile->value_panel, tile->sums + part, padded, m, round_up(count, 2));
        }
    }
}

#endif

typedef void (*attend_fn)(const struct attention *, const struct task *, struct tile *);

static attend_fn choose_attend(const struct attention *op) {
#if PELTON_X86
    int isa = pelton_isa();
    if (isa == ISA_AVX512 && op->dtype == DTYPE_BF16 && op->head_dim % 2 == 0)
        return attend_avx512;
    if (isa >= ISA_AVX2)
        return attend_avx2;
#endif
    return attend_plain;
}

static int run_task(attend_fn attend, const struct attention *op, const struct task *task) {
    int64_t padded = round_up(op->head_dim, PANEL), m = task->num_tokens * op->group;
    struct tile *tile = make_tile(op->head_dim);
    if (tile == NULL)
        return 1;
    memset(tile->sums, 0, (size_t)(m * padded) * sizeof(float));
    for (int64_t row = 0; row < m; row++)
        tile->best[row] = -INFINITY, tile->total[row] = 0.0f;
    attend(op, task, tile);
    for (int64_t row = 0; row < m; row++) {
        const float *sums = tile->sums + row * padded;
        float factor = 1.0f / tile->total[row];
        int64_t at = row / op->group * op->num_heads * op->head_dim + row % op->group * op->head_dim;
        char *output = (char *)task->output + (size_t)at * size_of(op->dtype);
        if (op->dtype == DTYPE_BF16)
            for (int64_t i = 0; i < op->head_dim; i++)
                ((bf16 *)output)[i] = to_bf16(sums[i] * factor);
        else
            for (int64_t i = 0; i < op->head_dim; i++)
                ((float *)output)[i] = sums[i] * factor;
    }
    return 0;
}

/* Tokens of a row that one task takes. */
INLINE int64_t task_tokens(const struct attention *op) { return most(TILE_ROWS / op->group, 1); }

static int64_t count_tiles(const struct attention *op, const struct step *step) {
    int64_t count = 0, tokens = task_tokens(op);
    for (int64_t row = 0; row < step->num_rows; row++)
        count += (step->query_start[row + 1] - step->query_start[row] + tokens - 1) / tokens;
    return count;
}

/* 0, or 1 when memory ran out. query and output point at token 0; query_stride: numbers between tokens of the query. */
EXPORT int pelton_attend(const struct attention *op, const struct step *step, const void *query, int64_t query_stride,
                         void *output) {
    attend_fn attend = choose_attend(op);
    int64_t num_tiles = count_tiles(op, step), tokens = task_tokens(op), found = 0;
    struct place {
        int32_t row, token;
    } *places = malloc((size_t)most(num_tiles, 1) * sizeof *places);
    if (places == NULL)
        return 1;
    for (int64_t row = step->num_rows - 1; row >= 0; row--) /* long rows stand last: first to go */
        for (int32_t token = (step->query_start[row + 1] - step->query_start[row] - 1) / (int32_t)tokens * (int32_t)tokens;
             token >= 0 && step->query_start[row + 1] > step->query_start[row]; token -= (int32_t)tokens)
            places[found++] = (struct place){(int32_t)row, token};
    int failed = 0;
    /* A row's heads go to one thread while there are rows enough: it fetches the next head's keys
       ahead, and those of the row that it will likely take next. */
    int64_t threads = 1;
#ifdef _OPENMP
    threads = omp_get_max_threads();
#endif
    int64_t portion = num_tiles > 8 ? op->num_kv_heads : 1;
#pragma omp parallel for schedule(dynamic, portion) reduction(| : failed) if (num_tiles * op->num_kv_heads > 1)
    for (int64_t index = 0; index < num_tiles * op->num_kv_heads; index++) {
        struct place place = places[index / op->num_kv_heads];
        int64_t head = index % op->num_kv_heads, start = step->query_start[place.row];
        int64_t row_tokens = step->query_start[place.row + 1] - start, length = step->seq_lens[place.row];
        size_t item = size_of(op->dtype);
        struct task task = {
            .table = step->block_table + place.row * step->table_stride,
            .head = head,
            .num_tokens = least(tokens, row_tokens - place.token),
            .position = length - row_tokens + place.token,
            .length = length,
            .is_causal = step->is_causal,
            .query = (const char *)query + (size_t)((start + place.token) * query_stride + head * op->group * op->head_dim) * item,
            .query_stride = query_stride,
            .output = (char *)output +
                      (size_t)(((start + place.token) * op->num_heads + head * op->group) * op->head_dim) * item,
        };
        task.first_key = op->window > 0 ? most(task.position - op->window + 1, 0) : 0;
        task.last_key = step->is_causal ? task.position + task.num_tokens : length;
        int64_t next = index / op->num_kv_heads + threads;
        if (next < num_tiles) {
            int32_t row = places[next].row;
            task.next_table = step->block_table + row * step->table_stride;
            task.next_length = step->seq_lens[row];
            task.next_key = op->window > 0 ? most(task.next_length - op->window, 0) : 0;
        }
        failed |= run_task(attend, op, &task);
    }
    free(places);
    return failed;
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

INLINE void rope_token(const struct rope *op, const struct attention *cache, const struct written *step, char *qkv, char *query,
                       int64_t token, int dtype) {
    size_t head_bytes = (size_t)op->head_dim * size_of(dtype);
    const float *cos_sin = op->rotary_dim ? op->cos_sin + step->positions[token] * op->rotary_dim : NULL;
    for (int64_t head = 0; head < op->num_heads; head++)
        rotate_head(op, qkv + head * head_bytes, query + head * head_bytes, op->q_norm, op->q_eps, op->q_unit_offset, cos_sin, dtype);
    int64_t slot = step->slots[token];
    if (slot < 0 || !op->writes_kv)
        return;
    const char *keys = qkv + op->num_heads * head_bytes, *values = keys + op->num_kv_heads * head_bytes;
    int64_t start = slot / cache->block_size * cache->block_stride + slot % cache->block_size * cache->token_stride;
    for (int64_t head = 0; head < op->num_kv_heads; head++) {
        size_t at = (size_t)(start + head * cache->head_stride) * size_of(dtype);
        rotate_head(op, keys + head * head_bytes, (char *)cache->k_cache + at, op->k_norm, op->k_eps, op->k_unit_offset, cos_sin, dtype);
        memcpy((char *)cache->v_cache + at, values + head * head_bytes, head_bytes);
    }
}

typedef void (*rope_fn)(const struct rope *, const struct attention *, const struct written *, char *, char *, int64_t);

static void rope_plain(const struct rope *op, const struct attention *cache, const struct written *step, char *qkv, char *query,
                       int64_t token) {
    if (op->dtype == DTYPE_BF16)
        rope_token(op, cache, step, qkv, query, token, DTYPE_BF16);
    else
        rope_token(op, cache, step, qkv, query, token, DTYPE_F32);
}

#if PELTON_X86
TARGET_AVX2 static void rope_avx2(const struct rope *op, const struct attention *cache, const struct written *step, char *qkv,
                                  char *query, int64_t token) {
    if (op->dtype == DTYPE_BF16)
        rope_token(op, cache, step, qkv, query, token, DTYPE_BF16);
    else
        rope_token(op, cache, step, qkv, query, token, DTYPE_F32);
}
#endif

/* query: [T, num_heads head_dim] with query_stride numbers between tokens; may be qkv itself, rotated in place. */
EXPORT void pelton_rope_write(const struct rope *op, const struct attention *cache, const struct written *step, void *qkv,
                              void *query, int64_t query_stride) {
    rope_fn rope = rope_plain;
#if PELTON_X86
    if (pelton_isa() >= ISA_AVX2)
        rope = rope_avx2;
#endif
    size_t item = size_of(op->dtype);
    size_t row_bytes = (size_t)((op->num_heads + 2 * op->num_kv_heads) * op->head_dim) * item;
#pragma omp parallel for schedule(static) if (step->num_tokens > 8)
    for (int64_t token = 0; token < step->num_tokens; token++)
        rope(op, cache, step, (char *)qkv + token * row_bytes, (char *)query + token * query_stride * item, token);
}

/* Both, for a whole step: queries are rotated where they stand in qkv. */
EXPORT int pelton_rope_attend(const struct rope *rope, const struct attention *op, const struct written *written,
                              const struct step *step, void *qkv, void *output) {
    int64_t stride = (op->num_heads + 2 * op->num_kv_heads) * op->head_dim;
    pelton_rope_write(rope, op, written, qkv, qkv, stride);
    return pelton_attend(op, step, qkv, stride, output);
}
