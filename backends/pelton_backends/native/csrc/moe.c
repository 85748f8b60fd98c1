/* A layer of experts: the router, the experts that it chooses for each token, and their weighted sum.

   Pairs of a token and one of its experts are sorted by expert: each has a place. Rows are packed by place, so that an expert's are
   blocks that meet the panels of its weights, as in product.c; a task is some panels of one expert times a group of its blocks.

   Weights in packed blocks are multiplied as in quant.c: rows of few are rounded to two int8 each, by place; for an expert with
   QUANT_MANY_ROWS and more its panels are dequantized as they are read, where that is faster. */
#include "moe.h"
#include "lines.h"

enum {
    ROUTER_TASK = 16,        /* experts whose logits are a task */
    GROUP_BLOCKS = 10,       /* blocks that panels are multiplied with before others */
    TASK_BYTES = 256 << 10,  /* of a weight, that a task reads */
    TASK_SUMS = 64 << 10,    /* bytes of its sums */
    MOST_BYTES = 64 << 20,   /* for the rows of all pairs: more tokens go one part after the other */
    LEAST_TOKENS = 64,
    FETCH_NEAR = 512,        /* as in product.c */
};

/* Some panels of an expert's matrix times some blocks of its rows. */
struct part {
    int32_t expert, first, rows; /* places of the expert's pairs */
    int32_t block, last_block, begin, end;
};

struct moe_call {
    const struct moe *op;
    const char *x;
    const int64_t *slots;
    char *output;
    int64_t num_tokens, num_pairs; /* num_pairs: with a place */
    int64_t first_token;           /* of all that the op is called with */
    int32_t *chosen;               /* [tokens, k], with their shares: the experts' places among those of all ranks; or NULL */
    float *chosen_shares;
    int only_chooses;              /* `chosen` is what is wanted; else it is given */
    float *logits;                 /* [tokens, experts] */
    int32_t *experts, *places;     /* [tokens, k], ascending by expert, counted from the first that is here; of padding and others -1 */
    float *shares;                 /* [tokens, k] */
    int32_t *pairs, *first;        /* of each place its pair; of each expert here its first place, [held + 1] */
    /* of the product under way */
    struct linear matrix;
    const struct engine *engine;
    struct shape shape;
    int64_t weight_stride, bias_stride, k;
    struct quant quant;            /* `num_parts` 0: a plain matrix */
    int64_t part_stride[2];
    int has_dense;                 /* packed blocks are dequantized for many rows: `engine` multiplies those */
    struct inputs x8;              /* other rows, by place */
    const struct part *parts;
    const char *rows;              /* plain, by place; NULL: x, by token */
    char *packed, *result;         /* by place */
    int *failed;
};

/* ---- router ---- */

INLINE float dot(const void *a, const void *b, int64_t k, int a_dtype, int b_dtype) {
    vec sums[2] = {{0}, {0}};
    int64_t i = 0;
    for (; i + 2 * LANES <= k; i += 2 * LANES) {
        sums[0] += load_lanes(a, i, a_dtype) * load_lanes(b, i, b_dtype);
        sums[1] += load_lanes(a, i + LANES, a_dtype) * load_lanes(b, i + LANES, b_dtype);
    }
    for (; i < k; i += LANES)
        sums[0] += load_part(a, i, k - i, a_dtype) * load_part(b, i, k - i, b_dtype);
    return vec_sum(sums[0] + sums[1]);
}

static void run_router(void *context, int64_t task, struct turn *turn) {
    const struct moe_call *call = context;
    const struct moe *op = call->op;
    int64_t hidden = op->gate_up.in_features, count = (op->num_experts + ROUTER_TASK - 1) / ROUTER_TASK;
    int64_t token = task / count, begin = task % count * ROUTER_TASK, end = least(begin + ROUTER_TASK, op->num_experts);
    const char *x = call->x + (size_t)(token * hidden) * size_of(op->gate_up.dtype);
    (void)turn;
    for (int64_t expert = begin; expert < end; expert++) {
        const char *row = (const char *)op->router + (size_t)(expert * hidden) * size_of(op->router_dtype);
        float logit = op->gate_up.dtype == DTYPE_F32        ? dot(x, row, hidden, DTYPE_F32, DTYPE_F32)
                      : op->router_dtype == DTYPE_F32 ? dot(x, row, hidden, DTYPE_BF16, DTYPE_F32)
                                                      : dot(x, row, hidden, DTYPE_BF16, DTYPE_BF16);
        if (op->router_bias != NULL)
            logit += load(op->router_bias, expert, op->bias_dtype);
        call->logits[token * op->num_experts + expert] = logit;
    }
}

