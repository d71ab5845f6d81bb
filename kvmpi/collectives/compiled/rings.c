/* Rings over connections: what ring.py does, without the interpreter and its lock. They do not wait for whole chunks:
 * what has come of a chunk is added at once, and sent on. */

#include "native.h"
#include "elements.h"
#include "terms.h"

#include <errno.h>
#include <poll.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>

#ifndef MSG_NOSIGNAL
#define MSG_NOSIGNAL 0
#endif

#define MAX_RINGS 64
#define MAX_PIECES 16 /* of memory that one call of the system reads or writes */

/* start, stop, place among partial sums; -1: the result. See schedule.Schedule. */
typedef int64_t transfer[3];

/* native.py declares it once more. */
struct ring {
    int64_t in_fd, out_fd;
    int64_t receives, sends; /* addresses of num_transfers transfers each */
    int64_t num_transfers, num_chunks, num_kept, num_summed;
    int64_t piece_bytes; /* so much of a chunk wakes this rank, or all that is left of it */
    int64_t incoming, partials; /* addresses: room for a chunk that comes in, and for partial sums */
    int64_t progress, announced; /* address of a word that says how many chunks are final, added to this; 0: none */
    int64_t received, sent; /* transfers that are through */
    int64_t received_bytes, ready, sent_bytes; /* of the next one: come, elements come and added, gone */
    int64_t own; /* so many of the first step's are at hand: this rank's contribution */
    int64_t wake_bytes; /* as the system was told */
    int64_t in_error, out_error; /* errno of a broken connection; -1: it was closed */
};

enum { IDLE, MOVED, DONE, FAILED };

static const int64_t *nth(int64_t transfers, int64_t number) { return ((const transfer *)transfers)[number]; }

static int64_t count_of(const int64_t *transfer) { return transfer[1] - transfer[0]; }

/* Of the elements of a transfer of this number: first come the steps with partial sums. */
static int64_t itemsize_of(int64_t number, const struct ring *ring, const struct terms *terms)
{
    return number < ring->num_summed ? terms->sum_itemsize : terms->itemsize;
}

static char *partial_of(const int64_t *transfer, const struct ring *ring, const struct terms *terms)
{
    return transfer[2] < 0 ? NULL : (char *)ring->partials + transfer[2] * terms->sum_itemsize;
}

/* Where elements from this one on lie, in the result or in the vectors, but for the first skipped bytes. */
static int pieces_of(const struct terms *terms, int64_t element, int64_t skipped, int64_t nbytes, int in_result,
                     struct iovec *found)
{
    int number = 0;
    element += skipped / terms->itemsize;
    skipped %= terms->itemsize;
    while (nbytes > 0 && number < MAX_PIECES) {
        const struct part *part = part_with(terms, element);
        char *base = (char *)(in_result ? part->out : ((const struct source *)part->sources)->address);
        int64_t length = (part->stop - element) * terms->itemsize - skipped;
        if (length > nbytes) length = nbytes;
        found[number++] = (struct iovec){base + (element - part->start) * terms->itemsize + skipped, (size_t)length};
        element = part->stop;
        skipped = 0;
        nbytes -= length;
    }
    return number;
}

/* Whether the next transfer may be received: the partial sums that it replaces have gone, as in ring.py. */
static int has_room(const struct ring *ring)
{
    return ring->received >= ring->num_kept || ring->sent > ring->received - ring->num_chunks;
}

/* Add what has come of a chunk of partial sums since the last time; whether that went well. */
static int take(struct ring *ring, const int64_t *transfer, struct terms *terms)
{
    const int64_t done = ring->ready, count = ring->received_bytes / terms->sum_itemsize - done;
    const char *incoming = (char *)ring->incoming + done * terms->sum_itemsize;
    char *partial = partial_of(transfer, ring, terms);
    if (partial) partial += done * terms->sum_itemsize;
    ring->ready += count;
    return add_terms(terms, incoming, transfer[0] + done, count, partial);
}

