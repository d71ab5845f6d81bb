#include "native.h"
#include "handover.h"

#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#include <x86intrin.h>
#endif

void copy_past_caches(char *to, const char *from, size_t nbytes)
{
#ifdef __SSE2__
    const size_t before = -(uintptr_t)to & 15;
    if (before < nbytes) {
        memcpy(to, from, before);
        to += before, from += before, nbytes -= before;
        for (; nbytes >= 64; to += 64, from += 64, nbytes -= 64)
            for (int i = 0; i < 64; i += 16)
                _mm_stream_si128((__m128i *)(to + i), _mm_loadu_si128((const __m128i *)(from + i)));
        _mm_sfence(); /* these stores come in no order with those that follow */
    }
#endif
    memcpy(to, from, nbytes);
}

/* The other way is tried after so many copies, then after twice as many, as long as it stays the slower one. */
enum { FIRST_TRIAL = 16, RAREST_TRIAL = 1024 };

int way_of_next(struct habit *habit)
{
    if (!habit->costs[0]) return 0;
    if (!habit->costs[1]) return 1;
    if (habit->left-- > 0) return habit->way;
    habit->every = habit->every < FIRST_TRIAL ? FIRST_TRIAL : habit->every < RAREST_TRIAL ? 2 * habit->every : RAREST_TRIAL;
    habit->left = habit->every;
    return !habit->way;
}

void learn(struct habit *habit, int way, int64_t cost)
{
    int64_t *known = &habit->costs[way];
    if (!*known) {
        *known = cost ? cost : 1;
    } else if (way == habit->way) {
        /* Who is interrupted takes long, whatever the way. */
        *known += ((cost < 2 * *known ? cost : 2 * *known) - *known) / 8;
    } else {
        *known = cost < *known ? cost : (*known + cost) / 2; /* it is tried too rarely to be learnt slowly */
    }
    const int other = !habit->way;
    if (habit->costs[other] && habit->costs[other] < habit->costs[habit->way] - habit->costs[habit->way] / 8) {
        habit->way = other;
        habit->every = habit->left = FIRST_TRIAL;
    }
}

#ifdef __SSE2__
/* Smaller copies are over before anything else matters. */
enum { LEAST_BYTES = 1 << 10, COST_OF_BYTES = 64 << 10, SIZES = 64 };
#endif

void hand_over(char *to, const char *from, size_t nbytes)
{
#ifdef __SSE2__
    /* Of each thread, whose calls are alike. */
    static _Thread_local struct habit habits[SIZES];
    if (nbytes >= LEAST_BYTES) {
        struct habit *habit = &habits[63 - __builtin_clzll(nbytes)];
        const int way = way_of_next(habit);
        const uint64_t start = __rdtsc();
        if (way) copy_past_caches(to, from, nbytes);
        else memcpy(to, from, nbytes);
        /* Who reads it next takes as long once more where it comes from memory. */
        const double cycles = (double)(__rdtsc() - start) * (way ? 2 : 1);
        learn(habit, way, (int64_t)(cycles * COST_OF_BYTES / (double)nbytes));
        return;
    }
#endif
    memcpy(to, from, nbytes);
}

const char hand_over_doc[] =
    "hand_over(to, source, /)\n--\n\n"
    "Copy the bytes of one contiguous buffer to another one as long, which another core reads next.";

PyObject *hand_over_buffer(PyObject *self, PyObject *const *args, Py_ssize_t num_args)
{
    Py_buffer to, from;
    if (num_args != 2) return PyErr_Format(PyExc_TypeError, "hand_over takes two arguments");
    if (PyObject_GetBuffer(args[0], &to, PyBUF_WRITABLE)) return NULL;
    if (PyObject_GetBuffer(args[1], &from, PyBUF_SIMPLE)) {
        PyBuffer_Release(&to);
        return NULL;
    }
    const int fits = to.len == from.len;
    if (fits && to.len <= LOCKED_BYTES) {
        hand_over(to.buf, from.buf, (size_t)to.len);
    } else if (fits) {
        Py_BEGIN_ALLOW_THREADS;
        hand_over(to.buf, from.buf, (size_t)to.len);
        Py_END_ALLOW_THREADS;
    }
    PyBuffer_Release(&from);
    PyBuffer_Release(&to);
    if (!fits) return PyErr_Format(PyExc_ValueError, "buffers of different lengths");
    Py_RETURN_NONE;
}
