/* Logits of rows that sample under a grammar's mask: where it allows few tokens, only the panels that hold one are multiplied.

   A panel has as many columns as a word of a mask has bits, so a row meets panel i where its word i is not 0. What is not computed
   is left as it was; `pelton_sample` reads nothing else of such a row. Each number is that of the whole product, to the bit. */
#include "linear.h"
#include "sampling.h"

enum {
    TASK_BYTES = 16 << 10, /* of the sums of a task's panels */
    WORTH_PARTS = 4,       /* a row by itself takes about twice as long for a panel as one among others: it skips three of four */
};

_Static_assert(PANEL == 32, "a word of a mask is a panel");

/* Where a row's logits go, and what they are sampled under; slot -1: all of them are computed. */
struct place {
    int64_t row, slot;
};

struct call {
    const struct linear *op;
    const struct engine *engine;
    const uint32_t *words;
    int64_t mask_stride, num_words; /* of a mask */
    struct rows in;
    struct shape shape;
    char *output;
    size_t row_bytes;
    int64_t k, line_bytes, packed_bytes, panel_bytes;
    int64_t num_whole, num_blocks; /* rows that need every panel come first, in blocks */
    int64_t num_places;            /* with those that do not, each packed by itself; rows of padding have none */
    int64_t num_parts, task_panels;
    const struct place *places;
    char *packed;
    int *failed;
};

INLINE int64_t block_start(const struct call *call, int64_t block) { return call->num_whole * block / call->num_blocks; }

/* One thread's memory. */
struct room {
    struct place *places; /* [num_places] */
    int32_t *taken;       /* [panels of a task][num_places], places whose sums there are */
    float *sums;          /* [panels of a task][num_places][PANEL] */
    char *lines;          /* of a block */
};

static int take_room(const struct call *call, struct room *room) {
    int64_t numbers = call->task_panels * call->num_places, lines = call->engine->most_rows * call->line_bytes;
    int64_t place_bytes = round_up(call->num_places * (int64_t)sizeof(struct place), 64), taken_bytes = round_up(numbers * 4, 64);
    char *memory = pelton_scratch((size_t)(place_bytes + taken_bytes + numbers * PANEL * 4 + lines + 64));
    if (memory == NULL)
        return 0;
    room->places = (struct place *)memory;
    room->taken = (int32_t *)(memory + place_bytes);
    room->sums = (float *)(memory + place_bytes + taken_bytes);
    room->lines = (char *)(room->sums + numbers * PANEL);
    return 1;
}

/* Norm and pack a block, or a row that is packed by itself. */
static void prepare(void *context, int64_t task, struct turn *turn) {
    const struct call *call = context;
    int is_block = task < call->num_blocks;
    int64_t first = is_block ? block_start(call, task) : call->num_whole + task - call->num_blocks;
    int64_t m = is_block ? block_start(call, task + 1) - first : 1;
    struct room room;
    (void)turn;
    if (!take_room(call, &room)) {
        *call->failed = 1;
        return;
    }
    for (int64_t i = 0; i < m; i++)
        call->engine->prepare(call->op, &call->in, call->places[first + i].row, room.lines + i * call->line_bytes);
    call->engine->pack_block(room.lines, m, call->shape.k, call->packed + first * call->packed_bytes);
}

/* Sums of the rows that need a panel; which, goes to `taken`. Returns how many there are. */
static int64_t add_panel(const struct call *call, const struct room *room, int64_t index, float *sums, int32_t *taken) {
    const struct engine *engine = call->engine;
    const char *panel = (const char *)call->op->weight + index * call->panel_bytes;
    int64_t count = call->num_whole;
    for (int64_t block = 0; block < call->num_blocks; block++) {
        int64_t first = block_start(call, block), m = block_start(call, block + 1) - first;
        engine->multiply(call->packed + first * call->packed_bytes, panel, call->k, sums + first * PANEL, panel + call->panel_bytes,
                         block == 0 ? call->panel_bytes : 0, m);
    }
    for (int64_t place = 0; place < call->num_whole; place++)
        taken[place] = (int32_t)place;
    for (int64_t place = call->num_whole; index < call->num_words && place < call->num_places; place++) {
        if (call->words[room->places[place].slot * call->mask_stride + index] == 0)
            continue;
        engine->multiply(call->packed + place * call->packed_bytes, panel, call->k, sums + count * PANEL, panel, 0, 1);
        taken[count++] = (int32_t)place;
    }
    return count;
}

