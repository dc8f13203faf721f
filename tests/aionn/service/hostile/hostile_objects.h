/* Attacks of hostile_peer.c by many bursts, by cache files, and by many objects at once; hostile_attacks.h lists them. */

/* Many bursts, whose packets fail */

static struct own_burst { unsigned char *asked, *answers; uint64_t written; } bursts[BURSTS];

/* A burst with memory of its own, which stays mapped. */
static int open_burst(int sock, struct own_burst *burst) {
    struct record *r = find("only_burst");
    forget(r);
    double limit_s = now_s() + 1e-3 * SETUP_MS;
    while (!say(sock, "only_burst")) {
        if (now_s() > limit_s || drain(sock) < 0) return -1;
        wait_for(sock, POLLIN | POLLOUT, ROOM_MS);
    }
    struct part *queues[2];
    for (int i = 0, found = 0; i < r->count && found < 2; i++)
        if (r->parts[i].kind == 'M') queues[found++] = &r->parts[i];
    burst->asked = queues[0]->mapped, burst->answers = queues[1]->mapped, burst->written = 0;
    queues[0]->mapped = queues[1]->mapped = NULL;
    forget(r);
    return 0;
}

static void close_bursts(int count) {
    while (count--) munmap(bursts[count].asked, RING_AT + RING_BYTES), munmap(bursts[count].answers, RING_AT + RING_BYTES);
}

static void wake_parked(unsigned char *place) {
    __atomic_exchange_n((uint32_t *)place, 0, __ATOMIC_SEQ_CST);
    syscall(SYS_futex, place, FUTEX_WAKE, 1 << 20, NULL, NULL, 0);
}

static void put(struct own_burst *burst, const unsigned char *bytes, uint32_t size) {
    for (uint32_t i = 0; i < size;) {
        uint64_t at = burst->written++ % RING_BYTES;
        burst->asked[RING_AT + at] = bytes[i++];
    }
}

/* Publishes a packet as a well-behaved client would; 0 where there is no room for it. */
static int put_packet(struct own_burst *burst, const unsigned char *packet, uint32_t size) {
    static const unsigned char zeros[8];
    uint32_t head[2] = {size, size ^ 0x464d5131u};
    uint64_t read = __atomic_load_n((uint64_t *)(burst->asked + READ_COUNTER), __ATOMIC_ACQUIRE);
    if (burst->written - read + sizeof head + size + 8 > RING_BYTES) return 0;
    put(burst, (unsigned char *)head, sizeof head), put(burst, packet, size), put(burst, zeros, -size & 7);
    __atomic_store_n((uint64_t *)burst->asked, burst->written, __ATOMIC_SEQ_CST);
    wake_parked(burst->asked + READER_PARK);
    sent++;
    return 1;
}

/* Reads all results without looking at them. */
static void empty(struct own_burst *burst) {
    uint64_t written = __atomic_load_n((uint64_t *)burst->answers, __ATOMIC_ACQUIRE);
    uint64_t *read = (uint64_t *)(burst->answers + READ_COUNTER);
    if (*read == written) return;
    answered++;
    __atomic_store_n(read, written, __ATOMIC_SEQ_CST);
    wake_parked(burst->answers + WRITER_PARK);
}

/* Packets to all bursts for as long as there is room: each of the bursts first gets one that succeeds, if there is one to be known. */
static void many_bursts(const char *known, const char *packet, int is_cut, int reads) {
    struct record *first = known ? find(known) : NULL, *next = find(packet);
    int sock = session(), count = 0;
    for (; sock >= 0 && count < BURSTS && open_burst(sock, &bursts[count]) == 0; count++)
        if (first) put_packet(&bursts[count], first->payload, first->size);
    while (count && !is_over()) {
        int written = 0, got;
        for (int i = 0; i < count; i++) {
            written += put_packet(&bursts[i], next->payload, is_cut ? 1 + random_below(next->size) : next->size);
            if (reads) empty(&bursts[i]);
        }
        while ((got = receive(sock)) > 0)
            if (got == 2 && (reads || random_below(2))) send_to(sock, find("memories"), question, 0);
        if (got < 0) break;
        if (!written) wait_for(sock, POLLIN, 1);
    }
    close_bursts(count);
    if (sock >= 0) close(sock);
    if (!is_over()) pause_ms(1);
}
static void many_bursts_expired(void) { many_bursts("only_packet_later", "only_packet_expired", 0, 1); }
static void many_bursts_odd(void) { many_bursts(NULL, "only_packet_odd", 1, 1); }
static void many_bursts_nested(void) { many_bursts(NULL, "only_packet_nested", 1, 1); }
static void many_bursts_wide(void) { many_bursts(NULL, "only_packet_wide", 0, 1); }
static void many_bursts_unread(void) { many_bursts("only_packet_later", "only_packet_later", 0, 0); }

