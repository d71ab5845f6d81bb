/* Sums of small vectors of the ranks of a host: what shared.py does in slots, where most of the time would be the
 * interpreter's. */

#include "native.h"
#include "elements.h"
#include "handover.h"
#include "words.h"

#include <string.h>
#ifdef __unix__
#include <sched.h>
#include <time.h>
#endif

/* So often each lets the others run that want its core; what takes longer is left to whoever knows how to wait. */
#define YIELDS 10
/* A yield that takes longer has met somebody who computes: nobody yields here for a while then, for twice as long after
 * the next, as waiting.py does. */
#define LONG_YIELD_NS 500000
#define SHORTEST_BUSY_NS 50000000
#define LONGEST_BUSY_NS 800000000
#define BLOCK_BYTES 4096

/* Ranks of one host. The addresses of each one's page, and of its slot for calls of this kind, follow. */
struct slots {
    int64_t num_ranks, index; /* of them, and this one's number */
    /* Words of a page: the last call that its rank has offered data in, has summed its part of, is through with. */
    int64_t posted, summed, finished;
    int64_t kind, count, itemsize;
    int64_t part; /* elements that a rank sums for all; 0 if each sums all of them itself */
    int64_t polls; /* so often is looked whether the others are there before these are let run */
    int64_t is_crowded; /* whether they may want this rank's core */
    int64_t addresses[];
};

static int64_t *page(const struct slots *slots, int64_t rank) { return (int64_t *)slots->addresses[rank]; }

static char *slot(const struct slots *slots, int64_t rank) { return (char *)slots->addresses[slots->num_ranks + rank]; }

static int all_have(const struct slots *slots, int64_t word, int64_t call)
{
    for (int64_t rank = 0; rank < slots->num_ranks; rank++)
        if (__atomic_load_n(page(slots, rank) + word, __ATOMIC_ACQUIRE) < call) return 0;
    return 1;
}

static int soon_all_have(const struct slots *slots, int64_t word, int64_t call)
{
    for (int64_t i = 0; !all_have(slots, word, call); i++) {
        if (i >= slots->polls) return 0;
#if defined(__x86_64__) || defined(__i386__)
        __builtin_ia32_pause();
#endif
    }
    return 1;
}

static void say(const struct slots *slots, int64_t word, int64_t call)
{
    say_word(page(slots, slots->index) + word, call);
}

/* The first byte that a rank sums for all, which is the end of those of the rank before it. */
static int64_t begin_of(const struct slots *slots, int64_t rank)
{
    const int64_t begin = rank * slots->part;
    return (begin < slots->count ? begin : slots->count) * slots->itemsize;
}

/* Bytes from start to stop, in rank order; only sums of all ranks are written to out, since others may have the same
 * memory. Which may be one of the slots. */
static void add_up(const struct slots *slots, int64_t start, int64_t stop, char *out)
{
    _Alignas(64) char block[BLOCK_BYTES];
    for (int64_t first = start; first < stop; first += BLOCK_BYTES) {
        const int64_t nbytes = stop - first < BLOCK_BYTES ? stop - first : BLOCK_BYTES;
        const char *sum = slot(slots, 0) + first;
        for (int64_t rank = 1; rank < slots->num_ranks; rank++) {
            char *into = rank == slots->num_ranks - 1 ? out + first : block;
            add((kind_t)slots->kind, into, sum, slot(slots, rank) + first, nbytes / slots->itemsize);
            sum = into;
        }
    }
}

/* How far a call is: native.py has these once more. */
enum { NOT_BEGUN, SUMMED, OFFERED, OWN_SUMMED };

static int sum_in_slots(const struct slots *slots, int64_t call, const char *vector, char *out, int so_far)
{
    const int64_t all = slots->count * slots->itemsize;
    if (so_far == NOT_BEGUN) {
        /* The slot is that of the call before last. A rank that has begun the last one is through with it. */
        if (!all_have(slots, slots->posted, call - 1)) return NOT_BEGUN;
        hand_over(slot(slots, slots->index), vector, (size_t)all);
        say(slots, slots->posted, call);
    }
    if (so_far != OWN_SUMMED) {
        if (!soon_all_have(slots, slots->posted, call)) return OFFERED;
        if (!slots->part) {
            add_up(slots, 0, all, out);
        } else {
            /* Over this rank's own numbers, which nobody else reads. */
            add_up(slots, begin_of(slots, slots->index), begin_of(slots, slots->index + 1), slot(slots, slots->index));
            say(slots, slots->summed, call);
        }
    }
    if (slots->part) {
        if (!soon_all_have(slots, slots->summed, call)) return OWN_SUMMED;
        for (int64_t rank = 0; rank < slots->num_ranks; rank++) {
            const int64_t begin = begin_of(slots, rank);
            memcpy(out + begin, slot(slots, rank) + begin, (size_t)(begin_of(slots, rank + 1) - begin));
        }
    }
    say(slots, slots->finished, call);
    return SUMMED;
}

