/* Copies: to memory that nobody reads soon, between processes, and (for Python) of many ranges at once. */

#ifndef KVMPI_COPIES_H
#define KVMPI_COPIES_H

#include <stddef.h>
#include <stdint.h>

/* So that what was there before need not be read. */
void copy_past_caches(char *to, const char *from, size_t nbytes);

/* Cross-memory attach: see cross_memory.py. What is at address belongs to process pid. 0, or errno. */
int read_process(int64_t pid, int64_t address, char *into, int64_t nbytes);
int write_process(int64_t pid, int64_t address, const char *block, int64_t nbytes);

#endif
