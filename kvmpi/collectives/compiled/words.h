/* Words of memory that processes share, which one of them writes and others wait for. Each has a second word behind it,
 * which says that somebody sleeps until it changes. */

#ifndef KVMPI_WORDS_H
#define KVMPI_WORDS_H

#include <stdint.h>

/* Write a word, so that all that was written before is seen by whoever sees it, and wake those who sleep. */
void say_word(int64_t *word, int64_t value);

#endif
