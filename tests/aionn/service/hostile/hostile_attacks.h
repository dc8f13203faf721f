/* The attacks of hostile_peer.c, which includes this file once. Each is run until the time is over. */

/* Floods */

static void flood_pings(void) { repeat("ping", 1, 0); }
static void flood_pings_unread(void) { repeat("ping", 0, 0); }
static void flood_hello(void) { repeat("hello", 1, 0); }
static void flood_hello_unread(void) { repeat("hello", 0, 0); }
static void flood_execute(void) { repeat("execute", 1, 0); }
static void flood_execute_unread(void) { repeat("execute", 0, 0); }
static void flood_execute_fresh_memory(void) { repeat("execute", 1, 1); }
static void flood_launch_unread(void) { repeat("launch", 0, 0); }
static void flood_prepare(void) { repeat("prepare", 1, 0); }
static void flood_allocate(void) { repeat("allocate", 1, 0); }
static void flood_replies(void) { repeat("memories_many", 1, 0); }
static void flood_failed_replies(void) { repeat("failed", 1, 0); }
static void flood_driver_calls(void) { repeat("recall", 1, 0); }
static void flood_fenced_ready_unread(void) { repeat("fenced_ready", 0, 0); }
static void flood_large_models(void) { repeat("supported_large", 1, 0); }
static void flood_large_models_kept(void) { repeat("prepare_large", 1, 0); }
static void flood_wide_models(void) { repeat("prepare_wide", 1, 0); }
static void flood_sparse_models(void) { repeat("prepare_sparse", 1, 0); }
static void flood_cached(void) { repeat("prepare_cached", 1, 0); }
static void flood_bursts(void) { repeat("burst_filled", 1, 1); }
static void flood_polling_bursts(void) { repeat("burst_filled_polling", 1, 1); }

static void each_kind(int reads) {
    int sock = session();
    while (sock >= 0 && !is_over()) {
        struct record *r = &records[random_below((uint32_t)common_count)];
        if (!strncmp(r->name, "prepare_", 8)) continue;
        uint32_t number = next_number++;
        if (!send_to(sock, r, number, number - random_below(4)) && !wait_for(sock, POLLOUT, ROOM_MS) && !reads) break;
        if (reads && drain(sock) < 0) break;
    }
    if (sock >= 0) close(sock);
}
static void flood_each_kind(void) { each_kind(1); }
static void flood_each_kind_unread(void) { each_kind(0); }

static void mutated(int kind) {
    int sock = session(), fds[FDS_MAX];
    while (sock >= 0 && !is_over()) {
        struct record *r = &records[random_below((uint32_t)common_count)];
        uint32_t size = r->size;
        int count = r->count;
        open_parts(r);
        memcpy(buffer, r->payload, size);
        for (int i = 0; i < count; i++) fds[i] = r->parts[i].fd;
        if (kind == 0)
            for (uint32_t i = 0; i < size; i++) buffer[i] = (unsigned char)random_below(256);
        else if (kind == 1)
            for (uint32_t i = 1 + random_below(3); i; i--) buffer[random_below(size)] ^= (unsigned char)(1 << random_below(8));
        else if (kind == 2) size = 1 + random_below(size);
        else if (kind == 3) count = count ? (int)random_below((uint32_t)count) : 0;
        else size = (34 << 10) + random_below(16 << 10);
        int failed = send_bytes(sock, buffer, size, fds, count);
        if (drain(sock) < 0 || (failed && failed != -EAGAIN)) { close(sock); sock = session(); }
        else if (failed) wait_for(sock, POLLIN | POLLOUT, ROOM_MS);
    }
    if (sock >= 0) close(sock);
}
static void flood_garbage(void) { mutated(0); }
static void flood_bit_flips(void) { mutated(1); }
static void flood_truncated(void) { mutated(2); }
static void flood_missing_descriptors(void) { mutated(3); }
static void flood_oversized(void) { mutated(4); }

static void many(const char *name, int is_greeted) {
    int socks[CONNECTIONS], count = 0;
    for (; count < CONNECTIONS && !is_over(); count++)
        if ((socks[count] = is_greeted ? session() : join()) < 0) break;
    for (int i = 0; count && !is_over(); i++) {
        if (name && !say(socks[i % count], name)) wait_for(socks[i % count], POLLIN, 1);
        if (name && drain(socks[i % count]) < 0) break;
        if (!name) pause_ms(1);
    }
    while (count) close(socks[--count]);
}
static void many_connections_ping(void) { many("ping", 1); }
static void many_connections_execute(void) { many("execute", 1); }
static void many_connections_ask_first(void) { many("ping", 0); }
static void many_connections_say_nothing(void) { many(NULL, 0); }
static void many_connections_stay(void) { many(NULL, 1); }