/* A transfer has been received. */
static void next(struct ring *ring)
{
    ring->received++;
    ring->received_bytes = ring->ready = 0;
    if (ring->progress && ring->received > ring->num_kept)
        __atomic_store_n((int64_t *)ring->progress, ring->announced + ring->received - ring->num_kept,
                         __ATOMIC_RELEASE);
}

/* Receive once, and add; whether anything came. */
static int receive(struct ring *ring, struct terms *terms)
{
    const int64_t *transfer = nth(ring->receives, ring->received);
    const int64_t itemsize = itemsize_of(ring->received, ring, terms), nbytes = count_of(transfer) * itemsize;
    const int64_t left = nbytes - ring->received_bytes;
    const int sums = ring->received < ring->num_summed;
    struct iovec pieces[MAX_PIECES] = {{(char *)ring->incoming + ring->received_bytes, (size_t)left}};
    struct msghdr message = {.msg_iov = pieces, .msg_iovlen = 1};
    if (!sums) message.msg_iovlen = (size_t)pieces_of(terms, transfer[0], ring->received_bytes, left, 1, pieces);
    const ssize_t count = recvmsg((int)ring->in_fd, &message, MSG_DONTWAIT);
    if (count <= 0) {
        if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return 0;
        ring->in_error = count ? errno : -1;
        return 0;
    }
    ring->received_bytes += count;
    if (!sums) ring->ready = ring->received_bytes / itemsize;
    else if (!take(ring, transfer, terms)) return 0;
    if (ring->received_bytes == nbytes) next(ring);
    return 1;
}

/* How many elements of the next transfer to the right are at hand: each but those of the first step is what is received
 * a step before. */
static int64_t at_hand(const struct ring *ring)
{
    const int64_t source = ring->sent - ring->num_chunks;
    if (source > ring->received) return 0;
    return source == ring->received ? ring->ready : count_of(nth(ring->sends, ring->sent));
}

/* Where so many bytes of the next transfer to the right lie; 0 if a source could not be read. */
static int outgoing(struct ring *ring, struct terms *terms, int64_t nbytes, struct iovec *found)
{
    const int64_t *transfer = nth(ring->sends, ring->sent);
    char *partial = partial_of(transfer, ring, terms);
    const int own = ring->sent < ring->num_chunks;
    if (!partial || (own && terms->as_they_are))
        return pieces_of(terms, transfer[0], ring->sent_bytes, nbytes, !partial, found);
    if (own && ring->own == ring->sent) {
        if (!add_terms(terms, NULL, transfer[0], count_of(transfer), partial)) return 0;
        ring->own++;
    }
    *found = (struct iovec){partial + ring->sent_bytes, (size_t)nbytes};
    return 1;
}