/* The place of the largest number that is not taken, the first of equal ones. */
INLINE int64_t take_best(const float *numbers, int64_t count, char *is_taken) {
    int64_t best = -1;
    for (int64_t i = 0; i < count; i++)
        if (!is_taken[i] && (best < 0 || numbers[i] > numbers[best]))
            best = i;
    is_taken[best] = 1;
    return best;
}

static void make_scores(const struct moe *op, const float *logits, float *scores) {
    float largest = -INFINITY, sum = 0.0f;
    for (int64_t i = 0; i < op->num_experts; i++)
        largest = logits[i] > largest ? logits[i] : largest;
    for (int64_t i = 0; i < op->num_experts; i++) {
        scores[i] = op->is_sigmoid ? 1.0f / (1.0f + expf(-logits[i])) : expf(logits[i] - largest);
        sum += scores[i];
    }
    if (!op->is_sigmoid)
        for (int64_t i = 0; i < op->num_experts; i++)
            scores[i] /= sum;
}

/* Take the experts of all groups but the best ones. */
static void keep_groups(const struct moe *op, const float *choice, char *is_taken) {
    int64_t size = op->num_experts / op->num_groups;
    float worth[op->num_groups];
    char is_kept[op->num_groups];
    for (int64_t group = 0; group < op->num_groups; group++) {
        float first = -INFINITY, second = -INFINITY;
        for (int64_t i = group * size; i < (group + 1) * size; i++)
            if (choice[i] > first)
                second = first, first = choice[i];
            else if (choice[i] > second)
                second = choice[i];
        worth[group] = op->is_top2 ? first + second : first;
        is_kept[group] = 0;
    }
    for (int64_t i = 0; i < op->top_groups; i++)
        take_best(worth, op->num_groups, is_kept);
    for (int64_t i = 0; i < op->num_experts; i++)
        is_taken[i] = !is_kept[i / size];
}

/* The place of a token's expert: of several each takes its turn, by the token's number. */
INLINE int64_t place_of(const struct moe *op, int64_t expert, int64_t token) {
    if (op->copies == NULL)
        return expert;
    const int32_t *row = op->copies + expert * (1 + op->most_copies);
    return row[1 + token % row[0]];
}

/* The same place, counted from the first that is here; -1 of others. */
INLINE int32_t place_here(const struct moe *op, int64_t place) {
    int64_t here = place - op->first_expert;
    return here >= 0 && here < op->num_held ? (int32_t)here : -1;
}

/* A token's experts, ascending, and their weights. Those that are not here get -1. */
static void run_choose(void *context, int64_t token, struct turn *turn) {
    const struct moe_call *call = context;
    const struct moe *op = call->op;
    int64_t count = op->num_experts, k = op->top_k;
    int32_t *experts = call->experts + token * k;
    float scores[count], choice[count], *shares = call->shares + token * k, sum = 0.0f;
    char is_taken[count];
    (void)turn;
    if (call->slots[token] < 0) {
        for (int64_t j = 0; j < k; j++)
            experts[j] = -1, shares[j] = 0.0f;
        return;
    }
    make_scores(op, call->logits + token * count, scores);
    for (int64_t i = 0; i < count; i++)
        choice[i] = scores[i] + (op->correction == NULL ? 0.0f : op->correction[i]);
    memset(is_taken, 0, (size_t)count);
    if (op->num_groups > 1)
        keep_groups(op, choice, is_taken);
    for (int64_t j = 0; j < k; j++) {
        int32_t expert = (int32_t)take_best(choice, count, is_taken);
        int64_t to = j;
        for (; to > 0 && experts[to - 1] > expert; to--)
            experts[to] = experts[to - 1], shares[to] = shares[to - 1];
        experts[to] = expert, shares[to] = scores[expert];
        sum += scores[expert];
    }
    for (int64_t j = 0; j < k; j++)
        shares[j] = (op->is_renormalized ? shares[j] / (sum + 1e-20f) : shares[j]) * op->scale;
    for (int64_t j = 0; j < k; j++) {
        int64_t place = place_of(op, experts[j], call->first_token + token);
        experts[j] = call->only_chooses ? (int32_t)place : place_here(op, place);
    }
}

