#define _GNU_SOURCE
#include "serving.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "inflight.h"
#include "names.h"
#include "requests.h"

enum {
    BUFFER_BYTES = (1 << 20) + 65536, /* the largest write that a kernel may announce, with its header */
    MAX_READ_BYTES = 1 << 20,
    LOOP_JOURNAL = JOURNALS - 1, /* replies of Python, one at a time */
    MAX_BACKGROUND = 256, /* read-ahead under way; the kernel's own default of 12 keeps disks and stores idle */
    INTERRUPT_CHECK_MS = 200,
    ORPHANS_MOST = 1024,
    NOTIFY_RESEND = 7,
    NAMES_MOST = 131072, /* some 200 bytes each */
};

/* Requests that only Python is to hear of: no reply of theirs reaches the kernel, whose own numbers are far below. */
#define SYNTHETIC (1ULL << 62)

struct backing_map {
    int32_t fd;
    uint32_t flags;
    uint64_t padding;
};
#define BACKING_OPEN _IOW(229, 1, struct backing_map)
#define BACKING_CLOSE _IOW(229, 2, uint32_t)

struct message {
    struct message *next;
    size_t count;
    uint8_t bytes[];
};

struct counters counters;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t not_busy = PTHREAD_COND_INITIALIZER;     /* a slot's is_busy was cleared */
static pthread_cond_t is_to_stop = PTHREAD_COND_INITIALIZER;

static struct settings settings;
static bool is_prepared, is_takeover, agrees, has_ended, passthrough;
static _Atomic bool is_stopping;
static int fuse_fd = -1, table_fd = -1, event_fd = -1;
static struct memory *memory;
static struct table *table;
static struct inflight inflight;
static struct names names;
static struct message *first_message, **last_message = &first_message;
static uint64_t init_unique, offered, agreed, synthetic_count;
static pthread_t threads[MAX_THREADS + 1];
static int started_count;
static int waits_count; /* threads that a failing disk of the hot tier might hold for ever: never all of them */
static _Atomic uint64_t handled[MAX_THREADS]; /* the request that each thread is at */
static uint64_t broken_in_on[MAX_THREADS];     /* the last of them that the kernel asked to give up */

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_BOOTTIME, &now); /* as the kernel's own times to live: not stopped by a suspend, nor set */
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

static uint32_t now_seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME_COARSE, &now);
    return (uint32_t)now.tv_sec;
}

/* -- set-up ------------------------------------------------------------------------------------------------------------ */

bool serving_prepare(const struct settings *wanted, int old_fuse_fd, int old_table_fd)
{
    if (is_prepared) { /* a takeover came to nothing: what follows is a fresh mount */
        close(fuse_fd);
        close(table_fd);
        if (event_fd >= 0)
            close(event_fd);
        event_fd = -1;
        table_free(table);
        table = NULL;
        munmap(memory, sizeof *memory);
        inflight_free(&inflight);
        names_free(&names);
        is_prepared = has_ended = agrees = is_stopping = false;
    }
    is_takeover = old_table_fd >= 0;
    table_fd = is_takeover ? old_table_fd : memfd_create("tiercache-open-table", MFD_CLOEXEC);
    if (table_fd < 0 || (!is_takeover && ftruncate(table_fd, sizeof *memory) != 0))
        return false;
    struct stat info;
    if (fstat(table_fd, &info) != 0)
        return false;
    if (info.st_size != (off_t)sizeof *memory) {
        errno = EPROTO;
        return false;
    }
    memory = mmap(NULL, sizeof *memory, PROT_READ | PROT_WRITE, MAP_SHARED, table_fd, 0);
    if (memory == MAP_FAILED)
        return false;
    if (is_takeover && (memory->init_request_bytes == 0 || memory->init_reply_bytes == 0)) {
        errno = EPROTO;
        return false;
    }
    table = table_new(memory, wanted->published_most);
    if (!table) {
        errno = EPROTO;
        return false;
    }
    memory->era += is_takeover;
    names_make(&names, NAMES_MOST); /* without memory for it every name is asked for */
    settings = *wanted;
    fuse_fd = old_fuse_fd;
    is_prepared = true;
    return true;
}

bool serving_is_prepared(void)
{
    return is_prepared;
}

static void note_init(const struct request *request)
{
    init_unique = request->head.unique;
    offered = init_offered(request);
}

int serving_begin(int mounted_fd)
{
    fuse_fd = mounted_fd;
    event_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (is_takeover) {
        struct request request;
        if (!request_parse(memory->init_request, memory->init_request_bytes, &request)) {
            errno = EPROTO;
            return -1;
        }
        note_init(&request);
    }
    return event_fd;
}

const void *serving_init_request(size_t *count)
{
    *count = is_takeover ? memory->init_request_bytes : 0;
    return memory->init_request;
}

bool serving_agrees(void)
{
    return agrees;
}

struct table *serving_lock(void)
{
    pthread_mutex_lock(&lock);
    return table;
}

