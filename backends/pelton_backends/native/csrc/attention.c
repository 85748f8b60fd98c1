/* Paged attention of a step's rows: keys and values are written, then tasks are handed out. A task has some tokens of one row and
   one key head, or one token and all of them. A long row's keys are cut into spans that leave their sums, and these are joined last.
   A prefix that all rows share is gone through once, for many rows at a time, and each row's own task starts from its sums. */
#include "float_kernels.h"

enum {
    TILE_QUERIES = 192, /* of a task: tokens times the heads of its key head */
    ENCODER_QUERIES = 384, /* the same where all of them see all keys, which are copied once for a task */
    SPAN = 512,         /* keys of a row with one token, from twice as many on */
    PREFIX_ROWS = 32,   /* that go through a shared prefix together */
    WRITE_TOKENS = 16,  /* that one task writes */
    FEW_KEYS = 256,     /* times heads: one thread is as fast */
};

/* Some work of a step. */
struct place {
    int32_t row, token, head, num_heads;
    int64_t first_key, last_key;
    int64_t state; /* where sums are left, -1 where output is written */
};

/* A row with more than one span, whose states start at `state`: [num_spans, num_heads]. */
struct cut_row {
    int32_t row, num_spans;
    int64_t state;
};

/* A step: what it is called with, who runs it, and how it is cut. */
struct plan {
    const struct attention *op;
    const struct step *step;
    const struct rope *rope; /* NULL: queries, keys and values are ready */
    const struct written *written;
    const char *query;
    int64_t query_stride;
    char *output;
    float *lse; /* [tokens, num_heads]; NULL: not asked for */
    attend_fn one_token, more_tokens;
    int64_t threads, prefix; /* tokens that all rows share and that are read once */
    int64_t tokens, heads;   /* of a row that one task takes; key heads of a task with one token */
    float *states;           /* of the prefix [rows, num_heads], then of spans */
    struct place *places;
    struct cut_row *cut_rows;
    int64_t num_places, num_cut_rows, num_states;
    int has_shares;          /* of places: one token each, which read memory in one stream */
    _Atomic int failed;
};

INLINE int64_t tokens_of(const struct step *step, int64_t row) { return step->query_start[row + 1] - step->query_start[row]; }

INLINE float *state_at(const struct plan *plan, int64_t index) { return plan->states + index * STATE(plan->op->head_dim); }

/* ---- how a step is cut ---- */

INLINE attend_fn decode_of(const struct attention *op) {
#if PELTON_ISA >= ISA_AVX512_BF16
    if (op->dtype == DTYPE_BF16 && pelton_decodes_avx512(op))
        return pelton_decode_avx512;
#endif
    return pelton_float.decode;
}

INLINE attend_fn prefill_of(const struct attention *op) {
#if PELTON_ISA >= ISA_AVX512_BF16
    if (op->dtype == DTYPE_BF16 && op->head_dim % 2 == 0)
        return pelton_prefill_avx512;
#endif
    return pelton_float.prefill;
}

/* Whether the op has to have the library of kernels in float32 arithmetic. */
EXPORT int pelton_attention_takes_float(const struct attention *op) {
#if PELTON_ISA >= ISA_AVX512_BF16
    return decode_of(op) != pelton_decode_avx512 || prefill_of(op) != pelton_prefill_avx512;
#else
    (void)op;
    return 0;
#endif
}

static void choose_paths(struct plan *plan) {
    const struct attention *op = plan->op;
    const struct step *step = plan->step;
    plan->one_token = decode_of(op), plan->more_tokens = prefill_of(op);
    int64_t num_tokens = step->query_start[step->num_rows] - step->query_start[0];
    plan->prefix = step->common_prefix == NULL ? 0 : kept_of(step, *step->common_prefix);
    plan->heads = step->num_rows >= 2 * plan->threads ? op->num_kv_heads : 1;
    plan->tokens = most((step->is_causal ? TILE_QUERIES : ENCODER_QUERIES) / op->group, 1);
    while (plan->tokens > 16 && num_tokens * op->num_kv_heads < 4 * plan->threads * plan->tokens)
        plan->tokens /= 2;
}

/* The keys of `num` tokens of a row from `token` on. */
static void set_keys(const struct plan *plan, struct place *place, int64_t num) {
    const struct step *step = plan->step;
    int64_t length = step->seq_lens[place->row], position = length - tokens_of(step, place->row) + place->token;
    place->first_key = plan->op->window == 0 ? plan->prefix : first_seen(plan->op, position);
    place->last_key = kept_of(step, step->is_causal ? position + num : length);
}

/* A row's length decides, whatever else is in the step: a row's result does not depend on how many rows there are. */
static int64_t keys_of_span(const struct place *place) {
    int64_t keys = place->last_key - place->first_key, spans = most(keys / SPAN, 1);
    return most(round_up((keys + spans - 1) / spans, 64), 64);
}

