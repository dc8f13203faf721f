/* The ring's hot path, the parking words and the event flag's futex, over memory shared with a peer.
 *
 * Owns: every access to the shared words, all ordering between them, all waiting on them. Refuses to own: mapping,
 * sealing and describing memory (region.py, descriptor.py) and anything to do with an event loop (aio.py).
 *
 * Invariants:
 *  1. A shared word is loaded once into a local, the local is checked, and only the local is used.
 *  2. Positions in the ring come from private indices; a shared counter is only ever compared or published.
 *  3. Mapped memory is used only between acquiring and releasing the Py_buffers; threads that wait without the
 *     GIL are counted in `inside`, and the last of them releases the buffers of a closed endpoint.
 *  4. The parking words carry no data: a wrong one costs a system call or PARK_SLICE_NS of delay.
 *
 * Sync points (drawn in README.md): DATA_READY, SPACE_FREE, CLAIM, PARK_READER, PARK_WRITER, EVENT_BITS, SLOTS.
 * Behaviour after AOSP libfmq (MessageQueueBase.h, EventFlag.cpp); README.md lists where this differs.
 */
#include "_native.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <sys/uio.h>
#include <unistd.h>

#ifndef RWF_NOWAIT
#define RWF_NOWAIT 0x00000008
#endif

/* A parked thread looks again this often, so that a peer that dies between publishing and waking costs delay only. */
#define PARK_SLICE_NS INT64_C(100000000)
/* The same for a task: its wake-up goes through the whole loop. */
#define WAIT_SLICE_NS 250000000
/* Between two looks at the peer's counter while spinning: about a microsecond. */
enum { SPIN_PAUSES_MAX = 64 };
#define NEVER INT64_MAX

enum { SYNCHRONIZED = 1, UNSYNCHRONIZED = 2 };
enum { READ_COUNTER, WRITE_COUNTER, DATA, EVENT_WORD, READER_PARK, WRITER_PARK, PIECES };
enum { PARKED_FUTEX = 1, PARKED_EVENTFD = 2 };
/* SERVED: a thread answers messages from this endpoint without the interpreter's lock (ring_enter). */
enum { UNOPENED, OPEN, CORRUPT, CLOSED, SERVED };
enum { HEADER_BYTES = 8, MESSAGE_ALIGNMENT = 8 };
#define HEADER_CHECK UINT32_C(0x464d5131)

static PyObject *RingType, *WatchType, *run_name;
static PyObject *ClosedQueue, *CorruptQueue, *InterruptedQueue, *InvalidArgument, *Overflow;

/* Bumped in a forked child: an endpoint opened before the fork belongs to the parent (its private indices would part
 * from the shared counters). A counter, since asking for the process id is a system call. */
static atomic_uint fork_generation;

static void after_fork_in_child(void) { atomic_fetch_add(&fork_generation, 1); }

int fmq_die_at;

void fmq_die(void)
{
    kill(getpid(), SIGKILL);
    for (;;)
        pause();
}

static inline void relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb" ::: "memory");
#endif
}

/* Sleeps while *word == expected, at most until `until_ns`. Spurious returns are allowed: callers look again. */
static int futex_wait(_Atomic uint32_t *word, uint32_t expected, int64_t until_ns, uint32_t bits)
{
    struct timespec until = {.tv_sec = until_ns / 1000000000, .tv_nsec = until_ns % 1000000000};
    long rc = syscall(SYS_futex, word, FUTEX_WAIT_BITSET, expected, &until, NULL, bits);
    return rc == 0 ? 0 : errno;
}

static void futex_wake(_Atomic uint32_t *word, uint32_t bits)
{
    syscall(SYS_futex, word, FUTEX_WAKE_BITSET, INT_MAX, NULL, NULL, bits);
}

/* None is NEVER; otherwise nanoseconds from now, saturating. Returns -1 with an exception if it is not a timeout. */
static int64_t deadline_from(PyObject *timeout)
{
    if (timeout == NULL || timeout == Py_None)
        return NEVER;
    long long ns = PyLong_AsLongLong(timeout);
    if (ns == -1 && PyErr_Occurred()) {
        if (!PyErr_ExceptionMatches(PyExc_OverflowError))
            return -1;
        PyErr_Clear();
        PyObject *zero = PyLong_FromLong(0);
        int negative = zero == NULL ? -1 : PyObject_RichCompareBool(timeout, zero, Py_LT);
        Py_XDECREF(zero);
        if (negative < 0)
            return -1;
        ns = negative ? -1 : NEVER;
    }
    if (ns < 0) {
        PyErr_Format(InvalidArgument, "timeout_ns: expected None or at least 0, got %S", timeout);
        return -1;
    }
    int64_t now = now_ns();
    return ns > NEVER - now ? NEVER : now + ns;
}

/* ---------------------------------------------------------------------------------------------------------------- */
/* The ring                                                                                                           */

struct Ring {
    PyObject_HEAD
    int state;                                  /* written with the lock, read without it as well: set_state */
    unsigned generation;
    int flavour;
    int readonly;

    uint64_t quantum, count, size;
    uint64_t mask, quantum_mask; /* size - 1 for a power of two, else 0; quantum - 1, else UINT64_MAX */
    uint8_t *data;
    _Atomic uint64_t *read_counter, *write_counter, *claim;
    _Atomic uint32_t *reader_park, *writer_park;

    int writing, reading;                       /* whether this endpoint has taken up the role */
    uint64_t write_index, seen_read;            /* own counter, peer's as last checked */
    uint64_t read_index, seen_write;
    uint64_t begun_write, begun_read;           /* bytes of the open transaction, and whether there is one */
    int write_open, read_open;
    int write_message_open, read_message_open;

    int reader_event, writer_event;             /* eventfds, -1 without */
    int interrupted;
    int inside;                                 /* threads waiting without the GIL */
    int64_t spin_ns, usual_wait_ns;

    uint64_t written, taken, lost, overflows, wakes, parks, spins;

    Py_buffer pieces[PIECES];
    int held[PIECES];
    PyObject *write_view, *read_view;           /* memoryviews of the whole ring, to slice regions from */
};

static inline void set_state(Ring *r, int state) { __atomic_store_n(&r->state, state, __ATOMIC_RELEASE); }
static inline int state_of(Ring *r) { return __atomic_load_n(&r->state, __ATOMIC_ACQUIRE); }

/* Statistics: one thread counts, any thread reads. */
#define COUNT(counter, more) __atomic_store_n(&(counter), (counter) + (more), __ATOMIC_RELAXED)
#define COUNTED(counter) __atomic_load_n(&(counter), __ATOMIC_RELAXED)

static void ring_release(Ring *r)
{
    for (int i = 0; i < PIECES; i++)
        if (r->held[i]) {
            r->held[i] = 0;
            PyBuffer_Release(&r->pieces[i]);
        }
    Py_CLEAR(r->write_view);
    Py_CLEAR(r->read_view);
}

static int unusable(Ring *r)
{
    if (r->state == SERVED) {
        PyErr_SetString(InvalidArgument, "queue: a thread answers messages from this endpoint; expected another one");
        return -1;
    }
    if (r->generation != atomic_load_explicit(&fork_generation, memory_order_relaxed) && r->state == OPEN)
        PyErr_SetString(ClosedQueue, "queue: opened before this process was forked; expected an endpoint attached in "
                                     "this process (MessageQueue.attach with the queue's descriptor and fds)");
    else if (r->state == CORRUPT)
        PyErr_SetString(CorruptQueue, "queue: found corrupt earlier; expected a new queue");
    else
        PyErr_SetString(ClosedQueue, "queue: the endpoint is closed");
    return -1;
}

static inline int usable(Ring *r)
{
    if (__builtin_expect(r->state == OPEN &&
                         r->generation == atomic_load_explicit(&fork_generation, memory_order_relaxed), 1))
        return 0;
    return unusable(r);
}

static int corrupt(Ring *r, const char *what, uint64_t expected, uint64_t got)
{
    set_state(r, CORRUPT);
    PyErr_Format(CorruptQueue, "queue of %llu x %llu bytes: %s: expected %llu, got %llu (the peer's fault, or memory "
                 "shared with too many)", (unsigned long long)r->count, (unsigned long long)r->quantum, what,
                 (unsigned long long)expected, (unsigned long long)got);
    return -1;
}

static inline uint64_t position(const Ring *r, uint64_t index)
{
    return r->mask ? index & r->mask : index % r->size;
}

/* Of a counter, or a distance: what is beyond whole elements. A division costs as much as the rest of a look. */
static inline uint64_t beyond_whole(const Ring *r, uint64_t bytes)
{
    return r->quantum_mask != UINT64_MAX ? bytes & r->quantum_mask : bytes % r->quantum;
}

/* Bytes that are written and not read, 0 to size; -1 (as UINT64_MAX) if the pair is impossible. */
static inline uint64_t used_bytes(const Ring *r, uint64_t write, uint64_t read)
{
    uint64_t used = write - read;
    return used > r->size || beyond_whole(r, used) ? UINT64_MAX : used;
}

static int misaligned(Ring *r, const char *what, uint64_t counter)
{
    return corrupt(r, what, counter - counter % r->quantum, counter);
}

static int bad_pair(Ring *r, uint64_t write, uint64_t read)
{
    if (write % r->quantum)
        return misaligned(r, "write counter not a multiple of the quantum", write);
    if (read % r->quantum)
        return misaligned(r, "read counter not a multiple of the quantum", read);
    return corrupt(r, "write counter out of reach of the read counter; distance", r->size, write - read);
}

/* DATA_READY acquire: the peer's write counter, when what was seen is less than `need`. Returns 1 if `need` bytes can be
 * read, 0 if not, -1 if corrupt. */
static inline int look_for_data(Ring *r, uint64_t need)
{
    uint64_t write = atomic_load_explicit(r->write_counter, memory_order_acquire);
    if (write == r->seen_write)
        return 0; /* the usual answer when polling; there was too little before */
    if (__builtin_expect(used_bytes(r, write, r->read_index) == UINT64_MAX, 0))
        return bad_pair(r, write, r->read_index);
    if (__builtin_expect(write - r->read_index < r->seen_write - r->read_index, 0))
        return corrupt(r, "write counter went backwards", r->seen_write, write);
    r->seen_write = write;
    return write - r->read_index >= need;
}

/* SPACE_FREE acquire: the peer's read counter. */
static inline int look_for_space(Ring *r, uint64_t need)
{
    uint64_t read = atomic_load_explicit(r->read_counter, memory_order_acquire);
    if (__builtin_expect(used_bytes(r, r->write_index, read) == UINT64_MAX, 0))
        return bad_pair(r, r->write_index, read);
    if (__builtin_expect(r->write_index - read > r->write_index - r->seen_read, 0))
        return corrupt(r, "read counter went backwards", r->seen_read, read);
    r->seen_read = read;
    return r->size - (r->write_index - read) >= need;
}

static int start_writing(Ring *r)
{
    if (r->readonly) {
        PyErr_SetString(InvalidArgument, "queue: mapped read-only; expected the writer's endpoint");
        return -1;
    }
    uint64_t write = atomic_load_explicit(r->write_counter, memory_order_acquire);
    if (r->flavour == SYNCHRONIZED) {
        uint64_t read = atomic_load_explicit(r->read_counter, memory_order_acquire);
        if (used_bytes(r, write, read) == UINT64_MAX || write % r->quantum)
            return bad_pair(r, write, read);
        r->seen_read = read;
    } else if (write % r->quantum)
        return misaligned(r, "write counter not a multiple of the quantum", write);
    r->write_index = write;
    r->writing = 1;
    return 0;
}

