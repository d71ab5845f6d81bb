/* What words.h promises, with Linux's futexes; elsewhere nobody sleeps. */

#include "native.h"
#include "words.h"

#if defined(__linux__) && defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define HAS_FUTEX 1
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* A futex has 32 bits: the lower half of a word, which is what changes. The memory may be another process's as well. */
static long futex(int64_t *word, int op, uint32_t value, const struct timespec *timeout)
{
    return syscall(SYS_futex, (uint32_t *)word, op, value, timeout, NULL, 0);
}
#else
#define HAS_FUTEX 0
#endif

void say_word(int64_t *word, int64_t value)
{
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
#if HAS_FUTEX
    /* Either this sees who is about to sleep, or they see the word. */
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (__atomic_load_n(word + 1, __ATOMIC_RELAXED)) {
        __atomic_store_n(word + 1, 0, __ATOMIC_RELAXED);
        futex(word, FUTEX_WAKE, INT_MAX, NULL);
    }
#endif
}

const char wakes_doc[] = "wakes()\n--\n\nWhether ``write_word`` wakes those in ``sleep_until``.";

PyObject *wakes(PyObject *self, PyObject *none) { return PyBool_FromLong(HAS_FUTEX); }

const char write_word_doc[] =
    "write_word(word, value, /)\n--\n\n"
    "Write a word of shared memory, given by its address, and wake those who sleep until it changes; the word behind it\n"
    "says whether there are any.";

PyObject *write_word(PyObject *self, PyObject *const *args, Py_ssize_t num_args)
{
    if (num_args != 2) return PyErr_Format(PyExc_TypeError, "write_word takes two arguments");
    int64_t *word = PyLong_AsVoidPtr(args[0]);
    const int64_t value = PyLong_AsLongLong(args[1]);
    if (PyErr_Occurred()) return NULL;
    say_word(word, value);
    Py_RETURN_NONE;
}

const char sleep_until_doc[] =
    "sleep_until(word, value, seconds, /)\n--\n\n"
    "Return when a word of shared memory, given by its address, is so large, or has changed, or seconds have passed.";

PyObject *sleep_until(PyObject *self, PyObject *args)
{
    unsigned long long address;
    long long value;
    double seconds;
    if (!PyArg_ParseTuple(args, "KLd", &address, &value, &seconds)) return NULL;
#if HAS_FUTEX
    int64_t *word = (int64_t *)(uintptr_t)address;
    const struct timespec timeout = {(time_t)seconds, (long)(1e9 * (seconds - (double)(time_t)seconds))};
    Py_BEGIN_ALLOW_THREADS;
    __atomic_store_n(word + 1, 1, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    const int64_t found = __atomic_load_n(word, __ATOMIC_ACQUIRE);
    if (found < value) futex(word, FUTEX_WAIT, (uint32_t)found, &timeout);
    Py_END_ALLOW_THREADS;
#endif
    Py_RETURN_NONE;
}
