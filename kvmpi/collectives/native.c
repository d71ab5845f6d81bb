/* Compiled parts of the collectives, with the results of their counterparts in Python, to the bit.
 *
 * Rings over connections do what ring.py does, without the interpreter and its lock, and do not wait for whole chunks:
 * what has come of a chunk is added at once, and sent on. Sums in slots do what shared.py does with small vectors,
 * where most of the time would be the interpreter's.
 *
 * native.py declares the structs once more.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <poll.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

#ifndef MSG_NOSIGNAL
#define MSG_NOSIGNAL 0
#endif

/* A sum is as fast as the memory with the widest registers that the processor has. */
#if defined(__x86_64__) && defined(__linux__) && defined(__GLIBC__) && defined(__GNUC__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif

/* ---- rings over connections */

#define MAX_RINGS 64

/* start, stop, place among partial sums; -1: the result. See schedule.Schedule. */
typedef int64_t transfer[3];

struct ring {
    int64_t in_fd, out_fd;
    int64_t receives, sends; /* addresses of num_transfers transfers each */
    int64_t num_transfers, num_chunks, num_kept, num_summed;
    int64_t piece_bytes; /* so much of a chunk wakes this rank, or all that is left of it */
    int64_t incoming, partials; /* addresses: room for a chunk that comes in, and for partial sums */
    int64_t received, sent; /* transfers that are through */
    int64_t received_bytes, ready_bytes, sent_bytes; /* of the next one: come, come and added, gone */
    int64_t wake_bytes; /* as the system was told */
    int64_t in_error, out_error; /* errno of a broken connection; -1: it was closed */
};

struct sum {
    int64_t kind; /* a character of native.KINDS */
    int64_t itemsize;
    int64_t out, base; /* address of the result, and which element it begins with */
    int64_t num_vectors;
    int64_t vectors; /* address of the addresses of this rank's vectors */
    double scale;
};

enum { IDLE, MOVED, DONE, FAILED };

/* into = incoming + own, for elements of one type; into may be own. */
#define DEFINE_ADD(TYPE, NAME)                                                                        \
    FOR_EACH_PROCESSOR static void NAME(TYPE *into, const TYPE *incoming, const TYPE *own, int64_t n) \
    {                                                                                                 \
        _Pragma("GCC ivdep") for (int64_t i = 0; i < n; i++) into[i] = (TYPE)(incoming[i] + own[i]);  \
    }
#define DEFINE_SCALE(TYPE, NAME)                                          \
    FOR_EACH_PROCESSOR static void NAME(TYPE *total, TYPE by, int64_t n) \
    {                                                                     \
        for (int64_t i = 0; i < n; i++) total[i] *= by;                   \
    }

DEFINE_ADD(float, add_float)
DEFINE_ADD(double, add_double)
DEFINE_ADD(uint8_t, add_uint8) /* integers wrap around, which signed ones may not in C */
DEFINE_ADD(uint16_t, add_uint16)
DEFINE_ADD(uint32_t, add_uint32)
DEFINE_ADD(uint64_t, add_uint64)
DEFINE_SCALE(float, scale_float)
DEFINE_SCALE(double, scale_double)

static void add(char kind, void *into, const void *incoming, const void *own, int64_t n)
{
    switch (kind) {
    case 'f': add_float(into, incoming, own, n); break;
    case 'd': add_double(into, incoming, own, n); break;
    case 'b': add_uint8(into, incoming, own, n); break;
    case 'h': add_uint16(into, incoming, own, n); break;
    case 'i': add_uint32(into, incoming, own, n); break;
    case 'q': add_uint64(into, incoming, own, n); break;
    }
}

static void scale(const struct sum *sum, void *total, int64_t n)
{
    if (sum->scale != 1.0 && sum->kind == 'f') scale_float(total, (float)sum->scale, n);
    if (sum->scale != 1.0 && sum->kind == 'd') scale_double(total, sum->scale, n);
}

static const int64_t *nth(int64_t transfers, int64_t number) { return ((const transfer *)transfers)[number]; }

static int64_t bytes_of(const int64_t *transfer, const struct sum *sum)
{
    return (transfer[1] - transfer[0]) * sum->itemsize;
}

static char *place_of(const int64_t *transfer, const struct ring *ring, const struct sum *sum)
{
    if (transfer[2] >= 0) return (char *)ring->partials + transfer[2] * sum->itemsize;
    return (char *)sum->out + (transfer[0] - sum->base) * sum->itemsize;
}

