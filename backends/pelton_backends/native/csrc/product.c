/* What every product has in common: rows are normed and packed in blocks, blocks meet panels of the weight, and what follows the
   product is done where the sums are. How one dtype is multiplied is its engine's matter (linear.h).

   A weight is in panels, brought there once in its own memory (`pelton_pack`), or it stays plain for others that read it: then
   few rows take dot products, and for more a panel is packed as it is read.

   Many rows: threads first norm and pack blocks, then multiply groups of blocks with panels. Few: each thread packs all rows for
   itself. A task is some panels times one group. */
#include "linear.h"

enum {
    /* From here on a thread multiplies rows that it packed itself, so that they need not leave its cache: 6 % at 64 and 128 rows
       where the cores share no L3, nothing where they do. With fewer rows, reading the weight twice costs more. */
    MANY_ROWS = 64,
    GROUP_ROWS = 32,         /* of one thread, at least */
    EVEN_BLOCKS = 8,         /* of a group, below which all groups have as many */
    GROUP_BYTES = 512 << 10, /* packed rows that panels are multiplied with before others: half of an L2 cache */
    PART_BYTES = 128 << 10,  /* the same of a part of rows, whose sums are about a fourth of it */
    TASK_BYTES = 256 << 10,  /* of a weight, that a task reads if its sums take no more than */
    TASK_SUMS = 16 << 10,    /* bytes */
    SMALL_PRODUCT = 1 << 16, /* multiplications: no more are worth a second thread */
    SMALL_NORMS = 1 << 12,   /* numbers to norm, the same */
    FETCH_NEAR = 512,        /* bytes ahead in a weight; linear_bf16.c has the measurements */
};

/* What the tasks of a call share; a late one finds a copy of it (pool.h). */
struct call {
    const struct linear *op;
    struct rows in;
    const struct engine *engine;
    struct panel_source source; /* make is NULL: the op's weight */
    struct shape shape;
    char *output;
    size_t row_bytes; /* of the output */
    int64_t k, num_blocks, num_groups;
    int64_t line_bytes, packed_bytes, group_rows; /* of a row, plain and packed; rows of the largest group */
    int64_t num_parts, task_panels;               /* parts of the panels, one of a task; panels of the largest */
    int is_few, is_dots, has_parts;
    char *rows;   /* few: as the op's dtype has them, normed */
    char *packed; /* many: packed rows; with parts, of each group all blocks' first part, then their second one */
    int *failed;
};

INLINE void *cut(char **memory, int64_t bytes) {
    void *start = *memory;
    *memory += round_up(bytes, 64);
    return start;
}

/* One thread's memory. */
struct room {
    float *sums;                /* [panels of a task][rows of a group][PANEL] */
    char *panel, *rows, *lines; /* packed; packed, where few; of a block */
};

INLINE int64_t room_bytes(const struct call *call) {
    int64_t numbers = round_up(call->k, PANEL), rows = call->is_few ? call->in.num_rows : 0;
    return round_up(call->task_panels * call->group_rows * PANEL * 4, 64) +
           round_up(PANEL * call->k * call->engine->weight_bytes, 64) + round_up(rows * numbers * 4, 64) + round_up(call->engine->most_rows * call->line_bytes, 64) + 64;
}

/* 0: no memory. */
INLINE int take_room(const struct call *call, struct room *room) {
    char *memory = pelton_scratch((size_t)room_bytes(call));
    int64_t numbers = round_up(call->k, PANEL), rows = call->is_few ? call->in.num_rows : 0;
    if (memory == NULL)
        return 0;
    room->sums = cut(&memory, call->task_panels * call->group_rows * PANEL * 4);
    room->panel = cut(&memory, PANEL * call->k * call->engine->weight_bytes);
    room->rows = cut(&memory, rows * numbers * 4);
    room->lines = memory;
    return 1;
}

/* With parts in whole tiles, but for the last block. */
INLINE int64_t block_start(const struct call *call, int64_t block) {
    int64_t tile = call->has_parts ? call->engine->tile : 1, num_tiles = (call->in.num_rows + tile - 1) / tile;
    return least(num_tiles * block / call->num_blocks * tile, call->in.num_rows);
}

INLINE int64_t group_start(const struct call *call, int64_t group) { return call->num_blocks * group / call->num_groups; }

/* Norm one row, where few. */
static void prepare_row(void *context, int64_t task, struct turn *turn) {
    const struct call *call = context;
    (void)turn;
    call->engine->prepare(call->op, &call->in, task, call->rows + task * call->line_bytes);
}

