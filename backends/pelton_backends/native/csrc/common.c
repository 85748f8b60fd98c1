/* Scratch memory, and which instruction set this library is for. */
#include "common.h"

EXPORT int pelton_isa(void) { return PELTON_ISA; }

void *pelton_scratch(size_t bytes) {
    static __thread void *memory;
    static __thread size_t size;
    if (bytes > size) {
        free(memory);
        size = (bytes + 4095) / 4096 * 4096;
        memory = aligned_alloc(64, size);
        if (memory == NULL)
            size = 0;
    }
    return memory;
}
