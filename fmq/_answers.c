/* Messages that are answered by a C function, without Python and without the interpreter's lock.
 *
 * Owns: the table of messages whose answer is known (Answers), and the loop that gives the answers. Refuses to own: what a
 * message means, every access to shared memory, which is _native.c's, and the slots of a device, which are _slots.c's.
 *
 * Invariants:
 *  1. A message is copied into private memory once. The copy is compared, all of its bytes, with a message that was added;
 *     the call is made with the words that were added with that one, and no word of the message is ever used but its times,
 *     which are only compared with a clock.
 *  2. A message that is unknown, late, not permitted or without a slot stays in the queue, for Python to read.
 *  3. A call holds a slot while it runs; one that was closed during the call is reported to Python.
 *  4. An entry lives until no call uses it: one that is removed before that is dropped by the thread of the call, with the lock.
 */
#include "_native.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

/* Most messages of a table: four for each buffer of a burst, with its limits and without. */
#define ENTRIES_MAX 128
/* Longest message and answer, which are kept whole. */
#define MESSAGE_BYTES_MAX 4096
/* Most words of a call: what both processor families that this is built for pass in registers. */
#define WORDS_MAX 6
/* Most times in a message. */
#define TIMES_MAX 2
#define TIME_BYTES 8

typedef int (*Function)(uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t);

/* ---------------------------------------------------------------------------------------------------------------- */
/* Answers                                                                                                            */

typedef struct Entry Entry;
struct Entry {
    Entry *next; /* of the removed ones */
    PyObject *permit;
    PyObject *call; /* given back with every event, and what it keeps alive */
    Function function;
    uintptr_t words[SLOTS_MAX][WORDS_MAX];
    int times_count;
    uint32_t times[TIMES_MAX]; /* where they begin, ascending */
    uint32_t message_bytes, answer_bytes;
    uint8_t bytes[]; /* the message, then the answer */
};

typedef struct {
    PyObject_HEAD
    pthread_mutex_t lock; /* the table, busy and removed; never held while Python runs or a call is made */
    int has_lock;
    Entry *entries[ENTRIES_MAX];
    int count, last;
    Entry *busy;    /* the entry whose call runs */
    Entry *removed; /* removed while they were busy */
    int serving, reports;
    /* The record of the calls: written by the thread that serves, read by any. */
    _Atomic uint64_t answered;
    _Atomic int64_t began_ns, ended_ns; /* began > ended while a call runs */
} Answers;

static void free_entry(Entry *e)
{
    PyObject *permit = e->permit, *call = e->call;
    free(e);
    Py_DECREF(permit);
    Py_DECREF(call); /* may run anything */
}

static uint64_t time_at(const uint8_t *bytes)
{
    uint64_t value = 0;
    for (int i = 0; i < TIME_BYTES; i++)
        value = value << 8 | bytes[i];
    return value;
}

/* Whether a private copy of a message is the one that was added: all bytes outside of its times, and times that are absent
 * (UINT64_MAX) or not negative. The first one is the deadline. */
static int is_message(const Entry *e, const uint8_t *message, uint32_t length, int64_t *deadline)
{
    if (length != e->message_bytes)
        return 0;
    uint32_t at = 0;
    *deadline = INT64_MAX;
    for (int i = 0; i < e->times_count; i++) {
        if (memcmp(message + at, e->bytes + at, e->times[i] - at) != 0)
            return 0;
        uint64_t value = time_at(message + e->times[i]);
        if (value != UINT64_MAX && value > (uint64_t)INT64_MAX)
            return 0;
        if (i == 0 && value != UINT64_MAX)
            *deadline = (int64_t)value;
        at = e->times[i] + TIME_BYTES;
    }
    return memcmp(message + at, e->bytes + at, length - at) == 0;
}

/* The entry of a message, busy from now on; NULL when it is not known. */
static Entry *begin_entry(Answers *a, const uint8_t *message, uint32_t length, int64_t *deadline)
{
    Entry *found = NULL;
    pthread_mutex_lock(&a->lock);
    for (int i = 0; i < a->count && found == NULL; i++) {
        /* The buffers of a stream come in turns. */
        int at = (a->last + 1 + i) % a->count;
        if (is_message(a->entries[at], message, length, deadline)) {
            found = a->busy = a->entries[at];
            a->last = at;
        }
    }
    pthread_mutex_unlock(&a->lock);
    return found;
}

