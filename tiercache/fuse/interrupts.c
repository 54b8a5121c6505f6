/* FUSE_INTERRUPT, of which pyfuse3 does not tell: who waits for Python's answer may be asked to stop. */
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <sys/syscall.h>

#include "parts.h"

enum { INTERRUPT_CHECK_MS = 200, LOOKS_MOST = 64 };

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

/* Looks at the process that waits, without the lock, and answers its request with EINTR if it may have that.
 *
 * The kernel tells of a signal only for a request that its process waits for itself. One that waits for a page which read-ahead
 * asked for is looked at all the same: the page stays empty, and the process asks for it again and can be interrupted then. */
static bool break_off(const struct waiting *seen)
{
    if (!wants_to_stop(seen->pid, seen->opcode, seen->is_interrupted))
        return false;
    pthread_mutex_lock(&lock);
    struct waiting *waiting = inflight_find(&inflight, seen->unique); /* perhaps it was answered meanwhile */
    bool is_waiting = waiting && !waiting->is_answered;
    if (is_waiting) {
        waiting->is_answered = true;
        counters.interrupted++;
        reply(waiting->unique, EINTR, NULL, 0);
    }
    pthread_mutex_unlock(&lock);
    return true;
}

void take_interrupt(const struct request *request)
{
    uint64_t unique;
    struct waiting seen = {0};

    if (!request_body(request, &unique, sizeof unique))
        return;
    pthread_mutex_lock(&lock);
    struct waiting *waiting = inflight_find(&inflight, unique);
    if (waiting && !waiting->is_interrupted && is_interruptible(waiting->opcode)) {
        waiting->is_interrupted = true;
        seen = *waiting;
    }
    bool is_here = waiting;
    for (int i = 0; i < settings.thread_count && !is_here; i++)
        if (handled[i] == unique) { /* reading the hot tier, which no disk would break off either, unless it is forwarded after all */
            broken_in_on[i] = unique;
            is_here = true;
        }
    pthread_mutex_unlock(&lock);
    if (seen.unique)
        break_off(&seen);
    if (!is_here)
        reply(request->head.unique, EAGAIN, NULL, 0); /* another thread is about to take it; if it was answered, this is for nobody */
}

/* Which requests have waited long enough to be looked at: some of them, others the next time. Under the lock. */
static size_t choose(struct waiting chosen[LOOKS_MOST], size_t *from)
{
    size_t count = 0;

    for (size_t step = 0; step < inflight.size && inflight.count && count < LOOKS_MOST; step++) {
        struct waiting *waiting = &inflight.places[(*from)++ & (inflight.size - 1)];
        if (!waiting->unique || waiting->is_answered)
            continue;
        waiting->checks_count += waiting->checks_count < UINT8_MAX;
        if (waiting->is_interrupted || is_old_read(waiting))
            chosen[count++] = *waiting;
    }
    return count;
}

/* The kernel tells of the first signal only. A later one, SIGKILL above all, has to be looked for. */
void *watch_waiting(void *unused)
{
    struct waiting chosen[LOOKS_MOST];
    size_t from = 0;

    (void)unused;
    pthread_mutex_lock(&lock);
    while (!is_stopping) {
        struct timespec until = moment_in(INTERRUPT_CHECK_MS);
        pthread_cond_timedwait(&is_to_stop, &lock, &until);
        size_t count = choose(chosen, &from);
        pthread_mutex_unlock(&lock);
        uint32_t patient = 0; /* the process that was looked at last and wants to go on: read-ahead has many requests of one */
        for (size_t i = 0; i < count; i++)
            if ((chosen[i].is_interrupted || chosen[i].pid != patient) && !break_off(&chosen[i]))
                patient = chosen[i].pid;
        pthread_mutex_lock(&lock);
    }
    pthread_mutex_unlock(&lock);
    return NULL;
}