/* Where part [start, start + count) of `m` rows from `first` on is packed. */
INLINE char *part_at(const struct call *call, int64_t group, int64_t first, int64_t start, int64_t count) {
    int64_t begin = block_start(call, group_start(call, group)), rows = block_start(call, group_start(call, group + 1)) - begin;
    return call->packed + begin * call->packed_bytes + (start * rows + count * (first - begin)) * call->engine->x_bytes;
}

/* Norm and pack one block, where many. */
static void prepare_block(void *context, int64_t block, struct turn *turn) {
    const struct call *call = context;
    const struct engine *engine = call->engine;
    int64_t first = block_start(call, block), m = block_start(call, block + 1) - first;
    const char *rows = (const char *)call->in.hidden + first * call->line_bytes;
    (void)turn;
    if (call->op->norm != NULL) {
        struct room room;
        if (!take_room(call, &room)) {
            *call->failed = 1;
            return;
        }
        for (int64_t i = 0; i < m; i++)
            engine->prepare(call->op, &call->in, first + i, room.lines + i * call->line_bytes);
        rows = room.lines;
    }
    if (!call->has_parts) {
        engine->pack_block(rows, m, call->shape.k, call->packed + first * call->packed_bytes);
        return;
    }
    int64_t group = 0;
    while (group_start(call, group + 1) <= block)
        group++;
    for (int64_t start = 0; start < call->k; start += engine->part) {
        int64_t count = least(engine->part, call->k - start);
        engine->pack_part(rows, m, call->shape.k, start, count, part_at(call, group, first, start, count));
    }
}

/* All rows, for this thread. */
static void pack_rows(const struct call *call, const struct room *room) {
    if (call->is_dots) {
        call->engine->spread_rows(call->rows, call->in.num_rows, call->shape.k, room->rows);
        return;
    }
    for (int64_t block = 0; block < call->num_blocks; block++) {
        int64_t first = block_start(call, block), m = block_start(call, block + 1) - first;
        const char *rows = call->rows + first * call->line_bytes;
        call->engine->pack_block(rows, m, call->shape.k, room->rows + first * call->packed_bytes);
    }
}

/* Columns of the output that panel `index` has. */
INLINE int64_t columns_of(const struct shape *shape, int64_t index) { return least(shape->width, shape->columns - index * shape->width); }

/* Sums of all rows with panel `index` of a plain weight. */
static void add_dots(const struct call *call, int64_t index, const struct room *room, float *sums) {
    const struct shape *shape = &call->shape;
    int64_t count = columns_of(shape, index);
    const char *weight = (const char *)call->op->weight + index * shape->width * call->line_bytes;
    call->engine->dots(weight, room->rows, shape->k, count, sums, call->in.num_rows);
    if (shape->width < PANEL)
        call->engine->dots(weight + shape->columns * call->line_bytes, room->rows, shape->k, count, sums + PANEL / 2,
                           call->in.num_rows);
}

INLINE void fetch_part(const char *memory, int64_t bytes, int64_t index, int64_t count) {
    for (int64_t at = round_up(bytes * index / count, 64); at < bytes * (index + 1) / count; at += 64)
        __builtin_prefetch(memory + at, 0, 2);
}

/* The results' places: whole panels of rows that lie far apart, for which `finish` would wait one after the other. */
INLINE void fetch_output(const struct call *call, int64_t index, int64_t row, int64_t m) {
    int64_t bytes = (int64_t)call->row_bytes / call->op->output_stride;
    const char *to = call->output + row * (int64_t)call->row_bytes + index * call->shape.width * bytes;
    for (int64_t i = 0; i < m; i++, to += call->row_bytes)
        for (int64_t at = 0; at < columns_of(&call->shape, index) * bytes; at += 64)
            __builtin_prefetch(to + at, 1, 2);
}

/* Sums of a group's rows with a panel, part by part. The next part is fetched meanwhile, of the next panel at last. */
static void add_parts(const struct call *call, const char *panel, int64_t index, int64_t group, float *sums) {
    const struct engine *engine = call->engine;
    int64_t first = group_start(call, group), last = group_start(call, group + 1), begin = block_start(call, first);
    for (int64_t start = 0; start < call->k; start += engine->part) {
        int64_t count = least(engine->part, call->k - start), line_bytes = PANEL * engine->weight_bytes;
        for (int64_t block = first; block < last; block++) {
            int64_t row = block_start(call, block), m = block_start(call, block + 1) - row;
            fetch_part(panel + (start + count) * line_bytes, engine->part * line_bytes, block - first, last - first);
            if (start + count == call->k)
                fetch_output(call, index, row, m);
            engine->multiply_part(part_at(call, group, row, start, count), panel, start, count, sums + (row - begin) * PANEL, m);
        }
    }
}

