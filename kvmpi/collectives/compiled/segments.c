/* Sums over the ranks of a host: a rank's segment of the result, delivered block by block, as shared.py says. */

#include "native.h"
#include "copies.h"
#include "handover.h"
#include "terms.h"

#include <string.h>

/* What becomes of a segment: native.py has these once more. */
enum { DELIVERED, NOT_READ, NOT_WRITTEN, GIVEN_UP };

/* A block of a result goes to everybody while it is in the cache. */
static int deliver(struct terms *terms, const struct part *part, int64_t offset, int64_t nbytes)
{
    const char *block = (char *)part->out + offset;
    for (int64_t i = 0; i < part->num_targets; i++) {
        const struct target *target = (const struct target *)part->targets + i;
        char *to = (char *)target->address + offset;
        if (target->given_up && __atomic_load_n((int64_t *)target->given_up, __ATOMIC_ACQUIRE)) return GIVEN_UP;
        if (target->pid) {
            terms->error = write_process(target->pid, target->address + offset, block, nbytes);
            if (terms->error) {
                terms->lost = target->pid;
                return NOT_WRITTEN;
            }
        } else if (target->given_up) {
            hand_over(to, block, (size_t)nbytes);
        } else if (target->past_caches) {
            copy_past_caches(to, block, (size_t)nbytes);
        } else {
            memcpy(to, block, (size_t)nbytes);
        }
    }
    return DELIVERED;
}

static int sum_and_deliver(struct terms *terms, int64_t start, int64_t stop)
{
    for (int64_t first = start, end; first < stop; first = end) {
        const struct part *part = part_with(terms, first);
        end = part->stop < stop ? part->stop : stop;
        if (end > first + terms->block_count) end = first + terms->block_count;
        if (!add_terms(terms, NULL, first, end - first, NULL)) return NOT_READ;
        const int result = deliver(terms, part, (first - part->start) * terms->itemsize, (end - first) * terms->itemsize);
        if (result != DELIVERED) return result;
    }
    return DELIVERED;
}

const char sum_segment_doc[] =
    "sum_segment(terms, start, stop, /)\n--\n\n"
    "Sum the elements from start to stop, and copy the result to all targets: 0 when that is done; 1 or 2 when another\n"
    "process's memory could not be read or written, ``lost`` of the terms; 3 when somebody has given up.\n\n"
    "terms: memory of native.TERMS.";

PyObject *sum_segment(PyObject *self, PyObject *args)
{
    Py_buffer terms;
    long long start, stop;
    int result = 0;
    if (!PyArg_ParseTuple(args, "w*LL", &terms, &start, &stop)) return NULL;
    const int fits = terms.len == sizeof(struct terms);
    if (fits) {
        Py_BEGIN_ALLOW_THREADS;
        result = sum_and_deliver(terms.buf, start, stop);
        Py_END_ALLOW_THREADS;
    }
    PyBuffer_Release(&terms);
    if (!fits) return PyErr_Format(PyExc_ValueError, "not the memory of native.TERMS");
    return PyLong_FromLong(result);
}