/* Logits, and the experts of each token. */
static void choose_all(struct moe_call *call) {
    const struct moe *op = call->op;
    int64_t tokens = call->num_tokens, tasks = tokens * ((op->num_experts + ROUTER_TASK - 1) / ROUTER_TASK);
    pool_do((struct pool_work){.run = run_router, .context = call, .num_tasks = tasks, .has_shares = 1,
                          .is_small = tokens * op->num_experts * op->gate_up.in_features <= 1 << 16});
    pool_do((struct pool_work){.run = run_choose, .context = call, .num_tasks = tokens, .has_shares = 1,
                          .is_small = tokens * op->num_experts <= 1 << 12});
}

/* Take the choice that is given. */
static void take_chosen(struct moe_call *call) {
    for (int64_t pair = 0; pair < call->num_tokens * call->op->top_k; pair++)
        call->experts[pair] = place_here(call->op, call->chosen[pair]), call->shares[pair] = call->chosen_shares[pair];
}

/* Give every pair its place. */
static void sort_pairs(struct moe_call *call) {
    const struct moe *op = call->op;
    int64_t pairs = call->num_tokens * op->top_k;
    int32_t *first = call->first, next[op->num_held];
    memset(first, 0, (size_t)(op->num_held + 1) * sizeof *first);
    for (int64_t pair = 0; pair < pairs; pair++)
        if (call->experts[pair] >= 0)
            first[call->experts[pair] + 1]++;
    for (int64_t expert = 0; expert < op->num_held; expert++) {
        if (op->load != NULL)
            op->load[op->first_expert + expert] += first[expert + 1];
        first[expert + 1] += first[expert];
        next[expert] = first[expert];
    }
    for (int64_t pair = 0; pair < pairs; pair++) {
        call->places[pair] = call->experts[pair] < 0 ? -1 : next[call->experts[pair]]++;
        if (call->places[pair] >= 0)
            call->pairs[call->places[pair]] = (int32_t)pair;
    }
    call->num_pairs = first[op->num_held];
}

/* ---- products ---- */

INLINE int64_t blocks_of(const struct engine *engine, int64_t rows) { return (rows + engine->most_rows - 1) / engine->most_rows; }

INLINE int64_t groups_of(const struct engine *engine, int64_t rows) {
    return (blocks_of(engine, rows) + GROUP_BLOCKS - 1) / GROUP_BLOCKS;
}

/* Whether an expert with so many rows has them in int8. */
INLINE int is_in_int8(const struct moe_call *call, int64_t rows) {
    return call->quant.num_parts > 0 && !(call->has_dense && rows >= QUANT_MANY_ROWS);
}

/* Bytes of a panel in memory. */
INLINE int64_t panel_bytes_of(const struct moe_call *call) {
    if (call->quant.num_parts == 0)
        return PANEL * call->k * call->engine->weight_bytes;
    int64_t bytes = 0;
    for (int64_t i = 0; i < 2; i++)
        bytes += call->matrix.in_features / QUANT_BLOCK * record_bytes(call->quant.parts[i % call->quant.num_parts].kind);
    return bytes;
}

/* A row by place; where it is another's times its share, in `room`. */
INLINE const char *row_of_pair(const struct moe_call *call, int64_t place, char *room) {
    const struct moe *op = call->op;
    int64_t k = call->shape.k, bytes = k * (int64_t)size_of(call->matrix.dtype);
    if (call->rows != NULL)
        return call->rows + place * bytes;
    int64_t pair = call->pairs[place];
    const char *from = call->x + pair / op->top_k * bytes;
    if (!op->scales_input)
        return from;
    for (int64_t i = 0; i < k; i++)
        store(room, i, load(from, i, op->gate_up.dtype) * call->shares[pair], op->gate_up.dtype);
    return room;
}

