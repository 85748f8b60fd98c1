/* What attention is called with; `library.py` mirrors the structs that are exported. */
#ifndef PELTON_ATTENTION_H
#define PELTON_ATTENTION_H

#include "common.h"

/* A layer and its cache. Strides count numbers; the last axis of the cache is contiguous. */
struct attention {
    void *k_cache, *v_cache;
    int64_t block_stride, token_stride, head_stride;
    int64_t block_size, num_heads, num_kv_heads, group, head_dim;
    int64_t window; /* 0: attends to everything */
    float scale;
    float soft_cap; /* 0: none */
    int32_t dtype;
};

/* A step of one group. */
struct step {
    const int32_t *query_start; /* [num_rows + 1] */
    const int32_t *seq_lens;    /* [num_rows] */
    const int32_t *block_table;
    int64_t table_stride, num_rows;
    int32_t is_causal;
    const int32_t *common_prefix; /* tokens that all rows share, in the blocks that row 0's table starts with: rows have one
                                     token each, and `pelton_decodes_avx512` says yes; NULL: not looked at */
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
    void *output;
    int32_t is_causal;
    const int32_t *next_table; /* a row whose keys may be wanted soon, from next_key on; NULL: none */
    int64_t next_key, next_length;
    float *states; /* of a prefix, PREFIX_STATE(head_dim) numbers a query row: left here by the task that reads it, taken up by
                      the row's own. NULL: the task sees all keys */
};

/* A query row's softmax (base, then sums of 16 lanes), and its sums of values. */
#define PREFIX_STATE(head_dim) (32 + (head_dim))

#if PELTON_ISA >= ISA_AVX512_BF16
/* Where the dtype is bfloat16 and head_dim even: 0, or 1 when memory ran out. The first one takes one
   token, where `pelton_decodes_avx512` says so. */
int pelton_decodes_avx512(const struct attention *op);
int pelton_decode_avx512(const struct attention *op, const struct task *task);
int pelton_prefill_avx512(const struct attention *op, const struct task *task);
int pelton_prefix_avx512(const struct attention *op, const struct task *task);

/* Rope and cache write of a token, in bfloat16 without norms: 1; 0 says that it is not for this function. */
int pelton_rope_avx512(const struct rope *op, const struct attention *cache, const struct written *step, char *qkv, char *query,
                       int64_t token);
#endif

#endif
