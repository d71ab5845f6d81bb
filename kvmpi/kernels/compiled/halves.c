/* The module kvmpi.kernels._halves: conversions of half types, for host.py. ``_halves.pyi`` says what the arguments are. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "elements.h"

typedef void convert_t(kind_t kind, void *into, const void *from, int64_t n);

/* ``count`` elements of ``width`` bytes each. */
static int is_of(const Py_buffer *memory, Py_ssize_t count, Py_ssize_t width) { return memory->len == count * width; }

static PyObject *convert(PyObject *args, convert_t *how, Py_ssize_t width, Py_ssize_t from_width)
{
    int kind;
    Py_buffer into, from;
    if (!PyArg_ParseTuple(args, "Cw*y*", &kind, &into, &from)) return NULL;
    const Py_ssize_t count = from.len / from_width;
    const int fits = is_half((kind_t)kind) && is_of(&from, count, from_width) && is_of(&into, count, width);
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        how((kind_t)kind, into.buf, from.buf, count);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&into);
    PyBuffer_Release(&from);
    if (!fits) {
        PyErr_SetString(PyExc_ValueError, "expected a half type and vectors of one length");
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *widen_halves(PyObject *self, PyObject *args) { return convert(args, widen, 4, 2); }

static PyObject *narrow_to_halves(PyObject *self, PyObject *args) { return convert(args, narrow, 2, 4); }

static PyMethodDef methods[] = {
    {"widen", widen_halves, METH_VARARGS, "widen(kind, into, halves): into = halves, exactly; without the interpreter lock."},
    {"narrow", narrow_to_halves, METH_VARARGS, "narrow(kind, into, floats): into = floats, rounded to nearest even."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_halves", "Conversions of half types.", -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__halves(void) { return PyModule_Create(&module); }
