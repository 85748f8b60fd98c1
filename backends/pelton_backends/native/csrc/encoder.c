/* Layers of an encoder that norms behind each sub-layer, one after the other, and the sum of embeddings before them.

   No token reads one of another text. So texts go in chunks, and a task is one layer of one chunk, computed by one thread from its
   first product to its last norm (the embeddings go with the first layer): threads wait for each other at the end alone, and what lies between a layer's kernels stays in that
   thread's cache. Whoever is free takes the chunk that has come least far, so that all of them end at about the same time.

   With fewer chunks than threads, the threads share each kernel's rows instead, of larger chunks. */
#include "attention.h"
#include "layer_norm.h"
#include "linear.h"

#include <stdatomic.h>

enum {
    CHUNK_ROWS = 128, /* of a chunk, if a text is no longer */
    SHARED_ROWS = 2048, /* of one whose kernels all threads share */
    LEAST_ROWS = 64,  /* of a chunk where there are few rows: with fewer, each weight is read too often for what it is used */
};

struct encoder_layer {
    const struct linear *qkv, *out, *up, *down;
    const struct layer_norm *out_norm, *down_norm;
};

struct encoder {
    const struct encoder_layer *layers;
    int64_t num_layers, num_heads, head_dim;
    float scale;
};

/* Where states come from: the norm of the sum of a word's row, a row that all share and a position's row. */
struct encoder_inputs {
    const float *words, *shared, *positions; /* [*, size], [size], [*, size] */
    const struct layer_norm *norm;
    const int64_t *word_ids, *position_ids; /* [tokens] */
};

/* Whole texts that follow each other. */
struct chunk {
    _Atomic int64_t state; /* layers that are done, times 2; and 1 while somebody is at the next one */
    int64_t first_row, num_rows, num_texts;
    const int32_t *starts, *lens; /* of its texts; starts from its first row on */
};

struct encoding {
    const struct encoder *op;
    const struct encoder_inputs *inputs; /* NULL: the states are there */
    float *hidden;
    struct chunk *chunks;
    int64_t num_chunks, most_rows;
    _Atomic int failed;
};

static void embed_chunk(const struct encoding *call, const struct chunk *chunk) {
    const struct encoder_inputs *in = call->inputs;
    int64_t size = in->norm->size, first = chunk->first_row;
    for (int64_t row = first; row < first + chunk->num_rows; row++) {
        const float *word = in->words + in->word_ids[row] * size, *position = in->positions + in->position_ids[row] * size;
        float *to = call->hidden + row * size;
        for (int64_t i = 0; i < size; i++)
            to[i] = word[i] + in->shared[i] + position[i];
    }
    float *hidden = call->hidden + first * size;
    pelton_layer_norm(in->norm, hidden, NULL, chunk->num_rows, hidden);
}

/* One layer of one chunk, whose states are replaced. 0, or 1 when memory ran out. */
static int run_layer(const struct encoding *call, const struct encoder_layer *layer, const struct chunk *chunk) {
    const struct encoder *op = call->op;
    int64_t rows = chunk->num_rows, size = layer->qkv->in_features, inner = op->num_heads * op->head_dim;
    int64_t width = most(layer->qkv->out_features, layer->up->out_features);
    float *wide = pelton_between((size_t)(call->most_rows * (width + inner + size)) * sizeof(float));
    if (wide == NULL)
        return 1;
    float *attended = wide + call->most_rows * width, *result = attended + call->most_rows * inner;
    float *hidden = call->hidden + chunk->first_row * size;
    /* To attention keys and values are a cache of one block, at whose first token a text's table points. */
    struct attention attention = {
        .k_cache = wide + inner, .v_cache = wide + 2 * inner, .block_stride = 3 * inner, .token_stride = 3 * inner,
        .head_stride = op->head_dim, .block_size = 1 << 30, .num_heads = op->num_heads, .num_kv_heads = op->num_heads, .group = 1,
        .head_dim = op->head_dim, .scale = op->scale, .dtype = DTYPE_F32, .kv_dtype = DTYPE_F32,
    };
    struct step step = {
        .query_start = chunk->starts, .seq_lens = chunk->lens, .block_table = chunk->starts, .table_stride = 1,
        .num_rows = chunk->num_texts, .ranks = 1,
    };
    if (pelton_product(layer->qkv, &(struct rows){.hidden = hidden, .num_rows = rows}, wide, NULL) ||
        pelton_attend(&attention, &step, wide, 3 * inner, attended) ||
        pelton_product(layer->out, &(struct rows){.hidden = attended, .num_rows = rows}, result, NULL))
        return 1;
    pelton_layer_norm(layer->out_norm, result, hidden, rows, hidden);
    if (pelton_product(layer->up, &(struct rows){.hidden = hidden, .num_rows = rows}, wide, NULL) ||
        pelton_product(layer->down, &(struct rows){.hidden = wide, .num_rows = rows}, result, NULL))
        return 1;
    pelton_layer_norm(layer->down_norm, result, hidden, rows, hidden);
    return 0;
}

