/* Copies to memory that other cores read. */

#ifndef KVMPI_HANDOVER_H
#define KVMPI_HANDOVER_H

#include <stddef.h>
#include <stdint.h>

/* As memcpy, with stores that leave the caches at once. What was there before is not fetched, nor are the cores asked
 * line by line that have it in theirs. */
void copy_past_caches(char *to, const char *from, size_t nbytes);

/* As memcpy, to what another core has read before and reads next. Stores into caches make that quick between threads of
 * a core, and cores that share a cache. Between others each line may cost a way to the other cache and back: twelve
 * times as long as stores past the caches, on some processors. So both ways are timed, and the way past the caches is
 * taken where that saves more than it costs the reader. */
void hand_over(char *to, const char *from, size_t nbytes);

/* Of copies of about one size: what each way has taken lately, and which one is taken. All 0 at first. */
struct habit {
    int64_t costs[2]; /* of stores into the caches, and past them, for so many bytes; 0: not known */
    int32_t way; /* which of the two */
    int32_t left, every; /* copies until the other way is tried, and from one such time to the next */
};

/* Which way the next copy goes. */
int way_of_next(struct habit *habit);

/* It has gone that way, and taken so long. */
void learn(struct habit *habit, int way, int64_t cost);

#endif