/* Pack one expert's rows. */
static void run_pack(void *context, int64_t expert, struct turn *turn) {
    const struct moe_call *call = context;
    int64_t first = call->first[expert], count = call->first[expert + 1] - first, blocks = blocks_of(call->engine, count);
    int64_t k = call->shape.k, bytes = k * (int64_t)size_of(call->matrix.dtype);
    char *lines = pelton_scratch((size_t)(call->engine->most_rows * bytes + 64));
    (void)turn;
    if (lines == NULL) {
        *call->failed = 1;
        return;
    }
    if (is_in_int8(call, count)) {
        for (int64_t place = first; place < first + count; place++)
            pelton_quant_round(row_of_pair(call, place, lines), call->matrix.dtype, place, &call->x8);
        return;
    }
    for (int64_t block = 0; block < blocks; block++) {
        int64_t start = first + count * block / blocks, m = first + count * (block + 1) / blocks - start;
        const char *rows = lines;
        if (call->rows != NULL)
            rows = call->rows + start * bytes;
        else
            for (int64_t row = 0; row < m; row++) {
                const char *from = row_of_pair(call, start + row, lines + row * bytes);
                if (from != lines + row * bytes)
                    memcpy(lines + row * bytes, from, (size_t)bytes);
            }
        call->engine->pack_block(rows, m, k, call->packed + start * call->k * call->engine->x_bytes);
    }
}

/* A panel times blocks of an expert's rows -> sums [rows][PANEL]. */
static void multiply_panel(const struct moe_call *call, const struct part *part, const char *weight, int64_t index, char *room,
                           float *sums, const struct quant *quant) {
    const struct engine *engine = call->engine;
    int64_t panel_bytes = PANEL * call->k * engine->weight_bytes, blocks = blocks_of(engine, part->rows);
    int64_t here = part->last_block - part->block, start = part->rows * part->block / blocks;
    const char *panel = room, *fetch = room;
    if (quant->num_parts > 0) {
        pelton_quant_panel(quant, index, room); /* which fetches the next ones */
        panel_bytes = 0;
    } else {
        fetch = weight + index * panel_bytes;
        if (call->matrix.is_packed)
            panel = fetch;
        else
            engine->pack_panel(&call->shape, weight, index, room);
        fetch += here > 1 ? panel_bytes : part->rows <= engine->near_rows ? FETCH_NEAR : engine->fetch_far;
    }
    for (int64_t block = part->block; block < part->last_block; block++) {
        int64_t row = part->rows * block / blocks, m = part->rows * (block + 1) / blocks - row;
        const char *packed = call->packed + (part->first + row) * call->k * engine->x_bytes;
        engine->multiply(packed, panel, call->k, sums + (row - start) * PANEL, fetch, panel_bytes / here, m);
        fetch += panel_bytes / here;
    }
}

/* The rows of a part in int8, by a panel of packed blocks. */
static void multiply_blocks(const struct moe_call *call, const struct quant *quant, int64_t index, int64_t first, int64_t m, float *sums) {
    for (int64_t row = 0; row < m; row += QUANT_TILE)
        pelton_quant_sums(quant, &call->x8, index, first + row, least(QUANT_TILE, m - row), sums + row * PANEL);
}

