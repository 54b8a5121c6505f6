/* What waits for Python: one queue for libfuse, and one each for OPENs and READs, which Python may take past it. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "parts.h"

/* Requests, oldest first. `event_fd` is readable while there are any. */
struct queue {
    struct message *first, **last;
    int event_fd;
    bool is_used;
};

static struct queue queues[WAYS];
static bool has_ended;
static uint64_t synthetic_count;

bool queues_open(void)
{
    bool are_open = true;

    for (int way = 0; way < WAYS; way++) {
        queues[way] = (struct queue){.last = &queues[way].first, .event_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)};
        are_open &= queues[way].event_fd >= 0;
    }
    queues[TO_LIBFUSE].is_used = true;
    return are_open;
}

void queues_close(void)
{
    for (int way = 0; way < WAYS; way++) {
        if (queues[way].last && queues[way].event_fd >= 0)
            close(queues[way].event_fd);
        queues[way] = (struct queue){.event_fd = -1};
    }
    has_ended = false;
}

/* Under the lock. */
static void wake(struct queue *queue)
{
    uint64_t one = 1;
    if (write(queue->event_fd, &one, sizeof one) < 0)
        return; /* its counter is full: readable already */
}

void queues_end(void)
{
    pthread_mutex_lock(&lock);
    has_ended = true;
    wake(&queues[TO_LIBFUSE]);
    pthread_mutex_unlock(&lock);
}

enum way way_of(const struct request *request)
{
    struct open_in open;
    struct read_in read;

    if (request->head.opcode == OP_OPEN && queues[OPENS].is_used && request_body(request, &open, sizeof open))
        return OPENS;
    if (request->head.opcode == OP_READ && queues[READS].is_used && request_body(request, &read, sizeof read))
        return READS;
    return TO_LIBFUSE;
}

void enqueue(enum way way, struct message *message)
{
    struct queue *queue = &queues[way];
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

struct message *copy_of(const void *bytes, size_t count)
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
        enqueue(TO_LIBFUSE, message);
}

ssize_t serving_receive(void *into, size_t size)
{
    pthread_mutex_lock(&lock);
    struct message *message = dequeue(&queues[TO_LIBFUSE]);
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

int serving_queue_fd(enum way way)
{
    pthread_mutex_lock(&lock);
    queues[way].is_used = true;
    pthread_mutex_unlock(&lock);
    return queues[way].event_fd;
}

size_t serving_take_opens(struct open_request *into, size_t most)
{
    size_t count = 0;
    struct message *message;

    pthread_mutex_lock(&lock);
    while (count < most && (message = dequeue(&queues[OPENS]))) {
        struct request request;
        struct open_in wanted = {0};
        if (request_parse(message->bytes, message->count, &request) && request_body(&request, &wanted, sizeof wanted))
            into[count++] = (struct open_request){request.head.unique, request.head.nodeid, wanted.flags};
        free(message);
    }
    pthread_mutex_unlock(&lock);
    return count;
}

size_t serving_take_reads(struct read_request *into, size_t most)
{
    size_t count = 0;
    struct message *message;

    pthread_mutex_lock(&lock);
    while (count < most && (message = dequeue(&queues[READS]))) {
        struct request request;
        struct read_in wanted = {0};
        if (request_parse(message->bytes, message->count, &request) && request_body(&request, &wanted, sizeof wanted))
            into[count++] = (struct read_request){request.head.unique, request.head.nodeid, wanted.offset, wanted.size};
        free(message);
    }
    pthread_mutex_unlock(&lock);
    return count;
}

void serving_answer(uint64_t unique, int error, const void *body, size_t count)
{
    struct out_header head = {.len = (uint32_t)(sizeof head + count), .error = -error, .unique = unique};
    struct iovec pieces[] = {{&head, sizeof head}, {(void *)body, count}};
    serving_reply(pieces, count ? 2 : 1);
}

void serving_answer_open(uint64_t unique, int error, uint64_t fh)
{
    struct open_out answer = {.fh = fh, .open_flags = FOPEN_KEEP_CACHE};
    serving_answer(unique, error, &answer, error ? 0 : sizeof answer);
}
