/* Hot files without Python: their opens and releases, counted and in the mode that the kernel wants, and their reads on the plain path.
 *
 * A slot stays in place while `opening` or `reading` say that somebody works with it, which also keeps its hot copy from eviction.
 * While `is_busy` one thread acquires or gives up its backing id or descriptor, without the lock.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "parts.h"

enum { ORPHANS_MOST = 1024 };

struct backing_map {
    int32_t fd;
    uint32_t flags;
    uint64_t padding;
};
#define BACKING_OPEN _IOW(229, 1, struct backing_map)
#define BACKING_CLOSE _IOW(229, 2, uint32_t)


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
void give_up(struct slot *slot)
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
struct open_out answer_in(const struct slot *slot, enum mode mode)
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
int open_natively(struct slot *slot, uint64_t unique, uint32_t journal, bool may_wait, struct open_out *answer)
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
void take_back(struct slot *slot, uint64_t fh, uint64_t unique, uint32_t journal)
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

bool answer_open(const struct request *request, uint32_t journal)
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
    }
    give_up(slot); /* it may have been closed again before this thread came here */
    pthread_mutex_unlock(&lock);
    return true;
}

bool answer_release(const struct request *request, uint32_t journal)
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
        give_up(slot);
        pthread_mutex_unlock(&lock);
    }
    return true;
}

/* -- read -------------------------------------------------------------------------------------------------------------- */

bool answer_read(const struct request *request, uint8_t *buffer)
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
    give_up(slot);
    pthread_mutex_unlock(&lock);
    if (!is_whole)
        return false;
    reply(request->head.unique, 0, buffer, expected);
    counters.reads++;
    counters.read_bytes += expected;
    return true;
}


/* Backing ids that the predecessor had acquired and not yet written down when it died: their files' blocks would stay for as long
 * as the connection. The kernel numbers upwards, so they are among the last. */
void close_orphans(void)
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
void finish_closing(void)
{
    for (size_t i = 0; i < table->buckets; i++)
        for (struct slot *slot = table->by_inode[i], *next; slot; slot = next) {
            next = slot->next_of_inode;
            give_up(slot);
        }
}