static void run_part(void *context, int64_t task, struct turn *turn) {
    const struct moe_call *call = context;
    const struct engine *engine = call->engine;
    const struct shape *shape = &call->shape;
    struct part part = call->parts[task];
    struct linear op = call->matrix;
    if (!is_wanted(turn))
        return;
    int64_t blocks = blocks_of(engine, part.rows), start = part.rows * part.block / blocks;
    int64_t m = part.rows * part.last_block / blocks - start, panel_bytes = PANEL * call->k * engine->weight_bytes;
    char *room = pelton_scratch((size_t)(round_up(panel_bytes, 64) + (part.end - part.begin) * m * PANEL * 4));
    if (room == NULL) {
        if (turn->run == 0)
            *call->failed = 1;
        return;
    }
    float *sums = (float *)(room + round_up(panel_bytes, 64));
    const char *weight = (const char *)op.weight + part.expert * call->weight_stride;
    struct quant quant = call->quant;
    for (int64_t i = 0; i < quant.num_parts; i++)
        quant.parts[i].panels += part.expert * call->part_stride[i];
    int is_int8 = is_in_int8(call, part.rows);
    for (int64_t index = part.begin; index < part.end; index++) {
        float *own = sums + (index - part.begin) * m * PANEL;
        if (is_int8)
            multiply_blocks(call, &quant, index, part.first + start, m, own);
        else
            multiply_panel(call, &part, weight, index, room, own, &quant);
    }
    if (!may_write(turn))
        return;
    size_t row_bytes = (size_t)shape->columns * size_of(op.dtype);
    if (op.bias != NULL)
        op.bias = (const char *)op.bias + part.expert * call->bias_stride;
    for (int64_t index = part.begin; index < part.end; index++)
        engine->finish(&op, sums + (index - part.begin) * m * PANEL, m, index * shape->width,
                       least(shape->width, shape->columns - index * shape->width),
                       call->result + (size_t)(part.first + start) * row_bytes, row_bytes);
}

/* Panels of a task, where an expert's group has so many rows. */
INLINE int64_t panels_together(const struct moe_call *call, int64_t num_groups) {
    int64_t panel_bytes = panel_bytes_of(call), num_panels = call->shape.num_panels;
    int64_t together = most(TASK_BYTES / most(panel_bytes, 1), 1);
    int64_t wanted = TASKS_EACH * pool_num_threads(), spread = num_panels * num_groups / most(wanted, 1);
    return most(least(least(together, spread), TASK_SUMS / (GROUP_BLOCKS * call->engine->most_rows * PANEL * 4)), 1);
}

/* Cut all experts' products into tasks; parts may be NULL. -> their number. */
static int64_t cut_parts(const struct moe_call *call, struct part *parts) {
    int64_t num_groups = 0, count = 0;
    for (int64_t expert = 0; expert < call->op->num_held; expert++)
        num_groups += groups_of(call->engine, call->first[expert + 1] - call->first[expert]);
    int64_t together = panels_together(call, num_groups);
    for (int64_t expert = 0; expert < call->op->num_held; expert++) {
        int64_t first = call->first[expert], rows = call->first[expert + 1] - first;
        int64_t groups = groups_of(call->engine, rows), blocks = blocks_of(call->engine, rows);
        for (int64_t group = 0; group < groups; group++)
            for (int64_t begin = 0; begin < call->shape.num_panels; begin += together, count++)
                if (parts != NULL)
                    parts[count] = (struct part){
                        (int32_t)expert, (int32_t)first, (int32_t)rows, (int32_t)(blocks * group / groups),
                        (int32_t)(blocks * (group + 1) / groups), (int32_t)begin,
                        (int32_t)least(begin + together, call->shape.num_panels),
                    };
    }
    return count;
}

/* Of which matrix the next product is. */
static void take_matrix(struct moe_call *call, int index) {
    const struct moe *op = call->op;
    call->matrix = index == 0 ? op->gate_up : op->down;
    call->engine = pelton_engine(&call->matrix);
    call->quant.num_parts = 0;
    if (op->parts[0].panels != NULL) {
        const struct engine *dense = pelton_quant_engine(&call->matrix);
        int first = index == 0 ? 0 : 2, count = index == 0 ? 2 : 1;
        call->quant = (struct quant){.op = call->matrix, .num_parts = count};
        for (int i = 0; i < count; i++)
            call->quant.parts[i] = op->parts[first + i], call->part_stride[i] = op->part_stride[first + i];
        call->has_dense = dense != NULL;
        if (dense != NULL)
            call->engine = dense;
    }
    call->shape = shape_of(&call->matrix);
    call->k = round_up(call->matrix.in_features, call->engine->step);
    call->weight_stride = op->weight_stride[index], call->bias_stride = op->bias_stride[index];
}