/* Add what has come of a chunk of partial sums since the last time. */
static void take(struct ring *ring, const int64_t *transfer, const struct sum *sum)
{
    const int64_t done = ring->ready_bytes, count = ring->received_bytes / sum->itemsize - done / sum->itemsize;
    char *into = place_of(transfer, ring, sum) + done;
    const char *incoming = (char *)ring->incoming + done;
    for (int64_t i = 0; i < sum->num_vectors; i++) {
        const char *own = (char *)((int64_t *)sum->vectors)[i] + transfer[0] * sum->itemsize + done;
        add((char)sum->kind, into, i ? into : incoming, own, count);
    }
    if (transfer[2] < 0) scale(sum, into, count);
    ring->ready_bytes = done + count * sum->itemsize;
}

/* Whether the next transfer may be received: the partial sums that it replaces have gone, as in ring.py. */
static int has_room(const struct ring *ring)
{
    return ring->received >= ring->num_kept || ring->sent > ring->received - ring->num_chunks;
}

/* Receive once, and add; whether anything came. */
static int receive(struct ring *ring, const struct sum *sum)
{
    const int64_t *transfer = nth(ring->receives, ring->received), nbytes = bytes_of(transfer, sum);
    const int sums = ring->received < ring->num_summed;
    char *into = (sums ? (char *)ring->incoming : place_of(transfer, ring, sum)) + ring->received_bytes;
    const ssize_t count = recv((int)ring->in_fd, into, (size_t)(nbytes - ring->received_bytes), MSG_DONTWAIT);
    if (count <= 0) {
        if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return 0;
        ring->in_error = count ? errno : -1;
        return 0;
    }
    ring->received_bytes += count;
    if (sums) take(ring, transfer, sum);
    else ring->ready_bytes = ring->received_bytes;
    if (ring->received_bytes == nbytes) {
        ring->received++;
        ring->received_bytes = ring->ready_bytes = 0;
    }
    return 1;
}

/* How many bytes of the next transfer to the right are at hand: those of the first step are, and each later one is what
 * is received a step before. */
static int64_t at_hand(const struct ring *ring, const struct sum *sum)
{
    const int64_t source = ring->sent - ring->num_chunks;
    if (source > ring->received) return 0;
    return source == ring->received ? ring->ready_bytes : bytes_of(nth(ring->sends, ring->sent), sum);
}

/* Send what is at hand; whether anything went. ``full``: the system takes no more for now. */
static int send_on(struct ring *ring, const struct sum *sum, int *full)
{
    int moved = 0;
    while (ring->sent < ring->num_transfers) {
        const int64_t *transfer = nth(ring->sends, ring->sent), nbytes = bytes_of(transfer, sum);
        const int64_t left = at_hand(ring, sum) - ring->sent_bytes;
        if (left > 0) {
            const char *from = place_of(transfer, ring, sum);
            /* A single vector is sent from where it is; the sum of several has been made before. */
            if (ring->sent < ring->num_chunks && transfer[2] >= 0 && sum->num_vectors == 1)
                from = (char *)((int64_t *)sum->vectors)[0] + transfer[0] * sum->itemsize;
            from += ring->sent_bytes;
            const ssize_t count = send((int)ring->out_fd, from, (size_t)left, MSG_DONTWAIT | MSG_NOSIGNAL);
            if (count < 0) {
                if (errno == EINTR) continue;
                if (errno == EAGAIN || errno == EWOULDBLOCK) *full = 1;
                else ring->out_error = errno;
                return moved;
            }
            moved = 1;
            ring->sent_bytes += count;
            if (count < left) {
                *full = 1;
                return moved;
            }
        }
        if (ring->sent_bytes < nbytes) return moved;
        ring->sent++;
        ring->sent_bytes = 0;
    }
    return moved;
}

/* Let the system wake this rank when much of the next transfer is there. */
static void expect(struct ring *ring, const struct sum *sum)
{
#ifdef __linux__
    int64_t wake_bytes = bytes_of(nth(ring->receives, ring->received), sum) - ring->received_bytes;
    if (wake_bytes > ring->piece_bytes) wake_bytes = ring->piece_bytes;
    if (wake_bytes != ring->wake_bytes) {
        const int value = (int)wake_bytes;
        setsockopt((int)ring->in_fd, SOL_SOCKET, SO_RCVLOWAT, &value, sizeof value);
        ring->wake_bytes = wake_bytes;
    }
#endif
}