static void add_one_token(struct plan *plan, int64_t row) {
    const struct attention *op = plan->op;
    struct place whole = {.row = (int32_t)row, .state = -1};
    set_keys(plan, &whole, 1);
    int64_t keys = keys_of_span(&whole), spans = most((whole.last_key - whole.first_key + keys - 1) / keys, 1);
    int64_t heads = spans >= 2 * plan->threads ? op->num_kv_heads : plan->heads, state = plan->num_states;
    if (spans > 1) {
        plan->cut_rows[plan->num_cut_rows++] = (struct cut_row){(int32_t)row, (int32_t)spans, state};
        plan->num_states += spans * op->num_heads;
    }
    for (int64_t span = 0; span < spans; span++)
        for (int64_t head = 0; head < op->num_kv_heads; head += heads) {
            struct place place = whole;
            place.head = (int32_t)head, place.num_heads = (int32_t)heads;
            place.first_key = whole.first_key + span * keys;
            place.last_key = least(place.first_key + keys, whole.last_key);
            place.state = spans > 1 ? state + span * op->num_heads + head * op->group : -1;
            plan->places[plan->num_places++] = place;
        }
}

/* A row's last tokens have most keys: these go first. */
static void add_tokens(struct plan *plan, int64_t row, int64_t count) {
    for (int64_t token = (count - 1) / plan->tokens * plan->tokens; token >= 0; token -= plan->tokens)
        for (int64_t head = 0; head < plan->op->num_kv_heads; head++) {
            struct place place = {.row = (int32_t)row, .token = (int32_t)token, .head = (int32_t)head, .num_heads = 1, .state = -1};
            set_keys(plan, &place, least(plan->tokens, count - token));
            plan->places[plan->num_places++] = place;
        }
}

/* Room for all places and states. 0: no memory. */
static int make_room(struct plan *plan) {
    const struct attention *op = plan->op;
    const struct step *step = plan->step;
    int64_t num_places = 0, num_states = plan->prefix > 0 ? step->num_rows * op->num_heads : 0;
    for (int64_t row = 0; row < step->num_rows; row++) {
        int64_t count = tokens_of(step, row), spans = step->seq_lens[row] / SPAN + 1;
        num_places += (count == 1 ? spans : (count + plan->tokens - 1) / plan->tokens) * op->num_kv_heads;
        num_states += count == 1 && spans > 2 ? spans * op->num_heads : 0;
    }
    size_t states = (size_t)round_up(num_states * STATE(op->head_dim), 16) * sizeof(float);
    size_t places = (size_t)num_places * sizeof *plan->places, cut_rows = (size_t)(step->num_rows + 1) * sizeof *plan->cut_rows;
    char *memory = pelton_shared(states + places + cut_rows);
    plan->states = (float *)memory;
    plan->places = (struct place *)(memory + states);
    plan->cut_rows = (struct cut_row *)(memory + states + places);
    return memory != NULL;
}

/* Long rows stand last: these go first. */
static void cut(struct plan *plan) {
    const struct step *step = plan->step;
    plan->num_states = plan->prefix > 0 ? step->num_rows * plan->op->num_heads : 0;
    plan->has_shares = 1;
    for (int64_t row = step->num_rows - 1; row >= 0; row--) {
        int64_t count = tokens_of(step, row);
        if (count == 1)
            add_one_token(plan, row);
        else if (count > 0)
            add_tokens(plan, row, count), plan->has_shares = 0;
    }
}

/* ---- what is handed out ---- */

static void write_keys(void *context, int64_t part, struct turn *turn) {
    const struct plan *plan = context;
    (void)turn;
    for (int64_t token = part * WRITE_TOKENS; token < least((part + 1) * WRITE_TOKENS, plan->written->num_tokens); token++)
        pelton_write_keys(plan->rope, plan->op, plan->written, plan->query, token);
}

/* What all tasks have in common; query and output are those of `head` of `token` of the step. */
static struct task make_task(const struct plan *plan, int64_t row, int64_t token, int64_t head) {
    const struct attention *op = plan->op;
    size_t item = size_of(op->dtype);
    int64_t number = head * op->group * op->head_dim;
    return (struct task){
        .table = plan->step->block_table + row * plan->step->table_stride,
        .head = head,
        .query = plan->query + (size_t)(token * plan->query_stride + number) * item,
        .query_stride = plan->query_stride,
        .rope = plan->rope,
        .positions = plan->rope == NULL ? NULL : plan->written->positions + token,
        .output = plan->output + (size_t)(token * op->num_heads * op->head_dim + number) * item,
        .lse = plan->lse == NULL ? NULL : plan->lse + token * op->num_heads + head * op->group,
        .step = plan->step,
    };
}

static void attend_prefix(void *context, int64_t index, struct turn *turn) {
    struct plan *plan = context;
    const struct attention *op = plan->op;
    int64_t head = index % op->num_kv_heads, row = index / op->num_kv_heads * PREFIX_ROWS;
    struct task task = make_task(plan, 0, plan->step->query_start[0] + row, head);
    task.num_heads = 1, task.num_tokens = least(PREFIX_ROWS, plan->step->num_rows - row);
    task.length = task.last_key = plan->prefix;
    task.states = state_at(plan, row * op->num_heads + head * op->group);
    if (plan->more_tokens(op, &task, turn))
        plan->failed = 1;
}