/* Rows by place -> result by place. */
static void multiply(struct moe_call *call, int index, struct part *parts, const char *rows, char *result) {
    take_matrix(call, index);
    call->rows = rows, call->result = result, call->parts = parts;
    if (call->quant.num_parts > 0) {
        int64_t dense = call->has_dense ? round_up(call->num_pairs * call->k * call->engine->x_bytes, 64) : 0;
        call->x8 = pelton_quant_inputs(call->packed + dense, call->num_pairs, call->matrix.in_features / QUANT_BLOCK);
    }
    int64_t count = cut_parts(call, parts), numbers = call->num_pairs * call->shape.k;
    pool_do((struct pool_work){.run = run_pack, .context = call, .num_tasks = call->op->num_held, .is_small = numbers <= 1 << 14});
    pool_do((struct pool_work){.run = run_part, .context = call, .context_bytes = sizeof *call, .num_tasks = count, .has_shares = 1,
                          .is_small = numbers * call->matrix.out_features <= 1 << 16});
}

/* The weighted sum of a token's pairs, in the order of its experts. */
static void run_combine(void *context, int64_t token, struct turn *turn) {
    const struct moe_call *call = context;
    const struct moe *op = call->op;
    int64_t size = op->down.out_features, k = op->top_k;
    int dtype = op->down.dtype;
    const int32_t *places = call->places + token * k;
    (void)turn;
    for (int64_t i = 0; i < size; i += LANES) {
        vec sum = {0};
        for (int64_t j = 0; j < k; j++) {
            if (places[j] < 0)
                continue;
            vec part = load_part(call->result, places[j] * size + i, size - i, dtype);
            sum += op->scales_input ? part : part * call->shares[token * k + j];
        }
        store_part(call->output, token * size + i, sum, size - i, dtype);
    }
}

/* ---- a call ---- */

INLINE void *cut(char **memory, int64_t bytes) {
    void *start = *memory;
    *memory += round_up(bytes, 64);
    return start;
}

/* Bytes of a packed row of the matrix in turn. */
INLINE int64_t packed_bytes(const struct moe_call *call) {
    int64_t bytes = call->k * call->engine->x_bytes;
    if (call->quant.num_parts == 0)
        return bytes;
    return (call->has_dense ? bytes : 0) + pelton_quant_input_bytes(1, call->matrix.in_features / QUANT_BLOCK);
}

/* Bytes of packed rows, and of both products' results, a pair. */
INLINE int64_t pair_bytes(struct moe_call *call) {
    int64_t element = (int64_t)size_of(call->op->gate_up.dtype), packed;
    take_matrix(call, 0);
    packed = packed_bytes(call);
    take_matrix(call, 1);
    return most(packed, packed_bytes(call)) + (call->op->down.in_features + call->op->down.out_features) * element;
}

/* Some tokens. */
static int run_tokens(struct moe_call *call) {
    const struct moe *op = call->op;
    int64_t tokens = call->num_tokens, pairs = tokens * op->top_k, element = (int64_t)size_of(op->gate_up.dtype);
    int64_t most_parts = 0;
    for (int index = 0; index < 2; index++) { /* each pair in a group of its own is the most that there can be */
        take_matrix(call, index);
        most_parts = most(most_parts, least(pairs, op->num_held + pairs / call->engine->most_rows) * call->shape.num_panels);
    }
    int64_t bytes = 64 * 18 + tokens * op->num_experts * 4 + 4 * pairs * 4 + (op->num_held + 1) * 4 +
                    most_parts * (int64_t)sizeof(struct part) + pairs * pair_bytes(call);
    char *memory = pelton_shared((size_t)bytes);
    if (memory == NULL)
        return 1;
    call->failed = memset(cut(&memory, sizeof(int)), 0, sizeof(int));
    call->logits = cut(&memory, tokens * op->num_experts * 4);
    call->experts = cut(&memory, pairs * 4), call->places = cut(&memory, pairs * 4);
    call->shares = cut(&memory, pairs * 4), call->pairs = cut(&memory, pairs * 4);
    call->first = cut(&memory, (op->num_held + 1) * 4);
    struct part *parts = cut(&memory, most_parts * (int64_t)sizeof *parts);
    char *inner = cut(&memory, pairs * op->down.in_features * element), *outer = cut(&memory, pairs * op->down.out_features * element);
    call->packed = memory;
    if (call->chosen == NULL)
        choose_all(call);
    else
        take_chosen(call);
    sort_pairs(call);
    multiply(call, 0, parts, NULL, inner);
    multiply(call, 1, parts, inner, outer);
    pool_do((struct pool_work){.run = run_combine, .context = call, .num_tasks = tokens, .has_shares = 1,
                          .is_small = pairs * op->down.out_features <= 1 << 15});
    return *call->failed;
}