static void same_number(void) {
    int sock = session();
    while (sock >= 0 && !is_over()) {
        if (!send_to(sock, find("execute_remembered"), 7, 0)) wait_for(sock, POLLIN, ROOM_MS);
        send_to(sock, find("fenced"), 7, 0);
        send_to(sock, find("cancel"), 8, 7);
        if (drain(sock) < 0) break;
    }
    if (sock >= 0) close(sock);
}

static void cancelled_at_once(void) {
    static const char *const names[] = {"execute", "execute_unknown", "launch", "fenced", "prepare", "allocate", "create", "supported_large"};
    int sock = session();
    for (int i = 0; sock >= 0 && !is_over(); i++) {
        struct record *r = find(names[i % 8]);
        uint32_t number = next_number++;
        if (!send_to(sock, r, number, 0)) wait_for(sock, POLLIN, ROOM_MS);
        send_to(sock, find("cancel"), next_number++, number);
        if (drain(sock) < 0) break;
    }
    if (sock >= 0) close(sock);
}

/* Storms */

static void storm_of_connections(void) {
    int sock = join();
    if (sock >= 0) close(sock);
}

static void storm_of_sessions(void) {
    int sock = session();
    if (sock < 0) return;
    say(sock, "execute"), say(sock, "launch"), say(sock, "fenced"), say(sock, "burst_filled"), say(sock, "prepare_large");
    close(sock);
}

static void half_messages_with_descriptors(void) {
    int sock = join(), fds[FDS_MAX + 2];
    if (sock < 0) return;
    open_parts(find("execute"));
    for (int i = 0; i < FDS_MAX + 2; i++) fds[i] = find("execute")->parts[0].fd;
    say(sock, "hello");
    struct record *r = find("execute");
    for (int i = 0; i < 4 && send_bytes(sock, r->payload, r->size / 2, fds, FDS_MAX + (i & 1) * 2) == 0; i++) {}
    send_bytes(sock, "", 0, fds, 3);
    close(sock);
}

static void dying(int how) {
    pid_t child = fork();
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        int sock = session();
        if (sock >= 0) {
            say(sock, "fenced_many"), say(sock, "burst_filled"), say(sock, "execute_unknown"), say(sock, "prepare_large");
            for (int i = 0; i < 50; i++) say(sock, "execute_remembered");
        }
        if (how == 0) _exit(0);
        raise(how);
        _exit(0);
    }
    if (child < 0) return;
    double limit_s = now_s() + 1;
    while (waitpid(child, NULL, WNOHANG | WUNTRACED) == 0 && now_s() < limit_s) pause_ms(1);
    if (how == SIGSTOP) while (!is_over()) pause_ms(5);
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    connected++;
}
static void exiting_in_the_middle(void) { dying(0); }
static void killed_in_the_middle(void) { dying(SIGKILL); }
static void stopped_in_the_middle(void) { dying(SIGSTOP); }

/* Silences */

static void unanswered_questions(void) {
    int sock = session();
    if (sock < 0) return;
    for (int i = 0; i < 8; i++) forget(find("burst_filled")), say(sock, "burst_filled");
    while (!is_over() && (say(sock, "execute_unknown") || wait_for(sock, POLLIN, ROOM_MS)) && drain(sock) >= 0) {}
    close(sock);
}

static void answered_questions(void) {
    static const char *const answers[] = {"memories", "memories_many", "done", "failed", "ping", "hello"};
    int sock = session(), got;
    if (sock < 0) return;
    for (int i = 0; i < 4; i++) forget(find("burst_filled")), say(sock, "burst_filled");
    for (int i = 0; !is_over(); i++) {
        say(sock, "execute_unknown");
        if ((got = receive(sock)) < 0) break;
        if (got == 2) send_to(sock, find(answers[random_below(6)]), question, 0);
        if (got == 0) wait_for(sock, POLLIN, 1);
    }
    close(sock);
}

