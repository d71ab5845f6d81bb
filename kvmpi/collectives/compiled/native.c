/* The module kvmpi.collectives._native: compiled parts of the collectives. native.py declares their structs once more. */

#include "native.h"

static PyMethodDef methods[] = {
    {"copy_ranges", copy_ranges, METH_VARARGS, copy_ranges_doc},
    {"exchange_words", exchange_words, METH_VARARGS, exchange_words_doc},
    {"hand_over", (PyCFunction)(void (*)(void))hand_over_buffer, METH_FASTCALL, hand_over_doc},
    {"move_rings", move_rings, METH_VARARGS, move_rings_doc},
    {"sleep_until", sleep_until, METH_VARARGS, sleep_until_doc},
    {"sum_segment", sum_segment, METH_VARARGS, sum_segment_doc},
    {"sum_slots", (PyCFunction)(void (*)(void))sum_slots, METH_FASTCALL, sum_slots_doc},
    {"wakes", wakes, METH_NOARGS, wakes_doc},
    {"write_word", (PyCFunction)(void (*)(void))write_word, METH_FASTCALL, write_word_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_native", "Compiled parts of the collectives.", -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModule_Create(&module); }