void serving_unlock(void)
{
    pthread_mutex_unlock(&lock);
}

int serving_fuse_fd(void) { return fuse_fd; }
int serving_table_fd(void) { return table_fd; }
uint64_t serving_offered(void) { return offered; }
uint64_t serving_agreed(void) { return agreed; }

void serving_set_passthrough(bool enabled)
{
    pthread_mutex_lock(&lock);
    passthrough = enabled;
    pthread_mutex_unlock(&lock);
}

static int32_t backing_open(int fd)
{
    struct backing_map map = {.fd = fd};
    int id = ioctl(fuse_fd, BACKING_OPEN, &map);
    return id > 0 ? id : -errno;
}

static void backing_close(int32_t id)
{
    uint32_t number = (uint32_t)id;
    ioctl(fuse_fd, BACKING_CLOSE, &number);
}

int serving_probe(int fd)
{
    int32_t id = backing_open(fd);
    if (id < 0)
        return -id;
    backing_close(id);
    return 0;
}

/* -- what Python is to see --------------------------------------------------------------------------------------------- */

/* Under the lock. */
static void enqueue(struct message *message)
{
    bool was_empty = !first_message;
    message->next = NULL;
    *last_message = message;
    last_message = &message->next;
    if (was_empty) {
        uint64_t one = 1;
        if (write(event_fd, &one, sizeof one) < 0)
            return; /* its counter is full: readable already */
    }
}

static struct message *copy_of(const void *bytes, size_t count)
{
    struct message *message = malloc(sizeof *message + count);
    if (message) {
        message->count = count;
        memcpy(message->bytes, bytes, count);
    }
    return message;
}

/* Tells Python of a release that the kernel was answered, or never asked for. Under the lock. */
static void tell_release(uint32_t opcode, uint64_t nodeid, uint64_t fh)
{
    struct {
        struct in_header head;
        struct release_in release;
    } request = {
        .head = {.len = sizeof request, .opcode = opcode, .unique = SYNTHETIC | synthetic_count++ << 1, .nodeid = nodeid},
        .release = {.fh = fh},
    };
    struct message *message = copy_of(&request, sizeof request);
    if (message)
        enqueue(message);
}

ssize_t serving_receive(void *into, size_t size)
{
    struct message *message;
    uint64_t count;

    pthread_mutex_lock(&lock);
    message = first_message;
    if (message) {
        first_message = message->next;
        if (!first_message)
            last_message = &first_message;
    }
    if (!first_message && !has_ended && read(event_fd, &count, sizeof count) < 0 && !message) {
        /* woken for what another task took */
    }
    pthread_mutex_unlock(&lock);
    if (!message) {
        errno = has_ended ? ENODEV : EINTR; /* what libfuse and pyfuse3 take for "unmounted" and for "try again" */
        return -1;
    }
    count = message->count < size ? message->count : size;
    memcpy(into, message->bytes, count);
    free(message);
    return (ssize_t)count;
}

/* -- replies ----------------------------------------------------------------------------------------------------------- */

static bool reply(uint64_t unique, int error, const void *body, size_t count)
{
    struct out_header head = {.len = (uint32_t)(sizeof head + count), .error = -error, .unique = unique};
    struct iovec pieces[] = {{&head, sizeof head}, {(void *)body, count}};
    return writev(fuse_fd, pieces, count ? 2 : 1) >= 0;
}

/* -- hot files --------------------------------------------------------------------------------------------------------- */

/* Opens the hot file of a slot whose place is known; -errno. ESTALE: it has not the size that it must have. */
static int open_hot(const struct slot *slot)
{
    static const char digits[] = "0123456789abcdef";
    char name[3 + 2 * OBJECT_ID_BYTES + 1];
    struct stat info;
    int fd;

    for (int i = 0; i < OBJECT_ID_BYTES; i++) {
        name[3 + 2 * i] = digits[slot->object_id[i] >> 4];
        name[4 + 2 * i] = digits[slot->object_id[i] & 15];
    }
    memcpy(name, name + 3, 2);
    name[2] = '/';
    name[sizeof name - 1] = 0;
    if (slot->directory >= settings.directory_count)
        return -ENOENT;
    fd = openat(settings.directories[slot->directory], name, O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NOATIME);
    if (fd < 0 && errno == EPERM)
        fd = openat(settings.directories[slot->directory], name, O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0)
        return -errno;
    if (fstat(fd, &info) != 0 || info.st_size != (off_t)slot->size_bytes) {
        close(fd);
        return -ESTALE;
    }
    return fd;
}

static void become_busy(struct slot *slot)
{
    slot->is_busy = true;
    pthread_mutex_unlock(&lock);
}

static void end_busy(struct slot *slot)
{
    pthread_mutex_lock(&lock);
    slot->is_busy = false;
    pthread_cond_broadcast(&not_busy);
}

