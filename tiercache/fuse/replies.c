/* What Python answers, by way of libfuse, and what is remembered of it. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "parts.h"

enum { MAX_BACKGROUND = 256 }; /* read-ahead under way; the kernel's own default of 12 keeps disks and stores idle */

bool answer_lookup(const struct request *request)
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
    if (head.unique == 0) /* a notification */
        return writev(fuse_fd, pieces, count);
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
