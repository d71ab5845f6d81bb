/* What words.h promises, with Linux's futexes; elsewhere nobody sleeps. */

#include "native.h"
#include "words.h"

#include <time.h>

#if defined(__linux__) && defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define HAS_FUTEX 1
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
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

/* So often is looked for an answer that does not come. */
#define MOST_POLLS 100000000

const char exchange_words_doc[] =
    "exchange_words(own, other, rounds, times, begins, /)\n--\n\n"
    "Answer another thread or process that does the same with the two words, given by their addresses, both 0 at first:\n"
    "times times so many rounds there and back. Seconds that the quickest of these took a round; -1.0 without an answer.";

PyObject *exchange_words(PyObject *self, PyObject *args)
{
    unsigned long long own, other;
    long long rounds, times;
    int begins;
    double least_s = -1;
    if (!PyArg_ParseTuple(args, "KKLLp", &own, &other, &rounds, &times, &begins)) return NULL;
    Py_BEGIN_ALLOW_THREADS;
    int64_t *mine = (int64_t *)(uintptr_t)own, *theirs = (int64_t *)(uintptr_t)other, number = 0, polls = 0;
    for (long long i = 0; i < times && polls <= MOST_POLLS; i++) {
        struct timespec start, stop;
        timespec_get(&start, TIME_UTC);
        for (long long round = 0; round < rounds && polls <= MOST_POLLS; round++) {
            number++;
            if (begins) __atomic_store_n(mine, number, __ATOMIC_RELEASE);
            for (polls = 0; __atomic_load_n(theirs, __ATOMIC_ACQUIRE) < number && polls <= MOST_POLLS;) polls++;
            if (!begins && polls <= MOST_POLLS) __atomic_store_n(mine, number, __ATOMIC_RELEASE);
        }
        timespec_get(&stop, TIME_UTC);
        const double s = ((double)(stop.tv_sec - start.tv_sec) + 1e-9 * (double)(stop.tv_nsec - start.tv_nsec)) / (double)rounds;
        if (polls > MOST_POLLS) least_s = -1;
        else if (least_s < 0 || s < least_s) least_s = s;
    }
    Py_END_ALLOW_THREADS;
    return PyFloat_FromDouble(least_s);
}