/* Under the lock, which it gives up meanwhile; the caller holds the slot by `opening` or `reading`. */
static bool get_descriptor(struct slot *slot)
{
    if (slot->fd < 0) {
        become_busy(slot);
        int fd = open_hot(slot);
        end_busy(slot);
        slot->fd = fd < 0 ? -1 : fd;
    }
    return slot->fd >= 0;
}

static bool get_backing_id(struct slot *slot)
{
    struct record *record = &memory->records[slot->record];

    if (record->backing_id == 0) {
        become_busy(slot);
        int fd = open_hot(slot);
        int32_t id = fd < 0 ? fd : backing_open(fd);
        if (fd >= 0)
            close(fd);
        end_busy(slot);
        if (id > 0)
            record->backing_id = id;
        else
            counters.passthrough_failures++;
    }
    return record->backing_id > 0;
}

/* Lets go of what an inode without opens holds in the kernel and here. Under the lock, which it gives up meanwhile. */
static void give_up(struct slot *slot)
{
    if (table_uses(table, slot) != 0 || slot->reading || slot->is_busy)
        return; /* whoever uses it comes here again */
    int32_t id = slot->record == NO_RECORD ? 0 : memory->records[slot->record].backing_id;
    int fd = slot->fd;
    slot->fd = -1;
    if (id || fd >= 0) {
        become_busy(slot);
        if (id)
            backing_close(id);
        if (fd >= 0)
            close(fd);
        end_busy(slot);
    }
    if (slot->record != NO_RECORD) {
        memory->records[slot->record].backing_id = 0;
        struct opens opens = table_opens(table, slot);
        if (!opens.passthrough && !opens.native && !opens.daemon && !slot->opening)
            table_close(table, slot);
    }
    table_forget_unused(table, slot);
}

/* -- open and release -------------------------------------------------------------------------------------------------- */

/* What the next open of an inode gets that is open in this mode already. */
static struct open_out answer_in(const struct slot *slot, enum mode mode)
{
    return (struct open_out){
        .fh = slot->inode | (mode == MODE_DAEMON ? 0 : NATIVE_HANDLE),
        .open_flags = mode == MODE_PASSTHROUGH ? FOPEN_PASSTHROUGH : FOPEN_KEEP_CACHE,
        .backing_id = mode == MODE_PASSTHROUGH ? memory->records[slot->record].backing_id : 0,
    };
}

/* Counts an open that needs no Python, and says what to answer. Under the lock; the caller holds the slot by `opening`.
 * ENFILE: more files are open than can be written down. EBUSY: a thread is at the file, and the caller may not wait for it. Another
 * errno: Python has to see to it. */
static int open_natively(struct slot *slot, uint64_t unique, uint32_t journal, bool may_wait, struct open_out *answer)
{
    while (slot->is_busy) {
        if (!may_wait)
            return EBUSY;
        pthread_cond_wait(&not_busy, &lock);
    }
    if (!table_record(table, slot))
        return ENFILE;
    bool has_id = passthrough && table_mode(table, slot) == MODE_NONE && get_backing_id(slot);
    enum mode mode = table_mode(table, slot); /* the lock was given up: Python may have opened it meanwhile */
    if (mode == MODE_NONE)
        mode = has_id ? MODE_PASSTHROUGH : MODE_NATIVE;
    if (mode == MODE_NATIVE && !get_descriptor(slot))
        return EIO;
    if (!table_count(table, slot, journal, OP_OPEN, unique, mode, 1))
        return ENFILE;
    *answer = answer_in(slot, mode);
    return 0;
}

static enum mode mode_of_handle(const struct slot *slot, uint64_t fh)
{
    if (!(fh & NATIVE_HANDLE))
        return MODE_DAEMON;
    return table_opens(table, slot).passthrough ? MODE_PASSTHROUGH : MODE_NATIVE;
}

/* Under the lock. */
static void take_back(struct slot *slot, uint64_t fh, uint64_t unique, uint32_t journal)
{
    if (slot->record != NO_RECORD && table_count(table, slot, journal, OP_RELEASE, unique, mode_of_handle(slot, fh), -1))
        return;
    table_settled(table, journal);
}

/* May this thread wait for the hot tier's disk? Under the lock. */
static bool take_wait(void)
{
    bool may_wait = waits_count + 1 < settings.thread_count;
    waits_count += may_wait;
    return may_wait;
}

static void end_wait(bool has_waited)
{
    waits_count -= has_waited;
}

static bool needs_disk(const struct slot *slot)
{
    enum mode mode = table_mode(table, slot);
    return mode == MODE_NONE || (mode == MODE_NATIVE && slot->fd < 0);
}