static void run_task(void *context, int64_t task, struct turn *turn) {
    const struct call *call = context;
    int64_t begin = first_piece(call->shape.num_panels, call->num_parts, task);
    int64_t end = first_piece(call->shape.num_panels, call->num_parts, task + 1), count[TASK_BYTES / (PANEL * 4)];
    struct room room;
    if (!take_room(call, &room)) {
        if (turn->run == 0)
            *call->failed = 1;
        return;
    }
    memcpy(room.places, call->places, (size_t)call->num_places * sizeof *room.places);
    if (!is_wanted(turn))
        return;
    for (int64_t index = begin; index < end; index++) {
        int64_t from = (index - begin) * call->num_places;
        count[index - begin] = add_panel(call, &room, index, room.sums + from * PANEL, room.taken + from);
    }
    if (!may_write(turn))
        return;
    for (int64_t index = begin; index < end; index++) {
        int64_t from = (index - begin) * call->num_places, first = index * PANEL;
        for (int64_t i = 0; i < count[index - begin]; i++) {
            char *output = call->output + (size_t)room.places[room.taken[from + i]].row * call->row_bytes;
            call->engine->finish(call->op, room.sums + (from + i) * PANEL, 1, first, least(PANEL, call->shape.columns - first), output,
                                 call->row_bytes);
        }
    }
}

static int64_t num_words(const uint32_t *words, int64_t count) {
    int64_t found = 0;
    for (int64_t i = 0; i < count; i++)
        found += words[i] != 0;
    return found;
}

/* Rows that need every panel, then those that do not. Returns how many the first are; `num_places`: how many in all. */
static int64_t find_places(const struct sampler *sampler, const int64_t *slots, int64_t num_rows, int64_t num_panels,
                           struct place *places, int64_t *num_places) {
    int64_t num_whole = 0, end = 0, size = least(num_panels, (sampler->vocab_size + 31) / 32);
    for (int64_t row = 0; row < num_rows; row++) {
        int64_t slot = slots[row];
        if (slot == sampler->batch->padding_slot)
            continue;
        int is_partial = pelton_takes_few(sampler, slot) &&
                         WORTH_PARTS * num_words(sampler->mask_words + slot * sampler->mask_stride, size) <= num_panels;
        sampler->is_partial[slot] = (uint8_t)is_partial;
        num_whole += !is_partial;
    }
    for (int64_t row = 0, whole = 0, partial = num_whole; row < num_rows; row++) {
        int64_t slot = slots[row];
        if (slot == sampler->batch->padding_slot)
            continue;
        int is_partial = sampler->is_partial[slot];
        places[is_partial ? partial++ : whole++] = (struct place){row, is_partial ? slot : -1};
        end++;
    }
    *num_places = end;
    return num_whole;
}

/* As `pelton_linear`, for logits that `pelton_sample` with the same sampler reads next, row i of slot slots[i]. */
EXPORT int pelton_allowed_logits(const struct linear *op, const struct sampler *sampler, const int64_t *slots, const void *hidden,
                                 const void *residual, const int64_t *rows, int64_t num_rows, void *output) {
    struct rows in = {hidden, residual, NULL, rows, num_rows};
    const struct engine *engine = pelton_engine(op);
    struct call call = {
        .op = op, .engine = engine, .words = sampler->mask_words, .mask_stride = sampler->mask_stride,
        .num_words = (sampler->vocab_size + 31) / 32, .in = in, .shape = shape_of(op),
        .output = output, .row_bytes = (size_t)op->output_stride * (op->is_logits ? sizeof(float) : size_of(op->dtype)),
        .k = round_up(op->in_features, engine->step), .line_bytes = op->in_features * (int64_t)size_of(op->dtype),
        .packed_bytes = round_up(op->in_features, engine->step) * engine->x_bytes,
    };
    int64_t place_bytes = round_up(num_rows * (int64_t)sizeof(struct place), 64);
    char *memory = op->is_packed ? pelton_shared((size_t)(64 + place_bytes + num_rows * call.packed_bytes)) : NULL;
    if (op->is_packed && memory == NULL)
        return 1;
    if (memory == NULL)
        return pelton_product(op, &in, output, NULL);
    struct place *places = (struct place *)(memory + 64);
    call.num_whole = find_places(sampler, slots, num_rows, call.shape.num_panels, places, &call.num_places);
    if (call.num_whole == num_rows)
        return pelton_product(op, &in, output, NULL);
    if (call.num_places == 0)
        return 0;
    call.failed = memset(memory, 0, sizeof(int));
    call.places = places, call.packed = memory + 64 + place_bytes;
    call.panel_bytes = PANEL * call.k * engine->weight_bytes;
    call.num_blocks = (call.num_whole + engine->most_rows - 1) / engine->most_rows;
    int64_t together = most(least(TASK_BYTES / (call.num_places * PANEL * 4), TASK_BYTES / (PANEL * 4)), 1);
    call.num_parts = pool_cut(call.shape.num_panels, together);
    call.task_panels = (call.shape.num_panels + call.num_parts - 1) / call.num_parts;
    struct room room;
    if (!take_room(&call, &room))
        return 1;
    pool_do((struct pool_work){.run = prepare, .context = &call, .num_tasks = call.num_blocks + call.num_places - call.num_whole});
    pool_do((struct pool_work){.run = run_task, .context = &call, .context_bytes = sizeof call, .has_shares = 1,
                               .num_tasks = call.num_parts});
    return *call.failed;
}