#ifdef __unix__
static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

/* Whether all have come so far once those have run that want this core. */
static int all_have_run(const struct slots *slots, int64_t word, int64_t call)
{
    static _Thread_local int64_t busy_until_ns, busy_for_ns = SHORTEST_BUSY_NS;
    int64_t start_ns = slots->is_crowded ? now_ns() : 0;
    if (!slots->is_crowded || start_ns < busy_until_ns) return 0;
    for (int i = 0; i < YIELDS; i++) {
        sched_yield();
        if (all_have(slots, word, call)) {
            busy_for_ns = SHORTEST_BUSY_NS;
            return 1;
        }
        const int64_t stop_ns = now_ns();
        if (stop_ns - start_ns >= LONG_YIELD_NS) {
            busy_until_ns = stop_ns + busy_for_ns;
            busy_for_ns = 2 * busy_for_ns < LONGEST_BUSY_NS ? 2 * busy_for_ns : LONGEST_BUSY_NS;
            return 0;
        }
        start_ns = stop_ns;
    }
    return 0;
}
#else
static int all_have_run(const struct slots *slots, int64_t word, int64_t call) { return 0; }
#endif

/* As sum_in_slots, while others run that may want this core. */
static int sum_with_others(const struct slots *slots, int64_t call, const char *vector, char *out, int so_far)
{
    for (;;) {
        so_far = sum_in_slots(slots, call, vector, out, so_far);
        if (so_far == SUMMED) return SUMMED;
        const int64_t awaited = so_far == NOT_BEGUN ? call - 1 : call;
        if (!all_have_run(slots, so_far == OWN_SUMMED ? slots->summed : slots->posted, awaited)) return so_far;
    }
}

const char sum_slots_doc[] =
    "sum_slots(slots, call, vector, out, so_far, /)\n--\n\n"
    "Sum small vectors of the ranks of a host: 1 when that is done, 2 when others are not there yet, 3 when they have\n"
    "not summed their parts yet, 0 when the call could not begin.\n\n"
    "slots: address of a struct slots. so_far: 0, or what this call has returned before.";

PyObject *sum_slots(PyObject *self, PyObject *const *args, Py_ssize_t num_args)
{
    if (num_args != 5) return PyErr_Format(PyExc_TypeError, "sum_slots takes five arguments");
    const struct slots *slots = PyLong_AsVoidPtr(args[0]);
    const int64_t call = PyLong_AsLongLong(args[1]);
    const int so_far = (int)PyLong_AsLong(args[4]);
    const int in_place = args[2] == args[3]; /* to ask an array for its memory takes longer than to sum little of it */
    Py_buffer vector, other, *out = in_place ? &vector : &other;
    int result = -1;
    if (PyErr_Occurred() || PyObject_GetBuffer(args[2], &vector, in_place ? PyBUF_WRITABLE : PyBUF_SIMPLE)) return NULL;
    if (in_place || PyObject_GetBuffer(args[3], out, PyBUF_WRITABLE) == 0) {
        const int64_t nbytes = slots->count * slots->itemsize;
        if (vector.len != nbytes || out->len != nbytes) {
            PyErr_Format(PyExc_ValueError, "vectors of other lengths than these slots are for");
        } else {
            result = nbytes > LOCKED_BYTES ? so_far : sum_in_slots(slots, call, vector.buf, out->buf, so_far);
            if (nbytes > LOCKED_BYTES || (slots->is_crowded && result != SUMMED)) {
                Py_BEGIN_ALLOW_THREADS;
                result = sum_with_others(slots, call, vector.buf, out->buf, result);
                Py_END_ALLOW_THREADS;
            }
        }
        if (!in_place) PyBuffer_Release(out);
    }
    PyBuffer_Release(&vector);
    return result < 0 ? NULL : PyLong_FromLong(result);
}
