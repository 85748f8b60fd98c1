/* Scratch memory, and which instruction set this library is for. */
#include "common.h"

EXPORT int pelton_isa(void) { return PELTON_ISA; }

struct memory {
    void *start;
    size_t size;
};

/* What was too small is left as it is, for a thread may be reading it. Sizes double, so it is no more than what is in use. */
static void *at_least(struct memory *memory, size_t bytes) {
    if (bytes > memory->size) {
        size_t size = (bytes + 4095) / 4096 * 4096;
        size = size < 2 * memory->size ? 2 * memory->size : size;
        void *start = aligned_alloc(64, size);
        if (start == NULL)
            return NULL;
        *memory = (struct memory){start, size};
    }
    return memory->start;
}

SHARED void *pelton_scratch(size_t bytes) {
    static __thread struct memory memory;
    return at_least(&memory, bytes);
}

SHARED void *pelton_shared(size_t bytes) {
    static __thread struct memory memory;
    return at_least(&memory, bytes);
}

SHARED void *pelton_between(size_t bytes) {
    static __thread struct memory memory;
    return at_least(&memory, bytes);
}
