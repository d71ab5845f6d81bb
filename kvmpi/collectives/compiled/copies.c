#define _GNU_SOURCE

#include "native.h"
#include "copies.h"

#include <errno.h>
#include <string.h>
#include <sys/types.h>
#ifdef __linux__
#include <sys/uio.h>
#endif
#ifdef __SSE2__
#include <emmintrin.h>
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

#ifdef __linux__
typedef ssize_t attach_t(pid_t, const struct iovec *, unsigned long, const struct iovec *, unsigned long, unsigned long);

static int attach(attach_t *copy, int64_t pid, int64_t address, char *here, int64_t nbytes)
{
    for (int64_t done = 0; done < nbytes;) {
        const struct iovec local = {here + done, (size_t)(nbytes - done)};
        const struct iovec remote = {(char *)address + done, (size_t)(nbytes - done)};
        const ssize_t count = copy((pid_t)pid, &local, 1, &remote, 1, 0);
        if (count <= 0) return count ? errno : EFAULT;
        done += count;
    }
    return 0;
}

int read_process(int64_t pid, int64_t address, char *into, int64_t nbytes)
{
    return attach(process_vm_readv, pid, address, into, nbytes);
}

int write_process(int64_t pid, int64_t address, const char *block, int64_t nbytes)
{
    return attach(process_vm_writev, pid, address, (char *)block, nbytes);
}
#else
int read_process(int64_t pid, int64_t address, char *into, int64_t nbytes) { return ENOSYS; }
int write_process(int64_t pid, int64_t address, const char *block, int64_t nbytes) { return ENOSYS; }
#endif

const char copy_ranges_doc[] =
    "copy_ranges(table, /)\n--\n\n"
    "Copy bytes, range by range. table: rows of three 64-bit integers: address to, address from, number of bytes.";

PyObject *copy_ranges(PyObject *self, PyObject *table)
{
    Py_buffer rows;
    if (PyObject_GetBuffer(table, &rows, PyBUF_SIMPLE)) return NULL;
    const int fits = rows.len % (3 * sizeof(int64_t)) == 0;
    if (fits) {
        Py_BEGIN_ALLOW_THREADS;
        const int64_t *row = rows.buf, *end = row + rows.len / (Py_ssize_t)sizeof(int64_t);
        for (; row < end; row += 3) memcpy((char *)row[0], (const char *)row[1], (size_t)row[2]);
        Py_END_ALLOW_THREADS;
    }
    PyBuffer_Release(&rows);
    if (!fits) return PyErr_Format(PyExc_ValueError, "not rows of three numbers");
    Py_RETURN_NONE;
}