static void nothing_is_read(void) {
    int sock = session();
    while (sock >= 0 && !is_over()) {
        static const char *const names[] = {"fenced", "hello", "launch", "supported", "execute_unknown", "status"};
        if (!say(sock, names[random_below(6)])) pause_ms(2);
    }
    if (sock >= 0) close(sock);
}

/* Lies */

static int wrong_descriptor(uint32_t kind, int sock) {
    static int silent[2] = {-1, -1}; /* A pipe that nobody will ever write to, and nobody closes. */
    int pair[2], fd = -1;
    switch (kind % WRONG_KINDS) {
    case 0: return open("/", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    case 1: return pipe2(pair, O_CLOEXEC) < 0 ? -1 : (close(pair[1]), pair[0]);
    case 2: return silent[0] < 0 && pipe2(silent, O_CLOEXEC) < 0 ? -1 : dup(silent[0]);
    case 3: return eventfd(0, EFD_CLOEXEC);
    case 4: return open("/dev/zero", O_RDWR | O_CLOEXEC);
    case 5: return open("/dev/full", O_RDWR | O_CLOEXEC);
    case 6: return socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) < 0 ? -1 : (close(pair[1]), pair[0]);
    case 7: return epoll_create1(EPOLL_CLOEXEC);
    case 8: return sealed(1 << 20, 0);
    case 9: return sealed(1 << 20, F_SEAL_SHRINK | F_SEAL_GROW);
    case 10: return sealed(1, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE);
    case 11: return sealed(1 << 20, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE | F_SEAL_SEAL);
    case 12: return open("/proc/self/exe", O_PATH | O_CLOEXEC);
    case 13: return open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
    case 14: return timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC);
    case 15: return inotify_init1(IN_CLOEXEC);
    case 16: return dup(sock); /* A connection inside itself. */
    default:
        fd = memfd_create("huge", MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_HUGETLB);
        if (fd >= 0 && (ftruncate(fd, 2 << 20) < 0 || fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) < 0)) perror("huge");
        return fd;
    }
}

static void wrong_descriptors(void) {
    int sock = session(), fds[FDS_MAX];
    static uint32_t turn;
    for (; sock >= 0 && !is_over(); turn++) {
        struct record *r = &records[turn / WRONG_KINDS % (uint32_t)common_count];
        if (!r->count || r->count > 8 || r->size > PAYLOAD_MAX) { turn += WRONG_KINDS - 1 - turn % WRONG_KINDS; continue; }
        open_parts(r);
        memcpy(buffer, r->payload, r->size);
        uint32_t network = __builtin_bswap32(next_number++);
        if (r->number_at != NOWHERE) memcpy(buffer + r->number_at, &network, 4);
        int replaced = (int)random_below((uint32_t)r->count), lie = wrong_descriptor(turn, sock);
        for (int i = 0; i < r->count; i++) fds[i] = i == replaced && lie >= 0 ? lie : r->parts[i].fd;
        int failed = send_bytes(sock, buffer, r->size, fds, r->count);
        if (lie >= 0) close(lie);
        wait_for(sock, POLLIN, 1);
        if (drain(sock) < 0 || (failed && failed != -EAGAIN)) { close(sock); sock = session(); }
    }
    if (sock >= 0) close(sock);
}

static void wrong_sizes(void) {
    int sock = session();
    while (sock >= 0 && !is_over()) {
        struct record *r = &records[random_below((uint32_t)common_count)];
        if (!r->count || r->parts[0].kind != 'M' || r->count > 8) continue;
        int fds[FDS_MAX];
        open_parts(r);
        for (int i = 0; i < r->count; i++) fds[i] = r->parts[i].fd;
        int small = sealed(1 + random_below(r->parts[0].size < 65536 ? r->parts[0].size : 65536), F_SEAL_SHRINK | F_SEAL_GROW);
        fds[random_below((uint32_t)r->count)] = small;
        int failed = send_bytes(sock, r->payload, r->size, fds, r->count);
        close(small);
        wait_for(sock, POLLIN, 1);
        if (drain(sock) < 0 || (failed && failed != -EAGAIN)) { close(sock); sock = session(); }
    }
    if (sock >= 0) close(sock);
}

static void handles_of_others(void) {
    static const char *const names[] = {"execute_of_another", "free_buffer", "end_burst", "free_slot", "info", "compute", "copy_to", "forget_execution", "notify", "get_memories"};
    int sock = session();
    while (sock >= 0 && !is_over()) {
        if (!say(sock, names[random_below(10)])) wait_for(sock, POLLIN, ROOM_MS);
        if (drain(sock) < 0) break;
    }
    if (sock >= 0) close(sock);
}