static bool answer_open(const struct request *request, uint32_t journal)
{
    struct open_in wanted;
    struct open_out answer;
    uint64_t unique = request->head.unique;

    if (!request_body(request, &wanted, sizeof wanted) || (wanted.flags & (O_ACCMODE | O_TRUNC | O_APPEND)) != O_RDONLY)
        return false;
    pthread_mutex_lock(&lock);
    struct slot *slot = table_find(table, request->head.nodeid);
    enum mode applied = unique & UNIQUE_RESENT ? table_was_applied(table, unique, OP_OPEN) : MODE_NONE;
    if (applied != MODE_NONE && slot && slot->record != NO_RECORD) {
        answer = answer_in(slot, applied); /* a predecessor counted it */
        slot->opening++;
    } else {
        /* One that was withdrawn is Python's to judge, also while it is open: its name may lead elsewhere. */
        if (!slot || !slot->is_published) {
            pthread_mutex_unlock(&lock);
            return false;
        }
        bool may_wait = take_wait();
        if (!may_wait && (slot->is_busy || needs_disk(slot))) {
            pthread_mutex_unlock(&lock);
            return false;
        }
        slot->opening++;
        int error = open_natively(slot, unique, journal, may_wait, &answer);
        end_wait(may_wait);
        if (error != 0) {
            slot->opening--;
            table_withdraw(table, slot); /* its file is not what it should be; Python will find out */
            give_up(slot);
            pthread_mutex_unlock(&lock);
            return false;
        }
        table_touch(table, slot, 1, 0, now_seconds());
    }
    pthread_mutex_unlock(&lock);

    bool is_open = reply(unique, 0, &answer, sizeof answer) || errno != ENOENT;
    counters.opens++;
    pthread_mutex_lock(&lock);
    table_settled(table, journal);
    slot->opening--;
    if (!is_open) { /* nobody waits any more: there will be no release */
        take_back(slot, answer.fh, unique, journal);
        table_settled(table, journal);
        give_up(slot);
    }
    pthread_mutex_unlock(&lock);
    return true;
}

static bool answer_release(const struct request *request, uint32_t journal)
{
    struct release_in released;

    if (!request_body(request, &released, sizeof released))
        return false;
    pthread_mutex_lock(&lock);
    struct slot *slot = table_find(table, request->head.nodeid);
    bool was_applied = request->head.unique & UNIQUE_RESENT &&
                       table_was_applied(table, request->head.unique, OP_RELEASE) != MODE_NONE;
    if (slot) {
        slot->opening++; /* stays until the reply */
        if (!was_applied)
            take_back(slot, released.fh, request->head.unique, journal);
    }
    if (!(released.fh & NATIVE_HANDLE) && !was_applied)
        tell_release(OP_RELEASE, request->head.nodeid, released.fh);
    pthread_mutex_unlock(&lock);
    reply(request->head.unique, 0, NULL, 0);
    counters.releases++;
    if (slot) {
        pthread_mutex_lock(&lock);
        table_settled(table, journal);
        slot->opening--;
        if (table_uses(table, slot) == 0)
            give_up(slot);
        pthread_mutex_unlock(&lock);
    }
    return true;
}

/* -- read -------------------------------------------------------------------------------------------------------------- */

static bool answer_read(const struct request *request, uint8_t *buffer)
{
    struct read_in wanted;
    ssize_t count;

    if (!request_body(request, &wanted, sizeof wanted) || wanted.size > MAX_READ_BYTES)
        return false;
    pthread_mutex_lock(&lock);
    struct slot *slot = table_find(table, request->head.nodeid);
    if (!slot || !slot->is_published) {
        pthread_mutex_unlock(&lock);
        return false;
    }
    bool may_wait = take_wait();
    if (!may_wait && (slot->is_busy || slot->fd < 0)) {
        pthread_mutex_unlock(&lock);
        return false;
    }
    slot->reading++;
    while (slot->is_busy)
        pthread_cond_wait(&not_busy, &lock);
    bool is_there = get_descriptor(slot);
    int fd = slot->fd;
    uint64_t size_bytes = slot->size_bytes;
    pthread_mutex_unlock(&lock);

    uint64_t begin = wanted.offset < size_bytes ? wanted.offset : size_bytes;
    size_t expected = wanted.size < size_bytes - begin ? wanted.size : size_bytes - begin;
    struct iovec whole = {buffer, expected};
    if (!is_there)
        count = -1;
    else if (may_wait)
        count = pread(fd, buffer, expected, (off_t)begin);
    else
        count = preadv2(fd, &whole, 1, (off_t)begin, RWF_NOWAIT);

    pthread_mutex_lock(&lock);
    end_wait(may_wait);
    bool is_whole = count >= 0 && (size_t)count == expected && slot->is_published;
    slot->reading--;
    if (is_whole)
        table_touch(table, slot, 0, expected, now_seconds());
    else if (may_wait)
        table_withdraw(table, slot); /* the disk fails, or somebody cut the file: Python deals with it */
    if (table_uses(table, slot) == 0)
        give_up(slot);
    pthread_mutex_unlock(&lock);
    if (!is_whole)
        return false;
    reply(request->head.unique, 0, buffer, expected);
    counters.reads++;
    counters.read_bytes += expected;
    return true;
}

/* -- interrupts -------------------------------------------------------------------------------------------------------- */