/* The entry is not busy any more; whether some were removed during the call, which the caller drops with the lock of Python. */
static int end_entry(Answers *a)
{
    pthread_mutex_lock(&a->lock);
    a->busy = NULL;
    int some = a->removed != NULL;
    pthread_mutex_unlock(&a->lock);
    return some;
}

static void drop_removed(Answers *a)
{
    pthread_mutex_lock(&a->lock);
    Entry *removed = a->removed;
    a->removed = NULL;
    pthread_mutex_unlock(&a->lock);
    while (removed != NULL) {
        Entry *next = removed->next;
        free_entry(removed);
        removed = next;
    }
}

typedef struct {
    Entry *entry; /* busy; NULL when there is nothing but the queue to look at */
    int slot;     /* to be released by Python; -1: none */
    int status;   /* of the call that failed */
    int64_t began_ns, ended_ns;
} Event;

/* Answers what is known until Python is needed. Without the interpreter's lock. */
static Event answer_messages(Answers *a, Ring *requests, Ring *results)
{
    uint8_t message[MESSAGE_BYTES_MAX];
    for (;;) {
        Event event = {.entry = NULL, .slot = -1};
        uint32_t length;
        int64_t deadline;
        if (ring_is_left(requests) || ring_await_message(requests) != 1 || ring_is_left(results)
            || !ring_copy_message(requests, message, sizeof message, &length))
            return event;
        POINT(41);
        Entry *e = begin_entry(a, message, length, &deadline);
        if (e == NULL)
            return event;
        int64_t now = now_ns();
        int slot = -1;
        if (deadline > now && ring_has_room(results, e->answer_bytes))
            slot = permit_take(e->permit, now);
        if (slot < 0) {
            end_entry(a);
            return event;
        }
        POINT(42);
        atomic_store_explicit(&a->began_ns, now, memory_order_release);
        ring_take_message(requests, length);
        POINT(43);
        const uintptr_t *words = e->words[slot];
        event.status = e->function(words[0], words[1], words[2], words[3], words[4], words[5]);
        POINT(44);
        event.began_ns = now;
        event.ended_ns = now_ns();
        if (event.ended_ns <= now)
            event.ended_ns = now + 1; /* a call that has ended */
        atomic_store_explicit(&a->ended_ns, event.ended_ns, memory_order_release);
        if (event.status == 0) {
            atomic_store_explicit(&a->answered, atomic_load_explicit(&a->answered, memory_order_relaxed) + 1,
                                  memory_order_relaxed);
            ring_put_message(results, e->bytes + e->message_bytes, e->answer_bytes);
        }
        POINT(45);
        if (permit_give(e->permit, slot))
            event.slot = slot;
        POINT(46);
        if (event.status != 0 || event.slot >= 0 || a->reports) {
            event.entry = e;
            return event;
        }
        if (end_entry(a))
            return event;
    }
}

PyDoc_STRVAR(answers_serve_doc, "serve(requests, results)\n--\n\nAnswers messages by their calls until Python is needed: None where "
             "the queue has the reason, else (call, slot to release or -1, status, began_ns, ended_ns) of a call that was made.");
static PyObject *answers_serve(Answers *a, PyObject *args)
{
    PyObject *from, *to;
    if (!PyArg_ParseTuple(args, "OO", &from, &to))
        return NULL;
    if (a->serving || from == to) {
        fmq_misuse(a->serving ? "serve: a thread serves already" : "serve: expected two queues, got one twice");
        return NULL;
    }
    Ring *requests = ring_enter(from, 1);
    if (requests == NULL)
        return NULL;
    Ring *results = ring_enter(to, 0);
    if (results == NULL) {
        ring_leave(requests);
        return NULL;
    }
    a->serving = 1;
    PyThreadState *thread = PyEval_SaveThread();
    Event event = answer_messages(a, requests, results);
    PyEval_RestoreThread(thread);
    a->serving = 0;
    ring_leave(results);
    ring_leave(requests);
    PyObject *result;
    if (event.entry == NULL)
        result = Py_NewRef(Py_None);
    else {
        result = Py_BuildValue("(OiiLL)", event.entry->call, event.slot, event.status, (long long)event.began_ns,
                               (long long)event.ended_ns);
        end_entry(a);
    }
    drop_removed(a);
    return result;
}

