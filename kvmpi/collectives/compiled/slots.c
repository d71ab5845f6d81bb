/* Sums of small vectors of the ranks of a host: what shared.py does in slots, where most of the time would be the
 * interpreter's. */

#include "native.h"
#include "elements.h"

#include <string.h>

/* So often is looked whether the others are there: what takes longer is left to whoever knows how to wait. */
#define POLLS 200
/* What is longer is summed without the interpreter's lock. */
#define LOCKED_BYTES (16 << 10)
#define BLOCK_BYTES 4096

/* Ranks of one host. The addresses of each one's page, and of its slot for calls of this kind, follow. */
struct slots {
    int64_t num_ranks, index; /* of them, and this one's number */
    int64_t posted, finished; /* words of a page: the last call that its rank has offered data in, is through with */
    int64_t kind, count, itemsize;
    int64_t addresses[];
};

static int64_t *page(const struct slots *slots, int64_t rank) { return (int64_t *)slots->addresses[rank]; }

static char *slot(const struct slots *slots, int64_t rank) { return (char *)slots->addresses[slots->num_ranks + rank]; }

static int64_t last_posted(const struct slots *slots, int64_t rank)
{
    return __atomic_load_n(page(slots, rank) + slots->posted, __ATOMIC_ACQUIRE);
}

static int all_posted(const struct slots *slots, int64_t call)
{
    for (int64_t rank = 0; rank < slots->num_ranks; rank++)
        if (last_posted(slots, rank) < call) return 0;
    return 1;
}

/* In rank order; only sums of all ranks are written to out, since others may have the same memory. */
static void add_up(const struct slots *slots, char *out)
{
    _Alignas(64) char block[BLOCK_BYTES];
    const int64_t total = slots->count * slots->itemsize;
    for (int64_t first = 0; first < total; first += BLOCK_BYTES) {
        const int64_t nbytes = total - first < BLOCK_BYTES ? total - first : BLOCK_BYTES;
        const char *sum = slot(slots, 0) + first;
        for (int64_t rank = 1; rank < slots->num_ranks; rank++) {
            char *into = rank == slots->num_ranks - 1 ? out + first : block;
            add((kind_t)slots->kind, into, sum, slot(slots, rank) + first, nbytes / slots->itemsize);
            sum = into;
        }
    }
}

enum { NOT_BEGUN, SUMMED, OFFERED };

static int sum_in_slots(const struct slots *slots, int64_t call, const char *vector, char *out, int offered)
{
    if (!offered) {
        /* The slot is that of the call before last. A rank that has begun the last one is through with it. */
        if (!all_posted(slots, call - 1)) return NOT_BEGUN;
        memcpy(slot(slots, slots->index), vector, (size_t)(slots->count * slots->itemsize));
        __atomic_store_n(page(slots, slots->index) + slots->posted, call, __ATOMIC_RELEASE);
    }
    for (int i = 0; !all_posted(slots, call); i++) {
        if (i == POLLS) return OFFERED;
#if defined(__x86_64__) || defined(__i386__)
        __builtin_ia32_pause();
#endif
    }
    add_up(slots, out);
    __atomic_store_n(page(slots, slots->index) + slots->finished, call, __ATOMIC_RELEASE);
    return SUMMED;
}

const char sum_slots_doc[] =
    "sum_slots(slots, call, vector, out, offered, /)\n--\n\n"
    "Sum small vectors of the ranks of a host: 1 when that is done, 2 when others are not there yet, 0 when the call\n"
    "could not begin.\n\n"
    "slots: address of a struct slots. offered: whether this call was made before, and returned 2.";

PyObject *sum_slots(PyObject *self, PyObject *const *args, Py_ssize_t num_args)
{
    if (num_args != 5) return PyErr_Format(PyExc_TypeError, "sum_slots takes five arguments");
    const struct slots *slots = PyLong_AsVoidPtr(args[0]);
    const int64_t call = PyLong_AsLongLong(args[1]);
    const int offered = PyObject_IsTrue(args[4]);
    Py_buffer vector, out;
    int result = -1;
    if (PyErr_Occurred() || PyObject_GetBuffer(args[2], &vector, PyBUF_SIMPLE)) return NULL;
    if (PyObject_GetBuffer(args[3], &out, PyBUF_WRITABLE) == 0) {
        const int64_t nbytes = slots->count * slots->itemsize;
        if (vector.len != nbytes || out.len != nbytes) {
            PyErr_Format(PyExc_ValueError, "vectors of other lengths than these slots are for");
        } else if (nbytes <= LOCKED_BYTES) {
            result = sum_in_slots(slots, call, vector.buf, out.buf, offered);
        } else {
            Py_BEGIN_ALLOW_THREADS;
            result = sum_in_slots(slots, call, vector.buf, out.buf, offered);
            Py_END_ALLOW_THREADS;
        }
        PyBuffer_Release(&out);
    }
    PyBuffer_Release(&vector);
    return result < 0 ? NULL : PyLong_FromLong(result);
}