/* Is the thread in a read system call? Else its read is a page fault, and EINTR would be a SIGBUS. True when nobody may know. */
static bool is_in_read_call(uint32_t pid)
{
    char path[32];
    long number = 0;

    snprintf(path, sizeof path, "/proc/%u/syscall", pid);
    FILE *file = fopen(path, "re");
    if (!file)
        return true;
    bool is_known = fscanf(file, "%ld", &number) == 1;
    fclose(file);
    return !is_known || number == SYS_read || number == SYS_pread64 || number == SYS_readv || number == SYS_preadv ||
           number == SYS_preadv2;
}

/* Is a signal waiting that its process should not have to wait for the store with? A fatal one, or one by which a user asks a
 * program to stop, also where it is caught. Other caught signals (timers, children) do not break off a read on a local disk either.
 * `if_unknown`: what to say of a process that is gone, or of another namespace. */
static bool wants_to_stop(uint32_t pid, uint32_t opcode, bool if_unknown)
{
    const uint64_t asking = 1ULL << (SIGINT - 1) | 1ULL << (SIGTERM - 1) | 1ULL << (SIGHUP - 1) | 1ULL << (SIGQUIT - 1);
    const uint64_t harmless = 1ULL << (SIGCHLD - 1) | 1ULL << (SIGURG - 1) | 1ULL << (SIGWINCH - 1) | 1ULL << (SIGCONT - 1) |
                              1ULL << (SIGSTOP - 1) | 1ULL << (SIGTSTP - 1) | 1ULL << (SIGTTIN - 1) | 1ULL << (SIGTTOU - 1);
    unsigned long long pending = 0, shared = 0, blocked = 0, ignored = 0, caught = 0;
    char path[32], line[256];

    snprintf(path, sizeof path, "/proc/%u/status", pid);
    FILE *file = fopen(path, "re");
    if (!file)
        return if_unknown;
    while (fgets(line, sizeof line, file)) {
        sscanf(line, "SigPnd: %llx", &pending);
        sscanf(line, "ShdPnd: %llx", &shared);
        sscanf(line, "SigBlk: %llx", &blocked);
        sscanf(line, "SigIgn: %llx", &ignored);
        sscanf(line, "SigCgt: %llx", &caught);
    }
    fclose(file);
    pending = (pending | shared) & ~blocked & ~ignored & ~harmless;
    if (pending & ~caught)
        return true;
    return pending & asking && (opcode != OP_READ || is_in_read_call(pid));
}

/* Does the process that waits perhaps not wait for this request itself, but for a page that read-ahead asked for? */
static bool is_old_read(const struct waiting *waiting)
{
    return waiting->opcode == OP_READ && waiting->checks_count >= 2;
}

/* Under the lock. Answers a waiting request with EINTR if its process may have it.
 *
 * The kernel tells of a signal only for a request that its process waits for itself. One that waits for a page which read-ahead
 * asked for is looked at all the same: the page stays empty, and the process asks for it again and can be interrupted then. */
static void try_to_break_off(struct waiting *waiting)
{
    if (waiting->is_answered || (!waiting->is_interrupted && !is_old_read(waiting)) ||
        !wants_to_stop(waiting->pid, waiting->opcode, waiting->is_interrupted))
        return;
    waiting->is_answered = true;
    counters.interrupted++;
    reply(waiting->unique, EINTR, NULL, 0);
}

static void take_interrupt(const struct request *request)
{
    uint64_t unique;

    if (!request_body(request, &unique, sizeof unique))
        return;
    pthread_mutex_lock(&lock);
    struct waiting *waiting = inflight_find(&inflight, unique);
    if (waiting && !waiting->is_interrupted && is_interruptible(waiting->opcode)) {
        waiting->is_interrupted = true;
        try_to_break_off(waiting);
    }
    bool is_here = waiting;
    for (int i = 0; i < settings.thread_count && !is_here; i++)
        if (handled[i] == unique) { /* reading the hot tier, which no disk would break off either, unless it is forwarded after all */
            broken_in_on[i] = unique;
            is_here = true;
        }
    pthread_mutex_unlock(&lock);
    if (!is_here)
        reply(request->head.unique, EAGAIN, NULL, 0); /* another thread is about to take it; if it was answered, this is for nobody */
}

/* The kernel tells of the first signal only. A later one, SIGKILL above all, has to be looked for. */
static void *watch_waiting(void *unused)
{
    (void)unused;
    pthread_mutex_lock(&lock);
    while (!is_stopping) {
        struct timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_nsec += INTERRUPT_CHECK_MS * 1000000L;
        until.tv_sec += until.tv_nsec / 1000000000L;
        until.tv_nsec %= 1000000000L;
        pthread_cond_timedwait(&is_to_stop, &lock, &until);
        uint32_t patient = 0; /* the process that was looked at last and wants to go on: read-ahead has many requests of one */
        for (size_t i = 0; i < inflight.size && inflight.count; i++) {
            struct waiting *waiting = &inflight.places[i];
            if (!waiting->unique || (!waiting->is_interrupted && waiting->pid == patient && is_old_read(waiting)))
                continue;
            waiting->checks_count += waiting->checks_count < UINT8_MAX;
            try_to_break_off(waiting);
            if (!waiting->is_answered && is_old_read(waiting))
                patient = waiting->pid;
        }
    }
    pthread_mutex_unlock(&lock);
    return NULL;
}