/* Send what is at hand; whether anything went. ``full``: the system takes no more for now. */
static int send_on(struct ring *ring, struct terms *terms, int *full)
{
    int moved = 0;
    while (ring->sent < ring->num_transfers) {
        const int64_t itemsize = itemsize_of(ring->sent, ring, terms);
        const int64_t left = at_hand(ring) * itemsize - ring->sent_bytes;
        if (left > 0) {
            struct iovec pieces[MAX_PIECES];
            const int number = outgoing(ring, terms, left, pieces);
            struct msghdr message = {.msg_iov = pieces, .msg_iovlen = (size_t)number};
            int64_t asked = 0;
            for (int i = 0; i < number; i++) asked += (int64_t)pieces[i].iov_len;
            if (!number) return moved;
            const ssize_t count = sendmsg((int)ring->out_fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
            if (count < 0) {
                if (errno == EINTR) continue;
                if (errno == EAGAIN || errno == EWOULDBLOCK) *full = 1;
                else ring->out_error = errno;
                return moved;
            }
            moved = 1;
            ring->sent_bytes += count;
            if (count < asked) {
                *full = 1;
                return moved;
            }
            if (count < left) continue;
        }
        if (ring->sent_bytes < count_of(nth(ring->sends, ring->sent)) * itemsize) return moved;
        ring->sent++;
        ring->sent_bytes = 0;
        if (ring->own < ring->sent) ring->own = ring->sent;
    }
    return moved;
}

/* Let the system wake this rank when much of the next transfer is there. */
static void expect(struct ring *ring, const struct terms *terms)
{
#ifdef __linux__
    const int64_t count = count_of(nth(ring->receives, ring->received));
    int64_t wake_bytes = count * itemsize_of(ring->received, ring, terms) - ring->received_bytes;
    if (wake_bytes > ring->piece_bytes) wake_bytes = ring->piece_bytes;
    if (wake_bytes != ring->wake_bytes) {
        const int value = (int)wake_bytes;
        setsockopt((int)ring->in_fd, SOL_SOCKET, SO_RCVLOWAT, &value, sizeof value);
        ring->wake_bytes = wake_bytes;
    }
#endif
}

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* Move the rings on until all are done, nothing has moved for idle_ms, most_ms are over, a signal has come, or a
 * connection is broken. */
static int move(struct ring *rings, int num_rings, struct terms *terms, int idle_ms, int most_ms)
{
    struct pollfd asked[MAX_RINGS][2]; /* of each ring: to the right, from the left */
    int full[MAX_RINGS] = {0}, moved = 0;
    const double until = now() + 1e-3 * most_ms;
    for (;;) {
        int waits = 0;
        for (int i = 0; i < num_rings; i++) {
            struct ring *ring = &rings[i];
            while (ring->received < ring->num_transfers && !count_of(nth(ring->receives, ring->received))) next(ring);
            if (!full[i]) moved |= send_on(ring, terms, &full[i]);
            if (ring->out_error || terms->error) return FAILED;
            const int receives = ring->received < ring->num_transfers && has_room(ring);
            if (receives) expect(ring, terms);
            /* The system passes over descriptors below zero. */
            asked[i][0] = (struct pollfd){.fd = full[i] ? (int)ring->out_fd : -1, .events = POLLOUT};
            asked[i][1] = (struct pollfd){.fd = receives ? (int)ring->in_fd : -1, .events = POLLIN};
            waits |= full[i] || receives;
        }
        if (!waits) return DONE;
        if (poll(asked[0], (nfds_t)(2 * num_rings), idle_ms) <= 0) return moved ? MOVED : IDLE;
        for (int i = 0; i < num_rings; i++) {
            if (asked[i][0].revents) full[i] = 0;
            if (asked[i][1].revents) moved |= receive(&rings[i], terms);
            if (rings[i].in_error || terms->error) return FAILED;
        }
        if (now() >= until) return moved ? MOVED : IDLE;
    }
}

const char move_rings_doc[] =
    "move_rings(rings, terms, idle_ms, most_ms, /)\n--\n\n"
    "Move rings on: 2 when all are done, 1 or 0 when they are not and something or nothing was moved, 3 when a\n"
    "connection is broken, of which the ring's ``in_error`` or ``out_error`` tells, or a source could not be read,\n"
    "``lost`` of the terms.\n\n"
    "rings, terms: memory of native.RING and native.TERMS. idle_ms: how long to wait for something to move; most_ms:\n"
    "after which to return in any case.";

PyObject *move_rings(PyObject *self, PyObject *args)
{
    Py_buffer rings, terms;
    int idle_ms, most_ms, result = 0;
    if (!PyArg_ParseTuple(args, "w*w*ii", &rings, &terms, &idle_ms, &most_ms)) return NULL;
    const Py_ssize_t num_rings = rings.len / (Py_ssize_t)sizeof(struct ring);
    const int whole = rings.len == num_rings * (Py_ssize_t)sizeof(struct ring) && terms.len == sizeof(struct terms);
    const int fits = whole && num_rings <= MAX_RINGS;
    if (fits) {
        Py_BEGIN_ALLOW_THREADS;
        result = move(rings.buf, (int)num_rings, terms.buf, idle_ms, most_ms);
        Py_END_ALLOW_THREADS;
    }
    PyBuffer_Release(&rings);
    PyBuffer_Release(&terms);
    if (!fits) return PyErr_Format(PyExc_ValueError, "not the memory of native.RING and native.TERMS");
    return PyLong_FromLong(result);
}
