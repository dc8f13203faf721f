/* Lets the n-th system call of a kind fail, in the processes that preload this library.
 *
 * What fails lies in a file that all of them map, so that a test changes it while they run. Calls are counted from the moment that
 * the plan names their kind. Mappings count only if they are shared, descriptors' duplicates only if fcntl makes them: the
 * interpreter's own memory is nobody's business here.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

enum kind {
    NOTHING, MMAP, MEMFD_CREATE, EVENTFD, RECVMSG, SENDMSG, SEND, SOCKETPAIR, FORK, FCNTL_DUP, FALLOCATE, PIPE, DUP, PIDFD_OPEN,
    EPOLL_CTL, EPOLL_CREATE, EPOLL_WAIT, POLL, PTHREAD_CREATE, CONNECT, ACCEPT, SOCKET
};

struct plan {
    _Atomic int kind, first, times, error, role, count, hits;
};

static struct plan *plan;
static int role; /* 1: an application; 2: a driver process */

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("FAILING_CALLS_PLAN");
    if (path == NULL) return;
    int fd = (int)syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC);
    if (fd < 0) abort();
    void *mapped = (void *)syscall(SYS_mmap, NULL, sizeof(struct plan), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0L);
    syscall(SYS_close, fd);
    if (mapped == MAP_FAILED) abort();
    static char line[1 << 16]; /* a driver process's has the module path in it */
    fd = (int)syscall(SYS_openat, AT_FDCWD, "/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
    long size = syscall(SYS_read, fd, line, sizeof line);
    syscall(SYS_close, fd);
    static const char host[] = "from aionn.service.", serve[] = "serve";
    role = 1;
    if (size > 0 && (memmem(line, (size_t)size, host, sizeof host - 1) || memmem(line, (size_t)size, serve, sizeof serve))) role = 2;
    plan = mapped;
}

static int fails(enum kind kind) {
    if (plan == NULL || plan->kind != (int)kind || plan->role != role) return 0;
    int number = atomic_fetch_add(&plan->count, 1) + 1;
    if (number < plan->first || number >= plan->first + plan->times) return 0;
    atomic_fetch_add(&plan->hits, 1);
    errno = plan->error;
    return 1;
}

#define REAL(name) \
    static __typeof__(&name) real; \
    if (real == NULL) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

void *mmap(void *address, size_t length, int protection, int flags, int fd, off_t offset) {
    REAL(mmap);
    return (flags & MAP_SHARED) && fails(MMAP) ? MAP_FAILED : real(address, length, protection, flags, fd, offset);
}

void *mmap64(void *address, size_t length, int protection, int flags, int fd, off64_t offset) {
    REAL(mmap64);
    return (flags & MAP_SHARED) && fails(MMAP) ? MAP_FAILED : real(address, length, protection, flags, fd, offset);
}

int memfd_create(const char *name, unsigned int flags) {
    REAL(memfd_create);
    return fails(MEMFD_CREATE) ? -1 : real(name, flags);
}

int eventfd(unsigned int value, int flags) {
    static int (*real)(unsigned int, int);
    if (real == NULL) real = (int (*)(unsigned int, int))dlsym(RTLD_NEXT, "eventfd");
    return fails(EVENTFD) ? -1 : real(value, flags);
}

ssize_t recvmsg(int fd, struct msghdr *message, int flags) {
    REAL(recvmsg);
    return fails(RECVMSG) ? -1 : real(fd, message, flags);
}

ssize_t sendmsg(int fd, const struct msghdr *message, int flags) {
    REAL(sendmsg);
    return fails(SENDMSG) ? -1 : real(fd, message, flags);
}

ssize_t send(int fd, const void *data, size_t size, int flags) {
    REAL(send);
    return fails(SEND) ? -1 : real(fd, data, size, flags);
}

int socketpair(int domain, int type, int protocol, int fds[2]) {
    REAL(socketpair);
    return fails(SOCKETPAIR) ? -1 : real(domain, type, protocol, fds);
}

int socket(int domain, int type, int protocol) {
    REAL(socket);
    return fails(SOCKET) ? -1 : real(domain, type, protocol);
}

int connect(int fd, const struct sockaddr *address, socklen_t size) {
    REAL(connect);
    return fails(CONNECT) ? -1 : real(fd, address, size);
}

int accept4(int fd, struct sockaddr *address, socklen_t *size, int flags) {
    REAL(accept4);
    return fails(ACCEPT) ? -1 : real(fd, address, size, flags);
}

pid_t fork(void) {
    REAL(fork);
    return fails(FORK) ? -1 : real();
}

/* A function around vfork would return before the child has gone; fork does the same, only slower. */
pid_t vfork(void) { return fork(); }

static int is_duplicate(int command) { return command == F_DUPFD || command == F_DUPFD_CLOEXEC; }

int fcntl(int fd, int command, ...) {
    va_list more;
    va_start(more, command);
    void *argument = va_arg(more, void *);
    va_end(more);
    REAL(fcntl);
    return is_duplicate(command) && fails(FCNTL_DUP) ? -1 : real(fd, command, argument);
}

int fcntl64(int fd, int command, ...) {
    va_list more;
    va_start(more, command);
    void *argument = va_arg(more, void *);
    va_end(more);
    REAL(fcntl64);
    return is_duplicate(command) && fails(FCNTL_DUP) ? -1 : real(fd, command, argument);
}

int posix_fallocate(int fd, off_t offset, off_t length) {
    REAL(posix_fallocate);
    return fails(FALLOCATE) ? plan->error : real(fd, offset, length);
}

int posix_fallocate64(int fd, off64_t offset, off64_t length) {
    REAL(posix_fallocate64);
    return fails(FALLOCATE) ? plan->error : real(fd, offset, length);
}

int pipe2(int fds[2], int flags) {
    REAL(pipe2);
    return fails(PIPE) ? -1 : real(fds, flags);
}

int dup(int fd) {
    REAL(dup);
    return fails(DUP) ? -1 : real(fd);
}

int epoll_ctl(int epoll, int operation, int fd, struct epoll_event *event) {
    REAL(epoll_ctl);
    return operation != EPOLL_CTL_DEL && fails(EPOLL_CTL) ? -1 : real(epoll, operation, fd, event);
}

int epoll_create1(int flags) {
    REAL(epoll_create1);
    return fails(EPOLL_CREATE) ? -1 : real(flags);
}

int epoll_wait(int epoll, struct epoll_event *events, int count, int timeout) {
    REAL(epoll_wait);
    return fails(EPOLL_WAIT) ? -1 : real(epoll, events, count, timeout);
}

int poll(struct pollfd *fds, nfds_t count, int timeout) {
    REAL(poll);
    return fails(POLL) ? -1 : real(fds, count, timeout);
}

int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*body)(void *), void *argument) {
    REAL(pthread_create);
    return fails(PTHREAD_CREATE) ? plan->error : real(thread, attributes, body, argument);
}

/* Python calls pidfd_open by its number; every other number goes through with all that a call may have. */
long syscall(long number, ...) {
    va_list more;
    long a[6];
    va_start(more, number);
    for (int i = 0; i < 6; i++) a[i] = va_arg(more, long);
    va_end(more);
    static long (*real)(long, ...);
    if (real == NULL) real = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
    if (number == SYS_pidfd_open && fails(PIDFD_OPEN)) return -1;
    return real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
