/* The ring and the slots as _answers.c uses them, and what the files of the module share.
 *
 * Between ring_enter and ring_leave one thread owns both roles' private indices of an endpoint without the interpreter's
 * lock, and every other call on that endpoint is refused; interrupt() and close() from other threads end it. The
 * functions marked "no lock" raise nothing: what they cannot explain is left in the queue, and the ordinary call of
 * Python that comes next finds it and raises. */
#ifndef FMQ_NATIVE_H
#define FMQ_NATIVE_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdatomic.h>
#include <stdint.h>
#include <time.h>

/* The headers of Python 3.12 and 3.13 take None for immortal here, though a module of the stable ABI may be loaded by
 * 3.11, which then frees None once thousands of references are lost. */
#undef Py_RETURN_NONE
#define Py_RETURN_NONE return Py_NewRef(Py_None)

typedef struct Ring Ring;

/* Numbered points at which a test lets this process die; one predictable branch on a private word otherwise. */
extern int fmq_die_at;
void fmq_die(void);
#define POINT(number)                                     \
    do {                                                  \
        if (__builtin_expect(fmq_die_at == (number), 0))  \
            fmq_die();                                    \
    } while (0)

static inline int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Raises InvalidArgument; -1. */
int fmq_misuse(const char *message);

/* With the lock: the endpoint of an object, for reading messages or for writing them; NULL with an exception. */
Ring *ring_enter(PyObject *object, int reader);
/* With the lock: ends what ring_enter began. */
void ring_leave(Ring *r);

/* No lock: whether interrupt() or close() was called. */
int ring_is_left(Ring *r);
/* No lock: waits for a message; 1 when there is one, -1 for Python to find out. */
int ring_await_message(Ring *r);
/* No lock: copies the next message into private memory; 0 if the message is longer than that, or for Python to find out. */
int ring_copy_message(Ring *r, uint8_t *into, uint32_t bytes_max, uint32_t *length);
/* No lock: takes the message of this length out of the queue. */
void ring_take_message(Ring *r, uint32_t length);
/* No lock: whether a message of this length can be written now. */
int ring_has_room(Ring *r, uint32_t length);
/* No lock: publishes a message for which there is room. */
void ring_put_message(Ring *r, const uint8_t *message, uint32_t length);

/* Most slots of a device. */
#define SLOTS_MAX 32

/* With the lock: the number of slots of a permit; 0 for any other object. */
int permit_slots_count(PyObject *object);
/* No lock: takes a slot; its index, or -1 when all are taken, or none may be taken. */
int permit_take(PyObject *permit, int64_t now);
/* No lock: gives it; whether Python must release it, since the slots were closed during the call. */
int permit_give(PyObject *permit, int slot);

/* Frees an object of one of the module's types. */
void fmq_dealloc(PyObject *object);

/* Add the types of _slots.c and _answers.c to the module. */
int slots_exec(PyObject *module);
int answers_exec(PyObject *module);

#endif