/* Takes an entry out of the table; the one to be freed, or NULL where a call still uses it. With a->lock. */
static Entry *take_out(Answers *a, int at)
{
    Entry *e = a->entries[at];
    a->entries[at] = a->entries[--a->count];
    a->last = 0;
    if (e != a->busy)
        return e;
    e->next = a->removed;
    a->removed = e;
    return NULL;
}

/* The words by slot: as many tuples as the device has slots, each of at most WORDS_MAX numbers. */
static int read_words(Entry *e, PyObject *by_slot)
{
    if (!PyTuple_Check(by_slot) || PyTuple_Size(by_slot) != permit_slots_count(e->permit))
        return fmq_misuse("add: expected a tuple of words for each slot");
    for (Py_ssize_t i = 0; i < PyTuple_Size(by_slot); i++) {
        PyObject *words = PyTuple_GetItem(by_slot, i);
        if (!PyTuple_Check(words) || PyTuple_Size(words) > WORDS_MAX)
            return fmq_misuse("add: expected at most 6 words of a call, in a tuple");
        for (Py_ssize_t j = 0; j < PyTuple_Size(words); j++) {
            unsigned long long word = PyLong_AsUnsignedLongLong(PyTuple_GetItem(words, j));
            if (PyErr_Occurred())
                return -1;
            if (word > UINTPTR_MAX)
                return fmq_misuse("add: expected words of the size of an address");
            e->words[i][j] = (uintptr_t)word;
        }
    }
    return 0;
}

static int read_times(Entry *e, PyObject *times)
{
    if (!PyTuple_Check(times) || PyTuple_Size(times) > TIMES_MAX)
        return fmq_misuse("add: expected at most 2 times, in a tuple");
    uint64_t least = 0;
    for (Py_ssize_t i = 0; i < PyTuple_Size(times); i++) {
        unsigned long long at = PyLong_AsUnsignedLongLong(PyTuple_GetItem(times, i));
        if (PyErr_Occurred())
            return -1;
        if (at < least || at > e->message_bytes || e->message_bytes - at < TIME_BYTES)
            return fmq_misuse("add: expected times within the message, in ascending order");
        e->times[e->times_count++] = (uint32_t)at;
        least = at + TIME_BYTES;
    }
    return 0;
}