static int start_reading(Ring *r)
{
    if (r->flavour == SYNCHRONIZED) {
        uint64_t read = atomic_load_explicit(r->read_counter, memory_order_acquire);
        uint64_t write = atomic_load_explicit(r->write_counter, memory_order_acquire);
        if (used_bytes(r, write, read) == UINT64_MAX || read % r->quantum)
            return bad_pair(r, write, read);
        r->read_index = read;
        r->seen_write = write;
    } else
        r->read_index = r->seen_write = 0; /* an unsynchronized reader starts at 0, never at the write counter */
    r->reading = 1;
    return 0;
}

/* Raises Overflow, moves the reader to the write counter. */
static int overflow(Ring *r, uint64_t write)
{
    uint64_t lost = (write - r->read_index) / r->quantum;
    r->lost += lost;
    r->overflows++;
    r->read_index = r->seen_write = write;
    PyObject *error = PyObject_CallFunction(Overflow, "sK",
        "queue: the writer overtook this reader; reading continues with the data that are written from now on",
        (unsigned long long)lost);
    if (error != NULL) {
        PyErr_SetObject(Overflow, error);
        Py_DECREF(error);
    }
    return -1;
}

/* For the unsynchronized flavour: 1 if `need` bytes can be read, 0 if not, -1 for overflow or corruption. */
static int look_for_broadcast(Ring *r, uint64_t need)
{
    uint64_t write = atomic_load_explicit(r->write_counter, memory_order_acquire);
    if (write % r->quantum)
        return misaligned(r, "write counter not a multiple of the quantum", write);
    if (write - r->read_index > (uint64_t)INT64_MAX || write < r->seen_write)
        return corrupt(r, "write counter went backwards", r->seen_write, write);
    r->seen_write = write;
    if (write - r->read_index > r->size)
        return overflow(r, write);
    return write - r->read_index >= need;
}

/* CLAIM acquire: after copying out, whether the writer has begun to overwrite what was copied. */
static int still_whole(Ring *r)
{
    atomic_thread_fence(memory_order_acquire);
    uint64_t claim = atomic_load_explicit(r->claim, memory_order_relaxed);
    if (claim - r->read_index <= r->size)
        return 0;
    uint64_t write = atomic_load_explicit(r->write_counter, memory_order_acquire);
    if (write % r->quantum || write < r->seen_write)
        return corrupt(r, "write counter went backwards or lost its alignment", r->seen_write, write);
    return overflow(r, write);
}

/* Only this endpoint writes its counter: another value is corruption, or a second reader. */
static inline int own_read_counter(Ring *r)
{
    if (r->flavour != SYNCHRONIZED)
        return 0;
    uint64_t own = atomic_load_explicit(r->read_counter, memory_order_relaxed);
    if (__builtin_expect(own == r->read_index, 1))
        return 0;
    return corrupt(r, "own read counter changed by another", r->read_index, own);
}

/* 1 if `need` bytes can be read now, 0 if not, -1 with an exception. */
static inline int readable(Ring *r, uint64_t need)
{
    if (__builtin_expect(!r->reading, 0) && start_reading(r) < 0)
        return -1;
    if (r->flavour != SYNCHRONIZED)
        return look_for_broadcast(r, need);
    if (__builtin_expect(own_read_counter(r) < 0, 0))
        return -1;
    return r->seen_write - r->read_index >= need ? 1 : look_for_data(r, need);
}

static inline int writable(Ring *r, uint64_t need)
{
    if (__builtin_expect(!r->writing, 0) && start_writing(r) < 0)
        return -1;
    uint64_t own = atomic_load_explicit(r->write_counter, memory_order_relaxed);
    if (__builtin_expect(own != r->write_index, 0))
        return corrupt(r, "own write counter changed by another", r->write_index, own);
    if (__builtin_expect(!r->mask && r->write_index + need < r->write_index, 0))
        return corrupt(r, "write counter would pass 2^64 in a ring whose size is not a power of two", 0, r->write_index);
    if (r->flavour != SYNCHRONIZED)
        return 1;
    return r->size - (r->write_index - r->seen_read) >= need ? 1 : look_for_space(r, need);
}

/* ---- parking: PARK_READER and PARK_WRITER ---- */

/* Wakes by reading. The peer shares the open file and can make it blocking, full or empty at any moment. A write has no flag of
 * its own against blocking: eventfd refuses RWF_NOWAIT there, and between a look at O_NONBLOCK and the write the peer can change
 * both. A read has. So the eventfd is a semaphore that starts with more than all endpoints can take (queue.py), every poke takes
 * one, and by that the kernel wakes the processes that poll it for room to write (watch_init). */
static void poke_eventfd(int fd)
{
    uint64_t taken;
    struct iovec into = {.iov_base = &taken, .iov_len = sizeof taken};
    if (fd >= 0)
        (void)syscall(SYS_preadv2, fd, &into, 1L, -1L, -1L, RWF_NOWAIT);
}

static void wake_parked(Ring *r, _Atomic uint32_t *word, int eventfd)
{
    uint32_t parked = atomic_exchange(word, 0);
    POINT(7);
    if (parked & PARKED_FUTEX)
        futex_wake(word, FUTEX_BITSET_MATCH_ANY);
    if (parked & PARKED_EVENTFD)
        poke_eventfd(eventfd);
    COUNT(r->wakes, 1);
}

/* After a release store of a counter: the full fence orders it before the load of the sleeper's word, as the fence in
 * the sleeper orders its word before its last look at the counter. One of the two sees the other. */
static inline void wake_if_parked(Ring *r, _Atomic uint32_t *word, int eventfd)
{
    POINT(5);
    if (word == NULL)
        return;
    atomic_thread_fence(memory_order_seq_cst);
    uint32_t parked = atomic_load_explicit(word, memory_order_relaxed);
    POINT(6);
    if (__builtin_expect(parked != 0, 0))
        wake_parked(r, word, eventfd);
    POINT(8);
}

/* ---- publishing ---- */

static inline void claim_space(Ring *r, uint64_t bytes)
{
    if (r->flavour != SYNCHRONIZED) {
        atomic_store_explicit(r->claim, r->write_index + bytes, memory_order_relaxed);
        atomic_thread_fence(memory_order_release); /* CLAIM release: before any byte of the data */
    }
}

static inline void publish_write(Ring *r, uint64_t bytes)
{
    POINT(4);
    r->write_open = 0; /* a begun write would now commit at another place than it was written to */
    r->write_index += bytes;
    atomic_store_explicit(r->write_counter, r->write_index, memory_order_release); /* DATA_READY release */
    COUNT(r->written, bytes);
    if (r->flavour == SYNCHRONIZED)
        wake_if_parked(r, r->reader_park, r->reader_event);
    else
        POINT(5);
}

/* Returns 0, or -1 if an unsynchronized reader has been overtaken since. */
static inline int publish_read(Ring *r, uint64_t bytes)
{
    POINT(14);
    r->read_open = 0;
    if (r->flavour != SYNCHRONIZED) {
        if (still_whole(r) < 0)
            return -1;
        r->read_index += bytes;
        COUNT(r->taken, bytes);
        return 0;
    }
    r->read_index += bytes;
    atomic_store_explicit(r->read_counter, r->read_index, memory_order_release); /* SPACE_FREE release */
    COUNT(r->taken, bytes);
    wake_if_parked(r, r->writer_park, r->writer_event);
    return 0;
}

static inline void copy_in(Ring *r, uint64_t index, const void *source, uint64_t bytes)
{
    uint64_t at = position(r, index);
    uint64_t first = bytes < r->size - at ? bytes : r->size - at;
    if (__builtin_expect(fmq_die_at == 3, 0)) {
        memcpy(r->data + at, source, first / 2);
        fmq_die();
    }
    memcpy(r->data + at, source, first);
    if (__builtin_expect(first < bytes, 0))
        memcpy(r->data, (const uint8_t *)source + first, bytes - first);
}

static inline void copy_out(Ring *r, uint64_t index, void *target, uint64_t bytes)
{
    uint64_t at = position(r, index);
    uint64_t first = bytes < r->size - at ? bytes : r->size - at;
    if (__builtin_expect(fmq_die_at == 13, 0)) {
        memcpy(target, r->data + at, first / 2);
        fmq_die();
    }
    memcpy(target, r->data + at, first);
    if (__builtin_expect(first < bytes, 0))
        memcpy((uint8_t *)target + first, r->data, bytes - first);
}

/* ---- waiting ---- */

static int look(Ring *r, int reader, uint64_t need) { return reader ? readable(r, need) : writable(r, need); }

/* Comes back from waiting without the GIL: unmaps the memory if the endpoint was closed during the wait. */
static int came_back(Ring *r)
{
    r->inside--;
    if (r->state == CLOSED) {
        if (r->inside == 0)
            ring_release(r);
        return unusable(r);
    }
    return 0;
}

/* Watches a counter until it changes, or until then. Without the GIL. */
static void watch_counter(_Atomic uint64_t *counter, uint64_t seen, int64_t until)
{
    /* Not immediately, and ever more rarely: each look takes the counter's line from the peer, who is about to write it. */
    for (int pauses = 32; now_ns() < until; pauses = pauses < SPIN_PAUSES_MAX ? 2 * pauses : pauses) {
        for (int i = 0; i < pauses; i++)
            relax();
        if (atomic_load_explicit(counter, memory_order_relaxed) != seen)
            break;
    }
}

/* Watches the peer's counter without the GIL for at most the spin window. 0 to look again, -1 with an exception. */
static int spin(Ring *r, int reader, int64_t deadline)
{
    _Atomic uint64_t *counter = reader ? r->write_counter : r->read_counter;
    uint64_t seen = reader ? r->seen_write : r->seen_read;
    int64_t until = now_ns() + r->spin_ns;
    if (until > deadline)
        until = deadline;
    COUNT(r->spins, 1);
    r->inside++;
    PyThreadState *thread = PyEval_SaveThread();
    watch_counter(counter, seen, until);
    PyEval_RestoreThread(thread);
    return came_back(r);
}

/* Declares this side asleep, looks once more, sleeps at most one slice. 0 to look again, -1 with an exception. */
static int park(Ring *r, int reader, uint64_t need, int64_t deadline)
{
    _Atomic uint32_t *word = reader ? r->reader_park : r->writer_park;
    uint32_t expected = atomic_fetch_or(word, PARKED_FUTEX) | PARKED_FUTEX;
    atomic_thread_fence(memory_order_seq_cst);
    POINT(21);
    int ready = look(r, reader, need);
    int result = 0;
    if (ready == 0) {
        int64_t until = now_ns() + PARK_SLICE_NS;
        COUNT(r->parks, 1);
        r->inside++;
        PyThreadState *thread = PyEval_SaveThread();
        POINT(22);
        int error = futex_wait(word, expected, until < deadline ? until : deadline, FUTEX_BITSET_MATCH_ANY);
        PyEval_RestoreThread(thread);
        int closed = r->state == CLOSED;
        if (!closed)
            atomic_fetch_and(word, ~(uint32_t)PARKED_FUTEX);
        result = came_back(r);
        if (result == 0 && error == EINTR)
            result = PyErr_CheckSignals();
    } else {
        if (r->state != CLOSED) /* by a finaliser, while an exception was made */
            atomic_fetch_and(word, ~(uint32_t)PARKED_FUTEX);
        result = ready < 0 ? -1 : 0;
    }
    return result;
}

