#define _GNU_SOURCE
#include "serving.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
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

struct message {
    struct message *next;
    size_t count;
    uint8_t bytes[];
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

/* Requests that wait for Python, oldest first. `event_fd` is readable while there are any. */
struct queue {
    struct message *first, **last;
    int event_fd;
};

static bool is_prepared, has_ended, takes_opens;
static int started_count;
static struct queue requests = {.last = &requests.first, .event_fd = -1}; /* libfuse's */
static struct queue opens = {.last = &opens.first, .event_fd = -1};       /* see serving_take_opens */
static uint64_t synthetic_count;
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
        if (requests.event_fd >= 0)
            close(requests.event_fd);
        if (opens.event_fd >= 0)
            close(opens.event_fd);
        requests.event_fd = opens.event_fd = -1;
        table_free(table);
        table = NULL;
        munmap(memory, sizeof *memory);
        inflight_free(&inflight);
        names_free(&names);
        is_prepared = has_ended = agrees = is_stopping = takes_opens = false;
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
    requests.event_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    opens.event_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (is_takeover) {
        struct request request;
        if (!request_parse(memory->init_request, memory->init_request_bytes, &request)) {
            errno = EPROTO;
            return -1;
        }
        note_init(&request);
    }
    return opens.event_fd < 0 ? -1 : requests.event_fd;
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

/* -- what Python is to see --------------------------------------------------------------------------------------------- */

/* Under the lock. */
static void wake(struct queue *queue)
{
    uint64_t one = 1;
    if (write(queue->event_fd, &one, sizeof one) < 0)
        return; /* its counter is full: readable already */
}

/* Under the lock. */
static void enqueue(struct queue *queue, struct message *message)
{
    bool was_empty = !queue->first;
    message->next = NULL;
    *queue->last = message;
    queue->last = &message->next;
    if (was_empty)
        wake(queue);
}

/* Under the lock. The oldest; NULL: none. */
static struct message *dequeue(struct queue *queue)
{
    struct message *message = queue->first;
    uint64_t count;

    if (message) {
        queue->first = message->next;
        if (!queue->first)
            queue->last = &queue->first;
    }
    if (!queue->first && !has_ended && read(queue->event_fd, &count, sizeof count) < 0 && !message) {
        /* woken for what another task took */
    }
    return message;
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

void tell_release(uint32_t opcode, uint64_t nodeid, uint64_t fh)
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
        enqueue(&requests, message);
}

ssize_t serving_receive(void *into, size_t size)
{
    pthread_mutex_lock(&lock);
    struct message *message = dequeue(&requests);
    pthread_mutex_unlock(&lock);
    if (!message) {
        errno = has_ended ? ENODEV : EINTR; /* what libfuse and pyfuse3 take for "unmounted" and for "try again" */
        return -1;
    }
    size_t count = message->count < size ? message->count : size;
    memcpy(into, message->bytes, count);
    free(message);
    return (ssize_t)count;
}

int serving_opens_fd(void)
{
    pthread_mutex_lock(&lock);
    takes_opens = true;
    pthread_mutex_unlock(&lock);
    return opens.event_fd;
}

size_t serving_take_opens(struct open_request *into, size_t most)
{
    size_t count = 0;
    struct message *message;

    pthread_mutex_lock(&lock);
    while (count < most && (message = dequeue(&opens))) {
        struct request request;
        struct open_in wanted = {0};
        if (request_parse(message->bytes, message->count, &request) && request_body(&request, &wanted, sizeof wanted))
            into[count++] = (struct open_request){request.head.unique, request.head.nodeid, wanted.flags};
        free(message);
    }
    pthread_mutex_unlock(&lock);
    return count;
}

void serving_answer_open(uint64_t unique, int error, uint64_t fh)
{
    struct open_out answer = {.fh = fh, .open_flags = FOPEN_KEEP_CACHE};
    size_t body_bytes = error ? 0 : sizeof answer;
    struct out_header head = {.len = (uint32_t)(sizeof head + body_bytes), .error = -error, .unique = unique};
    struct iovec pieces[] = {{&head, sizeof head}, {&answer, body_bytes}};
    serving_reply(pieces, error ? 1 : 2);
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
    if (is_noted) {
        struct open_in wanted;
        bool is_open = takes_opens && head->opcode == OP_OPEN && request_body(request, &wanted, sizeof wanted);
        enqueue(is_open ? &opens : &requests, message);
    }
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
    pthread_mutex_lock(&lock);
    has_ended = true;
    wake(&requests);
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
}

void serving_close(void)
{
    if (fuse_fd >= 0)
        close(fuse_fd);
    if (table_fd >= 0)
        close(table_fd);
    fuse_fd = table_fd = -1;
}
