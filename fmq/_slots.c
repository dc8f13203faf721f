/* The slots of a device as one atomic word, from which calls of _answers.c take theirs without the interpreter's lock.
 *
 * Owns: the word (Slots), the record of its holders, and the permission of an owner of calls, which can be withdrawn
 * (Permit). Refuses to own: the order of jobs; Python closes the word whenever another job holds a slot or waits.
 *
 * Invariants:
 *  1. A slot has one holder.
 *  2. A slot that was taken before Slots.close and given after it is reported to Python exactly once: both are one atomic
 *     step on the same word.
 *
 * Sync point SLOTS (drawn in README.md): taking is an acquire, giving a release of the word, so that what a call wrote is
 * seen by the next holder of its slot.
 */
#include "_native.h"

#define CLOSED_WORD (UINT64_C(1) << 63)

static PyObject *SlotsType, *PermitType;

/* ---------------------------------------------------------------------------------------------------------------- */
/* Slots                                                                                                              */

typedef struct {
    PyObject_HEAD
    _Atomic uint64_t word; /* bit i: a call holds slot i; CLOSED_WORD: none can be taken */
    int count;
    struct {
        _Atomic uint64_t owner;   /* 0 outside of a call, and for a moment at its beginning */
        _Atomic int64_t began_ns; /* the same */
    } held[SLOTS_MAX];
} Slots;

/* The index of a slot, -1 when all are taken. */
static int take_slot(Slots *s, uint64_t owner, int64_t now)
{
    uint64_t word = atomic_load_explicit(&s->word, memory_order_relaxed);
    for (;;) {
        uint64_t free = ~word & ((UINT64_C(1) << s->count) - 1);
        if (word & CLOSED_WORD || free == 0)
            return -1;
        int index = __builtin_ctzll(free);
        if (atomic_compare_exchange_weak_explicit(&s->word, &word, word | (UINT64_C(1) << index), /* SLOTS acquire */
                                                  memory_order_acquire, memory_order_relaxed)) {
            atomic_store_explicit(&s->held[index].owner, owner, memory_order_relaxed);
            atomic_store_explicit(&s->held[index].began_ns, now, memory_order_relaxed);
            return index;
        }
    }
}

/* Whether the slots were closed while the call held this one: then Python must release it. */
static int give_slot(Slots *s, int index)
{
    atomic_store_explicit(&s->held[index].owner, 0, memory_order_relaxed);
    atomic_store_explicit(&s->held[index].began_ns, 0, memory_order_relaxed);
    uint64_t before = atomic_fetch_and_explicit(&s->word, ~(UINT64_C(1) << index), memory_order_acq_rel); /* SLOTS release */
    return (before & CLOSED_WORD) != 0;
}

PyDoc_STRVAR(slots_close_doc, "close()\n--\n\nNo slot can be taken from now on. The indices of the slots that calls hold: each "
                              "is reported when its call ends. None when they were closed already.");
static PyObject *slots_close(Slots *s, PyObject *unused)
{
    uint64_t before = atomic_fetch_or_explicit(&s->word, CLOSED_WORD, memory_order_acq_rel); /* SLOTS acquire */
    if (before & CLOSED_WORD)
        return PyTuple_New(0);
    PyObject *held = PyList_New(0);
    for (int i = 0; held != NULL && i < s->count; i++) {
        if (!(before & UINT64_C(1) << i))
            continue;
        PyObject *index = PyLong_FromLong(i);
        if (index == NULL || PyList_Append(held, index) < 0)
            Py_CLEAR(held);
        Py_XDECREF(index);
    }
    PyObject *result = held == NULL ? NULL : PyList_AsTuple(held);
    Py_XDECREF(held);
    return result;
}

PyDoc_STRVAR(slots_open_doc, "open()\n--\n\nCalls may take slots. To be called only while no other job has one.");
static PyObject *slots_open(Slots *s, PyObject *unused)
{
    atomic_fetch_and_explicit(&s->word, ~CLOSED_WORD, memory_order_acq_rel);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(slots_holder_doc, "holder(index)\n--\n\n(owner, began_ns) of the call in a slot; zeros at its very beginning.");
static PyObject *slots_holder(Slots *s, PyObject *object)
{
    long index = PyLong_AsLong(object);
    if (index == -1 && PyErr_Occurred())
        return NULL;
    if (index < 0 || index >= s->count) {
        fmq_misuse("slots: expected the index of a slot");
        return NULL;
    }
    uint64_t owner = atomic_load_explicit(&s->held[index].owner, memory_order_relaxed);
    int64_t began = atomic_load_explicit(&s->held[index].began_ns, memory_order_relaxed);
    return Py_BuildValue("(KL)", (unsigned long long)owner, (long long)began);
}

static PyObject *slots_is_open(Slots *s, void *unused)
{
    return PyBool_FromLong(!(atomic_load_explicit(&s->word, memory_order_relaxed) & CLOSED_WORD));
}

static int slots_init(Slots *s, PyObject *args, PyObject *kwargs)
{
    int count;
    if (!PyArg_ParseTuple(args, "i", &count))
        return -1;
    if (count < 1 || count > SLOTS_MAX || s->count != 0)
        return fmq_misuse("slots: expected from 1 to 32 slots, once");
    s->count = count;
    atomic_store(&s->word, CLOSED_WORD);
    return 0;
}

void fmq_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(object);
    Py_DECREF(type);
}

