/* Copies to memory that nobody reads soon. */

#include "native.h"

#include <stdint.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

static void copy_past_caches(char *to, const char *from, size_t nbytes)
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

const char copy_past_doc[] =
    "copy_past(out, source, /)\n--\n\n"
    "Copy to memory that is not read soon: past the caches, so that what was there need not be read before.";

PyObject *copy_past(PyObject *self, PyObject *const *args, Py_ssize_t num_args)
{
    if (num_args != 2) return PyErr_Format(PyExc_TypeError, "copy_past takes two arguments");
    Py_buffer out, source;
    int fits = 0;
    if (PyObject_GetBuffer(args[0], &out, PyBUF_WRITABLE)) return NULL;
    if (PyObject_GetBuffer(args[1], &source, PyBUF_SIMPLE) == 0) {
        fits = out.len == source.len;
        if (fits) {
            Py_BEGIN_ALLOW_THREADS;
            copy_past_caches(out.buf, source.buf, (size_t)out.len);
            Py_END_ALLOW_THREADS;
        } else {
            PyErr_Format(PyExc_ValueError, "%zd bytes cannot be copied to %zd", source.len, out.len);
        }
        PyBuffer_Release(&source);
    }
    PyBuffer_Release(&out);
    if (!fits) return NULL;
    Py_RETURN_NONE;
}