/* Some tokens' places and shares. */
static int choose_tokens(struct moe_call *call) {
    char *memory = pelton_shared((size_t)(call->num_tokens * call->op->num_experts * 4));
    if (memory == NULL)
        return 1;
    call->logits = (float *)memory, call->experts = call->chosen, call->shares = call->chosen_shares;
    choose_all(call);
    return 0;
}

/* Tokens in parts, one after the other. */
static int run_all(struct moe_call whole, int64_t num_tokens) {
    const struct moe *op = whole.op;
    int64_t row_bytes = op->gate_up.in_features * (int64_t)size_of(op->gate_up.dtype);
    struct moe_call sizes = {.op = op};
    int64_t together = most(MOST_BYTES / (op->top_k * pair_bytes(&sizes)), LEAST_TOKENS);
    for (int64_t first = 0; first < num_tokens; first += together) {
        struct moe_call call = whole;
        call.first_token = first, call.num_tokens = least(together, num_tokens - first);
        call.x += first * row_bytes;
        if (call.slots != NULL)
            call.slots += first;
        if (call.output != NULL)
            call.output += first * row_bytes;
        if (call.chosen != NULL)
            call.chosen += first * op->top_k, call.chosen_shares += first * op->top_k;
        if (call.only_chooses ? choose_tokens(&call) : run_tokens(&call))
            return 1;
    }
    return 0;
}

/* x [num_tokens, hidden], slots [num_tokens] (-1: padding) -> output [num_tokens, hidden]. 1: no memory. */
EXPORT int pelton_moe(const struct moe *op, const void *x, const int64_t *slots, int64_t num_tokens, void *output) {
    return run_all((struct moe_call){.op = op, .x = x, .slots = slots, .output = output}, num_tokens);
}

/* x, slots -> places [num_tokens, k] among those of all ranks, -1 of padding, and shares [num_tokens, k]. 1: no memory. */
EXPORT int pelton_moe_choose(const struct moe *op, const void *x, const int64_t *slots, int64_t num_tokens, int32_t *places,
                             float *shares) {
    struct moe_call call = {.op = op, .x = x, .slots = slots, .chosen = places, .chosen_shares = shares, .only_chooses = 1};
    return run_all(call, num_tokens);
}

/* x, and what was chosen for it -> output [num_tokens, hidden]. 1: no memory. */
EXPORT int pelton_moe_compute(const struct moe *op, const void *x, int32_t *places, float *shares, int64_t num_tokens, void *output) {
    struct moe_call call = {.op = op, .x = x, .output = output, .chosen = places, .chosen_shares = shares};
    return run_all(call, num_tokens);
}

/* Bring all experts' matrices into panels, in their own memory, and say so in the struct: those whose shape fits. 1: no memory. */
EXPORT int pelton_moe_pack(struct moe *op) {
    if (op->parts[0].panels != NULL)
        return 0;
    for (int index = 0; index < 2; index++) {
        struct linear *matrix = index == 0 ? &op->gate_up : &op->down;
        char *weight = (char *)matrix->weight;
        if (op->weight_stride[index] % 64 || pelton_pack(matrix, weight))
            continue;
        for (int64_t expert = 1; expert < op->num_held; expert++)
            if (pelton_pack(matrix, weight + expert * op->weight_stride[index]))
                return 1;
        matrix->is_packed = 1;
    }
    return 0;
}
