/* A hostile peer of a driver process: replays and mutates the messages that hostile_messages.py wrote, in attacks with names.
 *
 *     hostile_peer MESSAGES SOCKET ATTACK SECONDS SEED
 *
 * Runs the attack again and again for so long, and then prints what it did. "list" as the attack prints their names. "spin" and
 * "own_files" talk to nobody: they show what a process does to others that is merely busy, or merely writes files. Everything that it opens is closed when it ends, so that what the
 * server still has afterwards is the server's fault. No attack blocks for ever: waits have limits.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/inotify.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { RECORDS_MAX = 96, FDS_MAX = 240, PAYLOAD_MAX = 64 << 10, CONNECTIONS = 60, NOWHERE = 0xFFFF, WRONG_KINDS = 18 };
enum { SETUP_MS = 1000, ROOM_MS = 5, SESSION_TURNS = 4, OWN_FILES_MS = 44 };
enum { BURSTS = 32, PLACES = 64, BUFFERS = 4096, HOLDERS = 16, HELD_MAX = 8192 };
/* A queue of bursts: where its ring begins, its bytes, and where the words beside it are. */
enum { RING_AT = 4096, RING_BYTES = 128 << 10, READ_COUNTER = 128, READER_PARK = 256, WRITER_PARK = 384 };

struct part { char kind; uint32_t size, filled; const unsigned char *content; int fd, sending; unsigned char *mapped; };
struct record { char name[64]; int number_at, other_at; uint32_t size; const unsigned char *payload; int count; struct part parts[FDS_MAX]; };

static struct record *records;
static int record_count;
static int common_count; /* Of the first ones, which attacks choose from; the others, "only_...", are found by their names alone. */
static const char *socket_path;
static double end_s;
static uint64_t random_state;
static uint32_t next_number = 1000;
static long sent, answered, connected, refused, asked;

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int is_over(void) { return now_s() >= end_s; }

static uint32_t random_below(uint32_t limit) {
    random_state = random_state * 6364136223846793005ULL + 1442695040888963407ULL;
    return limit ? (uint32_t)(random_state >> 33) % limit : 0;
}

static void pause_ms(int ms) { poll(NULL, 0, ms); }

/* Messages */

static void load(const char *path) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    struct stat status;
    if (fd < 0 || fstat(fd, &status) < 0) { perror(path); exit(2); }
    const unsigned char *at = mmap(NULL, (size_t)status.st_size, PROT_READ, MAP_PRIVATE, fd, 0), *end = at + status.st_size;
    records = calloc(RECORDS_MAX, sizeof *records);
    for (; at < end && record_count < RECORDS_MAX; record_count++) {
        struct record *r = &records[record_count];
        uint16_t places[2];
        memcpy(r->name, at + 1, *at);
        at += 1 + *at;
        if (strncmp(r->name, "only_", 5)) common_count = record_count + 1;
        memcpy(places, at, 4), r->number_at = places[0], r->other_at = places[1];
        memcpy(&r->size, at + 4, 4), r->payload = at + 8, at += 8 + r->size;
        r->count = *at++;
        for (int i = 0; i < r->count; i++) {
            struct part *p = &r->parts[i];
            p->kind = (char)*at, p->fd = p->sending = -1;
            memcpy(&p->size, at + 1, 4), memcpy(&p->filled, at + 5, 4);
            p->content = at + 9, at += 9 + p->filled;
        }
    }
    close(fd);
}

static struct record *find(const char *name) {
    for (int i = 0; i < record_count; i++)
        if (!strcmp(records[i].name, name)) return &records[i];
    fprintf(stderr, "no message %s\n", name);
    exit(2);
}

