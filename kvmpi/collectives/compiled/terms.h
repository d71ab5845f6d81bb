/* What the ranks of one process, or of one host, contribute to a sum, range by range: terms.HostTerms and
 * host_sum.HostSum. */

#ifndef KVMPI_TERMS_H
#define KVMPI_TERMS_H

#include <stdint.h>

/* The next three are declared in native.py once more. */

struct source {
    int64_t address;
    int64_t pid; /* of the process whose memory that is; 0: it can be read here */
};

/* Elements that lie one behind the other, in the result and in every vector. */
struct part {
    int64_t start, stop; /* which of all elements; the next part begins where this one ends */
    int64_t out; /* address of the result's first */
    int64_t num_sources, sources; /* of vectors; address of so many struct source, the first of which has no pid */
};

struct terms {
    int64_t kind; /* see elements.h */
    int64_t itemsize, sum_itemsize; /* of the dtype, and of the type of partial sums */
    int64_t num_parts, parts; /* address of so many struct part */
    int64_t as_they_are; /* whether every part's sum is its only source */
    int64_t block_count, fetched, wide; /* elements, and addresses, of a block: of another process, and of sums */
    double scale;
    int64_t lost, error; /* the process whose memory could not be read, and errno */
};

const struct part *part_with(const struct terms *terms, int64_t element);

/* Of the elements from start on: add incoming, if there is any, and all sources.
 *
 * partial: where the sum goes, in the type of sums; NULL: scaled, and rounded, it goes to the result.
 * Returns whether all could be read. */
int add_terms(struct terms *terms, const void *incoming, int64_t start, int64_t count, void *partial);

#endif