/* Cache files */

static void overwrite(struct part *p, uint32_t at, const void *bytes, size_t size) {
    if (pwrite(p->fd, bytes, size, at) < 0) perror("cache file");
}

static void restore(struct record *r) {
    for (int i = 0; i < r->count; i++) {
        struct part *p = &r->parts[i];
        if (p->kind != 'C' || p->fd < 0) continue;
        if (ftruncate(p->fd, 0) < 0 || ftruncate(p->fd, p->size) < 0) perror("cache file");
        overwrite(p, 0, p->content, p->filled);
    }
}

static void flip_bits(struct record *r, uint32_t below) {
    struct part *p = &r->parts[random_below((uint32_t)r->count)];
    uint32_t at = random_below(p->filled < below ? p->filled : below);
    if (p->kind != 'C' || !p->filled) return;
    unsigned char changed = p->content[at] ^ (unsigned char)(1 << random_below(8));
    overwrite(p, at, &changed, 1);
}

static void shorten(struct record *r) {
    struct part *p = &r->parts[random_below((uint32_t)r->count)];
    if (p->kind == 'C' && ftruncate(p->fd, random_below(p->size)) < 0) perror("cache file");
}

/* Says one of some messages with cache files, changes their files before or after that, and waits for the answer. */
static void cached(const char *const names[], uint32_t count, uint32_t flipped_below, int is_late) {
    int sock = session(), got = 0;
    for (int turns = 0; sock >= 0 && !is_over() && turns < SESSION_TURNS && got >= 0; turns++) {
        struct record *r = find(names[random_below(count)]);
        double limit_s = now_s() + 1e-3 * SETUP_MS;
        open_parts(r);
        restore(r);
        for (uint32_t i = random_below(3); flipped_below && !is_late && i; i--) flip_bits(r, flipped_below);
        if (!say(sock, r->name)) wait_for(sock, POLLOUT, ROOM_MS);
        while ((got = receive(sock)) == 0 && !is_over() && now_s() < limit_s) {
            if (is_late && random_below(32) == 0) shorten(r);
            else if (is_late) flip_bits(r, flipped_below);
            wait_for(sock, POLLIN, 1);
        }
    }
    if (sock >= 0) close(sock);
    for (uint32_t i = 0; i < count; i++) forget(find(names[i]));
}

/* The control of these: files of the same models are written anew and changed, as often as an attack does so, and the server is told
 * nothing. */
static void own_files(void) {
    static const char *const names[] = {"only_from_cache", "only_from_cache_filled"};
    while (!is_over()) {
        struct record *r = find(names[random_below(2)]);
        double next_s = now_s() + 1e-3 * OWN_FILES_MS;
        open_parts(r);
        restore(r);
        for (uint32_t i = random_below(3); i; i--) flip_bits(r, 88);
        while (!is_over() && now_s() < next_s) pause_ms(1);
    }
    for (int i = 0; i < 2; i++) forget(find(names[i]));
}
static void cache_forged_heads(void) {
    static const char *const names[] = {"only_from_cache", "only_from_cache_filled"};
    cached(names, 2, 88, 0);
}
static void cache_huge_lengths(void) {
    static const char *const names[] = {"only_huge_values", "only_huge_pools", "only_huge_file", "only_huge_structure"};
    cached(names, 4, 0, 0);
}
static void cache_sparse(void) {
    static const char *const names[] = {"only_sparse", "only_sparse_wrong"};
    cached(names, 2, 0, 0);
}
static void cache_changing(void) {
    static const char *const names[] = {"only_from_cache_filled"};
    cached(names, 1, ~0u, 1);
}
static void cache_saved_sparse(void) {
    static const char *const names[] = {"only_save_sparse"};
    cached(names, 1, 0, 0);
}

/* Preparation beside executions, and many connections */