/* -- the threads ------------------------------------------------------------------------------------------------------- */

static bool answer_lookup(const struct request *request)
{
    const char *name = (const char *)request->body;
    struct entry_out entry;

    pthread_mutex_lock(&lock);
    bool is_known = names_find(&names, request->head.nodeid, name, strnlen(name, request->body_bytes), now_ns(), &entry);
    pthread_mutex_unlock(&lock);
    if (is_known) {
        reply(request->head.unique, 0, &entry, sizeof entry);
        counters.lookups++;
    }
    return is_known;
}

void serving_forget_name(uint64_t parent, const char *name, size_t count)
{
    pthread_mutex_lock(&lock);
    names_drop(&names, parent, name, count);
    pthread_mutex_unlock(&lock);
}

/* Keeps what Python says of names. Under the lock. */
static void note_names(const struct waiting *waiting, int32_t error, const struct iovec *pieces, int count)
{
    struct entry_out entry;

    if (error == -ESTALE) { /* the kernel looks the name up again, and must not be led to the same inode */
        names_clear(&names);
    } else if (error == 0 && count == 2 && waiting->name && pieces[1].iov_len >= sizeof entry) {
        memcpy(&entry, pieces[1].iov_base, sizeof entry);
        names_put(&names, waiting->nodeid, waiting->name, waiting->name_bytes, &entry, now_ns());
    } else if (error == 0 && count == 2 && waiting->opcode == OP_READDIRPLUS) {
        names_put_listed(&names, waiting->nodeid, pieces[1].iov_base, pieces[1].iov_len, now_ns());
    }
}

static void forward(const struct request *request, const void *bytes, size_t count)
{
    const struct in_header *head = &request->head;
    struct message *message = copy_of(bytes, count);

    if (!message) {
        reply(head->unique, ENOMEM, NULL, 0);
        return;
    }
    pthread_mutex_lock(&lock);
    if (head->opcode == OP_INIT) {
        note_init(request);
        if (count <= INIT_BYTES) {
            memcpy(memory->init_request, bytes, count);
            memory->init_request_bytes = (uint32_t)count;
        }
    }
    if (head->opcode == OP_READDIR || head->opcode == OP_READDIRPLUS || head->opcode == OP_RELEASEDIR)
        directory_request(message->bytes, count, memory->era);
    struct waiting waiting = {.unique = head->unique, .nodeid = head->nodeid, .opcode = head->opcode, .pid = head->pid};
    size_t name_bytes = head->opcode == OP_LOOKUP ? strnlen((const char *)request->body, request->body_bytes) : 0;
    if (name_bytes > 0 && name_bytes <= NAME_BYTES && (waiting.name = strndup((const char *)request->body, name_bytes)))
        waiting.name_bytes = (uint8_t)name_bytes;
    for (int i = 0; i < settings.thread_count; i++)
        waiting.is_interrupted |= broken_in_on[i] == head->unique && is_interruptible(head->opcode);
    bool is_noted = inflight_add(&inflight, waiting);
    if (is_noted)
        enqueue(message);
    counters.forwarded++;
    pthread_mutex_unlock(&lock);
    if (!is_noted) {
        free(waiting.name);
        free(message);
        reply(head->unique, ENOMEM, NULL, 0);
    }
}

static void take(uint8_t *bytes, size_t count, uint32_t journal, uint8_t *buffer)
{
    struct request request;
    bool is_answered = false;

    if (!request_parse(bytes, count, &request))
        return;
    handled[journal] = request.head.unique;
    switch (request.head.opcode) {
    case OP_LOOKUP:
        is_answered = answer_lookup(&request);
        break;
    case OP_OPEN:
        is_answered = answer_open(&request, journal);
        break;
    case OP_READ:
        is_answered = answer_read(&request, buffer);
        break;
    case OP_RELEASE:
        is_answered = answer_release(&request, journal);
        break;
    case OP_FLUSH: /* nothing is ever written: the kernel need not ask again */
        is_answered = reply(request.head.unique, ENOSYS, NULL, 0) || true;
        break;
    case OP_INTERRUPT:
        take_interrupt(&request);
        is_answered = true;
        break;
    case OP_FORGET: /* inode numbers are names, not references */
    case OP_BATCH_FORGET:
        is_answered = true;
        break;
    }
    if (!is_answered)
        forward(&request, bytes, count);
    handled[journal] = 0;
}

static void end(void)
{
    uint64_t one = 1;
    pthread_mutex_lock(&lock);
    has_ended = true;
    if (write(event_fd, &one, sizeof one) < 0)
        perror("eventfd");
    pthread_mutex_unlock(&lock);
}