/* Rewritings: of memory that the server reads at this moment. */

static void wake_all(const struct part *p) {
    for (uint32_t at = 0; at < p->size && at < 4096; at += 4) syscall(SYS_futex, p->mapped + at, FUTEX_WAKE, 1 << 20, NULL, NULL, 0);
}

static void scribble(struct record *r, uint32_t from, uint32_t to, int wakes) {
    uint64_t one = 1;
    for (int i = 0; i < r->count; i++) {
        struct part *p = &r->parts[i];
        if (p->kind == 'E' && write(p->fd, &one, 8) < 0 && errno != EAGAIN) return;
        if (p->kind != 'M' || p->fd < 0) continue;
        uint32_t limit = to < p->size ? to : p->size;
        for (int n = 0; n < 32 && from < limit; n++) {
            uint32_t at = from + random_below(limit - from);
            unsigned char *place = p->mapped + (at & ~7u);
            if (random_below(2)) p->mapped[at] = (unsigned char)random_below(256);
            else *(volatile uint64_t *)place = random_below(4) ? random_below(PAYLOAD_MAX) : ~(uint64_t)random_below(8);
        }
        if (random_below(16) == 0) fallocate(p->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, from & ~4095u, 4096);
        if (random_below(16) == 0) memcpy(p->mapped, p->content, p->filled);
        if (wakes) wake_all(p);
    }
}

static void rewriting(const char *name, uint32_t from, uint32_t to, int wakes) {
    int sock = session();
    struct record *r = find(name);
    forget(r);
    for (int i = 0; sock >= 0 && !is_over(); i++) {
        if (i % 64 == 0) { if (!say(sock, name)) wait_for(sock, POLLIN, ROOM_MS); }
        scribble(r, from, to, wakes);
        int got = receive(sock);
        if (got == 2) send_to(sock, find("memories"), question, 0);
        if (got < 0) break;
    }
    if (sock >= 0) close(sock);
    forget(r);
}
static void rewriting_queue_headers(void) { rewriting("burst_filled", 0, 640, 1); }
static void rewriting_queues(void) { rewriting("burst_filled", 0, ~0u, 1); }
static void rewriting_packets(void) { rewriting("burst_filled", 4096, 6144, 1); }
static void rewriting_polled_queues(void) { rewriting("burst_filled_polling", 0, 640, 1); }
static void rewriting_requests(void) { rewriting("execute_remembered", 0, ~0u, 0); }
static void rewriting_large_messages(void) { rewriting("supported_large", 0, ~0u, 0); }
static void rewriting_cache_files(void) { rewriting("prepare_cached", 0, ~0u, 0); }
static void rewriting_cached_models(void) { rewriting("prepare_from_cache", 0, ~0u, 0); }

/* Packets that the server takes for new without end: the counters run ahead of it. */
static void endless_packets(void) {
    int sock = session();
    struct record *r = find("burst_filled");
    forget(r);
    if (sock < 0 || !say(sock, "burst_filled")) { if (sock >= 0) close(sock); return; }
    uint64_t step = 64, written = 0;
    memcpy(&written, r->parts[0].mapped, 8);
    while (!is_over()) {
        written += step;
        *(volatile uint64_t *)r->parts[0].mapped = written;
        wake_all(&r->parts[0]);
        int got = receive(sock);
        if (got == 2) send_to(sock, find("memories"), question, 0);
        if (got < 0) break;
        if (asked > 4 && random_below(4096) == 0) break;
    }
    close(sock);
    forget(r);
}

/* Fences */

static void fences_never_signalled(void) { repeat("fenced_many", 1, 1); }

static void fences_with_garbage(void) {
    int sock = session();
    struct record *r = find("fenced");
    while (sock >= 0 && !is_over()) {
        forget(r);
        if (!say(sock, "fenced")) wait_for(sock, POLLIN, ROOM_MS);
        for (uint32_t i = 0; i < 1 + random_below(40000); i += 64) buffer[i] = (unsigned char)random_below(256);
        send_bytes(r->parts[0].sending, buffer, random_below(40000), NULL, 0);
        if (random_below(2)) send_bytes(r->parts[0].sending, buffer, 1, &sock, 1);
        if (drain(sock) < 0) break;
    }
    if (sock >= 0) close(sock);
    forget(r);
}

