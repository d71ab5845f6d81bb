/* The module kvmpi.handover._copies: copies for Python; ``_copies.pyi`` says what the arguments are. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "handover.h"

/* What is copied sooner than another thread gets the interpreter's lock. */
enum { LOCKED_BYTES = 16 << 10 };

static const char hand_over_doc[] =
    "hand_over(to, source, /)\n--\n\n"
    "Copy the bytes of one contiguous buffer to another one as long, which another core reads next.";

static PyObject *hand_over_of(PyObject *self, PyObject *const *args, Py_ssize_t num_args)
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

static PyMethodDef methods[] = {
    {"hand_over", (PyCFunction)(void (*)(void))hand_over_of, METH_FASTCALL, hand_over_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_copies", "Compiled copies.", -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__copies(void) { return PyModule_Create(&module); }
