#define _GNU_SOURCE
#include "serving.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "parts.h"

enum {
    BUFFER_BYTES = (1 << 20) + 65536, /* the largest write that a kernel may announce, with its header */
    NOTIFY_RESEND = 7,
    NAMES_MOST = 131072, /* some 200 bytes each */
};

struct counters counters;
pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t not_busy = PTHREAD_COND_INITIALIZER, is_to_stop = PTHREAD_COND_INITIALIZER;
_Atomic bool is_stopping;
struct settings settings;
bool is_takeover, passthrough, agrees;
int fuse_fd = -1, table_fd = -1, waits_count;
struct memory *memory;
struct table *table;
struct inflight inflight;
struct names names;
uint64_t init_unique, offered, agreed;
_Atomic uint64_t handled[MAX_THREADS];
uint64_t broken_in_on[MAX_THREADS];

static bool is_prepared;
static int started_count;
static pthread_t threads[MAX_THREADS + 1];

uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_BOOTTIME, &now); /* as the kernel's own times to live: not stopped by a suspend, nor set */
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

uint32_t now_seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME_COARSE, &now);
    return (uint32_t)now.tv_sec;
}

struct timespec moment_in(long milliseconds)
{
    struct timespec moment;
    clock_gettime(CLOCK_REALTIME, &moment);
    moment.tv_nsec += milliseconds * 1000000L;
    moment.tv_sec += moment.tv_nsec / 1000000000L;
    moment.tv_nsec %= 1000000000L;
    return moment;
}

/* -- set-up ------------------------------------------------------------------------------------------------------------ */

bool serving_prepare(const struct settings *wanted, int old_fuse_fd, int old_table_fd)
{
    if (is_prepared) { /* a takeover came to nothing: what follows is a fresh mount */
        close(fuse_fd);
        close(table_fd);
        queues_close();
        table_free(table);
        table = NULL;
        munmap(memory, sizeof *memory);
        inflight_free(&inflight);
        names_free(&names);
        is_prepared = agrees = is_stopping = false;
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
    bool has_queues = queues_open();
    if (is_takeover) {
        struct request request;
        if (!request_parse(memory->init_request, memory->init_request_bytes, &request)) {
            errno = EPROTO;
            return -1;
        }
        note_init(&request);
    }
    return has_queues ? serving_queue_fd(TO_LIBFUSE) : -1;
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

/* -- replies ----------------------------------------------------------------------------------------------------------- */

bool reply(uint64_t unique, int error, const void *body, size_t count)
{
    struct out_header head = {.len = (uint32_t)(sizeof head + count), .error = -error, .unique = unique};
    struct iovec pieces[] = {{&head, sizeof head}, {(void *)body, count}};
    return writev(fuse_fd, pieces, count ? 2 : 1) >= 0;
}

/* -- the threads ------------------------------------------------------------------------------------------------------- */

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
        enqueue(way_of(request), message);
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

static void *serve(void *number)
{
    uint32_t journal = (uint32_t)(uintptr_t)number;
    uint8_t *bytes = malloc(BUFFER_BYTES), *buffer = malloc(MAX_READ_BYTES);

    while (bytes && buffer && !is_stopping) {
        ssize_t count = read(fuse_fd, bytes, BUFFER_BYTES);
        if (count >= 0)
            take(bytes, (size_t)count, journal, buffer);
        else if (errno != EINTR && errno != EAGAIN && errno != ENOENT) { /* ENODEV: unmounted */
            queues_end();
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
            pthread_kill(threads[i], WAKE_SIGNAL);
            struct timespec until = moment_in(10);
            if (pthread_timedjoin_np(threads[i], NULL, &until) == 0)
                break;
        }
    started_count = 0;
    stop_reading();
}

void serving_close(void)
{
    if (fuse_fd >= 0)
        close(fuse_fd);
    if (table_fd >= 0)
        close(table_fd);
    fuse_fd = table_fd = -1;
}