/* 1 when `need` bytes can be read (or written), 0 at the deadline, -1 with an exception. Data beats an expired
 * deadline; an interruption beats waiting but not data. */
static int wait_for(Ring *r, int reader, uint64_t need, int64_t deadline)
{
    int ready = look(r, reader, need);
    if (ready != 0)
        return ready;
    if (r->flavour != SYNCHRONIZED || r->reader_park == NULL) {
        PyErr_SetString(InvalidArgument, r->flavour != SYNCHRONIZED
            ? "queue: blocking calls need the synchronized flavour, got the unsynchronized one"
            : "queue: blocking calls need an event flag, got a queue made without one");
        return -1;
    }
    int64_t began = now_ns(), now = began;
    for (;;) {
        if (r->interrupted) {
            PyErr_SetString(InterruptedQueue, "queue: interrupt() was called on this endpoint");
            return -1;
        }
        if (now >= deadline)
            return 0;
        int again = r->spin_ns > 0 && r->usual_wait_ns < r->spin_ns && now - began < r->spin_ns
            ? spin(r, reader, deadline) : park(r, reader, need, deadline);
        if (again < 0 || usable(r) < 0)
            return -1;
        ready = look(r, reader, need);
        now = now_ns();
        if (ready != 0) {
            /* A moving average of how long it usually takes decides whether the next wait starts by spinning. */
            int64_t waited = now - began < 4 * r->spin_ns ? now - began : 4 * r->spin_ns;
            r->usual_wait_ns += (waited - r->usual_wait_ns) / 8;
            return ready;
        }
    }
}

/* ---- arguments ---- */

static int too_large(Ring *r, uint64_t bytes)
{
    PyErr_Format(InvalidArgument, "queue: expected at most %llu elements of %llu bytes (its capacity), got %llu bytes",
                 (unsigned long long)r->count, (unsigned long long)r->quantum, (unsigned long long)bytes);
    return -1;
}

/* Whole elements, no more than the capacity. */
static int check_elements(Ring *r, uint64_t bytes, int exactly_one)
{
    if (exactly_one && bytes != r->quantum) {
        PyErr_Format(InvalidArgument, "queue: expected one element of %llu bytes, got %llu bytes",
                     (unsigned long long)r->quantum, (unsigned long long)bytes);
        return -1;
    }
    if (bytes % r->quantum) {
        PyErr_Format(InvalidArgument, "queue: expected whole elements of %llu bytes, got %llu bytes",
                     (unsigned long long)r->quantum, (unsigned long long)bytes);
        return -1;
    }
    return bytes > r->size ? too_large(r, bytes) : 0;
}

/* A count of elements as bytes; UINT64_MAX with an exception if it is not a count, or exceeds the capacity. */
static uint64_t count_to_bytes(Ring *r, PyObject *count)
{
    Py_ssize_t n = PyNumber_AsSsize_t(count, PyExc_OverflowError);
    if (n == -1 && PyErr_Occurred()) {
        if (PyErr_ExceptionMatches(PyExc_OverflowError)) {
            PyErr_Clear();
            PyErr_Format(InvalidArgument, "queue: expected a count of 0 to %llu elements, got %S",
                         (unsigned long long)r->count, count);
        }
        return UINT64_MAX;
    }
    if (n < 0 || (uint64_t)n > r->count) {
        PyErr_Format(InvalidArgument, "queue: expected a count of 0 to %llu elements, got %zd",
                     (unsigned long long)r->count, n);
        return UINT64_MAX;
    }
    return (uint64_t)n * r->quantum;
}

static int wrong_arguments(const char *name, Py_ssize_t expected, Py_ssize_t got)
{
    PyErr_Format(PyExc_TypeError, "%s: expected %zd arguments, got %zd", name, expected, got);
    return -1;
}

/* ---- elements ---- */

static PyObject *write_elements(Ring *r, PyObject *source, int exactly_one)
{
    Py_buffer b;
    if (PyObject_GetBuffer(source, &b, PyBUF_SIMPLE) < 0)
        return NULL;
    PyObject *result = NULL;
    uint64_t bytes = (uint64_t)b.len;
    POINT(1);
    if (usable(r) < 0 || check_elements(r, bytes, exactly_one) < 0)
        goto done;
    int room = writable(r, bytes);
    if (room < 0)
        goto done;
    if (room && bytes) {
        claim_space(r, bytes);
        POINT(2);
        copy_in(r, r->write_index, b.buf, bytes);
        publish_write(r, bytes);
    }
    result = PyBool_FromLong(room);
done:
    PyBuffer_Release(&b);
    return result;
}

PyDoc_STRVAR(write_doc, "write(element)\n--\n\nAppends one element; False when the queue is full.");
static PyObject *ring_write(Ring *r, PyObject *source) { return write_elements(r, source, 1); }

PyDoc_STRVAR(write_many_doc, "write_many(elements)\n--\n\nAppends all elements of a buffer, or none: False when they do "
                             "not fit now.");
static PyObject *ring_write_many(Ring *r, PyObject *source) { return write_elements(r, source, 0); }

/* Reads `bytes` into a new bytes object. */
static PyObject *read_bytes(Ring *r, uint64_t bytes)
{
    PyObject *result = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)bytes);
    if (result == NULL || bytes == 0)
        return result;
    POINT(12);
    copy_out(r, r->read_index, PyBytes_AsString(result), bytes);
    if (publish_read(r, bytes) < 0)
        Py_CLEAR(result);
    return result;
}

PyDoc_STRVAR(read_doc, "read()\n--\n\nTakes one element; None when the queue is empty.");
static PyObject *ring_read(Ring *r, PyObject *unused)
{
    POINT(11);
    if (usable(r) < 0)
        return NULL;
    int ready = readable(r, r->quantum);
    if (ready < 0)
        return NULL;
    if (ready == 0)
        Py_RETURN_NONE;
    return read_bytes(r, r->quantum);
}

PyDoc_STRVAR(read_many_doc, "read_many(count)\n--\n\nTakes exactly count elements, or none: None when there are fewer.");
static PyObject *ring_read_many(Ring *r, PyObject *count)
{
    POINT(11);
    if (usable(r) < 0)
        return NULL;
    uint64_t bytes = count_to_bytes(r, count);
    if (bytes == UINT64_MAX)
        return NULL;
    int ready = readable(r, bytes);
    if (ready < 0)
        return NULL;
    if (ready == 0)
        Py_RETURN_NONE;
    return read_bytes(r, bytes);
}

PyDoc_STRVAR(read_available_doc, "read_available(count_max)\n--\n\nTakes what there is, at most count_max elements; "
                                 "empty when there is nothing.");
static PyObject *ring_read_available(Ring *r, PyObject *count)
{
    POINT(11);
    if (usable(r) < 0)
        return NULL;
    uint64_t bytes = count_to_bytes(r, count);
    if (bytes == UINT64_MAX)
        return NULL;
    int ready = readable(r, bytes); /* on 0, seen_write is fresh */
    if (ready < 0)
        return NULL;
    uint64_t there = r->seen_write - r->read_index;
    return read_bytes(r, there < bytes ? there : bytes);
}

static PyObject *read_into(Ring *r, PyObject *target, int exactly_one)
{
    Py_buffer b;
    if (PyObject_GetBuffer(target, &b, PyBUF_WRITABLE) < 0)
        return NULL;
    PyObject *result = NULL;
    uint64_t bytes = (uint64_t)b.len;
    POINT(11);
    if (usable(r) < 0 || check_elements(r, bytes, exactly_one) < 0)
        goto done;
    int ready = readable(r, bytes);
    if (ready < 0)
        goto done;
    if (ready && bytes) {
        POINT(12);
        copy_out(r, r->read_index, b.buf, bytes);
        if (publish_read(r, bytes) < 0)
            goto done;
    }
    result = PyBool_FromLong(ready);
done:
    PyBuffer_Release(&b);
    return result;
}

PyDoc_STRVAR(read_into_doc, "read_into(buffer)\n--\n\nTakes one element into a buffer; False when the queue is empty.");
static PyObject *ring_read_into(Ring *r, PyObject *target) { return read_into(r, target, 1); }

PyDoc_STRVAR(read_many_into_doc, "read_many_into(buffer)\n--\n\nFills a buffer with elements, or takes none: False when "
                                 "there are fewer.");
static PyObject *ring_read_many_into(Ring *r, PyObject *target) { return read_into(r, target, 0); }

/* ---- transactions ---- */

/* The one or two views of `bytes` from `index` on, as a tuple. Making them may run the collector, and that any
 * finaliser, so the view is held and the endpoint looked at again. */
static PyObject *regions(Ring *r, PyObject *view, uint64_t index, uint64_t bytes)
{
    PyObject *result = NULL, *b = NULL;
    uint64_t at = position(r, index);
    uint64_t first = bytes < r->size - at ? bytes : r->size - at;
    Py_INCREF(view);
    PyObject *a = PySequence_GetSlice(view, (Py_ssize_t)at, (Py_ssize_t)(at + first));
    if (a != NULL && first == bytes)
        result = PyTuple_Pack(1, a);
    else if (a != NULL && (b = PySequence_GetSlice(view, 0, (Py_ssize_t)(bytes - first))) != NULL)
        result = PyTuple_Pack(2, a, b);
    Py_XDECREF(a);
    Py_XDECREF(b);
    Py_DECREF(view);
    if (result != NULL && usable(r) < 0)
        Py_CLEAR(result);
    return result;
}

static PyObject *open_write(Ring *r, uint64_t bytes)
{
    int room = writable(r, bytes);
    if (room < 0)
        return NULL;
    if (room == 0)
        Py_RETURN_NONE;
    PyObject *views = regions(r, r->write_view, r->write_index, bytes);
    if (views != NULL) {
        claim_space(r, bytes);
        r->begun_write = bytes;
        r->write_open = 1;
        r->write_message_open = 0;
    }
    return views;
}

static PyObject *open_read(Ring *r, uint64_t bytes, uint64_t skip, uint64_t shown)
{
    PyObject *views = regions(r, r->read_view, r->read_index + skip, shown);
    if (views != NULL) {
        r->begun_read = bytes;
        r->read_open = 1;
        r->read_message_open = 0;
    }
    return views;
}

PyDoc_STRVAR(begin_write_doc, "_begin_write(count)\n--\n\nOne or two writable views of the next count elements, or "
                              "None when they do not fit now.");
static PyObject *ring_begin_write(Ring *r, PyObject *count)
{
    POINT(1);
    if (usable(r) < 0)
        return NULL;
    uint64_t bytes = count_to_bytes(r, count);
    return bytes == UINT64_MAX ? NULL : open_write(r, bytes);
}

static int misuse(const char *message)
{
    PyErr_SetString(InvalidArgument, message);
    return -1;
}