static int sealed(uint32_t size, int seals) {
    int fd = memfd_create("hostile", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (ftruncate(fd, size) < 0 || (seals && fcntl(fd, F_ADD_SEALS, seals) < 0)) perror("memfd");
    return fd;
}

static int pending_fence(int *sending) {
    int pair[2];
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) < 0) return -1;
    int length = snprintf(name.sun_path + 1, 90, "fences/1/%d/%08x%08x%08x", getpid(), random_below(~0u), random_below(~0u), random_below(~0u));
    bind(pair[0], (struct sockaddr *)&name, (socklen_t)(sizeof name.sun_family + 1 + (size_t)length));
    shutdown(pair[0], SHUT_WR);
    *sending = pair[1];
    return pair[0];
}

/* The descriptors of a message; fresh ones after `forget`. */
static void open_parts(struct record *r) {
    for (int i = 0; i < r->count; i++) {
        struct part *p = &r->parts[i];
        if (p->fd >= 0) continue;
        if (p->kind == 'M') {
            p->fd = sealed(p->size, F_SEAL_SHRINK | F_SEAL_GROW);
            p->mapped = mmap(NULL, p->size, PROT_READ | PROT_WRITE, MAP_SHARED, p->fd, 0);
            if (p->mapped == MAP_FAILED) { perror("mmap"); exit(2); }
            memcpy(p->mapped, p->content, p->filled);
        } else if (p->kind == 'C') { /* A cache file: what can be shortened. */
            p->fd = memfd_create("cache", MFD_CLOEXEC);
            if (ftruncate(p->fd, p->size) < 0 || pwrite(p->fd, p->content, p->filled, 0) < 0) perror("cache file");
        } else if (p->kind == 'F') p->fd = pending_fence(&p->sending);
        else p->fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    }
}

static void forget(struct record *r) {
    for (int i = 0; i < r->count; i++) {
        struct part *p = &r->parts[i];
        if (p->mapped) munmap(p->mapped, p->size);
        if (p->fd >= 0) close(p->fd);
        if (p->sending >= 0) close(p->sending);
        p->fd = p->sending = -1, p->mapped = NULL;
    }
}

/* Sockets */

static int send_bytes(int sock, const void *bytes, size_t size, const int *fds, int count) {
    char control[CMSG_SPACE(sizeof(int) * 253)];
    struct iovec part = {(void *)bytes, size};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (count) {
        message.msg_control = control, message.msg_controllen = CMSG_SPACE(sizeof(int) * (size_t)count);
        struct cmsghdr *head = CMSG_FIRSTHDR(&message);
        head->cmsg_level = SOL_SOCKET, head->cmsg_type = SCM_RIGHTS, head->cmsg_len = CMSG_LEN(sizeof(int) * (size_t)count);
        memcpy(CMSG_DATA(head), fds, sizeof(int) * (size_t)count);
    }
    int done = (int)sendmsg(sock, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (done >= 0) sent++;
    return done < 0 ? -errno : 0;
}

static unsigned char buffer[PAYLOAD_MAX];

static uint32_t send_to(int sock, struct record *r, uint32_t number, uint32_t other) {
    int fds[FDS_MAX];
    uint32_t network = __builtin_bswap32(number), network_other = __builtin_bswap32(other);
    open_parts(r);
    memcpy(buffer, r->payload, r->size);
    if (r->number_at != NOWHERE) memcpy(buffer + r->number_at, &network, 4);
    if (r->other_at != NOWHERE) memcpy(buffer + r->other_at, &network_other, 4);
    for (int i = 0; i < r->count; i++) fds[i] = r->parts[i].fd;
    return send_bytes(sock, buffer, r->size, fds, r->count) == 0;
}

static uint32_t say(int sock, const char *name) { return send_to(sock, find(name), next_number++, 0); }

static int wait_for(int sock, short events, int ms) {
    struct pollfd waited = {sock, events, 0};
    return poll(&waited, 1, ms) > 0 && !(waited.revents & (POLLHUP | POLLERR));
}

static uint32_t question; /* The number of the server's last call. */

static int receive(int sock) {
    char control[CMSG_SPACE(sizeof(int) * 253)];
    static unsigned char bytes[PAYLOAD_MAX];
    struct iovec part = {bytes, sizeof bytes};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    ssize_t size = recvmsg(sock, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (size <= 0) return size < 0 && errno == EAGAIN ? 0 : -1;
    for (struct cmsghdr *head = CMSG_FIRSTHDR(&message); head; head = CMSG_NXTHDR(&message, head))
        for (size_t i = 0; CMSG_LEN(sizeof(int) * (i + 1)) <= head->cmsg_len; i++) {
            int fd;
            memcpy(&fd, CMSG_DATA(head) + i * sizeof fd, sizeof fd);
            close(fd);
        }
    if (size > 15 && !memcmp(bytes + 7, "Call", 4)) {
        const unsigned char *at = bytes + 14;
        question = *at < 0x80 ? *at : *at == 0xcc ? at[1] : *at == 0xcd ? (uint32_t)at[1] << 8 | at[2] : 0;
        asked++;
        return 2;
    }
    answered++;
    return 1;
}

static int drain(int sock) {
    int got;
    while ((got = receive(sock)) > 0) {}
    return got;
}

static int join(void) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof address.sun_path, "%s", socket_path);
    int sock = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    while (connect(sock, (struct sockaddr *)&address, sizeof address) < 0) {
        if (errno != EAGAIN || is_over()) { close(sock); refused++; return -1; }
        pause_ms(1);
    }
    connected++;
    return sock;
}