static void *serve(void *number)
{
    uint32_t journal = (uint32_t)(uintptr_t)number;
    uint8_t *bytes = malloc(BUFFER_BYTES), *buffer = malloc(MAX_READ_BYTES);

    while (bytes && buffer && !is_stopping) {
        ssize_t count = read(fuse_fd, bytes, BUFFER_BYTES);
        if (count >= 0)
            take(bytes, (size_t)count, journal, buffer);
        else if (errno != EINTR && errno != EAGAIN && errno != ENOENT) { /* ENODEV: unmounted */
            end();
            break;
        }
    }
    free(bytes);
    free(buffer);
    return NULL;
}

static void wake_up(int signal_number)
{
    (void)signal_number;
}

#define WAKE_SIGNAL (SIGRTMIN + 9)

/* Backing ids that the predecessor had acquired and not yet written down when it died: their files' blocks would stay for as long
 * as the connection. The kernel numbers upwards, so they are among the last. */
static void close_orphans(void)
{
    bool is_used[ORPHANS_MOST] = {false};
    int32_t newest = backing_open(table_fd), first = newest > ORPHANS_MOST ? newest - ORPHANS_MOST : 1;

    if (newest < 0)
        return; /* this connection has no passthrough */
    table_backing_ids(table, first, is_used, ORPHANS_MOST);
    for (int32_t id = first; id <= newest; id++)
        if (id == newest || !is_used[id - first])
            backing_close(id);
}

/* Records of inodes that were being closed when the predecessor died. */
static void finish_closing(void)
{
    for (size_t i = 0; i < table->buckets; i++)
        for (struct slot *slot = table->by_inode[i], *next; slot; slot = next) {
            next = slot->next_of_inode;
            if (table_uses(table, slot) == 0)
                give_up(slot);
        }
}

bool serving_start(void)
{
    struct sigaction action = {.sa_handler = wake_up};
    sigset_t all, before;

    sigaction(WAKE_SIGNAL, &action, NULL);
    if (is_takeover) {
        struct out_header resend = {.len = sizeof resend, .error = NOTIFY_RESEND};
        pthread_mutex_lock(&lock);
        finish_closing();
        close_orphans();
        pthread_mutex_unlock(&lock);
        if (write(fuse_fd, &resend, sizeof resend) < 0)
            return false;
    }
    sigfillset(&all);
    sigdelset(&all, WAKE_SIGNAL);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (int i = 0; i < settings.thread_count; i++)
        if (pthread_create(&threads[started_count], NULL, serve, (void *)(uintptr_t)i) == 0)
            started_count++;
    bool any = started_count > 0;
    if (any && pthread_create(&threads[started_count], NULL, watch_waiting, NULL) == 0)
        started_count++;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return any;
}

void serving_stop(void)
{
    is_stopping = true;
    pthread_mutex_lock(&lock);
    pthread_cond_broadcast(&is_to_stop);
    pthread_mutex_unlock(&lock);
    for (int i = 0; i < started_count; i++)
        for (;;) { /* a signal that comes before the read has begun wakes nobody: once more */
            struct timespec until;
            pthread_kill(threads[i], WAKE_SIGNAL);
            clock_gettime(CLOCK_REALTIME, &until);
            until.tv_nsec += 10000000;
            until.tv_sec += until.tv_nsec / 1000000000L;
            until.tv_nsec %= 1000000000L;
            if (pthread_timedjoin_np(threads[i], NULL, &until) == 0)
                break;
        }
    started_count = 0;
}

void serving_close(void)
{
    if (fuse_fd >= 0)
        close(fuse_fd);
    if (table_fd >= 0)
        close(table_fd);
    fuse_fd = table_fd = -1;
}

/* -- what libfuse answers ---------------------------------------------------------------------------------------------- */

static ssize_t deliver(struct iovec *pieces, int count, size_t total)
{
    if (writev(fuse_fd, pieces, count) >= 0)
        return (ssize_t)total;
    return errno == ENOENT ? (ssize_t)total : -1; /* broken off meanwhile: nothing that anybody could do about */
}

static ssize_t deliver_init(struct iovec *pieces, int count, size_t total)
{
    uint8_t answer[INIT_BYTES];
    size_t filled = 0;

    if (total > sizeof answer)
        return deliver(pieces, count, total);
    for (int i = 0; i < count; filled += pieces[i++].iov_len)
        memcpy(answer + filled, pieces[i].iov_base, pieces[i].iov_len);
    agreed = init_patch(answer, total, offered, settings.wanted_flags, MAX_BACKGROUND);
    if (is_takeover) { /* the kernel has had its answer long ago */
        agrees = memory->init_reply_bytes == total && init_agrees(memory->init_reply, answer, total);
        return (ssize_t)total;
    }
    memcpy(memory->init_reply, answer, total);
    memory->init_reply_bytes = (uint32_t)total;
    struct iovec whole = {answer, total};
    return deliver(&whole, 1, total);
}

