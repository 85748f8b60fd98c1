/* Paged attention in bfloat16 by AVX-512, two products an instruction (vdpbf16ps); sums and softmax are float32, weights are
   rounded to bfloat16 before they meet the values.

   - One token of a row: dot products on keys and values where they lie. All heads of a task go through a chunk of keys
     together, for a block holds them side by side: memory is read in one stream.
   - More tokens: keys and values of a chunk are packed once (tile_avx512.h), then 12 query rows at a time go through scores, softmax
     and values while all of it is in the L1 cache. */
#include "attention.h"
#include "fp8_avx512.h"
#include "tile_avx512.h"

#if PELTON_ISA >= ISA_AVX512_BF16

enum { CHUNK = 64, GROUP = 16, ROWS = 12, MOST_DIM = 512 };

static const bf16 zeros[MOST_DIM];

/* 2^x, relative error below 3e-6; 0 for -infinity. */
INLINE __m512 exp2_avx512(__m512 x) {
    __m512 rest = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    __m512 sum = _mm512_set1_ps(1.35341672e-2f);
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(5.20114619e-2f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(2.41442756e-1f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(6.93003835e-1f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(1.00000259f));
    return _mm512_scalef_ps(sum, x);
}

INLINE void multiply_line(float *line, int64_t size, float factor) {
    for (int64_t i = 0; i < size; i += 16)
        _mm512_storeu_ps(line + i, _mm512_mul_ps(_mm512_loadu_ps(line + i), _mm512_set1_ps(factor)));
}

/* One query row's softmax as it is carried along: weights are powers of 2 above `base`, which may lie SLACK below the highest
   score: a row is scaled anew when a score rises above that, not with every new maximum. */
enum { SLACK = 8 };

struct softmax {
    float total[16];
    float base;
};

static __attribute__((noinline)) void raise(struct softmax *row, const __m512 *parts, float *sums, int64_t size) {
    __m512 high = _mm512_max_ps(_mm512_max_ps(parts[0], parts[1]), _mm512_max_ps(parts[2], parts[3]));
    float base = _mm512_reduce_max_ps(high), change = exp2f(row->base - base);
    row->base = base;
    multiply_line(row->total, 16, change);
    multiply_line(sums, size, change);
}

/* One query row's scores [CHUNK] of the keys [lower, upper) to weights, 0 elsewhere. factor: scale times log2(e); a soft cap is
   applied already and has its own. sums [size]: what the row has summed up so far. */
INLINE void soften(float factor, const float *scores, int64_t lower, int64_t upper, struct softmax *row, float *sums,
                                 int64_t size, bf16 *weights) {
    __m512 parts[4], lowest = _mm512_set1_ps(-INFINITY);
    uint64_t mask = (upper == CHUNK ? ~0ull : (1ull << upper) - 1) & ~((1ull << lower) - 1);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
        parts[i] = _mm512_mask_mul_ps(lowest, (__mmask16)(mask >> (i * 16)), _mm512_loadu_ps(scores + i * 16), _mm512_set1_ps(factor));
    __m512 most = _mm512_set1_ps(row->base + SLACK);
    __mmask16 above = 0;
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
        above |= _mm512_cmp_ps_mask(parts[i], most, _CMP_GT_OQ);
    if (above)
        raise(row, parts, sums, size);
    __m512 base = _mm512_set1_ps(row->base), total = _mm512_loadu_ps(row->total);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        __m512 weight = exp2_avx512(_mm512_sub_ps(parts[i], base));
        total = _mm512_add_ps(total, weight);
        _mm256_storeu_si256((__m256i *)(weights + i * 16), (__m256i)_mm512_cvtneps_pbh(weight));
    }
    _mm512_storeu_ps(row->total, total);
}

static void start_rows(struct softmax *rows, int64_t count) {
    memset(rows, 0, (size_t)count * sizeof *rows);
    for (int64_t i = 0; i < count; i++)
        rows[i].base = -INFINITY;
}

INLINE float total_of(const struct softmax *row) { return _mm512_reduce_add_ps(_mm512_loadu_ps(row->total)); }

/* Scores that have a soft cap; `soften` then takes log2(e) as its factor. */
static void cap_scores(const struct attention *op, float *scores) {
    for (int64_t i = 0; i < CHUNK; i++)
        scores[i] = op->soft_cap * tanhf(scores[i] * op->scale / op->soft_cap);
}

INLINE float factor_of(const struct attention *op) { return (op->soft_cap > 0.0f ? 1.0f : op->scale) * 1.44269504f; }

/* ---- one token ---- */

/* sums of 16 vectors, one in each place */
INLINE __m512 sum_each(const __m512 v[16]) {
    __m512 halves[8], lanes[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
        for (int half = 0; half < 2; half++) {
            __m512 a = v[i + half * 8], b = v[i + half * 8 + 4];
            halves[i + half * 4] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
        }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
        lanes[i] = _mm512_add_ps(_mm512_shuffle_f32x4(halves[i], halves[i + 4], 0x88), _mm512_shuffle_f32x4(halves[i], halves[i + 4], 0xdd));
    __m512d low = (__m512d)_mm512_add_ps(_mm512_unpacklo_ps(lanes[0], lanes[1]), _mm512_unpackhi_ps(lanes[0], lanes[1]));
    __m512d high = (__m512d)_mm512_add_ps(_mm512_unpacklo_ps(lanes[2], lanes[3]), _mm512_unpackhi_ps(lanes[2], lanes[3]));
    return _mm512_add_ps((__m512)_mm512_unpacklo_pd(low, high), (__m512)_mm512_unpackhi_pd(low, high));
}

/* QUERIES queries against GROUP keys that are `stride` apart; scores are CHUNK apart. */
INLINE void score_group(const bf16 *query, const bf16 *keys, int64_t stride, int64_t dim, int64_t queries, float *scores) {
    for (int64_t i = 0; i < queries; i++) {
        __m512 sums[GROUP];
#pragma GCC unroll 16
        for (int key = 0; key < GROUP; key++)
            sums[key] = _mm512_setzero_ps();
#pragma GCC unroll 2
        for (int64_t k = 0; k < dim; k += 32) {
            __m512bh part = (__m512bh)_mm512_loadu_si512(query + i * dim + k);
#pragma GCC unroll 16
            for (int key = 0; key < GROUP; key++)
                sums[key] = _mm512_dpbf16_ps(sums[key], part, (__m512bh)_mm512_loadu_si512(keys + key * stride + k));
        }
        _mm512_storeu_ps(scores + i * CHUNK, sum_each(sums));
    }
}

/* Known strides make addresses constants. */
INLINE void score(const bf16 *query, const bf16 *keys, int64_t stride, int64_t dim, int64_t queries, float *scores) {
    if (dim == 64 && stride == 64)
        score_group(query, keys, 64, 64, queries, scores);
    else if (dim == 128 && stride == 128)
        score_group(query, keys, 128, 128, queries, scores);
    else
        score_group(query, keys, stride, dim, queries, scores);
}

/* What a chunk's keys are: the first of each group of GROUP, and which of them count. */
struct chunk {
    const bf16 *values[CHUNK / GROUP];
    int64_t lower, upper;
};

/* sums [QUERIES][dim] += weights [QUERIES][CHUNK] times values, numbers [first, first + 32 PARTS) of them. Each 32 numbers of
   `sums` stand as unpacking leaves them; `in_order` takes them back. */
INLINE void add_values(const struct chunk *chunk, int64_t stride, const bf16 *weights, float *sums, int64_t dim,
                                     int64_t first, int QUERIES, int PARTS) {
    __m512 parts[4][4];
#pragma GCC unroll 4
    for (int query = 0; query < QUERIES; query++)
#pragma GCC unroll 4
        for (int i = 0; i < 2 * PARTS; i++)
            parts[query][i] = _mm512_loadu_ps(sums + query * dim + first + i * 16);
    for (int64_t key = chunk->lower & ~1ll; key < chunk->upper;) {
        const bf16 *even = chunk->values[key / GROUP] + key % GROUP * stride + first;
        int64_t end = least(key / GROUP * GROUP + GROUP, chunk->upper);
        for (; key < end; key += 2, even += 2 * stride) {
            const bf16 *a = key < chunk->lower ? zeros : even, *b = key + 1 < chunk->upper ? even + stride : zeros;
            __m512bh values[4];
#pragma GCC unroll 2
            for (int i = 0; i < PARTS; i++) {
                __m512i low = _mm512_loadu_si512(a + i * 32), high = _mm512_loadu_si512(b + i * 32);
                values[2 * i] = (__m512bh)_mm512_unpacklo_epi16(low, high);
                values[2 * i + 1] = (__m512bh)_mm512_unpackhi_epi16(low, high);
            }
#pragma GCC unroll 4
            for (int query = 0; query < QUERIES; query++) {
                int32_t pair;
                memcpy(&pair, weights + query * CHUNK + key, sizeof pair);
                __m512bh factor = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 4
                for (int i = 0; i < 2 * PARTS; i++)
                    parts[query][i] = _mm512_dpbf16_ps(parts[query][i], values[i], factor);
            }
        }
    }
#pragma GCC unroll 4
    for (int query = 0; query < QUERIES; query++)
#pragma GCC unroll 4
        for (int i = 0; i < 2 * PARTS; i++)
            _mm512_storeu_ps(sums + query * dim + first + i * 16, parts[query][i]);
}

/* All numbers of up to four queries. */
static void add_all_values(const struct chunk *chunk, int64_t stride, const bf16 *weights, float *sums, int64_t dim, int64_t queries) {
    int64_t first = 0;
    for (; first + 64 <= dim; first += 64)
        switch (queries) {
        case 1:
            add_values(chunk, stride, weights, sums, dim, first, 1, 2);
            break;
        case 2:
            add_values(chunk, stride, weights, sums, dim, first, 2, 2);
            break;
        case 3:
            add_values(chunk, stride, weights, sums, dim, first, 3, 2);
            break;
        default:
            add_values(chunk, stride, weights, sums, dim, first, 4, 2);
        }
    if (first < dim)
        for (int64_t query = 0; query < queries; query++)
            add_values(chunk, stride, weights + query * CHUNK, sums + query * dim, dim, first, 1, 1);
}

struct sixteens {
    __m512 first, second;
};

/* 32 numbers of `sums` in their order. */
INLINE struct sixteens in_order(const float *sums) {
    __m512i low = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
    __m512i high = _mm512_set_epi32(31, 30, 29, 28, 15, 14, 13, 12, 27, 26, 25, 24, 11, 10, 9, 8);
    __m512 a = _mm512_loadu_ps(sums), b = _mm512_loadu_ps(sums + 16);
    return (struct sixteens){_mm512_permutex2var_ps(a, low, b), _mm512_permutex2var_ps(a, high, b)};
}

INLINE void put_line(const float *sums, int64_t dim, float factor, bf16 *output) {
    for (int64_t i = 0; i < dim; i += 32) {
        struct sixteens line = in_order(sums + i);
        _mm256_storeu_si256((__m256i *)(output + i), (__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(line.first, _mm512_set1_ps(factor))));
        _mm256_storeu_si256((__m256i *)(output + i + 16), (__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(line.second, _mm512_set1_ps(factor))));
    }
}

INLINE void leave_line(const float *sums, int64_t dim, float *line) {
    for (int64_t i = 0; i < dim; i += 32) {
        struct sixteens part = in_order(sums + i);
        _mm512_storeu_ps(line + i, part.first);
        _mm512_storeu_ps(line + i + 16, part.second);
    }
}

/* The other way. */
INLINE void take_line(const float *line, int64_t dim, float *sums) {
    __m512i low = _mm512_set_epi32(27, 26, 25, 24, 19, 18, 17, 16, 11, 10, 9, 8, 3, 2, 1, 0);
    __m512i high = _mm512_set_epi32(31, 30, 29, 28, 23, 22, 21, 20, 15, 14, 13, 12, 7, 6, 5, 4);
    for (int64_t i = 0; i < dim; i += 32) {
        __m512 a = _mm512_loadu_ps(line + i), b = _mm512_loadu_ps(line + i + 16);
        _mm512_storeu_ps(sums + i, _mm512_permutex2var_ps(a, low, b));
        _mm512_storeu_ps(sums + i + 16, _mm512_permutex2var_ps(a, high, b));
    }
}

int pelton_decodes_avx512(const struct attention *op) {
    return op->head_dim % 32 == 0 && op->head_dim <= MOST_DIM && op->block_size % GROUP == 0;
}

/* Lines of one head's keys or values, GROUP tokens, wanted soon. */
INLINE void fetch_group(const char *from, int64_t step, int64_t bytes) {
    for (int64_t token = 0; token < GROUP; token++)
        for (int64_t i = 0; i < bytes; i += 64)
            _mm_prefetch(from + token * step + i, _MM_HINT_T1);
}

/* The key at which this task's keys go on being read when those before `key` are done: in the row itself or in the next. */
struct ahead {
    const int32_t *table;
    int64_t key, length;
};

INLINE struct ahead look_ahead(const struct task *task, int64_t next) {
    if (next < task->last_key)
        return (struct ahead){task->table, next, task->last_key};
    return (struct ahead){task->next_table, task->next_key / GROUP * GROUP, task->next_length};
}

/* The first `count` lines of a group, which numbers of 8 bits have in `wide` then, dim apart. */
INLINE const bf16 *lines_of(const struct attention *op, const char *from, int64_t count, bf16 *wide) {
    if (op->kv_dtype == DTYPE_BF16)
        return (const bf16 *)from;
    widen_lines(from, op->token_stride, count, op->head_dim, wide, op->head_dim, op->kv_dtype);
    return wide;
}

int pelton_decode_avx512(const struct attention *op, const struct task *task, struct turn *turn) {
    int is_wide = op->kv_dtype == DTYPE_BF16;
    int64_t dim = op->head_dim, stride = is_wide ? op->token_stride : dim, queries = task->num_heads * op->group;
    int64_t item = (int64_t)kv_size(op), step = op->token_stride * item, head_step = op->head_stride * item; /* of the cache, in bytes */
    size_t line = (size_t)(dim + CHUNK) * (sizeof(float) + sizeof(bf16)) + sizeof(struct softmax);
    size_t widened = is_wide ? 0 : (size_t)((GROUP + CHUNK) * dim) * sizeof(bf16);
    char *memory = pelton_scratch(widened + (size_t)queries * line);
    if (memory == NULL)
        return 1;
    bf16 *wide_keys = (bf16 *)memory, *wide_values = wide_keys + GROUP * dim;
    float *sums = (float *)(memory + widened), *scores = sums + queries * dim;
    struct softmax *rows = (struct softmax *)(scores + queries * CHUNK);
    bf16 *weights = (bf16 *)(rows + queries);
    bf16 *query = weights + queries * CHUNK;
    const char *k_cache = op->k_cache, *v_cache = op->v_cache;
    memset(sums, 0, (size_t)(queries * dim) * sizeof(float));
    start_rows(rows, queries);
    for (int64_t i = 0; i < queries; i++) {
        const float *state = task->given + i * STATE(dim);
        pelton_copy_query(op, task, 0, i, query + i * dim);
        if (task->given == NULL)
            continue;
        rows[i].base = state[0], rows[i].total[0] = state[1];
        take_line(state + STATE(0), dim, sums + i * dim);
    }
    for (int64_t first = task->first_key / GROUP * GROUP; first < task->last_key; first += CHUNK) {
        int64_t count = least(CHUNK, task->last_key - first);
        struct chunk chunk = {.lower = most(task->first_key - first, 0), .upper = count};
        struct ahead ahead = look_ahead(task, first + CHUNK);
        int64_t places[CHUNK / GROUP], later[CHUNK / GROUP]; /* of the first head; -1: none */
        for (int64_t at = 0, i = 0; at < CHUNK; at += GROUP, i++) {
            places[i] = at < count ? key_at(op, task->table, task->head, first + at) * item : -1;
            later[i] = ahead.table != NULL && ahead.key + at < ahead.length ? key_at(op, ahead.table, task->head, ahead.key + at) * item : -1;
            for (int64_t head = 0; head < task->num_heads && places[i] < 0 && later[i] >= 0; head++) {
                fetch_group(k_cache + later[i] + head * head_step, step, dim * item);
                fetch_group(v_cache + later[i] + head * head_step, step, dim * item);
            }
        }
        for (int64_t at = 0, i = 0; at < count; at += GROUP, i++)
            for (int64_t head = 0; head < task->num_heads; head++) {
                int64_t row = head * op->group;
                if (later[i] >= 0)
                    fetch_group(k_cache + later[i] + head * head_step, step, dim * item);
                const bf16 *keys = lines_of(op, k_cache + places[i] + head * head_step, least(GROUP, count - at), wide_keys);
                score(query + row * dim, keys, stride, dim, op->group, scores + row * CHUNK + at);
            }
        for (int64_t i = 0; i < queries; i++) {
            if (op->soft_cap > 0.0f)
                cap_scores(op, scores + i * CHUNK);
            soften(factor_of(op), scores + i * CHUNK, chunk.lower, chunk.upper, rows + i, sums + i * dim, dim, weights + i * CHUNK);
        }
        for (int64_t head = 0; head < task->num_heads; head++) {
            for (int64_t at = 0, i = 0; at < count; at += GROUP, i++) {
                chunk.values[i] = lines_of(op, v_cache + places[i] + head * head_step, least(GROUP, count - at), wide_values + at * dim);
                if (later[i] >= 0)
                    fetch_group(v_cache + later[i] + head * head_step, step, dim * item);
            }
            for (int64_t i = 0; i < op->group; i += 4) {
                int64_t row = head * op->group + i;
                add_all_values(&chunk, stride, weights + row * CHUNK, sums + row * dim, dim, least(4, op->group - i));
            }
        }
    }
    if (!may_write(turn))
        return 0;
    for (int64_t i = 0; i < queries; i++) {
        float total = total_of(rows + i), *state = task->states + i * STATE(dim);
        if (task->states == NULL) {
            float factor = finish_query(op, task, task->head * op->group + i, i, rows[i].base, total);
            put_line(sums + i * dim, dim, factor, (bf16 *)task->output + i * dim);
            continue;
        }
        state[0] = rows[i].base, state[1] = total;
        leave_line(sums + i * dim, dim, state + STATE(0));
    }
    return 0;
}

/* ---- more tokens ---- */

/* Keys [lower, upper) of the chunk that starts at `first` which the token of query row `row` attends to. */
INLINE int64_t seen_from(const struct attention *op, const struct task *task, int64_t row, int64_t first) {
    int64_t position = task->position + row / op->group;
    return least(most(first_seen(op, position) - first, 0), CHUNK);
}

INLINE int64_t seen_to(const struct attention *op, const struct task *task, int64_t row, int64_t first, int64_t count) {
    int64_t upper = task->is_causal ? kept_of(task->step, task->position + row / op->group + 1) : task->length;
    return most(least(upper - first, count), 0);
}

struct panels {
    bf16 *keys[CHUNK / PANEL]; /* each [dim / 2][PANEL][2] */
    bf16 *values;              /* [round_up(dim, PANEL) / PANEL] of [CHUNK / 2][PANEL][2] */
    bf16 *wide;                /* [CHUNK, 2, round_up(dim, PANEL)]: lines of keys and values that have 8 bits in the cache */
};

static void pack_chunk(const struct attention *op, const struct task *task, int64_t first, int64_t count, struct panels *panels) {
    const void *keys[CHUNK], *values[CHUNK];
    int64_t padded = round_up(op->head_dim, PANEL);
    for (int64_t i = 0; i < count; i++) {
        int64_t at = key_at(op, task->table, task->head, first + i);
        keys[i] = (const bf16 *)op->k_cache + at, values[i] = (const bf16 *)op->v_cache + at;
        if (op->kv_dtype == DTYPE_BF16)
            continue;
        keys[i] = panels->wide + 2 * i * padded, values[i] = panels->wide + (2 * i + 1) * padded;
        widen_lines((const char *)op->k_cache + at, 0, 1, op->head_dim, panels->wide + 2 * i * padded, 0, op->kv_dtype);
        widen_lines((const char *)op->v_cache + at, 0, 1, op->head_dim, panels->wide + (2 * i + 1) * padded, 0, op->kv_dtype);
    }
    for (int64_t i = count; i < round_up(count, PANEL); i++)
        keys[i] = keys[0];
    for (int64_t part = 0; part < count; part += PANEL)
        avx512_pack_rows(keys + part, op->head_dim, panels->keys[part / PANEL]);
    for (int64_t part = 0; part < op->head_dim; part += PANEL)
        avx512_pack_cols(values, count, part, least(PANEL, op->head_dim - part), panels->values + part * CHUNK);
}

/* What the query rows have summed up, divided by their weights or as states. */
static void finish_rows(const struct attention *op, const struct task *task, const float *sums, const struct softmax *rows) {
    int64_t dim = op->head_dim, padded = round_up(dim, PANEL);
    for (int64_t row = 0; row < task->num_tokens * op->group; row++, sums += padded) {
        int64_t place = row / op->group * op->num_heads + row % op->group;
        float total = total_of(rows + row), *state = task->states + place * STATE(dim);
        if (task->states != NULL) {
            state[0] = rows[row].base, state[1] = total;
            memcpy(state + STATE(0), sums, (size_t)dim * sizeof(float));
            continue;
        }
        float factor = finish_query(op, task, task->head * op->group + row % op->group, place, rows[row].base, total);
        for (int64_t i = 0; i < dim; i += 16) {
            __mmask16 mask = (__mmask16)((1u << least(dim - i, 16)) - 1u);
            __m512 line = _mm512_mul_ps(_mm512_loadu_ps(sums + i), _mm512_set1_ps(factor));
            _mm256_mask_storeu_epi16((bf16 *)task->output + place * dim + i, mask, (__m256i)_mm512_cvtneps_pbh(line));
        }
    }
}

/* Rows [row, row + m) of the task against a packed chunk of `count` keys. */
static void attend_rows(const struct attention *op, const struct task *task, const struct panels *panels, int64_t first,
                                      int64_t count, int64_t row, int64_t m, const bf16 *query, float *sums, struct softmax *rows) {
    _Alignas(64) float scores[ROWS * CHUNK];
    _Alignas(64) bf16 weights[ROWS * CHUNK];
    int64_t dim = op->head_dim, padded = round_up(dim, PANEL), end = seen_to(op, task, row + m - 1, first, count);
    if (end == 0 || seen_from(op, task, row, first) >= count)
        return;
    memset(scores, 0, (size_t)(m * CHUNK) * sizeof(float));
    for (int64_t part = 0; part < end; part += PANEL)
        avx512_multiply(query + row * dim, dim, panels->keys[part / PANEL], scores + part, CHUNK, m, dim);
    for (int64_t i = 0; i < m; i++) {
        int64_t lower = seen_from(op, task, row + i, first), upper = seen_to(op, task, row + i, first, count);
        if (lower >= upper) {
            memset(weights + i * CHUNK, 0, CHUNK * sizeof(bf16));
            continue;
        }
        if (op->soft_cap > 0.0f)
            cap_scores(op, scores + i * CHUNK);
        soften(factor_of(op), scores + i * CHUNK, lower, upper, rows + row + i, sums + (row + i) * padded, padded, weights + i * CHUNK);
    }
    for (int64_t part = 0; part < dim; part += PANEL)
        avx512_multiply(weights, CHUNK, panels->values + part * CHUNK, sums + row * padded + part, padded, m, round_up(end, 2));
}

int pelton_prefill_avx512(const struct attention *op, const struct task *task, struct turn *turn) {
    int64_t dim = op->head_dim, padded = round_up(dim, PANEL), m = task->num_tokens * op->group;
    size_t panel = (size_t)(padded * PANEL) * sizeof(bf16);
    size_t line = (size_t)padded * (sizeof(float) + sizeof(bf16)) + sizeof(struct softmax);
    size_t values = (size_t)(padded * CHUNK) * sizeof(bf16), wide = op->kv_dtype == DTYPE_BF16 ? 0 : 2 * values;
    char *memory = pelton_scratch(2 * panel + values + wide + (size_t)m * line);
    if (memory == NULL)
        return 1;
    struct panels panels = {.keys = {(bf16 *)memory, (bf16 *)(memory + panel)}, .values = (bf16 *)(memory + 2 * panel)};
    panels.wide = panels.values + padded * CHUNK;
    float *sums = (float *)(memory + 2 * panel + values + wide);
    struct softmax *rows = (struct softmax *)(sums + m * padded);
    bf16 *query = (bf16 *)(rows + m);
    memset(sums, 0, (size_t)(m * padded) * sizeof(float));
    start_rows(rows, m);
    for (int64_t row = 0; row < m; row++)
        pelton_copy_query(op, task, row / op->group, row % op->group, query + row * dim);
    for (int64_t first = task->first_key; first < task->last_key; first += CHUNK) {
        int64_t count = least(CHUNK, task->last_key - first);
        pack_chunk(op, task, first, count, &panels);
        for (int64_t row = 0; row < m; row += ROWS)
            attend_rows(op, task, &panels, first, count, row, least(ROWS, m - row), query, sums, rows);
    }
    if (may_write(turn))
        finish_rows(op, task, sums, rows);
    return 0;
}

#endif