/* The chunk that has come least far of those that nobody is at; NULL: there is none, and each one left has its thread. */
static struct chunk *take_chunk(const struct encoding *call) {
    for (;;) {
        int64_t least_state = 2 * call->op->num_layers;
        struct chunk *found = NULL;
        for (struct chunk *chunk = call->chunks; chunk < call->chunks + call->num_chunks; chunk++) {
            int64_t state = atomic_load_explicit(&chunk->state, memory_order_acquire);
            if (state % 2 == 0 && state < least_state)
                found = chunk, least_state = state;
        }
        if (found == NULL || atomic_compare_exchange_strong(&found->state, &least_state, least_state + 1))
            return found;
    }
}

static void run_chunks(void *context, int64_t task, struct turn *turn) {
    struct encoding *call = context;
    struct chunk *chunk;
    (void)task, (void)turn;
    while (!call->failed && (chunk = take_chunk(call)) != NULL) {
        int64_t layer = atomic_load(&chunk->state) / 2;
        if (layer == 0 && call->inputs != NULL)
            embed_chunk(call, chunk);
        if (run_layer(call, call->op->layers + layer, chunk))
            call->failed = 1;
        atomic_fetch_add_explicit(&chunk->state, 1, memory_order_release);
    }
}

/* Rows of a chunk: no more than would leave a thread without one. */
static int64_t wanted_rows(int64_t num_rows) {
    int64_t threads = pool_num_threads();
    return most(least((num_rows + threads - 1) / threads, CHUNK_ROWS), LEAST_ROWS);
}

/* Cut texts into chunks; returns how many. `starts` [num_texts + chunks] and `lens` [num_texts] are theirs. */
static int64_t cut_texts(struct encoding *call, const int32_t *text_starts, int64_t num_texts, int64_t rows, int32_t *starts, int32_t *lens) {
    int64_t count = 0;
    for (int64_t text = 0; text < num_texts; count++) {
        struct chunk *chunk = call->chunks + count;
        int64_t first = text_starts[text], begin = text;
        *chunk = (struct chunk){.first_row = first, .starts = starts, .lens = lens};
        do {
            *starts++ = (int32_t)(text_starts[text] - first), *lens++ = text_starts[text + 1] - text_starts[text];
            text++;
        } while (text < num_texts && text_starts[text + 1] - first <= rows);
        *starts++ = (int32_t)(text_starts[text] - first);
        chunk->num_rows = text_starts[text] - first, chunk->num_texts = text - begin;
        call->most_rows = most(call->most_rows, chunk->num_rows);
    }
    return count;
}

/* States [text_starts[num_texts], size] of texts, each from its start on, replaced by what the layers make of them; with `inputs` of
   those. Nonzero: no memory. */
EXPORT int pelton_encode(const struct encoder *op, const struct encoder_inputs *inputs, const int32_t *text_starts, int64_t num_texts,
                         float *hidden) {
    int64_t num_rows = num_texts ? text_starts[num_texts] - text_starts[0] : 0, threads = pool_num_threads();
    if (num_rows == 0)
        return 0;
    size_t chunk_bytes = (size_t)num_texts * sizeof(struct chunk), text_bytes = (size_t)num_texts * sizeof(int32_t);
    char *memory = malloc(chunk_bytes + 3 * text_bytes);
    if (memory == NULL)
        return 1;
    struct encoding call = {.op = op, .inputs = inputs, .hidden = hidden, .chunks = (struct chunk *)memory};
    int32_t *starts = (int32_t *)(memory + chunk_bytes), *lens = starts + 2 * num_texts;
    call.num_chunks = cut_texts(&call, text_starts, num_texts, wanted_rows(num_rows), starts, lens);
    if (call.num_chunks < threads) {
        call.most_rows = 0;
        call.num_chunks = cut_texts(&call, text_starts, num_texts, SHARED_ROWS, starts, lens);
        run_chunks(&call, 0, NULL);
    } else {
        pool_run(threads, run_chunks, &call);
    }
    free(memory);
    return call.failed;
}