PyDoc_STRVAR(commit_write_doc, "_commit_write(count)\n--\n\nPublishes the first count elements of the begun write.");
static PyObject *ring_commit_write(Ring *r, PyObject *count)
{
    if (usable(r) < 0)
        return NULL;
    uint64_t bytes = count_to_bytes(r, count);
    if (bytes == UINT64_MAX)
        return NULL;
    if (!r->write_open || r->write_message_open || bytes > r->begun_write) {
        misuse("commit_write: expected a begun write of at least as many elements");
        return NULL;
    }
    r->write_open = 0;
    if (writable(r, 0) < 0)
        return NULL;
    if (bytes)
        publish_write(r, bytes);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(begin_read_doc, "_begin_read(count)\n--\n\nOne or two read-only views of the next count elements, or None "
                             "when there are fewer.");
static PyObject *ring_begin_read(Ring *r, PyObject *count)
{
    POINT(11);
    if (usable(r) < 0)
        return NULL;
    uint64_t bytes = count_to_bytes(r, count);
    if (bytes == UINT64_MAX)
        return NULL;
    int ready = readable(r, bytes);
    if (ready < 0)
        return NULL;
    if (ready == 0)
        Py_RETURN_NONE;
    return open_read(r, bytes, 0, bytes);
}

PyDoc_STRVAR(commit_read_doc, "_commit_read(count)\n--\n\nGives back the first count elements of the begun read.");
static PyObject *ring_commit_read(Ring *r, PyObject *count)
{
    if (usable(r) < 0)
        return NULL;
    uint64_t bytes = count_to_bytes(r, count);
    if (bytes == UINT64_MAX)
        return NULL;
    if (!r->read_open || r->read_message_open || bytes > r->begun_read) {
        misuse("commit_read: expected a begun read of at least as many elements");
        return NULL;
    }
    r->read_open = 0;
    if (own_read_counter(r) < 0 || publish_read(r, bytes) < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* ---- messages: a header {length, length ^ HEADER_CHECK}, the payload, padding to MESSAGE_ALIGNMENT ---- */

/* Bytes a message takes in the ring. */
static inline uint64_t padded(uint64_t length)
{
    return HEADER_BYTES + (length + MESSAGE_ALIGNMENT - 1) / MESSAGE_ALIGNMENT * MESSAGE_ALIGNMENT;
}

/* The same; UINT64_MAX with an exception if it can never fit. */
static uint64_t message_bytes(Ring *r, uint64_t length)
{
    if (r->quantum != 1) {
        misuse("queue: messages need a queue of quantum 1");
        return UINT64_MAX;
    }
    uint64_t whole = length > UINT32_MAX ? 0 : padded(length);
    if (length > UINT32_MAX || whole > r->size) {
        PyErr_Format(InvalidArgument, "queue: expected a message of at most %llu bytes (capacity less header), got %llu",
                     (unsigned long long)(r->size < HEADER_BYTES ? 0 : (r->size - HEADER_BYTES) / MESSAGE_ALIGNMENT
                         * MESSAGE_ALIGNMENT), (unsigned long long)length);
        return UINT64_MAX;
    }
    return whole;
}

static inline void put_header(Ring *r, uint64_t length)
{
    uint32_t header[2] = {(uint32_t)length, (uint32_t)length ^ HEADER_CHECK};
    copy_in(r, r->write_index, header, HEADER_BYTES);
}

/* Padding is cleared: nothing of an earlier message shows through. */
static inline void pad(Ring *r, uint64_t length, uint64_t whole)
{
    static const uint8_t zeros[MESSAGE_ALIGNMENT];
    uint64_t gap = whole - HEADER_BYTES - length;
    if (gap)
        copy_in(r, r->write_index + HEADER_BYTES + length, zeros, gap);
}

static void put_message(Ring *r, const Py_buffer *b, uint64_t whole)
{
    claim_space(r, whole);
    POINT(2);
    put_header(r, (uint64_t)b->len);
    copy_in(r, r->write_index + HEADER_BYTES, b->buf, (uint64_t)b->len);
    pad(r, (uint64_t)b->len, whole);
    publish_write(r, whole);
}

/* 1 with the length of the next message, checked against the bytes that are there; 0 without one; -1. */
static int next_message(Ring *r, uint64_t *length)
{
    if (r->quantum != 1)
        return misuse("queue: messages need a queue of quantum 1");
    int ready = readable(r, HEADER_BYTES);
    if (ready != 1)
        return ready;
    uint32_t header[2];
    copy_out(r, r->read_index, header, HEADER_BYTES);
    if (r->flavour != SYNCHRONIZED && still_whole(r) < 0)
        return -1;
    if ((header[0] ^ HEADER_CHECK) != header[1])
        return corrupt(r, "message header does not check", header[0] ^ HEADER_CHECK, header[1]);
    uint64_t there = r->seen_write - r->read_index;
    uint64_t whole = padded(header[0]);
    if (whole > there) {
        if (look(r, 1, whole) < 0)
            return -1;
        there = r->seen_write - r->read_index;
        if (whole > there)
            return corrupt(r, "message longer than what was published", there, whole);
    }
    *length = header[0];
    return 1;
}

static PyObject *take_message(Ring *r, uint64_t length)
{
    PyObject *result = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)length);
    if (result == NULL)
        return NULL;
    POINT(12);
    copy_out(r, r->read_index + HEADER_BYTES, PyBytes_AsString(result), length);
    if (publish_read(r, padded(length)) < 0)
        Py_CLEAR(result);
    return result;
}

static PyObject *write_message(Ring *r, PyObject *payload, int64_t deadline, int blocking)
{
    Py_buffer b;
    if (PyObject_GetBuffer(payload, &b, PyBUF_SIMPLE) < 0)
        return NULL;
    PyObject *result = NULL;
    POINT(1);
    uint64_t whole;
    if (usable(r) < 0 || (whole = message_bytes(r, (uint64_t)b.len)) == UINT64_MAX)
        goto done;
    int room = blocking ? wait_for(r, 0, whole, deadline) : writable(r, whole);
    if (room < 0)
        goto done;
    if (room)
        put_message(r, &b, whole);
    result = PyBool_FromLong(room);
done:
    PyBuffer_Release(&b);
    return result;
}

PyDoc_STRVAR(write_message_doc, "write_message(payload)\n--\n\nAppends one message; False when it does not fit now.");
static PyObject *ring_write_message(Ring *r, PyObject *payload) { return write_message(r, payload, 0, 0); }

PyDoc_STRVAR(read_message_doc, "read_message()\n--\n\nTakes one message; None if the queue is empty.");
static PyObject *ring_read_message(Ring *r, PyObject *unused)
{
    uint64_t length;
    POINT(11);
    if (usable(r) < 0)
        return NULL;
    int ready = next_message(r, &length);
    if (ready < 0)
        return NULL;
    if (ready == 0)
        Py_RETURN_NONE;
    return take_message(r, length);
}

PyDoc_STRVAR(write_message_blocking_doc, "write_message_blocking(payload, timeout_ns)\n--\n\nAppends one message, "
             "waiting for room; False at the timeout. None waits without a limit.");
static PyObject *ring_write_message_blocking(Ring *r, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 2) {
        wrong_arguments("write_message_blocking", 2, nargs);
        return NULL;
    }
    int64_t deadline = deadline_from(args[1]);
    return deadline < 0 ? NULL : write_message(r, args[0], deadline, 1);
}

PyDoc_STRVAR(read_message_blocking_doc, "read_message_blocking(timeout_ns)\n--\n\nTakes one message, waiting for it; "
             "None at the timeout. A timeout of None waits without a limit.");
static PyObject *ring_read_message_blocking(Ring *r, PyObject *timeout)
{
    int64_t deadline = deadline_from(timeout);
    if (deadline < 0 || usable(r) < 0)
        return NULL;
    POINT(11);
    uint64_t length;
    int ready = r->quantum == 1 ? wait_for(r, 1, HEADER_BYTES, deadline) : 1;
    if (ready == 1)
        ready = next_message(r, &length);
    if (ready < 0)
        return NULL;
    if (ready == 0)
        Py_RETURN_NONE;
    return take_message(r, length);
}

PyDoc_STRVAR(reserve_message_doc, "_reserve_message(size_bytes)\n--\n\nOne or two writable views for the payload of a "
                                  "message, or None when it does not fit now.");
static PyObject *ring_reserve_message(Ring *r, PyObject *size)
{
    if (usable(r) < 0)
        return NULL;
    Py_ssize_t length = PyNumber_AsSsize_t(size, PyExc_OverflowError);
    if (length == -1 && PyErr_Occurred())
        return NULL;
    if (length < 0) {
        misuse("reserve_message: expected a size of at least 0 bytes");
        return NULL;
    }
    uint64_t whole = message_bytes(r, (uint64_t)length);
    if (whole == UINT64_MAX)
        return NULL;
    int room = writable(r, whole);
    if (room < 0)
        return NULL;
    if (room == 0)
        Py_RETURN_NONE;
    PyObject *views = regions(r, r->write_view, r->write_index + HEADER_BYTES, (uint64_t)length);
    if (views != NULL) {
        claim_space(r, whole);
        r->begun_write = (uint64_t)length;
        r->write_open = r->write_message_open = 1;
    }
    return views;
}

PyDoc_STRVAR(commit_message_doc, "_commit_message(size_bytes)\n--\n\nPublishes the first size_bytes of the reserved "
                                 "message.");