static void skip_empty(struct ring *ring, const struct sum *sum)
{
    while (ring->received < ring->num_transfers && !bytes_of(nth(ring->receives, ring->received), sum))
        ring->received++;
}

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* Move the rings on until all are done, nothing has moved for idle_ms, most_ms are over, a signal has come, or a
 * connection is broken. */
static int move(struct ring *rings, int num_rings, const struct sum *sum, int idle_ms, int most_ms)
{
    struct pollfd asked[MAX_RINGS][2]; /* of each ring: to the right, from the left */
    int full[MAX_RINGS] = {0}, moved = 0;
    const double until = now() + 1e-3 * most_ms;
    for (;;) {
        int waits = 0;
        for (int i = 0; i < num_rings; i++) {
            struct ring *ring = &rings[i];
            skip_empty(ring, sum);
            if (!full[i]) moved |= send_on(ring, sum, &full[i]);
            if (ring->out_error) return FAILED;
            const int receives = ring->received < ring->num_transfers && has_room(ring);
            if (receives) expect(ring, sum);
            /* The system passes over descriptors below zero. */
            asked[i][0] = (struct pollfd){.fd = full[i] ? (int)ring->out_fd : -1, .events = POLLOUT};
            asked[i][1] = (struct pollfd){.fd = receives ? (int)ring->in_fd : -1, .events = POLLIN};
            waits |= full[i] || receives;
        }
        if (!waits) return DONE;
        if (poll(asked[0], (nfds_t)(2 * num_rings), idle_ms) <= 0) return moved ? MOVED : IDLE;
        for (int i = 0; i < num_rings; i++) {
            if (asked[i][0].revents) full[i] = 0;
            if (asked[i][1].revents) moved |= receive(&rings[i], sum);
            if (rings[i].in_error) return FAILED;
        }
        if (now() >= until) return moved ? MOVED : IDLE;
    }
}

PyDoc_STRVAR(move_rings_doc,
             "move_rings(rings, sum, idle_ms, most_ms, /)\n--\n\n"
             "Move rings on: 2 when all are done, 1 or 0 when they are not and something or nothing was moved, 3 when\n"
             "a connection is broken, of which the ring's ``in_error`` or ``out_error`` tells.\n\n"
             "rings, sum: memory of native.RING and native.SUM. idle_ms: how long to wait for something to move;\n"
             "most_ms: after which to return in any case.");

static PyObject *move_rings(PyObject *self, PyObject *args)
{
    Py_buffer rings, sum;
    int idle_ms, most_ms, result = 0;
    if (!PyArg_ParseTuple(args, "w*y*ii", &rings, &sum, &idle_ms, &most_ms)) return NULL;
    const Py_ssize_t num_rings = rings.len / (Py_ssize_t)sizeof(struct ring);
    const int whole = rings.len == num_rings * (Py_ssize_t)sizeof(struct ring) && sum.len == sizeof(struct sum);
    const int fits = whole && num_rings <= MAX_RINGS;
    if (fits) {
        Py_BEGIN_ALLOW_THREADS;
        result = move(rings.buf, (int)num_rings, sum.buf, idle_ms, most_ms);
        Py_END_ALLOW_THREADS;
    }
    PyBuffer_Release(&rings);
    PyBuffer_Release(&sum);
    if (!fits) return PyErr_Format(PyExc_ValueError, "not the memory of native.RING and native.SUM");
    return PyLong_FromLong(result);
}

/* ---- sums in slots */

/* So often is looked whether the others are there: what takes longer is left to whoever knows how to wait. */
#define POLLS 200
/* What is longer is summed without the interpreter's lock. */
#define LOCKED_BYTES (16 << 10)
#define BLOCK_BYTES 4096

/* Ranks of one host. The addresses of each one's page, and of its slot for calls of this kind, follow. */
struct slots {
    int64_t num_ranks, index; /* of them, and this one's number */
    int64_t posted, finished; /* words of a page: the last call that its rank has offered data in, is through with */
    int64_t kind, count, itemsize;
    int64_t addresses[];
};

static int64_t *page(const struct slots *slots, int64_t rank) { return (int64_t *)slots->addresses[rank]; }

