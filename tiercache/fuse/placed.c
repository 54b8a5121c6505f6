/* READs whose bytes lie in a file that Python names: threads of their own read and answer them, without the GIL.
 *
 * They never wait for a disk: what is not in the page cache after all goes to libfuse, and Python reads it in its own way. So do
 * requests for which there is no memory, descriptor or thread. A request stays in `inflight` until `serving_reply` has its answer. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#include "parts.h"

enum { READERS_MOST = 2 };

struct job {
    struct job *next;
    struct read_request request;
    int fd; /* ours */
};

static struct job *first, **last = &first;
static int jobs_count, idle_count, readers_count;
static pthread_t readers[READERS_MOST];
static pthread_cond_t is_work = PTHREAD_COND_INITIALIZER;

/* Python is to answer the request with bytes. Its handle is the inode, whoever opened it. */
static void hand_back(const struct read_request *wanted)
{
    struct {
        struct in_header head;
        struct read_in read;
    } request = {
        .head = {.len = sizeof request, .opcode = OP_READ, .unique = wanted->unique, .nodeid = wanted->inode},
        .read = {.fh = wanted->inode, .offset = wanted->offset, .size = wanted->size},
    };
    struct message *message = copy_of(&request, sizeof request);

    if (!message) {
        serving_answer(wanted->unique, ENOMEM, NULL, 0);
        return;
    }
    pthread_mutex_lock(&lock);
    enqueue(TO_LIBFUSE, message);
    pthread_mutex_unlock(&lock);
}

static void free_job(struct job *job)
{
    close(job->fd);
    free(job);
}

static void perform(struct job *job, uint8_t *buffer)
{
    const struct read_request *wanted = &job->request;
    struct iovec whole = {buffer, wanted->size};

    if (preadv2(job->fd, &whole, 1, (off_t)wanted->offset, RWF_NOWAIT) == (ssize_t)wanted->size)
        serving_answer(wanted->unique, 0, buffer, wanted->size);
    else
        hand_back(wanted);
    free_job(job);
}

/* Under the lock. */
static struct job *take_job(void)
{
    struct job *job = first;

    if (job) {
        first = job->next;
        if (!first)
            last = &first;
        jobs_count--;
    }
    return job;
}

static void *read_and_answer(void *buffer)
{
    struct job *job;

    pthread_mutex_lock(&lock);
    while (!is_stopping) {
        if ((job = take_job())) {
            pthread_mutex_unlock(&lock);
            perform(job, buffer);
            pthread_mutex_lock(&lock);
        } else {
            idle_count++;
            pthread_cond_wait(&is_work, &lock);
            idle_count--;
        }
    }
    pthread_mutex_unlock(&lock);
    free(buffer);
    return NULL;
}

/* Under the lock. */
static void start_reader(void)
{
    uint8_t *buffer = malloc(MAX_READ_BYTES);
    sigset_t all, before;

    if (!buffer)
        return;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    if (pthread_create(&readers[readers_count], NULL, read_and_answer, buffer) == 0)
        readers_count++;
    else
        free(buffer);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

void serving_answer_read_from(const struct read_request *request, int fd)
{
    struct job *job = request->size <= MAX_READ_BYTES ? malloc(sizeof *job) : NULL;

    if (job)
        *job = (struct job){.request = *request, .fd = fcntl(fd, F_DUPFD_CLOEXEC, 0)};
    if (job && job->fd < 0) {
        free(job);
        job = NULL;
    }
    if (!job) {
        hand_back(request);
        return;
    }
    pthread_mutex_lock(&lock);
    if (!is_stopping && jobs_count >= idle_count && readers_count < READERS_MOST)
        start_reader();
    bool is_accepted = !is_stopping && readers_count > 0;
    if (is_accepted) {
        *last = job;
        last = &job->next;
        jobs_count++;
        pthread_cond_signal(&is_work);
    }
    bool is_left = is_stopping; /* to a successor */
    pthread_mutex_unlock(&lock);
    if (is_accepted)
        return;
    free_job(job);
    if (!is_left)
        hand_back(request);
}

void stop_reading(void)
{
    struct job *job;

    pthread_mutex_lock(&lock);
    pthread_cond_broadcast(&is_work);
    pthread_mutex_unlock(&lock);
    for (int i = 0; i < readers_count; i++)
        pthread_join(readers[i], NULL);
    readers_count = 0;
    while ((job = take_job())) /* a successor gets these requests again */
        free_job(job);
}