static Entry *make_entry(const Py_buffer *message, const Py_buffer *answer, unsigned long long function, PyObject *by_slot,
                         PyObject *permit, PyObject *call, PyObject *times)
{
    if (message->len > MESSAGE_BYTES_MAX || answer->len > MESSAGE_BYTES_MAX) {
        fmq_misuse("add: expected a message and an answer of at most 4096 bytes");
        return NULL;
    }
    if (permit_slots_count(permit) == 0 || function == 0 || function > UINTPTR_MAX) {
        fmq_misuse("add: expected a permit, and the address of a function");
        return NULL;
    }
    Entry *e = calloc(1, sizeof *e + (size_t)message->len + (size_t)answer->len);
    if (e == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    e->permit = Py_NewRef(permit);
    e->call = Py_NewRef(call);
    e->function = (Function)(uintptr_t)function;
    e->message_bytes = (uint32_t)message->len;
    e->answer_bytes = (uint32_t)answer->len;
    memcpy(e->bytes, message->buf, (size_t)message->len);
    memcpy(e->bytes + message->len, answer->buf, (size_t)answer->len);
    if (read_words(e, by_slot) < 0 || read_times(e, times) < 0) {
        free_entry(e);
        return NULL;
    }
    return e;
}

PyDoc_STRVAR(answers_add_doc, "_add(message, answer, function, words by slot, permit, call, times)\n--\n\nAnswers this message by a "
                              "call from now on; replaces an earlier one of the same bytes.");
static PyObject *answers_add(Answers *a, PyObject *args)
{
    Py_buffer message, answer;
    unsigned long long function;
    PyObject *by_slot, *permit, *call, *times;
    if (!PyArg_ParseTuple(args, "y*y*KOOOO", &message, &answer, &function, &by_slot, &permit, &call, &times))
        return NULL;
    Entry *e = make_entry(&message, &answer, function, by_slot, permit, call, times);
    PyBuffer_Release(&message);
    PyBuffer_Release(&answer);
    if (e == NULL)
        return NULL;
    Entry *replaced = NULL;
    int is_added = 0;
    pthread_mutex_lock(&a->lock);
    for (int i = 0; i < a->count; i++) {
        const Entry *other = a->entries[i];
        if (other->message_bytes == e->message_bytes && memcmp(other->bytes, e->bytes, e->message_bytes) == 0) {
            replaced = take_out(a, i);
            break;
        }
    }
    if (a->count < ENTRIES_MAX) {
        a->entries[a->count++] = e;
        is_added = 1;
    }
    pthread_mutex_unlock(&a->lock);
    if (replaced != NULL)
        free_entry(replaced);
    if (!is_added)
        free_entry(e);
    return PyBool_FromLong(is_added);
}

PyDoc_STRVAR(answers_clear_doc, "clear()\n--\n\nForgets all messages, from any thread. The one whose call runs is forgotten as well, and "
                                "what it keeps alive is dropped when that call ends.");
static PyObject *answers_clear(Answers *a, PyObject *unused)
{
    Entry *taken[ENTRIES_MAX];
    int count = 0;
    pthread_mutex_lock(&a->lock);
    while (a->count > 0) {
        Entry *e = take_out(a, a->count - 1);
        if (e != NULL)
            taken[count++] = e;
    }
    pthread_mutex_unlock(&a->lock);
    while (count > 0)
        free_entry(taken[--count]);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(answers_activity_doc, "activity()\n--\n\nThe record of the calls: (answered messages, when the last call began, when the "
                                   "last one ended); a call runs while it began after the end.");
static PyObject *answers_activity(Answers *a, PyObject *unused)
{
    /* The end first: read the other way round, a call that begins between the two reads would not be seen to run. */
    long long ended = atomic_load_explicit(&a->ended_ns, memory_order_acquire);
    long long began = atomic_load_explicit(&a->began_ns, memory_order_acquire);
    return Py_BuildValue("(KLL)", (unsigned long long)atomic_load_explicit(&a->answered, memory_order_relaxed), began, ended);
}

static PyObject *answers_is_busy(Answers *a, void *unused)
{
    pthread_mutex_lock(&a->lock);
    int is_busy = a->busy != NULL;
    pthread_mutex_unlock(&a->lock);
    return PyBool_FromLong(is_busy);
}

static PyObject *answers_count(Answers *a, void *unused) { return PyLong_FromLong(a->count); }

static int answers_init(Answers *a, PyObject *args, PyObject *kwargs)
{
    if (!PyArg_ParseTuple(args, "|p", &a->reports))
        return -1;
    if (a->has_lock)
        return fmq_misuse("answers: already initialised");
    if (pthread_mutex_init(&a->lock, NULL) != 0) {
        PyErr_NoMemory();
        return -1;
    }
    a->has_lock = 1;
    return 0;
}

static void answers_dealloc(Answers *a)
{
    for (int i = 0; i < a->count; i++)
        free_entry(a->entries[i]);
    if (a->has_lock) {
        drop_removed(a);
        pthread_mutex_destroy(&a->lock);
    }
    fmq_dealloc((PyObject *)a);
}

static PyMethodDef answers_methods[] = {
    {"serve", (PyCFunction)answers_serve, METH_VARARGS, answers_serve_doc},
    {"_add", (PyCFunction)answers_add, METH_VARARGS, answers_add_doc},
    {"clear", (PyCFunction)answers_clear, METH_NOARGS, answers_clear_doc},
    {"activity", (PyCFunction)answers_activity, METH_NOARGS, answers_activity_doc},
    {NULL},
};

static PyGetSetDef answers_getset[] = {
    {"count", (getter)answers_count, NULL, "Number of messages whose answer is known.", NULL},
    {"is_busy", (getter)answers_is_busy, NULL, "Whether a message was found whose call has not ended.", NULL},
    {NULL},
};

static PyType_Slot answers_slots[] = {
    {Py_tp_doc, "A table of messages that are answered by C functions; the base of fmq.Answers."},
    {Py_tp_init, answers_init},
    {Py_tp_dealloc, answers_dealloc},
    {Py_tp_methods, answers_methods},
    {Py_tp_getset, answers_getset},
    {0, NULL},
};

static PyType_Spec answers_spec = {
    .name = "fmq._native.Answers",
    .basicsize = sizeof(Answers),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .slots = answers_slots,
};

int answers_exec(PyObject *module)
{
    PyObject *answers = PyType_FromSpec(&answers_spec);
    if (answers == NULL || PyModule_AddObjectRef(module, "Answers", answers) < 0)
        return -1;
    Py_DECREF(answers);
    return 0;
}