static void prepare_beside_flood(void) {
    int flooding = session(), preparing = session(), is_waiting = 0, got;
    while (flooding >= 0 && preparing >= 0 && !is_over()) {
        if (!say(flooding, "execute")) wait_for(flooding, POLLIN, 1);
        if (drain(flooding) < 0 || (got = receive(preparing)) < 0) break;
        if (got == 1) is_waiting = 0;
        if (!is_waiting) is_waiting = (int)say(preparing, "prepare_large");
    }
    if (flooding >= 0) close(flooding);
    if (preparing >= 0) close(preparing);
}

/* Connections each of which has one call in progress at any time. */
static void in_turn(int limit, const char *const names[], uint32_t count) {
    struct pollfd waited[PLACES];
    int joined = 0, is_open = 1;
    for (; joined < limit && !is_over(); joined++) {
        if ((waited[joined].fd = session()) < 0) break;
        waited[joined].events = POLLIN;
        say(waited[joined].fd, names[(uint32_t)joined % count]);
    }
    while (joined && is_open && !is_over()) {
        poll(waited, (nfds_t)joined, ROOM_MS);
        for (int i = 0; i < joined && is_open; i++) {
            if (!waited[i].revents) continue;
            int got = receive(waited[i].fd);
            is_open = got >= 0;
            if (got == 1) say(waited[i].fd, names[random_below(count)]);
        }
    }
    while (joined) close(waited[--joined].fd);
}
static void many_connections_prepare(void) {
    static const char *const names[] = {"prepare_large", "prepare_wide", "prepare_sparse", "supported_large"};
    in_turn(16, names, 4);
}
static void many_connections_in_turn(void) {
    static const char *const names[] = {"execute"};
    in_turn(PLACES, names, 1);
}

/* Deadlines, device memories and descriptors by the thousand */

static void deadlines_far_ahead(void) {
    static const char *const names[] = {"only_execute_later", "only_launch_later", "only_fenced_later"};
    int sock = session(), got = 0;
    while (sock >= 0 && !is_over() && got >= 0) {
        uint32_t first = next_number;
        for (int i = 0; i < 1000 && !is_over() && got >= 0; i++) {
            if (!say(sock, names[i % 3])) wait_for(sock, POLLIN | POLLOUT, ROOM_MS);
            if (i % 50 == 0) got = drain(sock), forget(find("only_fenced_later"));
        }
        for (uint32_t last = next_number; first < last && !is_over() && got >= 0; first++) {
            if (!send_to(sock, find("cancel"), next_number++, first)) wait_for(sock, POLLIN | POLLOUT, ROOM_MS);
            if (first % 50 == 0) got = drain(sock);
        }
    }
    if (sock >= 0) close(sock);
    forget(find("only_fenced_later"));
}

/* The model has the handle after the session's, and each memory the next one. */
static void memories_of_unknown_shape(void) {
    int sock = session(), got = 0;
    if (sock < 0 || !say(sock, "only_prepare_unknown") || await_replies(sock, 1) < 0) { if (sock >= 0) close(sock); return; }
    for (uint32_t i = 0; i < 2 * BUFFERS && !is_over() && got >= 0; i++) {
        uint32_t handle = 3 + i % BUFFERS;
        uint32_t is_sent = i < BUFFERS ? say(sock, "only_allocate_unknown") : send_to(sock, find("only_fill"), next_number++, handle);
        if (!is_sent) wait_for(sock, POLLIN | POLLOUT, ROOM_MS), i--;
        got = drain(sock);
    }
    close(sock);
}

/* What the server keeps for it: pending fences, whose other ends stay open, and memories of requests; then it asks for more. */
static void descriptors_held(void) {
    static int kept[HELD_MAX];
    struct record *r = find("fenced_many"), *memory = find("execute");
    int socks[HOLDERS], count = 0, held = 0, turns = 0, is_open = 1;
    for (; count < HOLDERS && !is_over(); count++)
        if ((socks[count] = session()) < 0) break;
    for (; count && is_open && !is_over(); turns++) {
        int sock = socks[turns % count];
        forget(r), forget(memory);
        if (held + r->count < HELD_MAX && say(sock, r->name)) {
            for (int i = 0; i < r->count; i++)
                if (r->parts[i].sending >= 0) kept[held++] = r->parts[i].sending, r->parts[i].sending = -1;
        } else wait_for(sock, POLLIN | POLLOUT, ROOM_MS);
        say(sock, memory->name);
        is_open = drain(sock) >= 0;
    }
    while (held) close(kept[--held]);
    while (count) close(socks[--count]);
    forget(r), forget(memory);
}
