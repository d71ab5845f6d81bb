/* What the module ``_native`` offers; ``_native.pyi`` says what the arguments are. */

#ifndef KVMPI_NATIVE_H
#define KVMPI_NATIVE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* What is longer is copied, or summed, without the interpreter's lock. */
#define LOCKED_BYTES (16 << 10)

extern const char copy_ranges_doc[], exchange_words_doc[], hand_over_doc[], move_rings_doc[], sleep_until_doc[],
    sum_segment_doc[], sum_slots_doc[], wakes_doc[], write_word_doc[];

PyObject *copy_ranges(PyObject *self, PyObject *args);
PyObject *exchange_words(PyObject *self, PyObject *args);
PyObject *hand_over_buffer(PyObject *self, PyObject *const *args, Py_ssize_t num_args);
PyObject *move_rings(PyObject *self, PyObject *args);
PyObject *sleep_until(PyObject *self, PyObject *args);
PyObject *sum_segment(PyObject *self, PyObject *args);
PyObject *sum_slots(PyObject *self, PyObject *const *args, Py_ssize_t num_args);
PyObject *wakes(PyObject *self, PyObject *none);
PyObject *write_word(PyObject *self, PyObject *const *args, Py_ssize_t num_args);

#endif
