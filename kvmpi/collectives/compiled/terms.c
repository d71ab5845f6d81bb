#include "terms.h"
#include "copies.h"
#include "elements.h"

/* Read from another process's memory; whether that went well. */
static int fetch(struct terms *terms, const struct source *source, int64_t offset, int64_t nbytes)
{
    terms->error = read_process(source->pid, source->address + offset, (char *)terms->fetched, nbytes);
    if (terms->error) terms->lost = source->pid;
    return !terms->error;
}

const struct part *part_with(const struct terms *terms, int64_t element)
{
    const struct part *parts = (const struct part *)terms->parts;
    int64_t first = 0, last = terms->num_parts - 1;
    while (first < last) {
        const int64_t middle = (first + last + 1) / 2;
        if (parts[middle].start <= element) first = middle;
        else last = middle - 1;
    }
    return parts + first;
}

/* What add_terms does, for a block that lies in a part. */
static int add_block(struct terms *terms, const struct part *part, const char *incoming, int64_t start, int64_t count,
                     char *partial)
{
    const kind_t kind = (kind_t)terms->kind;
    const int64_t offset = (start - part->start) * terms->itemsize;
    char *result = (char *)part->out + offset;
    const int rounds = is_half(kind) && terms->sum_itemsize == terms->itemsize; /* partial sums, too */
    char *into = partial && !rounds ? partial : is_half(kind) ? (char *)terms->wide : result;
    const char *total = incoming;
    if (rounds && incoming) {
        widen(kind, into, incoming, count);
        total = into;
    }
    for (int64_t i = 0; i < part->num_sources; i++) {
        const struct source *source = (const struct source *)part->sources + i;
        const char *own = (char *)source->address + offset;
        if (source->pid) {
            if (!fetch(terms, source, offset, count * terms->itemsize)) return 0;
            own = (char *)terms->fetched;
        }
        if (!total && part->num_sources > 1 && !is_half(kind)) {
            total = own; /* where it is */
            continue;
        }
        if (total) add(kind, into, total, own, count);
        else if (own != into) widen(kind, into, own, count);
        total = into;
    }
    if (partial) {
        if (rounds) narrow(kind, partial, into, count);
        return 1;
    }
    if (terms->scale != 1.0) scale(kind, into, terms->scale, count);
    if (is_half(kind)) narrow(kind, result, into, count);
    return 1;
}

int add_terms(struct terms *terms, const void *incoming, int64_t start, int64_t count, void *partial)
{
    for (int64_t first = 0, length; first < count; first += length) {
        const struct part *part = part_with(terms, start + first);
        const int64_t offset = first * terms->sum_itemsize;
        const char *before = incoming ? (const char *)incoming + offset : 0;
        length = count - first < terms->block_count ? count - first : terms->block_count;
        if (length > part->stop - start - first) length = part->stop - start - first;
        if (!add_block(terms, part, before, start + first, length, partial ? (char *)partial + offset : 0)) return 0;
    }
    return 1;
}
