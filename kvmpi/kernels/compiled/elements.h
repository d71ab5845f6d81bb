/* Arithmetic on vectors of every dtype that kvmpi carries, with the results of kernels/host.py, to the bit. */

#ifndef KVMPI_ELEMENTS_H
#define KVMPI_ELEMENTS_H

#include <stdint.h>

/* A dtype: a character of host.KINDS. Half types add up in float, all others in themselves. */
typedef char kind_t;

/* into = total + own; into may be total. What adds up has the type of sums, own that of the dtype. */
void add(kind_t kind, void *into, const void *total, const void *own, int64_t n);

/* into = own, in the type of sums. */
void widen(kind_t kind, void *into, const void *own, int64_t n);

/* total *= by, of float types. */
void scale(kind_t kind, void *total, double by, int64_t n);

/* out = total, of half types, rounded to nearest even; every NaN becomes the positive quiet one. */
void narrow(kind_t kind, void *out, const void *total, int64_t n);

int is_half(kind_t kind);

#endif