/* Sums of a group's rows with panel `index`. */
static void add_blocks(const struct call *call, int64_t index, int64_t group, const struct room *room, float *sums) {
    const struct engine *engine = call->engine;
    int64_t panel_bytes = PANEL * call->k * engine->weight_bytes;
    const char *weight = (const char *)call->op->weight + index * panel_bytes, *panel = weight;
    if (call->source.make != NULL) {
        call->source.make(call->source.weight, index, room->panel);
        weight = panel = room->panel;
    } else if (!call->op->is_packed) {
        engine->pack_panel(&call->shape, call->op->weight, index, room->panel);
        panel = room->panel;
    }
    if (call->has_parts) {
        add_parts(call, panel, index, group, sums);
        return;
    }
    /* The next panel is fetched while this one is used, a part with every block. */
    int64_t first = group_start(call, group), last = group_start(call, group + 1), start = block_start(call, first);
    int64_t part = panel_bytes / (last - first), ahead = panel_bytes;
    if (last - first == 1 && call->op->is_packed)
        ahead = call->in.num_rows <= engine->near_rows ? FETCH_NEAR : engine->fetch_far;
    const char *rows = call->is_few ? room->rows : call->packed, *fetch = weight + ahead;
    for (int64_t block = first; block < last; block++) {
        int64_t row = block_start(call, block), m = block_start(call, block + 1) - row;
        if (!call->is_few)
            fetch_output(call, index, row, m);
        engine->multiply(rows + row * call->packed_bytes, panel, call->k, sums + (row - start) * PANEL, fetch, part, m);
        fetch += part;
    }
}

static void run_task(void *context, int64_t task, struct turn *turn) {
    const struct call *call = context;
    const struct shape *shape = &call->shape;
    int64_t part = task % call->num_parts, group = task / call->num_parts;
    int64_t begin = first_piece(shape->num_panels, call->num_parts, part), end = first_piece(shape->num_panels, call->num_parts, part + 1);
    int64_t first = block_start(call, group_start(call, group)), m = block_start(call, group_start(call, group + 1)) - first;
    struct room room;
    if (!take_room(call, &room)) {
        if (turn->run == 0) /* otherwise the caller's thread does it */
            *call->failed = 1;
        return;
    }
    if (call->is_few && turn->is_first)
        pack_rows(call, &room);
    for (int64_t index = begin; index < end; index++) {
        float *sums = room.sums + (index - begin) * m * PANEL;
        if (call->is_dots)
            add_dots(call, index, &room, sums);
        else
            add_blocks(call, index, group, &room, sums);
    }
    if (!may_write(turn))
        return;
    char *output = call->output + (size_t)first * call->row_bytes;
    for (int64_t index = begin; index < end; index++)
        call->engine->finish(call->op, room.sums + (index - begin) * m * PANEL, m, index * shape->width, columns_of(shape, index),
                             output, call->row_bytes);
}

/* Cut rows into blocks, and blocks into groups. */
static void cut_rows(struct call *call) {
    int64_t num_rows = call->in.num_rows, threads = pool_num_free(), most_rows = call->engine->most_rows;
    call->is_few = num_rows < MANY_ROWS;
    call->has_parts = !call->is_few && call->engine->part > 0;
    call->num_groups = 1;
    if (!call->is_few) {
        int64_t bytes = num_rows * (call->has_parts ? call->engine->part * call->engine->x_bytes : call->packed_bytes);
        int64_t together = call->has_parts ? PART_BYTES : GROUP_BYTES, groups = (bytes + together - 1) / together;
        call->num_groups = most(groups, least(threads, num_rows / GROUP_ROWS));
        if (call->num_groups > threads)
            call->num_groups = round_up(call->num_groups, threads);
    }
    call->num_blocks = (num_rows + most_rows - 1) / most_rows;
    if (call->num_blocks < EVEN_BLOCKS * call->num_groups) /* otherwise whole blocks count for more than groups that are alike */
        call->num_blocks = round_up(call->num_blocks, call->num_groups);
    for (int64_t group = 0; group < call->num_groups; group++) {
        int64_t first = block_start(call, group_start(call, group)), last = block_start(call, group_start(call, group + 1));
        call->group_rows = most(call->group_rows, last - first);
    }
}

