/* Counts the bytes that a process has in use, and the most it ever had: preloaded, it stands before malloc and free.
   Resident size cannot tell: it hides what is taken from memory freed before, and shows what the allocator keeps. */
#include <errno.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stddef.h>

extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

static atomic_long in_use, most;

static void *took(void *block) {
    if (!block) return NULL;
    long size = (long)malloc_usable_size(block);
    long now = atomic_fetch_add(&in_use, size) + size;
    long seen = atomic_load(&most);
    while (now > seen && !atomic_compare_exchange_weak(&most, &seen, now)) {}
    return block;
}

void *malloc(size_t size) { return took(__libc_malloc(size)); }
void *calloc(size_t count, size_t size) { return took(__libc_calloc(count, size)); }
void *memalign(size_t alignment, size_t size) { return took(__libc_memalign(alignment, size)); }
void *aligned_alloc(size_t alignment, size_t size) { return memalign(alignment, size); }

int posix_memalign(void **block, size_t alignment, size_t size) {
    void *found = memalign(alignment, size);
    if (!found) return ENOMEM;
    *block = found;
    return 0;
}

void free(void *block) {
    if (block) atomic_fetch_sub(&in_use, (long)malloc_usable_size(block));
    __libc_free(block);
}

void *realloc(void *block, size_t size) {
    long before = block ? (long)malloc_usable_size(block) : 0;
    void *found = __libc_realloc(block, size);
    if (found || size == 0) atomic_fetch_sub(&in_use, before);
    return took(found);
}

long heap_in_use(void) { return atomic_load(&in_use); }
long heap_most(void) { return atomic_load(&most); }
void heap_forget_most(void) { atomic_store(&most, atomic_load(&in_use)); }