static PyMethodDef slots_methods[] = {
    {"close", (PyCFunction)slots_close, METH_NOARGS, slots_close_doc},
    {"open", (PyCFunction)slots_open, METH_NOARGS, slots_open_doc},
    {"holder", (PyCFunction)slots_holder, METH_O, slots_holder_doc},
    {NULL},
};

static PyGetSetDef slots_getset[] = {
    {"is_open", (getter)slots_is_open, NULL, "Whether calls may take slots.", NULL},
    {NULL},
};

static PyType_Slot slots_slots[] = {
    {Py_tp_doc, "The slots of a device, for calls of Answers; closed at first."},
    {Py_tp_init, slots_init},
    {Py_tp_dealloc, fmq_dealloc},
    {Py_tp_methods, slots_methods},
    {Py_tp_getset, slots_getset},
    {0, NULL},
};

static PyType_Spec slots_spec = {
    .name = "fmq._native.Slots",
    .basicsize = sizeof(Slots),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = slots_slots,
};

/* ---------------------------------------------------------------------------------------------------------------- */
/* Permit                                                                                                             */

typedef struct {
    PyObject_HEAD
    Slots *slots;
    uint64_t owner;
    atomic_int withdrawn;
} Permit;

PyDoc_STRVAR(permit_withdraw_doc, "withdraw()\n--\n\nNo call of this permit begins from now on; one that runs continues.");
static PyObject *permit_withdraw(Permit *p, PyObject *unused)
{
    atomic_store_explicit(&p->withdrawn, 1, memory_order_release);
    Py_RETURN_NONE;
}

static PyObject *permit_is_withdrawn(Permit *p, void *unused)
{
    return PyBool_FromLong(atomic_load_explicit(&p->withdrawn, memory_order_relaxed));
}

static int permit_init(Permit *p, PyObject *args, PyObject *kwargs)
{
    PyObject *slots;
    unsigned long long owner;
    if (!PyArg_ParseTuple(args, "OK", &slots, &owner))
        return -1;
    if (!PyObject_TypeCheck(slots, (PyTypeObject *)SlotsType) || ((Slots *)slots)->count == 0 || p->slots != NULL)
        return fmq_misuse("permit: expected the slots of a device, once");
    p->slots = (Slots *)Py_NewRef(slots);
    p->owner = owner;
    return 0;
}

static void permit_dealloc(Permit *p)
{
    Py_XDECREF((PyObject *)p->slots);
    fmq_dealloc((PyObject *)p);
}

static PyMethodDef permit_methods[] = {
    {"withdraw", (PyCFunction)permit_withdraw, METH_NOARGS, permit_withdraw_doc},
    {NULL},
};

static PyGetSetDef permit_getset[] = {
    {"is_withdrawn", (getter)permit_is_withdrawn, NULL, "Whether withdraw() was called.", NULL},
    {NULL},
};

static PyType_Slot permit_slots[] = {
    {Py_tp_doc, "The permission to make calls in the slots of a device."},
    {Py_tp_init, permit_init},
    {Py_tp_dealloc, permit_dealloc},
    {Py_tp_methods, permit_methods},
    {Py_tp_getset, permit_getset},
    {0, NULL},
};

static PyType_Spec permit_spec = {
    .name = "fmq._native.Permit",
    .basicsize = sizeof(Permit),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = permit_slots,
};

int permit_slots_count(PyObject *object)
{
    if (!PyObject_TypeCheck(object, (PyTypeObject *)PermitType) || ((Permit *)object)->slots == NULL)
        return 0;
    return ((Permit *)object)->slots->count;
}

int permit_take(PyObject *object, int64_t now)
{
    Permit *p = (Permit *)object;
    return atomic_load_explicit(&p->withdrawn, memory_order_acquire) ? -1 : take_slot(p->slots, p->owner, now);
}

int permit_give(PyObject *object, int slot) { return give_slot(((Permit *)object)->slots, slot); }

int slots_exec(PyObject *module)
{
    SlotsType = PyType_FromSpec(&slots_spec);
    PermitType = PyType_FromSpec(&permit_spec);
    if (SlotsType == NULL || PermitType == NULL || PyModule_AddObjectRef(module, "Slots", SlotsType) < 0)
        return -1;
    return PyModule_AddObjectRef(module, "Permit", PermitType);
}