static char *slot(const struct slots *slots, int64_t rank) { return (char *)slots->addresses[slots->num_ranks + rank]; }

static int64_t last_posted(const struct slots *slots, int64_t rank)
{
    return __atomic_load_n(page(slots, rank) + slots->posted, __ATOMIC_ACQUIRE);
}

static int all_posted(const struct slots *slots, int64_t call)
{
    for (int64_t rank = 0; rank < slots->num_ranks; rank++)
        if (last_posted(slots, rank) < call) return 0;
    return 1;
}

/* In rank order; only sums of all ranks are written to out, since others may have the same memory. */
static void add_up(const struct slots *slots, char *out)
{
    _Alignas(64) char block[BLOCK_BYTES];
    const int64_t total = slots->count * slots->itemsize;
    for (int64_t first = 0; first < total; first += BLOCK_BYTES) {
        const int64_t nbytes = total - first < BLOCK_BYTES ? total - first : BLOCK_BYTES;
        const char *sum = slot(slots, 0) + first;
        for (int64_t rank = 1; rank < slots->num_ranks; rank++) {
            char *into = rank == slots->num_ranks - 1 ? out + first : block;
            add((char)slots->kind, into, sum, slot(slots, rank) + first, nbytes / slots->itemsize);
            sum = into;
        }
    }
}

enum { NOT_BEGUN, SUMMED, OFFERED };

static int sum_in_slots(const struct slots *slots, int64_t call, const char *vector, char *out, int offered)
{
    if (!offered) {
        /* The slot is that of the call before last. A rank that has begun the last one is through with it. */
        if (!all_posted(slots, call - 1)) return NOT_BEGUN;
        memcpy(slot(slots, slots->index), vector, (size_t)(slots->count * slots->itemsize));
        __atomic_store_n(page(slots, slots->index) + slots->posted, call, __ATOMIC_RELEASE);
    }
    for (int i = 0; !all_posted(slots, call); i++) {
        if (i == POLLS) return OFFERED;
#if defined(__x86_64__) || defined(__i386__)
        __builtin_ia32_pause();
#endif
    }
    add_up(slots, out);
    __atomic_store_n(page(slots, slots->index) + slots->finished, call, __ATOMIC_RELEASE);
    return SUMMED;
}

PyDoc_STRVAR(sum_slots_doc,
             "sum_slots(slots, call, vector, out, offered, /)\n--\n\n"
             "Sum small vectors of the ranks of a host: 1 when that is done, 2 when others are not there yet, 0 when\n"
             "the call could not begin.\n\n"
             "slots: address of a struct slots. offered: whether this call was made before, and returned 2.");

static PyObject *sum_slots(PyObject *self, PyObject *const *args, Py_ssize_t num_args)
{
    if (num_args != 5) return PyErr_Format(PyExc_TypeError, "sum_slots takes five arguments");
    const struct slots *slots = PyLong_AsVoidPtr(args[0]);
    const int64_t call = PyLong_AsLongLong(args[1]);
    const int offered = PyObject_IsTrue(args[4]);
    Py_buffer vector, out;
    int result = -1;
    if (PyErr_Occurred() || PyObject_GetBuffer(args[2], &vector, PyBUF_SIMPLE)) return NULL;
    if (PyObject_GetBuffer(args[3], &out, PyBUF_WRITABLE) == 0) {
        const int64_t nbytes = slots->count * slots->itemsize;
        if (vector.len != nbytes || out.len != nbytes) {
            PyErr_Format(PyExc_ValueError, "vectors of other lengths than these slots are for");
        } else if (nbytes <= LOCKED_BYTES) {
            result = sum_in_slots(slots, call, vector.buf, out.buf, offered);
        } else {
            Py_BEGIN_ALLOW_THREADS;
            result = sum_in_slots(slots, call, vector.buf, out.buf, offered);
            Py_END_ALLOW_THREADS;
        }
        PyBuffer_Release(&out);
    }
    PyBuffer_Release(&vector);
    return result < 0 ? NULL : PyLong_FromLong(result);
}

static PyMethodDef methods[] = {
    {"move_rings", move_rings, METH_VARARGS, move_rings_doc},
    {"sum_slots", (PyCFunction)(void (*)(void))sum_slots, METH_FASTCALL, sum_slots_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_native", "Compiled parts of the collectives.", -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModule_Create(&module); }