/* Cut panels into parts. */
static void cut_panels(struct call *call) {
    int64_t panel_bytes = PANEL * call->k * call->engine->weight_bytes, num_panels = call->shape.num_panels;
    int64_t together = most(least(TASK_BYTES / most(panel_bytes, 1), TASK_SUMS / (call->group_rows * PANEL * 4)), 1);
    call->num_parts = pool_cut(num_panels, together);
    call->task_panels = (num_panels + call->num_parts - 1) / call->num_parts;
}

/* Norm and pack, as far as it is done once for all threads. */
static void prepare(struct call *call) {
    int64_t num_rows = call->in.num_rows;
    if (!call->is_few)
        pool_do((struct pool_work){.run = prepare_block, .context = call, .num_tasks = call->num_blocks, .has_shares = 1});
    else if (call->op->norm != NULL)
        pool_do((struct pool_work){.run = prepare_row, .context = call, .num_tasks = num_rows, .has_shares = 1,
                              .is_small = num_rows * call->shape.k <= SMALL_NORMS});
    else
        memcpy(call->rows, call->in.hidden, (size_t)(num_rows * call->line_bytes));
}

SHARED int pelton_product(const struct linear *op, const struct rows *in, void *output, const struct panel_source *source) {
    const struct engine *engine = source == NULL ? pelton_engine(op) : source->engine;
    if (in->num_rows == 0)
        return 0;
    struct call call = {
        .op = op,
        .in = *in,
        .engine = engine,
        .shape = shape_of(op),
        .output = output,
        .row_bytes = (size_t)op->output_stride * (op->is_logits ? sizeof(float) : size_of(op->dtype)),
        .k = round_up(op->in_features, engine->step),
        .line_bytes = op->in_features * (int64_t)size_of(op->dtype),
        .packed_bytes = round_up(op->in_features, engine->step) * engine->x_bytes,
        .is_dots = !op->is_packed && source == NULL && in->num_rows <= engine->dot_rows,
    };
    if (source != NULL)
        call.source = *source;
    cut_rows(&call);
    cut_panels(&call);
    int64_t row_bytes = call.is_few ? call.line_bytes : call.packed_bytes;
    char *memory = pelton_shared((size_t)(64 + in->num_rows * row_bytes));
    struct room room;
    if (memory == NULL || !take_room(&call, &room))
        return 1;
    call.failed = memset(memory, 0, sizeof(int));
    call.rows = call.packed = memory + 64;
    prepare(&call);
    pool_do((struct pool_work){.run = run_task, .context = &call, .context_bytes = sizeof call, .has_shares = 1,
                          .num_tasks = call.num_parts * call.num_groups,
                          .is_small = in->num_rows * op->out_features * call.shape.k <= SMALL_PRODUCT});
    return *call.failed;
}

/* ---- weights into panels ---- */

struct packing {
    const struct engine *engine;
    struct shape shape;
    const void *plain;
    char *panels;
    int64_t panel_bytes;
};

static void pack_panel(void *context, int64_t index, struct turn *turn) {
    const struct packing *packing = context;
    (void)turn;
    packing->engine->pack_panel(&packing->shape, packing->plain, index, packing->panels + index * packing->panel_bytes);
}

/* Bring a weight into panels, in its own memory. 0: done; 1: it stays as it is, for want of memory or for its shape. */
EXPORT int pelton_pack(const struct linear *op, void *weight) {
    struct packing packing = {.engine = pelton_engine(op), .shape = shape_of(op), .panels = weight};
    int64_t k = packing.shape.k;
    int is_same_size = packing.engine->weight_bytes == (int64_t)size_of(op->dtype);
    if (!is_same_size || packing.shape.columns % packing.shape.width || k % packing.engine->step || (uintptr_t)weight % 64)
        return 1;
    size_t bytes = (size_t)(op->out_features * k) * size_of(op->dtype);
    void *plain = malloc(bytes);
    if (plain == NULL)
        return 1;
    packing.plain = memcpy(plain, weight, bytes);
    packing.panel_bytes = PANEL * k * packing.engine->weight_bytes;
    pool_do((struct pool_work){.run = pack_panel, .context = &packing, .num_tasks = packing.shape.num_panels, .has_shares = 1});
    free(plain);
    return 0;
}
