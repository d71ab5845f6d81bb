/* Copies between processes, and (for Python) of many ranges at once. */

#ifndef KVMPI_COPIES_H
#define KVMPI_COPIES_H

#include <stdint.h>

/* Cross-memory attach: see cross_memory.py. What is at address belongs to process pid. 0, or errno. */
int read_process(int64_t pid, int64_t address, char *into, int64_t nbytes);
int write_process(int64_t pid, int64_t address, const char *block, int64_t nbytes);

#endif
