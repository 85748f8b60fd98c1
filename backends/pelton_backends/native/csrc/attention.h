/* What attention is called with; `library.py` mirrors the structs that are exported. */
#ifndef PELTON_ATTENTION_H
#define PELTON_ATTENTION_H

#include "common.h"
#include "pool.h"

/* A layer and its cache. Strides count numbers; the last axis of the cache is contiguous. */
struct attention {
    void *k_cache, *v_cache;
    int64_t block_stride, token_stride, head_stride;
    int64_t block_size, num_heads, num_kv_heads, group, head_dim;
    int64_t window; /* 0: attends to everything; below 0: to the tokens of its own aligned chunk of -window */
    float scale;
    float soft_cap; /* 0: none */
    int32_t dtype, kv_dtype; /* of queries and output; of the cache: the same, or one of 8 bits */
    const float *sinks; /* [num_heads], as powers of 2, of weights without values; NULL: none */
};

/* Bytes of a number of the cache. */
INLINE size_t kv_size(const struct attention *op) { return op->kv_dtype >= DTYPE_E4M3 ? 1 : size_of(op->dtype); }

/* The first key that the token at a position attends to. */
INLINE int64_t first_seen(const struct attention *op, int64_t position) {
    if (op->window < 0)
        return position - position % -op->window;
    return op->window > 0 ? most(position - op->window + 1, 0) : 0;
}

/* A step of one group. */
struct step {
    const int32_t *query_start; /* [num_rows + 1] */
    const int32_t *seq_lens;    /* [num_rows] */
    const int32_t *block_table;
    int64_t table_stride, num_rows;
    int32_t is_causal;
    const int32_t *common_prefix; /* tokens that all rows share, in the blocks that row 0's table starts with: rows have one
                                     token each and no window; NULL: not looked at */
    int32_t ranks, rank; /* above 1: the cache has tokens rank, rank + ranks, ... of each row, and no window is asked for */
};

struct rope {
    const float *cos_sin; /* [positions, rotary_dim] */
    const void *q_norm, *k_norm;
    int64_t num_heads, num_kv_heads, head_dim, rotary_dim;
    float q_eps, k_eps;
    int32_t q_unit_offset, k_unit_offset, writes_kv, dtype;
};

/* Where a step's tokens stand and go. */
struct written {
    const int64_t *positions; /* [num_tokens] */
    const int64_t *slots;     /* [num_tokens], -1 is not written */
    int64_t num_tokens;
};

/* Some tokens of one row against its keys [first_key, last_key) of some key heads: of one where there are several tokens. */
struct task {
    const int32_t *table;
    int64_t head, num_heads, num_tokens, position, length, first_key, last_key;
    const void *query;
    int64_t query_stride;
    const struct rope *rope; /* what queries still lack; NULL: nothing */
    const int64_t *positions;
    void *output;
    int32_t is_causal;
    const int32_t *next_table; /* a row whose keys may be wanted soon, from next_key on; NULL: none */
    int64_t next_head, next_key, next_length;
    const float *given; /* states [queries] of keys before first_key; NULL: there are none */
    float *states;      /* where states are left instead of output; NULL: nowhere */
    float *lse;         /* where the logarithm of each query's sum of weights is left, -INFINITY without a key; NULL: nowhere */
    const struct step *step;
};

/* What a query has summed up over some keys: the power of 2 that weights stand above, their sum, and that of weighted values from
   number 16 on. */
#define STATE(head_dim) (16 + (head_dim))

/* The sum of all of a head's weights. */
INLINE float with_sink(const struct attention *op, int64_t head, float base, float total) {
    return op->sinks == NULL ? total : total + exp2f(op->sinks[head] - base);
}

/* How many of a row's first `tokens` the cache has. */
INLINE int64_t kept_of(const struct step *step, int64_t tokens) {
    return step->ranks > 1 ? (tokens + step->ranks - 1 - step->rank) / step->ranks : tokens;
}

/* The logarithm of a sum of weights, powers of 2 above `base`. */
INLINE float log_of(float base, float total) { return total == 0.0f ? -INFINITY : (base + log2f(total)) * 0.69314718f; }

/* What a query's sums are multiplied by, in the end: 0 where there was no key. place: of its log-sum-exp from the task's on. */
INLINE float finish_query(const struct attention *op, const struct task *task, int64_t head, int64_t place, float base, float total) {
    float whole = with_sink(op, head, base, total);
    if (task->lse != NULL)
        task->lse[place] = log_of(base, whole);
    return whole == 0.0f ? 0.0f : 1.0f / whole;
}

/* Where a row's keys lie, in numbers from the start of either cache. */
INLINE int64_t key_at(const struct attention *op, const int32_t *table, int64_t head, int64_t key) {
    return table[key / op->block_size] * op->block_stride + head * op->head_stride + key % op->block_size * op->token_stride;
}

/* Query `index` of a token of the task, normed and rotated: as float32 with zeros up to `padded`, which is a
   multiple of LANES, or as it was given. */
void pelton_take_query(const struct attention *op, const struct task *task, int64_t token, int64_t index, float *line, int64_t padded);
void pelton_copy_query(const struct attention *op, const struct task *task, int64_t token, int64_t index, void *line);

/* Keys and values of a token of `qkv`, in place of its slot. */
void pelton_write_keys(const struct rope *op, const struct attention *cache, const struct written *step, const void *qkv, int64_t token);

typedef int (*attend_fn)(const struct attention *, const struct task *, struct turn *);

/* 0, or 1 when memory ran out. The first is for one token; the second for any number of them, and of one key head. */
int pelton_decode(const struct attention *op, const struct task *task, struct turn *turn);
int pelton_prefill(const struct attention *op, const struct task *task, struct turn *turn);

#if PELTON_ISA >= ISA_AVX512_BF16
/* The same for bfloat16 and an even head_dim; the first one where `pelton_decodes_avx512` says so. */
int pelton_decodes_avx512(const struct attention *op);
int pelton_decode_avx512(const struct attention *op, const struct task *task, struct turn *turn);
int pelton_prefill_avx512(const struct attention *op, const struct task *task, struct turn *turn);
#endif

/* Rows of queries against their keys -> output [tokens, num_heads, head_dim]. 0, or 1 when memory ran out. query and output point at
   token 0; query_stride: numbers between tokens of the query. */
int pelton_attend(const struct attention *op, const struct step *step, const void *query, int64_t query_stride, void *output);

#endif