/* Python's answer to an OPEN. Its handle says whether Python gave the file over to us (hand_over holds the slot by `opening` then). */
static ssize_t deliver_open(const struct waiting *waiting, struct iovec *pieces, size_t total)
{
    struct out_header head;
    struct open_out answer;
    uint64_t unique = waiting->unique;

    memcpy(&head, pieces[0].iov_base, sizeof head);
    memcpy(&answer, pieces[1].iov_base, sizeof answer);
    pthread_mutex_lock(&lock);
    struct slot *slot = table_slot(table, waiting->nodeid);
    bool is_pythons = !(answer.fh & NATIVE_HANDLE), is_counted = false;
    if (slot && is_pythons)
        slot->opening++;
    /* Between Python's decision and here a thread may have opened the inode in passthrough, and then all its opens have to be. */
    if (slot && (!is_pythons || table_mode(table, slot) == MODE_PASSTHROUGH)) {
        int error = open_natively(slot, unique, LOOP_JOURNAL, false, &answer); /* Python's loop waits for no thread */
        is_counted = error == 0;
        if (!is_counted && error != EBUSY)
            table_withdraw(table, slot);
    }
    enum mode cached = is_pythons ? MODE_DAEMON : MODE_NATIVE; /* what Python gave over stays so: it takes back what is read */
    if (slot && !is_counted && table_mode(table, slot) != MODE_PASSTHROUGH && table_record(table, slot) &&
        table_count(table, slot, LOOP_JOURNAL, OP_OPEN, unique, cached, 1)) {
        is_counted = true;
        answer = answer_in(slot, cached);
    }
    pthread_mutex_unlock(&lock);

    bool is_open = is_counted && (reply(unique, 0, &answer, sizeof answer) || errno != ENOENT);
    if (!is_counted)
        reply(unique, ENFILE, NULL, 0);
    pthread_mutex_lock(&lock);
    table_settled(table, LOOP_JOURNAL);
    if (is_pythons && (!is_open || answer.fh & NATIVE_HANDLE))
        tell_release(OP_RELEASE, waiting->nodeid, waiting->nodeid);
    if (slot) {
        slot->opening--;
        if (is_counted && !is_open) {
            take_back(slot, answer.fh, unique, LOOP_JOURNAL);
            table_settled(table, LOOP_JOURNAL);
        }
        if (table_uses(table, slot) == 0)
            give_up(slot);
    }
    pthread_mutex_unlock(&lock);
    return (ssize_t)total;
}

static ssize_t deliver_opendir(struct iovec *pieces, size_t total)
{
    struct open_out answer;

    memcpy(&answer, pieces[1].iov_base, sizeof answer);
    answer.fh = directory_handle(answer.fh, memory->era);
    struct iovec tagged[] = {pieces[0], {&answer, sizeof answer}};
    return deliver(tagged, 2, total);
}

/* Python has opened what nobody waits for any more. Under the lock. */
static void close_again(const struct waiting *waiting, const struct iovec *pieces)
{
    struct open_out answer;

    memcpy(&answer, pieces[1].iov_base, sizeof answer);
    if (waiting->opcode == OP_OPENDIR) {
        tell_release(OP_RELEASEDIR, waiting->nodeid, answer.fh);
        return;
    }
    struct slot *slot = table_find(table, waiting->nodeid);
    if (!(answer.fh & NATIVE_HANDLE))
        tell_release(OP_RELEASE, waiting->nodeid, answer.fh);
    else if (slot && slot->opening)
        slot->opening--;
    if (slot)
        give_up(slot);
}

ssize_t serving_reply(struct iovec *pieces, int count)
{
    struct out_header head;
    size_t total = 0;

    for (int i = 0; i < count; i++)
        total += pieces[i].iov_len;
    if (total < sizeof head || pieces[0].iov_len < sizeof head) {
        errno = EINVAL;
        return -1;
    }
    memcpy(&head, pieces[0].iov_base, sizeof head);
    if (head.unique == 0) { /* a notification */
        ssize_t written = writev(fuse_fd, pieces, count);
        return written;
    }
    if (head.unique & SYNTHETIC && !(head.unique & UNIQUE_RESENT))
        return (ssize_t)total;
    if (head.unique == init_unique)
        return deliver_init(pieces, count, total);

    pthread_mutex_lock(&lock);
    struct waiting waiting = inflight_take(&inflight, head.unique);
    bool has_opened = head.error == 0 && (waiting.opcode == OP_OPEN || waiting.opcode == OP_OPENDIR) && count == 2 &&
                      pieces[1].iov_len == sizeof(struct open_out);
    if (waiting.is_answered && has_opened)
        close_again(&waiting, pieces);
    note_names(&waiting, head.error, pieces, count);
    pthread_mutex_unlock(&lock);
    free(waiting.name);
    if (waiting.is_answered)
        return (ssize_t)total;
    if (has_opened && waiting.opcode == OP_OPEN)
        return deliver_open(&waiting, pieces, total);
    if (has_opened)
        return deliver_opendir(pieces, total);
    return deliver(pieces, count, total);
}
