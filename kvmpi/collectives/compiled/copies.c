#define _GNU_SOURCE

#include "native.h"
#include "copies.h"
#include "handover.h"

#include <errno.h>
#include <string.h>
#include <sys/types.h>
#ifdef __linux__
#include <sys/uio.h>
#endif

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
    "copy_ranges(table, for_others, /)\n--\n\n"
    "Copy bytes, range by range. table: rows of three 64-bit integers: address to, address from, number of bytes.\n"
    "for_others: whether others read them next.";

PyObject *copy_ranges(PyObject *self, PyObject *args)
{
    Py_buffer rows;
    int for_others;
    if (!PyArg_ParseTuple(args, "y*p", &rows, &for_others)) return NULL;
    const int fits = rows.len % (3 * sizeof(int64_t)) == 0;
    if (fits) {
        Py_BEGIN_ALLOW_THREADS;
        const int64_t *row = rows.buf, *end = row + rows.len / (Py_ssize_t)sizeof(int64_t);
        for (; row < end; row += 3) {
            char *to = (char *)row[0];
            const char *from = (const char *)row[1];
            if (for_others) hand_over(to, from, (size_t)row[2]);
            else memcpy(to, from, (size_t)row[2]);
        }
        Py_END_ALLOW_THREADS;
    }
    PyBuffer_Release(&rows);
    if (!fits) return PyErr_Format(PyExc_ValueError, "not rows of three numbers");
    Py_RETURN_NONE;
}
