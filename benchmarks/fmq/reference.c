/* The bare mechanisms the queue is measured against, without a queue: two processes that hand 64 bytes to each other.
 *
 * Usage: fmq_reference spin|futex CLIENT_CORE SERVER_CORE ROUND_TRIPS   (a core of -1 leaves the process where it is)
 * Prints the median round trip in nanoseconds: of single ones for futex, of groups of 16 for spin.
 */
#define _GNU_SOURCE
#include <linux/futex.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

struct side {
    _Alignas(128) _Atomic uint32_t turn;
    _Alignas(128) unsigned char payload[64];
};

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void pin(int core)
{
    cpu_set_t set;
    if (core < 0)
        return;
    CPU_ZERO(&set);
    CPU_SET(core, &set);
    sched_setaffinity(0, sizeof set, &set);
}

static void hand_over(struct side *s, uint32_t turn, const unsigned char *payload, int futex)
{
    memcpy(s->payload, payload, sizeof s->payload);
    atomic_store(&s->turn, turn);
    if (futex)
        syscall(SYS_futex, &s->turn, FUTEX_WAKE, 1, NULL, NULL, 0);
}

static void await_turn(struct side *s, uint32_t turn, unsigned char *payload, int futex)
{
    uint32_t seen;
    while ((seen = atomic_load(&s->turn)) != turn)
        if (futex)
            syscall(SYS_futex, &s->turn, FUTEX_WAIT, seen, NULL, NULL, 0);
    memcpy(payload, s->payload, sizeof s->payload);
}

static int ascending(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv)
{
    if (argc != 5)
        return 2;
    int futex = strcmp(argv[1], "futex") == 0;
    int group = futex ? 1 : 16;
    uint32_t rounds = (uint32_t)atoi(argv[4]);
    struct side *sides = mmap(NULL, 2 * sizeof *sides, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    int64_t *times = calloc(rounds / group + 1, sizeof *times);
    unsigned char payload[64] = {1};
    if (sides == MAP_FAILED || times == NULL)
        return 1;
    pid_t child = fork();
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        pin(atoi(argv[3]));
        for (uint32_t i = 1; i <= rounds; i++) {
            await_turn(&sides[0], i, payload, futex);
            hand_over(&sides[1], i, payload, futex);
        }
        _exit(0);
    }
    pin(atoi(argv[2]));
    uint32_t count = 0;
    int64_t began = now_ns();
    for (uint32_t i = 1; i <= rounds; i++) {
        hand_over(&sides[0], i, payload, futex);
        await_turn(&sides[1], i, payload, futex);
        if (i % group == 0) {
            int64_t now = now_ns();
            times[count++] = (now - began) / group;
            began = now;
        }
    }
    waitpid(child, NULL, 0);
    qsort(times, count, sizeof *times, ascending);
    printf("%lld\n", (long long)times[count / 2]);
    return 0;
}
