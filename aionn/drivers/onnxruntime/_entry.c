/* The way from ONNX Runtime's Python package to its C interface, and a call of it as one of fmq.Answers.
 *
 * Owns: the pointer to the interface, and the form of a call. Refuses to own: every object of ONNX Runtime.
 *
 * The package does not export OrtGetApiBase. It gives the interface to a library of custom operators, which this is for it: one
 * without any. A library beside the package has the function, and is a second runtime: with it a process takes 31 MiB more.
 *
 * Invariants:
 *  1. The pointer is that of the runtime that the package has loaded, and does not change.
 *  2. A status, which is an object, is never cut to an int and never lost: its owner is the place that the caller named.
 */
#include <stdint.h>

#define EXPORTED __attribute__((visibility("default")))

typedef void *(*Function)(uintptr_t, uintptr_t, uintptr_t, uintptr_t);

static const void *interface; /* written by each registration, with the same value */

/* Called by SessionOptions.register_custom_ops_library; NULL is success. */
EXPORTED void *RegisterCustomOps(void *options, const void *base)
{
    (void)options;
    interface = base;
    return 0;
}

/* The OrtApiBase; NULL before the registration. */
EXPORTED const void *aionn_ort_interface(void)
{
    return interface;
}

/* Calls a function that returns NULL for success: 0 then, else 1 with the pointer in its place. */
EXPORTED int aionn_ort_call(uintptr_t function, uintptr_t place, uintptr_t a, uintptr_t b, uintptr_t c, uintptr_t d)
{
    void *status = ((Function)function)(a, b, c, d);
    if (status == 0)
        return 0;
    *(void **)place = status;
    return 1;
}