/* Each execution waits for the one before: its fence goes back to the process that made it. */
static void fences_in_a_chain(void) {
    int sock = session(), last = -1;
    struct record *r = find("fenced");
    while (sock >= 0 && !is_over()) {
        forget(r);
        open_parts(r);
        if (last >= 0) { for (int i = 0; i < r->count; i++) if (r->parts[i].kind == 'F') { close(r->parts[i].fd); r->parts[i].fd = last; last = -1; } }
        if (!say(sock, "fenced")) { wait_for(sock, POLLIN, ROOM_MS); continue; }
        if (!wait_for(sock, POLLIN, 20)) continue;
        char control[CMSG_SPACE(sizeof(int) * 253)];
        struct iovec part = {buffer, sizeof buffer};
        struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
        if (recvmsg(sock, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC) <= 0) break;
        answered++;
        struct cmsghdr *head = CMSG_FIRSTHDR(&message);
        if (head) memcpy(&last, CMSG_DATA(head), sizeof last);
    }
    if (last >= 0) close(last);
    if (sock >= 0) close(sock);
    forget(r);
}

#include "hostile_objects.h"

/* The first control: busy, and no business of the server's. The second: own_files, in hostile_objects.h. */
static void spin(void) { while (!is_over()) random_below(2); }

#define ATTACK(name) {#name, name}
static const struct attack { const char *name; void (*run)(void); } attacks[] = {
    ATTACK(flood_pings), ATTACK(flood_pings_unread), ATTACK(flood_hello), ATTACK(flood_hello_unread), ATTACK(flood_execute),
    ATTACK(flood_execute_unread), ATTACK(flood_execute_fresh_memory), ATTACK(flood_launch_unread), ATTACK(flood_prepare),
    ATTACK(flood_allocate), ATTACK(flood_replies), ATTACK(flood_failed_replies), ATTACK(flood_driver_calls),
    ATTACK(flood_fenced_ready_unread), ATTACK(flood_large_models), ATTACK(flood_large_models_kept), ATTACK(flood_wide_models),
    ATTACK(flood_sparse_models), ATTACK(flood_cached), ATTACK(flood_bursts), ATTACK(flood_polling_bursts), ATTACK(flood_each_kind),
    ATTACK(flood_each_kind_unread), ATTACK(flood_garbage), ATTACK(flood_bit_flips), ATTACK(flood_truncated),
    ATTACK(flood_missing_descriptors), ATTACK(flood_oversized), ATTACK(many_connections_ping), ATTACK(many_connections_execute),
    ATTACK(many_connections_ask_first), ATTACK(many_connections_say_nothing), ATTACK(many_connections_stay), ATTACK(same_number),
    ATTACK(cancelled_at_once), ATTACK(storm_of_connections), ATTACK(storm_of_sessions), ATTACK(half_messages_with_descriptors),
    ATTACK(exiting_in_the_middle), ATTACK(killed_in_the_middle), ATTACK(stopped_in_the_middle), ATTACK(unanswered_questions),
    ATTACK(answered_questions), ATTACK(nothing_is_read), ATTACK(wrong_descriptors), ATTACK(wrong_sizes), ATTACK(handles_of_others),
    ATTACK(rewriting_queue_headers), ATTACK(rewriting_queues), ATTACK(rewriting_packets), ATTACK(rewriting_polled_queues),
    ATTACK(rewriting_requests), ATTACK(rewriting_large_messages), ATTACK(rewriting_cache_files), ATTACK(rewriting_cached_models),
    ATTACK(endless_packets), ATTACK(fences_never_signalled), ATTACK(fences_with_garbage), ATTACK(fences_in_a_chain),
    ATTACK(many_bursts_expired), ATTACK(many_bursts_odd), ATTACK(many_bursts_nested), ATTACK(many_bursts_wide),
    ATTACK(many_bursts_unread), ATTACK(cache_forged_heads), ATTACK(cache_huge_lengths), ATTACK(cache_sparse),
    ATTACK(cache_changing), ATTACK(cache_saved_sparse), ATTACK(prepare_beside_flood), ATTACK(many_connections_prepare),
    ATTACK(many_connections_in_turn), ATTACK(deadlines_far_ahead), ATTACK(memories_of_unknown_shape), ATTACK(descriptors_held),
    ATTACK(spin), ATTACK(own_files),
    {NULL, NULL},
};
