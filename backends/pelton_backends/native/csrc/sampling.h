/* What a step's tail is called with; `sampling.py` mirrors the structs. */
#ifndef PELTON_SAMPLING_H
#define PELTON_SAMPLING_H

#include "step.h"

/* By side slot; tables as wide as the vocabulary, rows without gaps. Which of them a slot uses, the flags say. */
struct side_tables {
    int32_t *counts; /* of output tokens; written */
    const uint8_t *in_prompt, *banned, *stop_ids;
    const float *bias;
    const float *presence, *frequency, *repetition;
    const int64_t *min_tokens;
    const int32_t *bad_word_prefix; /* [slots, num_words, word_length], aligned right */
    const int64_t *bad_word_prefix_len, *bad_word_last;
    int64_t num_words, word_length;
    const uint8_t *has_penalties, *has_bias, *has_banned, *has_min_tokens, *has_bad_words;
};

/* Columns by slot. */
struct sampler {
    const struct batch *batch;
    int64_t vocab_size;
    const int64_t *seeds, *side_slots, *num_prompt_tokens;
    /* `pelton.sampling.columns`, in its order */
    const float *temperature; /* 0 is greedy */
    const int64_t *top_k;
    const float *top_p, *min_p;
    const struct side_tables *side; /* NULL: no slot has any */
    const uint32_t *mask_words;     /* a grammar's, rows mask_stride apart; NULL: no slot has one */
    const uint8_t *has_mask;
    int64_t mask_stride;
    int64_t *logprob_ids; /* by row, 1 + num_logprobs each; NULL: nobody wants any */
    float *logprobs;
    int64_t *ranks;
    int64_t num_logprobs;
    uint8_t *is_partial; /* by slot, 1: of the row's logits there are only those that the mask allows. NULL: of every row there are all */
};

/* Whether a row's mask allows so few tokens that only their logits are read. */
int pelton_takes_few(const struct sampler *op, int64_t slot);

#endif