static PyObject *ring_commit_message(Ring *r, PyObject *size)
{
    if (usable(r) < 0)
        return NULL;
    Py_ssize_t length = PyNumber_AsSsize_t(size, PyExc_OverflowError);
    if (length == -1 && PyErr_Occurred())
        return NULL;
    if (!r->write_open || !r->write_message_open || length < 0 || (uint64_t)length > r->begun_write) {
        misuse("commit_message: expected a reserved message of at least as many bytes");
        return NULL;
    }
    r->write_open = r->write_message_open = 0;
    if (writable(r, 0) < 0)
        return NULL;
    uint64_t whole = padded((uint64_t)length);
    put_header(r, (uint64_t)length);
    pad(r, (uint64_t)length, whole);
    publish_write(r, whole);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(peek_message_doc, "_peek_message()\n--\n\nOne or two read-only views of the next message, or None.");
static PyObject *ring_peek_message(Ring *r, PyObject *unused)
{
    uint64_t length;
    if (usable(r) < 0)
        return NULL;
    int ready = next_message(r, &length);
    if (ready < 0)
        return NULL;
    if (ready == 0)
        Py_RETURN_NONE;
    PyObject *views = open_read(r, padded(length), HEADER_BYTES, length);
    if (views != NULL)
        r->read_message_open = 1;
    return views;
}

PyDoc_STRVAR(release_message_doc, "_release_message()\n--\n\nTakes the peeked message out of the queue.");
static PyObject *ring_release_message(Ring *r, PyObject *unused)
{
    if (usable(r) < 0)
        return NULL;
    if (!r->read_open || !r->read_message_open) {
        misuse("release_message: expected a peeked message");
        return NULL;
    }
    r->read_open = r->read_message_open = 0;
    if (own_read_counter(r) < 0 || publish_read(r, r->begun_read) < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* ---- for _answers.c: without the interpreter's lock, raising nothing (_native.h) ---- */

int fmq_misuse(const char *message) { return misuse(message); }

Ring *ring_enter(PyObject *object, int reader)
{
    if (!PyObject_TypeCheck(object, (PyTypeObject *)RingType)) {
        misuse("serve: expected two queues");
        return NULL;
    }
    Ring *r = (Ring *)object;
    if (usable(r) < 0)
        return NULL;
    if (r->flavour != SYNCHRONIZED || r->reader_park == NULL || r->quantum != 1) {
        misuse("serve: expected queues of messages: synchronized, with an event flag, of quantum 1");
        return NULL;
    }
    if (reader ? !r->reading && start_reading(r) < 0 : !r->writing && start_writing(r) < 0)
        return NULL;
    r->inside++;
    set_state(r, SERVED);
    return r;
}

void ring_leave(Ring *r)
{
    if (r->state == SERVED)
        set_state(r, OPEN);
    r->inside--;
    if (r->state == CLOSED && r->inside == 0)
        ring_release(r);
}

int ring_is_left(Ring *r)
{
    return state_of(r) != SERVED || __atomic_load_n(&r->interrupted, __ATOMIC_SEQ_CST);
}

/* As readable, where a counter that no correct peer writes is -1 and stays for the next call of Python to find. */
static int look_without_lock(Ring *r, uint64_t need)
{
    if (atomic_load_explicit(r->read_counter, memory_order_relaxed) != r->read_index)
        return -1;
    if (r->seen_write - r->read_index >= need)
        return 1;
    uint64_t write = atomic_load_explicit(r->write_counter, memory_order_acquire); /* DATA_READY acquire */
    if (write == r->seen_write)
        return 0;
    if (used_bytes(r, write, r->read_index) == UINT64_MAX || write - r->read_index < r->seen_write - r->read_index)
        return -1;
    r->seen_write = write;
    return write - r->read_index >= need;
}

int ring_await_message(Ring *r)
{
    int ready = look_without_lock(r, HEADER_BYTES);
    if (ready != 0)
        return ready;
    int64_t began = now_ns(), now = began;
    while (ready == 0) {
        if (ring_is_left(r))
            return -1;
        if (r->spin_ns > 0 && r->usual_wait_ns < r->spin_ns && now - began < r->spin_ns) {
            COUNT(r->spins, 1);
            watch_counter(r->write_counter, r->seen_write, began + r->spin_ns);
        } else {
            /* PARK_READER, as in park */
            uint32_t expected = atomic_fetch_or(r->reader_park, PARKED_FUTEX) | PARKED_FUTEX;
            atomic_thread_fence(memory_order_seq_cst);
            POINT(21);
            int error = 0;
            if (look_without_lock(r, HEADER_BYTES) == 0 && !ring_is_left(r)) {
                COUNT(r->parks, 1);
                POINT(22);
                now = now_ns();
                error = futex_wait(r->reader_park, expected, now + PARK_SLICE_NS, FUTEX_BITSET_MATCH_ANY);
            }
            atomic_fetch_and(r->reader_park, ~(uint32_t)PARKED_FUTEX);
            if (error == EINTR)
                return -1; /* Python's handlers of signals run with the lock */
        }
        ready = look_without_lock(r, HEADER_BYTES);
        now = now_ns();
    }
    if (ready > 0) {
        int64_t waited = now - began < 4 * r->spin_ns ? now - began : 4 * r->spin_ns;
        r->usual_wait_ns += (waited - r->usual_wait_ns) / 8;
    }
    return ready;
}

int ring_copy_message(Ring *r, uint8_t *into, uint32_t bytes_max, uint32_t *length)
{
    uint32_t header[2];
    copy_out(r, r->read_index, header, HEADER_BYTES);
    if ((header[0] ^ HEADER_CHECK) != header[1] || header[0] > bytes_max
        || look_without_lock(r, padded(header[0])) != 1)
        return 0;
    POINT(12);
    copy_out(r, r->read_index + HEADER_BYTES, into, header[0]);
    *length = header[0];
    return 1;
}

void ring_take_message(Ring *r, uint32_t length) { (void)publish_read(r, padded(length)); /* never -1: synchronized */ }

int ring_has_room(Ring *r, uint32_t length)
{
    uint64_t need = padded(length);
    uint64_t own = atomic_load_explicit(r->write_counter, memory_order_relaxed);
    uint64_t read = atomic_load_explicit(r->read_counter, memory_order_acquire); /* SPACE_FREE acquire */
    if (own != r->write_index || (!r->mask && own + need < own) || used_bytes(r, own, read) == UINT64_MAX
        || own - read > own - r->seen_read)
        return 0;
    r->seen_read = read;
    return r->size - (own - read) >= need;
}

void ring_put_message(Ring *r, const uint8_t *message, uint32_t length)
{
    uint64_t whole = padded(length);
    POINT(2);
    put_header(r, length);
    copy_in(r, r->write_index + HEADER_BYTES, message, length);
    pad(r, length, whole);
    publish_write(r, whole);
}

/* ---- looking and waiting ---- */

PyDoc_STRVAR(available_to_read_doc, "available_to_read()\n--\n\nElements written and not read by this endpoint; 0 when "
                                    "the counters are impossible.");
static PyObject *ring_available_to_read(Ring *r, PyObject *unused)
{
    if (r->state == CORRUPT)
        return PyLong_FromLong(0);
    if (r->state != SERVED && usable(r) < 0)
        return NULL;
    uint64_t write = atomic_load_explicit(r->write_counter, memory_order_acquire);
    uint64_t read = r->reading && r->state != SERVED ? r->read_index
        : r->flavour == SYNCHRONIZED ? atomic_load_explicit(r->read_counter, memory_order_acquire) : 0;
    uint64_t used = write - read;
    if (used % r->quantum || write % r->quantum || (r->flavour == SYNCHRONIZED ? used > r->size : write < read))
        used = 0;
    return PyLong_FromUnsignedLongLong(used / r->quantum);
}

PyDoc_STRVAR(available_to_write_doc, "available_to_write()\n--\n\nElements that can be written now without loss; 0 when "
                                     "the counters are impossible.");
static PyObject *ring_available_to_write(Ring *r, PyObject *unused)
{
    if (r->state == CORRUPT)
        return PyLong_FromLong(0);
    if (r->state != SERVED && usable(r) < 0)
        return NULL;
    uint64_t write = r->writing && r->state != SERVED ? r->write_index : atomic_load_explicit(r->write_counter, memory_order_acquire);
    uint64_t read = r->flavour == SYNCHRONIZED ? atomic_load_explicit(r->read_counter, memory_order_acquire)
        : r->reading ? r->read_index : 0;
    uint64_t used = used_bytes(r, write, read);
    return PyLong_FromUnsignedLongLong(used == UINT64_MAX || write % r->quantum ? 0 : (r->size - used) / r->quantum);
}

static PyObject *wait_elements(Ring *r, int reader, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 2) {
        wrong_arguments(reader ? "wait_readable" : "wait_writable", 2, nargs);
        return NULL;
    }
    if (usable(r) < 0)
        return NULL;
    uint64_t bytes = count_to_bytes(r, args[0]);
    int64_t deadline = bytes == UINT64_MAX ? -1 : deadline_from(args[1]);
    if (deadline < 0)
        return NULL;
    int ready = wait_for(r, reader, bytes, deadline);
    return ready < 0 ? NULL : PyBool_FromLong(ready);
}

PyDoc_STRVAR(wait_readable_doc, "wait_readable(count, timeout_ns)\n--\n\nWaits until count elements can be read; False "
                                "at the timeout. None waits without a limit.");
static PyObject *ring_wait_readable(Ring *r, PyObject *const *args, Py_ssize_t nargs)
{
    return wait_elements(r, 1, args, nargs);
}

PyDoc_STRVAR(wait_writable_doc, "wait_writable(count, timeout_ns)\n--\n\nWaits until count elements can be written; "
                                "False at the timeout. None waits without a limit.");
static PyObject *ring_wait_writable(Ring *r, PyObject *const *args, Py_ssize_t nargs)
{
    return wait_elements(r, 0, args, nargs);
}

/* Declares one side asleep on its eventfd and looks once more: 1 if it may sleep, 0 if there is something to do, -1. */
static int arm(Ring *r, int reader, uint64_t need)
{
    if (usable(r) < 0)
        return -1;
    if (r->interrupted) {
        PyErr_SetString(InterruptedQueue, "queue: interrupt() was called on this endpoint");
        return -1;
    }
    _Atomic uint32_t *word = reader ? r->reader_park : r->writer_park;
    if (r->flavour != SYNCHRONIZED || word == NULL || (reader ? r->reader_event : r->writer_event) < 0)
        return misuse("queue: waiting needs the synchronized flavour and an event flag");
    atomic_fetch_or(word, PARKED_EVENTFD);
    atomic_thread_fence(memory_order_seq_cst);
    POINT(21);
    int ready = look(r, reader, need);
    if (ready == 0) {
        COUNT(r->parks, 1);
        return 1;
    }
    if (r->state != CLOSED)
        atomic_fetch_and(word, ~(uint32_t)PARKED_EVENTFD);
    return ready < 0 ? -1 : 0;
}

PyDoc_STRVAR(disarm_doc, "_disarm(reader)\n--\n\nDeclares one side awake again.");
static PyObject *ring_disarm(Ring *r, PyObject *reader)
{
    int side = PyObject_IsTrue(reader);
    if (side < 0)
        return NULL;
    _Atomic uint32_t *word = side ? r->reader_park : r->writer_park;
    if ((r->state == OPEN || r->state == CORRUPT) && word != NULL)
        atomic_fetch_and(word, ~(uint32_t)PARKED_EVENTFD);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(interrupt_doc, "interrupt()\n--\n\nMakes waiting calls of this endpoint, parked or to come, raise "
                            "InterruptedQueue.");
static PyObject *ring_interrupt(Ring *r, PyObject *unused)
{
    if (r->state != OPEN && r->state != CORRUPT && r->state != SERVED)
        Py_RETURN_NONE;
    __atomic_store_n(&r->interrupted, 1, __ATOMIC_SEQ_CST); /* before the words change: ring_await_message */
    /* The changed word keeps a thread awake that has released the GIL and does not sleep yet. */
    if (r->reader_park != NULL) {
        wake_parked(r, r->reader_park, r->reader_event);
        wake_parked(r, r->writer_park, r->writer_event);
    }
    Py_RETURN_NONE;
}

PyDoc_STRVAR(release_doc, "_release()\n--\n\nCloses the endpoint: parked threads raise ClosedQueue, the memory is given "
                          "back when the last of them has left.");
static PyObject *ring_close(Ring *r, PyObject *unused)
{
    if (r->state == OPEN || r->state == CORRUPT || r->state == SERVED) {
        int ours = r->generation == atomic_load_explicit(&fork_generation, memory_order_relaxed);
        set_state(r, CLOSED);
        if (!ours)
            r->inside = 0; /* threads do not survive a fork */
        else if (r->reader_park != NULL && r->inside > 0) {
            wake_parked(r, r->reader_park, r->reader_event);
            wake_parked(r, r->writer_park, r->writer_event);
        }
        if (r->inside == 0)
            ring_release(r);
    }
    Py_RETURN_NONE;
}

PyDoc_STRVAR(counters_doc, "_counters()\n--\n\n(written, taken, lost, overflows, wakes, parks, spins).");
static PyObject *ring_counters(Ring *r, PyObject *unused)
{
    uint64_t quantum = r->quantum ? r->quantum : 1;
    const uint64_t counted[] = {COUNTED(r->written) / quantum, COUNTED(r->taken) / quantum, COUNTED(r->wakes),
                                COUNTED(r->parks), COUNTED(r->spins)};
    return Py_BuildValue("(KKKKKKK)", (unsigned long long)counted[0], (unsigned long long)counted[1],
                         (unsigned long long)r->lost, (unsigned long long)r->overflows,
                         (unsigned long long)counted[2], (unsigned long long)counted[3],
                         (unsigned long long)counted[4]);
}

static PyObject *get_state(Ring *r, void *unused)
{
    static const char *const names[] = {"unopened", "open", "corrupt", "closed", "open"};
    if (r->state == OPEN && r->generation != atomic_load_explicit(&fork_generation, memory_order_relaxed))
        return PyUnicode_FromString("forked");
    return PyUnicode_FromString(names[r->state]);
}

static PyObject *get_interrupted(Ring *r, void *unused) { return PyBool_FromLong(r->interrupted); }
static PyObject *get_quantum(Ring *r, void *unused) { return PyLong_FromUnsignedLongLong(r->quantum); }
static PyObject *get_count(Ring *r, void *unused) { return PyLong_FromUnsignedLongLong(r->count); }

/* One piece of shared memory: at least `least` bytes, 8-byte aligned, writable unless the ring is read-only. */
static int hold(Ring *r, int i, PyObject *buffer, uint64_t least)
{
    static const char *const names[] = {"read counter", "write counter", "data", "event flag", "reader parking",
                                        "writer parking"};
    if (PyObject_GetBuffer(buffer, &r->pieces[i], r->readonly ? PyBUF_SIMPLE : PyBUF_WRITABLE) < 0)
        return -1;
    r->held[i] = 1;
    if ((uint64_t)r->pieces[i].len < least || (uintptr_t)r->pieces[i].buf % 8) {
        PyErr_Format(InvalidArgument, "%s: expected at least %llu bytes at a multiple of 8, got %zd", names[i],
                     (unsigned long long)least, r->pieces[i].len);
        return -1;
    }
    return 0;
}

static int make_views(Ring *r, PyObject *data)
{
    PyObject *whole = PyMemoryView_FromObject(data);
    if (whole == NULL)
        return -1;
    r->write_view = PySequence_GetSlice(whole, 0, (Py_ssize_t)r->size);
    Py_DECREF(whole);
    if (r->write_view == NULL)
        return -1;
    r->read_view = PyObject_CallMethod(r->write_view, "toreadonly", NULL);
    return r->read_view == NULL ? -1 : 0;
}

static int ring_init(Ring *r, PyObject *args, PyObject *kwargs)
{
    PyObject *pieces[PIECES];
    unsigned long long quantum, count;
    long long spin_ns;
    int flavour, reset, readonly, reader_event, writer_event;
    if (!PyArg_ParseTuple(args, "(OOOOOO)KKippiiL", &pieces[0], &pieces[1], &pieces[2], &pieces[3], &pieces[4],
                          &pieces[5], &quantum, &count, &flavour, &reset, &readonly, &reader_event, &writer_event,
                          &spin_ns))
        return -1;
    if (r->state != UNOPENED)
        return misuse("Ring: already initialised");
    if (quantum == 0 || count == 0 || count > (unsigned long long)PY_SSIZE_T_MAX / quantum
        || (flavour != SYNCHRONIZED && flavour != UNSYNCHRONIZED))
        return misuse("Ring: expected a positive quantum and count whose product fits, and a flavour of 1 or 2");
    r->quantum = quantum;
    r->count = count;
    r->size = quantum * count;
    r->mask = (r->size & (r->size - 1)) == 0 ? r->size - 1 : 0;
    r->quantum_mask = (quantum & (quantum - 1)) == 0 ? quantum - 1 : UINT64_MAX;
    r->flavour = flavour;
    r->readonly = readonly;
    r->reader_event = reader_event;
    r->writer_event = writer_event;
    r->spin_ns = spin_ns;
    const uint64_t least[PIECES] = {8, flavour == UNSYNCHRONIZED ? 16 : 8, r->size, 4, 4, 4};
    for (int i = 0; i < PIECES; i++)
        if ((i <= DATA || pieces[i] != Py_None) && hold(r, i, pieces[i], least[i]) < 0)
            goto failed;
    if (make_views(r, pieces[DATA]) < 0)
        goto failed;
    r->read_counter = r->pieces[READ_COUNTER].buf;
    r->write_counter = r->pieces[WRITE_COUNTER].buf;
    r->claim = flavour == UNSYNCHRONIZED ? r->write_counter + 1 : NULL;
    r->data = r->pieces[DATA].buf;
    if (r->held[READER_PARK] && r->held[WRITER_PARK] && !readonly) {
        r->reader_park = r->pieces[READER_PARK].buf;
        r->writer_park = r->pieces[WRITER_PARK].buf;
    }
    if (reset && !readonly) {
        atomic_store(r->read_counter, 0);
        atomic_store(r->write_counter, 0);
        if (r->claim != NULL)
            atomic_store(r->claim, 0);
    }
    r->generation = atomic_load(&fork_generation);
    set_state(r, OPEN);
    return 0;
failed:
    ring_release(r);
    return -1;
}

static void ring_dealloc(Ring *r)
{
    PyTypeObject *type = Py_TYPE((PyObject *)r);
    ring_release(r);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(r);
    Py_DECREF(type);
}

#define METHOD(name, flags) {#name, (PyCFunction)(void (*)(void))ring_##name, flags, name##_doc}
static PyMethodDef ring_methods[] = {
    METHOD(write, METH_O),
    METHOD(write_many, METH_O),
    METHOD(read, METH_NOARGS),
    METHOD(read_many, METH_O),
    METHOD(read_available, METH_O),
    METHOD(read_into, METH_O),
    METHOD(read_many_into, METH_O),
    METHOD(write_message, METH_O),
    METHOD(read_message, METH_NOARGS),
    METHOD(write_message_blocking, METH_FASTCALL),
    METHOD(read_message_blocking, METH_O),
    METHOD(available_to_read, METH_NOARGS),
    METHOD(available_to_write, METH_NOARGS),
    METHOD(wait_readable, METH_FASTCALL),
    METHOD(wait_writable, METH_FASTCALL),
    METHOD(interrupt, METH_NOARGS),
    {"_begin_write", (PyCFunction)ring_begin_write, METH_O, begin_write_doc},
    {"_begin_read", (PyCFunction)ring_begin_read, METH_O, begin_read_doc},
    {"_commit_write", (PyCFunction)ring_commit_write, METH_O, commit_write_doc},
    {"_commit_read", (PyCFunction)ring_commit_read, METH_O, commit_read_doc},
    {"_commit_message", (PyCFunction)ring_commit_message, METH_O, commit_message_doc},
    {"_release_message", (PyCFunction)ring_release_message, METH_NOARGS, release_message_doc},
    {"_reserve_message", (PyCFunction)ring_reserve_message, METH_O, reserve_message_doc},
    {"_peek_message", (PyCFunction)ring_peek_message, METH_NOARGS, peek_message_doc},
    {"_disarm", (PyCFunction)ring_disarm, METH_O, disarm_doc},
    {"_release", (PyCFunction)ring_close, METH_NOARGS, release_doc},
    {"_counters", (PyCFunction)ring_counters, METH_NOARGS, counters_doc},
    {NULL},
};

static PyGetSetDef ring_getset[] = {
    {"state", (getter)get_state, NULL, "open, corrupt, closed, or forked in the child of a fork.", NULL},
    {"interrupted", (getter)get_interrupted, NULL, "Whether interrupt() was called.", NULL},
    {"quantum_bytes", (getter)get_quantum, NULL, "Size of one element in bytes.", NULL},
    {"count", (getter)get_count, NULL, "Capacity in elements.", NULL},
    {NULL},
};

static PyType_Slot ring_slots[] = {
    {Py_tp_doc, "Endpoint of a ring in shared memory; the base of MessageQueue."},
    {Py_tp_init, ring_init},
    {Py_tp_dealloc, ring_dealloc},
    {Py_tp_methods, ring_methods},
    {Py_tp_getset, ring_getset},
    {0, NULL},
};

static PyType_Spec ring_spec = {
    .name = "fmq._native.Ring",
    .basicsize = sizeof(Ring),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .slots = ring_slots,
};

/* ---------------------------------------------------------------------------------------------------------------- */
/* The event flag word: EVENT_BITS                                                                                    */

typedef struct {
    PyObject_HEAD
    _Atomic uint32_t *word;
    Py_buffer buffer;
    int held, closed, inside;
    unsigned interruptions;
} FlagWord;

static void flag_release(FlagWord *f)
{
    if (f->held) {
        f->held = 0;
        PyBuffer_Release(&f->buffer);
    }
}

static int flag_usable(FlagWord *f)
{
    if (f->held && !f->closed)
        return 0;
    PyErr_SetString(ClosedQueue, "event flag: closed");
    return -1;
}

/* A mask of 32 bits; -1 with an exception. */
static int64_t mask_from(PyObject *object)
{
    unsigned long long mask = PyLong_AsUnsignedLongLong(object);
    if (mask == (unsigned long long)-1 && PyErr_Occurred()) {
        if (!PyErr_ExceptionMatches(PyExc_OverflowError))
            return -1;
        PyErr_Clear();
        mask = UINT64_MAX;
    }
    if (mask > UINT32_MAX) {
        PyErr_Format(InvalidArgument, "event flag: expected a mask of 32 bits, got %S", object);
        return -1;
    }
    return (int64_t)mask;
}

PyDoc_STRVAR(flag_wake_doc, "wake(mask)\n--\n\nSets bits, and wakes who waits for them only if some were not set.");
static PyObject *flag_wake(FlagWord *f, PyObject *object)
{
    int64_t mask = mask_from(object);
    if (mask < 0 || flag_usable(f) < 0)
        return NULL;
    if (mask != 0) {
        uint32_t before = atomic_fetch_or_explicit(f->word, (uint32_t)mask, memory_order_seq_cst); /* EVENT_BITS release */
        POINT(31);
        if (~before & (uint32_t)mask)
            futex_wake(f->word, (uint32_t)mask);
    }
    Py_RETURN_NONE;
}

/* The bits of mask that are set; consumed if asked for. 0 when none came until the deadline, or at a spurious return
 * without retry. -1 with an exception. */
static int64_t flag_wait_bits(FlagWord *f, uint32_t mask, int64_t deadline, int retry, int consume,
                              unsigned interruptions)
{
    for (;;) {
        if (flag_usable(f) < 0)
            return -1;
        uint32_t before = consume ? atomic_fetch_and_explicit(f->word, ~mask, memory_order_seq_cst) /* EVENT_BITS acquire */
                                  : atomic_load_explicit(f->word, memory_order_acquire);
        if (before & mask)
            return before & mask;
        int64_t now = now_ns();
        if (now >= deadline || (!consume && f->interruptions != interruptions))
            return 0;
        int64_t until = deadline - now > PARK_SLICE_NS ? now + PARK_SLICE_NS : deadline;
        f->inside++;
        PyThreadState *thread = PyEval_SaveThread();
        int error = futex_wait(f->word, before, until, mask);
        PyEval_RestoreThread(thread);
        f->inside--;
        if (f->closed && f->inside == 0)
            flag_release(f);
        if (error == EINTR && PyErr_CheckSignals() < 0)
            return -1;
        if (!retry && (error == EINTR || error == EAGAIN))
            return 0;
    }
}

PyDoc_STRVAR(flag_wait_doc, "wait(mask, timeout_ns=None, retry=True)\n--\n\nConsumes bits, waiting for at least one of "
                            "mask; 0 at the timeout.");
static PyObject *flag_wait(FlagWord *f, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"mask", "timeout_ns", "retry", NULL};
    PyObject *object, *timeout = Py_None;
    int retry = 1;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|Op", names, &object, &timeout, &retry))
        return NULL;
    int64_t mask = mask_from(object);
    if (mask < 0)
        return NULL;
    if (mask == 0) {
        misuse("event flag: expected a mask with at least one bit to wait for, got 0");
        return NULL;
    }
    int64_t deadline = deadline_from(timeout);
    if (deadline < 0)
        return NULL;
    int64_t bits = flag_wait_bits(f, (uint32_t)mask, deadline, retry, 1, 0);
    return bits < 0 ? NULL : PyLong_FromLongLong(bits);
}

PyDoc_STRVAR(flag_watch_doc, "_watch(mask, timeout_ns, interruptions)\n--\n\nAs wait, without consuming; 0 also when "
                             "there have been more interruptions than given.");
static PyObject *flag_watch(FlagWord *f, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 3) {
        wrong_arguments("_watch", 3, nargs);
        return NULL;
    }
    int64_t mask = mask_from(args[0]);
    int64_t deadline = mask < 0 ? -1 : deadline_from(args[1]);
    if (deadline < 0)
        return NULL;
    unsigned interruptions = (unsigned)PyLong_AsUnsignedLong(args[2]);
    if (PyErr_Occurred())
        return NULL;
    int64_t bits = flag_wait_bits(f, (uint32_t)mask, deadline, 1, 0, interruptions);
    return bits < 0 ? NULL : PyLong_FromLongLong(bits);
}

PyDoc_STRVAR(flag_interrupt_doc, "_interrupt()\n--\n\nMakes _watch calls of this process return.");
static PyObject *flag_interrupt(FlagWord *f, PyObject *unused)
{
    f->interruptions++;
    if (f->held)
        futex_wake(f->word, FUTEX_BITSET_MATCH_ANY);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(flag_close_doc, "close()\n--\n\nGives the word back; waiting calls raise ClosedQueue.");
static PyObject *flag_close(FlagWord *f, PyObject *unused)
{
    if (!f->closed && f->held) {
        f->closed = 1;
        futex_wake(f->word, FUTEX_BITSET_MATCH_ANY);
        if (f->inside == 0)
            flag_release(f);
    }
    f->closed = 1;
    Py_RETURN_NONE;
}

static PyObject *flag_value(FlagWord *f, void *unused)
{
    if (flag_usable(f) < 0)
        return NULL;
    return PyLong_FromUnsignedLong(atomic_load_explicit(f->word, memory_order_acquire));
}

static PyObject *flag_interruptions(FlagWord *f, void *unused) { return PyLong_FromUnsignedLong(f->interruptions); }

static int flag_init(FlagWord *f, PyObject *args, PyObject *kwargs)
{
    PyObject *memory;
    if (!PyArg_ParseTuple(args, "O", &memory))
        return -1;
    if (f->held || f->closed)
        return misuse("event flag: already initialised");
    if (PyObject_GetBuffer(memory, &f->buffer, PyBUF_WRITABLE) < 0)
        return -1;
    f->held = 1;
    if (f->buffer.len < 4 || (uintptr_t)f->buffer.buf % 4) {
        PyErr_Format(InvalidArgument, "event flag: expected 4 bytes at a multiple of 4, got %zd", f->buffer.len);
        flag_release(f);
        return -1;
    }
    f->word = f->buffer.buf;
    return 0;
}

static void flag_dealloc(FlagWord *f)
{
    PyTypeObject *type = Py_TYPE((PyObject *)f);
    flag_release(f);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(f);
    Py_DECREF(type);
}

static PyMethodDef flag_methods[] = {
    {"wake", (PyCFunction)flag_wake, METH_O, flag_wake_doc},
    {"wait", (PyCFunction)(void (*)(void))flag_wait, METH_VARARGS | METH_KEYWORDS, flag_wait_doc},
    {"_watch", (PyCFunction)(void (*)(void))flag_watch, METH_FASTCALL, flag_watch_doc},
    {"_interrupt", (PyCFunction)flag_interrupt, METH_NOARGS, flag_interrupt_doc},
    {"close", (PyCFunction)flag_close, METH_NOARGS, flag_close_doc},
    {NULL},
};

static PyGetSetDef flag_getset[] = {
    {"_interruptions", (getter)flag_interruptions, NULL, "Number of calls of _interrupt().", NULL},
    {"value", (getter)flag_value, NULL, "The bits set now.", NULL},
    {NULL},
};

static PyType_Slot flag_slots[] = {
    {Py_tp_doc, "A 32-bit futex word; the base of EventFlag."},
    {Py_tp_init, flag_init},
    {Py_tp_dealloc, flag_dealloc},
    {Py_tp_methods, flag_methods},
    {Py_tp_getset, flag_getset},
    {0, NULL},
};

static PyType_Spec flag_spec = {
    .name = "fmq._native.FlagWord",
    .basicsize = sizeof(FlagWord),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .slots = flag_slots,
};

/* ---------------------------------------------------------------------------------------------------------------- */
/* The object that a task awaits: one side of an endpoint on one event loop (aio.py derives from it)                */

/* The protocol a Task has for awaited objects other than a Future: __await__ yields the object with
 * _asyncio_future_blocking set, the Task asks get_loop() and hands its wake-up to add_done_callback(), and that asks
 * result(). The wake-up runs within readable(), where a Future would have it wait for the loop's next turn, which costs
 * about as much as the wake itself. */
typedef struct {
    PyObject_HEAD
    PyObject *loop, *queue, *callback, *context, *error; /* queue only while armed */
    int fd, timer_fd, poll_fd, reader, blocking, yielded, timed;
} Watch;

/* Declares this side of a queue asleep: 1 if the watch is to be awaited, 0 if there is something to do, -1. */
static int watch_sleep(Watch *w, PyObject *queue, uint64_t need)
{
    if (w->callback != NULL) {
        PyErr_Format(InvalidArgument, "queue: expected one task to %s this endpoint at a time, got a second one",
                     w->reader ? "read" : "write");
        return -1;
    }
    int asleep = arm((Ring *)queue, w->reader, need);
    if (asleep <= 0)
        return asleep;
    if (w->queue != queue) {
        PyObject *before = w->queue;
        w->queue = Py_NewRef(queue);
        Py_XDECREF(before);
    }
    if (!w->timed) {
        /* Left running when the wait ends early: one timer a slice, not one a message. Not a timer of the loop,
         * which would then program a timer for each of its own waits. */
        const struct itimerspec slice = {.it_value = {.tv_sec = 0, .tv_nsec = WAIT_SLICE_NS}};
        w->timed = timerfd_settime(w->timer_fd, 0, &slice, NULL) == 0;
    }
    return 1;
}

PyDoc_STRVAR(watch_arm_doc, "arm(queue, need_bytes)\n--\n\nDeclares this side of the queue asleep: True if the watch is "
                            "to be awaited, False if there is something to do.");
static PyObject *watch_arm(Watch *w, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 2) {
        wrong_arguments("arm", 2, nargs);
        return NULL;
    }
    if (!PyObject_TypeCheck(args[0], (PyTypeObject *)RingType)) {
        misuse("arm: expected a queue");
        return NULL;
    }
    unsigned long long need = PyLong_AsUnsignedLongLong(args[1]);
    if (need == (unsigned long long)-1 && PyErr_Occurred())
        return NULL;
    int asleep = watch_sleep(w, args[0], need);
    return asleep < 0 ? NULL : PyBool_FromLong(asleep);
}

static PyObject *watch_await(Watch *w)
{
    w->yielded = 0;
    Py_INCREF((PyObject *)w);
    return (PyObject *)w;
}

static PyObject *watch_next(Watch *w)
{
    if (w->yielded) {
        w->yielded = 0;
        return NULL; /* the end of the await, with None */
    }
    w->yielded = w->blocking = 1;
    Py_INCREF((PyObject *)w);
    return (PyObject *)w;
}

PyDoc_STRVAR(watch_get_loop_doc, "get_loop()\n--\n\nFor the Task: the loop it must belong to.");
static PyObject *watch_get_loop(Watch *w, PyObject *unused)
{
    Py_INCREF(w->loop);
    return w->loop;
}

PyDoc_STRVAR(watch_add_done_callback_doc, "add_done_callback(callback, *, context=None)\n--\n\nFor the Task: what "
                                          "resumes it.");
static PyObject *watch_add_done_callback(Watch *w, PyObject *const *args, Py_ssize_t nargs, PyObject *names)
{
    if (nargs != 1 || (names != NULL && PyTuple_Size(names) > 1)) {
        wrong_arguments("add_done_callback", 1, nargs);
        return NULL;
    }
    PyObject *callback = w->callback, *context = w->context, *error = w->error;
    w->error = NULL;
    w->callback = args[0];
    Py_INCREF(w->callback);
    w->context = names != NULL && PyTuple_Size(names) == 1 && args[1] != Py_None ? args[1] : NULL;
    Py_XINCREF(w->context);
    Py_XDECREF(callback);
    Py_XDECREF(context);
    Py_XDECREF(error);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(watch_result_doc, "result()\n--\n\nFor the Task: what its await raises.");
static PyObject *watch_result(Watch *w, PyObject *unused)
{
    PyObject *error = w->error;
    if (error == NULL)
        Py_RETURN_NONE;
    w->error = NULL;
    PyErr_SetObject((PyObject *)Py_TYPE(error), error);
    Py_DECREF(error);
    return NULL;
}

PyDoc_STRVAR(watch_readable_doc, "_readable()\n--\n\nTakes what there is of pokes and of the slices' timer, without ever "
                                 "waiting, and resumes the task.");
static PyObject *watch_readable(Watch *w, PyObject *unused)
{
    struct epoll_event events[2];
    int count = epoll_wait(w->poll_fd, events, 2, 0);
    for (int i = 0; i < count; i++) {
        uint64_t expirations;
        if (events[i].data.fd == w->timer_fd && read(w->timer_fd, &expirations, sizeof expirations) > 0)
            w->timed = 0;
    }
    if (w->callback == NULL)
        Py_RETURN_NONE;
    PyObject *callback = w->callback, *context = w->context, *queue = w->queue;
    w->callback = w->context = w->queue = NULL;
    PyObject *result = context == NULL ? PyObject_CallFunctionObjArgs(callback, (PyObject *)w, NULL)
        : PyObject_CallMethodObjArgs(context, run_name, callback, (PyObject *)w, NULL);
    Py_DECREF(callback);
    Py_XDECREF(context);
    Py_XDECREF(queue);
    return result;
}

static void watch_close(Watch *w)
{
    if (w->poll_fd >= 0)
        close(w->poll_fd);
    if (w->timer_fd >= 0)
        close(w->timer_fd);
    w->poll_fd = w->timer_fd = -1;
    w->timed = 0;
}

PyDoc_STRVAR(watch_leave_doc, "_leave()\n--\n\nCloses the descriptor that the loop watches, and the timer.");
static PyObject *watch_leave(Watch *w, PyObject *unused)
{
    watch_close(w);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(watch_take_doc, "_take(error)\n--\n\nEnds a wait with an error: (callback, context, queue) for the caller "
                             "to call, or None if no task waits.");
static PyObject *watch_take(Watch *w, PyObject *error)
{
    if (w->callback == NULL)
        Py_RETURN_NONE;
    PyObject *taken = PyTuple_Pack(3, w->callback, w->context == NULL ? Py_None : w->context,
                                   w->queue == NULL ? Py_None : w->queue);
    if (taken == NULL)
        return NULL;
    Py_CLEAR(w->callback);
    Py_CLEAR(w->context);
    Py_CLEAR(w->queue);
    PyObject *before = w->error;
    Py_INCREF(error);
    w->error = error;
    Py_XDECREF(before);
    return taken;
}

static PyObject *watch_get_blocking(Watch *w, void *unused) { return PyBool_FromLong(w->blocking); }

static int watch_set_blocking(Watch *w, PyObject *value, void *unused)
{
    int blocking = value == NULL ? 0 : PyObject_IsTrue(value);
    if (blocking >= 0)
        w->blocking = blocking;
    return blocking < 0 ? -1 : 0;
}

static PyObject *watch_get_waiting(Watch *w, void *unused) { return PyBool_FromLong(w->callback != NULL); }
static PyObject *watch_get_poll_fd(Watch *w, void *unused) { return PyLong_FromLong(w->poll_fd); }
static PyObject *watch_get_fd(Watch *w, void *unused) { return PyLong_FromLong(w->fd); }
static PyObject *watch_get_reader(Watch *w, void *unused) { return PyBool_FromLong(w->reader); }

static int watch_init(Watch *w, PyObject *args, PyObject *kwargs)
{
    PyObject *loop;
    int fd, reader;
    if (!PyArg_ParseTuple(args, "Oip", &loop, &fd, &reader))
        return -1;
    if (w->loop != NULL)
        return misuse("watch: already initialised");
    /* Edges and not levels: there is always room in the semaphore, and an edge for each poke. A loop that is level-triggered
     * watches the descriptor of this private epoll instead, which is readable from an edge until epoll_wait has returned it. */
    struct epoll_event edge = {.events = EPOLLOUT | EPOLLET, .data.fd = -1}, timer = {.events = EPOLLIN};
    w->poll_fd = epoll_create1(EPOLL_CLOEXEC);
    w->timer_fd = timer.data.fd = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
    if (w->poll_fd < 0 || w->timer_fd < 0 || epoll_ctl(w->poll_fd, EPOLL_CTL_ADD, fd, &edge) < 0
        || epoll_ctl(w->poll_fd, EPOLL_CTL_ADD, w->timer_fd, &timer) < 0) {
        PyErr_SetFromErrno(PyExc_OSError);
        watch_close(w);
        return -1;
    }
    (void)epoll_wait(w->poll_fd, &edge, 1, 0); /* the present room does not count as a poke */
    Py_INCREF(loop);
    w->loop = loop;
    w->fd = fd;
    w->reader = reader;
    return 0;
}

static int watch_traverse(Watch *w, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE((PyObject *)w));
    Py_VISIT(w->loop);
    Py_VISIT(w->queue);
    Py_VISIT(w->callback);
    Py_VISIT(w->context);
    Py_VISIT(w->error);
    return 0;
}

static int watch_clear(Watch *w)
{
    Py_CLEAR(w->queue);
    Py_CLEAR(w->callback);
    Py_CLEAR(w->context);
    Py_CLEAR(w->error);
    return 0;
}

static void watch_dealloc(Watch *w)
{
    PyTypeObject *type = Py_TYPE((PyObject *)w);
    PyObject_GC_UnTrack(w);
    watch_clear(w);
    if (w->loop != NULL)
        watch_close(w);
    Py_CLEAR(w->loop);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(w);
    Py_DECREF(type);
}

static PyMethodDef watch_methods[] = {
    {"arm", (PyCFunction)(void (*)(void))watch_arm, METH_FASTCALL, watch_arm_doc},
    {"get_loop", (PyCFunction)watch_get_loop, METH_NOARGS, watch_get_loop_doc},
    {"add_done_callback", (PyCFunction)(void (*)(void))watch_add_done_callback, METH_FASTCALL | METH_KEYWORDS,
     watch_add_done_callback_doc},
    {"result", (PyCFunction)watch_result, METH_NOARGS, watch_result_doc},
    {"_readable", (PyCFunction)watch_readable, METH_NOARGS, watch_readable_doc},
    {"_leave", (PyCFunction)watch_leave, METH_NOARGS, watch_leave_doc},
    {"_take", (PyCFunction)watch_take, METH_O, watch_take_doc},
    {NULL},
};

static PyGetSetDef watch_getset[] = {
    {"_asyncio_future_blocking", (getter)watch_get_blocking, (setter)watch_set_blocking, "For the Task.", NULL},
    {"waiting", (getter)watch_get_waiting, NULL, "Whether a task waits.", NULL},
    {"poll_fd", (getter)watch_get_poll_fd, NULL, "The descriptor that the loop watches, -1 when left.", NULL},
    {"fd", (getter)watch_get_fd, NULL, "The eventfd that pokes go to.", NULL},
    {"reader", (getter)watch_get_reader, NULL, "Whether it is the reading side of the endpoint.", NULL},
    {NULL},
};

static PyType_Slot watch_slots[] = {
    {Py_tp_doc, "One side of an endpoint on one event loop, awaitable by a Task."},
    {Py_tp_init, watch_init},
    {Py_tp_dealloc, watch_dealloc},
    {Py_tp_traverse, watch_traverse},
    {Py_tp_clear, watch_clear},
    {Py_tp_methods, watch_methods},
    {Py_tp_getset, watch_getset},
    {Py_am_await, watch_await},
    {Py_tp_iternext, watch_next},
    {0, NULL},
};

static PyType_Spec watch_spec = {
    .name = "fmq._native.Watch",
    .basicsize = sizeof(Watch),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = watch_slots,
};

/* ---------------------------------------------------------------------------------------------------------------- */
/* The next message of a queue, awaited again and again                                                               */

/* As read_message of aio.py, without a coroutine and without Python between the task and the queue: after a wait that code
 * is no longer in the processor's cache. It has no state of its own: each step takes a message, or declares the side asleep
 * and has the Task wait for the watch. */
typedef struct {
    PyObject_HEAD
    PyObject *queue, *watch;
} MessageReader;

static PySendResult reader_send(MessageReader *m, PyObject *unused, PyObject **result)
{
    Ring *r = (Ring *)m->queue;
    Watch *w = (Watch *)m->watch;
    if (r == NULL) {
        misuse("message reader: not initialised");
        return PYGEN_ERROR;
    }
    /* A side that is not declared asleep has a message, or raises: so the second round ends, unless the peer is hostile. */
    for (int round = 0; round < 2; round++) {
        *result = ring_read_message(r, NULL);
        if (*result == NULL)
            return PYGEN_ERROR;
        if (*result != Py_None)
            return PYGEN_RETURN;
        Py_DECREF(*result);
        *result = NULL;
        if (w->poll_fd < 0) {
            misuse("message reader: expected an event loop that watches the queue, got one that has left it");
            return PYGEN_ERROR;
        }
        int asleep = watch_sleep(w, m->queue, HEADER_BYTES);
        if (asleep < 0)
            return PYGEN_ERROR;
        if (asleep) {
            w->blocking = 1;
            *result = Py_NewRef(m->watch);
            return PYGEN_NEXT;
        }
    }
    corrupt(r, "write counter moved back", r->read_index + HEADER_BYTES, r->seen_write);
    return PYGEN_ERROR;
}

static PyObject *reader_next(MessageReader *m)
{
    PyObject *result;
    PySendResult kind = reader_send(m, NULL, &result);
    if (kind != PYGEN_RETURN)
        return result;
    PyErr_SetObject(PyExc_StopIteration, result);
    Py_DECREF(result);
    return NULL;
}

static PyObject *reader_await(PyObject *m) { return Py_NewRef(m); }

static int reader_init(MessageReader *m, PyObject *args, PyObject *kwargs)
{
    PyObject *queue, *watch;
    if (!PyArg_ParseTuple(args, "OO", &queue, &watch))
        return -1;
    if (m->queue != NULL || !PyObject_TypeCheck(queue, (PyTypeObject *)RingType)
        || !PyObject_TypeCheck(watch, (PyTypeObject *)WatchType) || ((Watch *)watch)->loop == NULL
        || !((Watch *)watch)->reader)
        return misuse("message reader: expected a queue and the watch of its reading side, once");
    m->queue = Py_NewRef(queue);
    m->watch = Py_NewRef(watch);
    return 0;
}

static int reader_traverse(MessageReader *m, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE((PyObject *)m));
    Py_VISIT(m->queue);
    Py_VISIT(m->watch);
    return 0;
}

static int reader_clear(MessageReader *m)
{
    Py_CLEAR(m->queue);
    Py_CLEAR(m->watch);
    return 0;
}

static void reader_dealloc(MessageReader *m)
{
    PyTypeObject *type = Py_TYPE((PyObject *)m);
    PyObject_GC_UnTrack(m);
    reader_clear(m);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(m);
    Py_DECREF(type);
}

static PyType_Slot reader_slots[] = {
    {Py_tp_doc, "MessageReader(queue, watch)\n--\n\nThe next message of a queue, each time that it is awaited."},
    {Py_tp_init, reader_init},
    {Py_tp_dealloc, reader_dealloc},
    {Py_tp_traverse, reader_traverse},
    {Py_tp_clear, reader_clear},
    {Py_am_await, reader_await},
    {Py_am_send, reader_send},
    {Py_tp_iter, PyObject_SelfIter},
    {Py_tp_iternext, reader_next},
    {0, NULL},
};

static PyType_Spec reader_spec = {
    .name = "fmq._native.MessageReader",
    .basicsize = sizeof(MessageReader),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = reader_slots,
};

/* ---------------------------------------------------------------------------------------------------------------- */

PyDoc_STRVAR(die_at_doc, "die_at(point)\n--\n\nLets this process die by SIGKILL at a numbered point; 0 is never. Refused "
                         "unless FMQ_DEBUG_POINTS is set in the environment.");
static PyObject *set_die_at(PyObject *module, PyObject *object)
{
    if (getenv("FMQ_DEBUG_POINTS") == NULL) {
        misuse("die_at: expected FMQ_DEBUG_POINTS in the environment");
        return NULL;
    }
    int point = (int)PyLong_AsLong(object);
    if (point == -1 && PyErr_Occurred())
        return NULL;
    fmq_die_at = point;
    Py_RETURN_NONE;
}

static PyMethodDef module_methods[] = {
    {"die_at", set_die_at, METH_O, die_at_doc},
    {NULL},
};

static int module_exec(PyObject *module)
{
    PyObject *errors = PyImport_ImportModule("fmq.errors");
    if (errors == NULL)
        return -1;
    const struct { const char *name; PyObject **slot; } wanted[] = {
        {"ClosedQueue", &ClosedQueue}, {"CorruptQueue", &CorruptQueue}, {"InterruptedQueue", &InterruptedQueue},
        {"InvalidArgument", &InvalidArgument}, {"Overflow", &Overflow},
    };
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++)
        if ((*wanted[i].slot = PyObject_GetAttrString(errors, wanted[i].name)) == NULL)
            return -1;
    Py_DECREF(errors);
    PyObject *ring = PyType_FromSpec(&ring_spec), *flag = PyType_FromSpec(&flag_spec);
    PyObject *watch = PyType_FromSpec(&watch_spec), *reader = PyType_FromSpec(&reader_spec);
    if (ring == NULL || flag == NULL || watch == NULL || reader == NULL
        || (run_name = PyUnicode_InternFromString("run")) == NULL
        || PyModule_AddObjectRef(module, "Watch", watch) < 0 || PyModule_AddObjectRef(module, "Ring", ring) < 0
        || PyModule_AddObjectRef(module, "FlagWord", flag) < 0
        || PyModule_AddObjectRef(module, "MessageReader", reader) < 0)
        return -1;
    RingType = ring; /* both kept for arm() and readers */
    WatchType = watch;
    Py_DECREF(flag);
    Py_DECREF(reader);
    if (slots_exec(module) < 0 || answers_exec(module) < 0)
        return -1;
    if (PyModule_AddIntConstant(module, "HEADER_BYTES", HEADER_BYTES) < 0
        || PyModule_AddIntConstant(module, "MESSAGE_ALIGNMENT", MESSAGE_ALIGNMENT) < 0)
        return -1;
    return pthread_atfork(NULL, NULL, after_fork_in_child) == 0 ? 0 : -1;
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec},
    {0, NULL},
};

static struct PyModuleDef module_definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "fmq._native",
    .m_doc = "The ring's hot path and the event flag's futex.",
    .m_size = 0,
    .m_methods = module_methods,
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&module_definition); }