static int await_replies(int sock, int count) {
    double limit_s = now_s() + 1e-3 * SETUP_MS;
    while (count > 0) {
        int got = receive(sock);
        if (got < 0 || (got == 0 && now_s() > limit_s)) return -1;
        if (got == 0) wait_for(sock, POLLIN, 20);
        count -= got == 1;
    }
    return 0;
}

/* A client that has said Hello and prepared a model; -1 where the server is too busy or refuses. */
static int session(void) {
    int sock = join();
    if (sock < 0) return -1;
    if (send_to(sock, find("hello"), 1, 0) && send_to(sock, find("prepare"), 2, 0) && await_replies(sock, 2) == 0) return sock;
    close(sock);
    refused++;
    return -1;
}

/* Says a message as often as there is room for it; reads what comes meanwhile, or not. */
static void repeat(const char *name, int reads, int fresh) {
    int sock = session();
    struct record *r = find(name);
    while (sock >= 0 && !is_over()) {
        if (fresh) forget(r);
        if (!send_to(sock, r, next_number++, 0) && !wait_for(sock, reads ? POLLIN | POLLOUT : POLLOUT, ROOM_MS) && reads && drain(sock) < 0) break;
        if (reads && drain(sock) < 0) break;
    }
    if (sock >= 0) close(sock);
    forget(r);
    if (!is_over()) pause_ms(1);
}

#include "hostile_attacks.h"

int main(int count, char **arguments) {
    if (count == 2 && !strcmp(arguments[1], "list")) {
        for (const struct attack *a = attacks; a->run; a++) puts(a->name);
        return 0;
    }
    if (count != 6) { fprintf(stderr, "expected MESSAGES SOCKET ATTACK SECONDS SEED, or list\n"); return 2; }
    struct rlimit files;
    if (getrlimit(RLIMIT_NOFILE, &files) == 0) files.rlim_cur = files.rlim_max, setrlimit(RLIMIT_NOFILE, &files);
    signal(SIGPIPE, SIG_IGN);
    load(arguments[1]);
    socket_path = arguments[2];
    random_state = strtoull(arguments[5], NULL, 10) * 2654435761ULL + 1;
    end_s = now_s() + atof(arguments[4]);
    for (const struct attack *a = attacks; a->run; a++) {
        if (strcmp(a->name, arguments[3])) continue;
        while (!is_over()) a->run();
        printf("{\"sent\": %ld, \"answered\": %ld, \"asked\": %ld, \"connected\": %ld, \"refused\": %ld}\n", sent, answered, asked, connected, refused);
        return 0;
    }
    fprintf(stderr, "no attack %s\n", arguments[3]);
    return 2;
}