static void attend_place(void *context, int64_t index, struct turn *turn) {
    struct plan *plan = context;
    const struct attention *op = plan->op;
    const struct step *step = plan->step;
    const struct place *place = plan->places + index;
    int64_t row_tokens = tokens_of(step, place->row), length = step->seq_lens[place->row];
    struct task task = make_task(plan, place->row, step->query_start[place->row] + place->token, place->head);
    task.num_heads = place->num_heads;
    task.num_tokens = least(plan->tokens, row_tokens - place->token);
    task.position = length - row_tokens + place->token, task.length = kept_of(step, length), task.is_causal = step->is_causal;
    task.first_key = place->first_key, task.last_key = place->last_key;
    if (plan->prefix > 0 && place->first_key == plan->prefix)
        task.given = state_at(plan, place->row * op->num_heads + place->head * op->group);
    if (place->state >= 0)
        task.states = state_at(plan, place->state);
    int64_t ahead = plan->has_shares ? 1 : plan->threads;
    if (index + ahead < plan->num_places) {
        const struct place *next = place + ahead;
        task.next_table = step->block_table + next->row * step->table_stride;
        task.next_head = next->head, task.next_key = next->first_key, task.next_length = next->last_key;
    }
    if ((row_tokens == 1 ? plan->one_token : plan->more_tokens)(op, &task, turn))
        plan->failed = 1;
}

static void join_spans(void *context, int64_t index, struct turn *turn) {
    const struct plan *plan = context;
    const struct attention *op = plan->op;
    struct cut_row row = plan->cut_rows[index];
    (void)turn;
    for (int64_t head = 0; head < op->num_heads; head++) {
        float base = -INFINITY;
        for (int64_t span = 0; span < row.num_spans; span++)
            base = fmaxf(base, state_at(plan, row.state + span * op->num_heads + head)[0]);
        float line[op->head_dim], total = 0.0f;
        memset(line, 0, sizeof line);
        for (int64_t span = 0; span < row.num_spans; span++) {
            const float *state = state_at(plan, row.state + span * op->num_heads + head);
            float factor = exp2f(state[0] - base);
            total += state[1] * factor;
            for (int64_t i = 0; i < op->head_dim; i++)
                line[i] += state[STATE(i)] * factor;
        }
        float whole = with_sink(op, head, base, total);
        int64_t at = plan->step->query_start[row.row] * op->num_heads + head;
        if (plan->lse != NULL)
            plan->lse[at] = log_of(base, whole);
        for (int64_t i = 0; i < op->head_dim; i++)
            store(plan->output, at * op->head_dim + i, line[i] / whole, op->dtype);
    }
}

/* ---- a step ---- */

static void hand_out(struct plan *plan, int64_t num_tasks, task_fn run, int has_shares) {
    pool_do((struct pool_work){.run = run, .context = plan, .num_tasks = num_tasks, .is_small = plan->threads == 1, .has_shares = has_shares});
}

static int attend(struct plan *plan) {
    const struct attention *op = plan->op;
    const struct step *step = plan->step;
    int64_t num_keys = 0;
    for (int64_t row = 0; row < step->num_rows; row++)
        num_keys += step->seq_lens[row];
    plan->threads = num_keys * op->num_heads > FEW_KEYS ? pool_num_free() : 1;
    choose_paths(plan);
    if (!make_room(plan))
        return 1;
    cut(plan);
    if (plan->rope != NULL) /* all keys are there before any is read */
        hand_out(plan, (plan->written->num_tokens + WRITE_TOKENS - 1) / WRITE_TOKENS, write_keys, 1);
    if (plan->prefix > 0)
        hand_out(plan, (step->num_rows + PREFIX_ROWS - 1) / PREFIX_ROWS * op->num_kv_heads, attend_prefix, 0);
    hand_out(plan, plan->num_places, attend_place, plan->has_shares);
    hand_out(plan, plan->num_cut_rows, join_spans, 0);
    return plan->failed;
}

EXPORT int pelton_attend(const struct attention *op, const struct step *step, const void *query, int64_t query_stride, void *output) {
    struct plan plan = {.op = op, .step = step, .query = query, .query_stride = query_stride, .output = output};
    return attend(&plan);
}

/* The same for a part of the keys, with what outputs of all parts are put together by. */
EXPORT int pelton_attend_part(const struct attention *op, const struct step *step, const void *query, int64_t query_stride, void *output,
                              float *lse) {
    struct plan plan = {.op = op, .step = step, .query = query, .query_stride = query_stride, .output = output, .lse = lse};
    return attend(&plan);
}

/* Both, for a whole step: what stands before attention, and it. */
EXPORT int pelton_rope_attend(const struct rope *rope, const struct attention *op, const struct written *written,
                              const struct step *step, const void *qkv, void *output) {
    struct plan plan = {.op = op, .step = step, .rope = rope, .written = written, .query = qkv, .output = output};
    plan.query_stride = (op->num_heads + 2 * op->num_kv_heads) * op->head_dim;
    return attend(&plan);
}
