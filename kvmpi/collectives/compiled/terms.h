/* What the ranks of one process, or of one host, contribute to a sum, range by range, and where the sum goes:
 * terms.HostTerms, host_sum.HostSum and host_sum.Delivery. */

#ifndef KVMPI_TERMS_H
#define KVMPI_TERMS_H

#include <stdint.h>

/* The next four are declared in native.py once more. */

struct source {
    int64_t address;
    int64_t pid; /* of the process whose memory that is; 0: it can be read here */
};

/* Where a result is delivered to. */
struct target {
    int64_t address;
    int64_t pid; /* of the process whose memory that is; 0: it can be written here */
    int64_t given_up; /* address of a word that is not 0 once nothing may be written there any more; or 0, where
                       * no other process reads */
    int64_t past_caches; /* whether nobody reads there soon */
};

/* Elements that lie one behind the other, in the result, in every vector and in every target. */
struct part {
    int64_t start, stop; /* which of all elements; the next part begins where this one ends */
    int64_t out; /* address of the result's first */
    int64_t num_sources, sources; /* of vectors; address of so many struct source, the first of which has no pid */
    int64_t num_targets, targets; /* address of so many struct target; only for sum_segment */
};

struct terms {
    int64_t kind; /* see elements.h */
    int64_t itemsize, sum_itemsize; /* of the dtype, and of partial sums: the same, or float32 for half types */
    int64_t num_parts, parts; /* address of so many struct part */
    int64_t as_they_are; /* whether every part's sum is its only source */
    int64_t block_count, fetched, wide; /* elements, and addresses, of a block: of another process, and of sums */
    double scale;
    int64_t lost, error; /* the process whose memory could not be read, or written, and errno */
};

const struct part *part_with(const struct terms *terms, int64_t element);

/* Of the elements from start on: add incoming, if there is any, and all sources.
 *
 * partial: where the sum goes, in the type of sums; NULL: scaled, and rounded, it goes to the result.
 * Returns whether all could be read. */
int add_terms(struct terms *terms, const void *incoming, int64_t start, int64_t count, void *partial);

#endif
