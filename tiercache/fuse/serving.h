/* The native side of a mounted session: threads that read the requests, answer what is hot, and queue the rest for libfuse.
 *
 * Nothing here knows of Python. Every function may be called from any thread; none waits for a disk or for Python unless it says so.
 */
#ifndef TIERCACHE_SERVING_H
#define TIERCACHE_SERVING_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <sys/uio.h>

#include "open_table.h"

enum { MAX_DIRECTORIES = 64, MAX_THREADS = 32 };

struct settings {
    int directories[MAX_DIRECTORIES]; /* descriptors of the hot directories, by their position; borrowed */
    int directory_count, thread_count;
    uint64_t wanted_flags; /* of FUSE_INIT */
    size_t published_most;
};

struct counters {
    _Atomic uint64_t lookups, opens, releases, reads, read_bytes, forwarded, interrupted, passthrough_failures;
};
extern struct counters counters;

/* Before the mount. `fuse_fd` and `table_fd` are a predecessor's, or -1. False: errno says why (EPROTO: a table of another layout). */
bool serving_prepare(const struct settings *settings, int fuse_fd, int table_fd);
bool serving_is_prepared(void);
/* The mount is there: from now on libfuse reads from the returned descriptor, by serving_receive. -1: errno. */
int serving_begin(int fuse_fd);
/* For a takeover, after libfuse was given `serving_init_request` and has answered it: may the connection be taken over? */
const void *serving_init_request(size_t *count);
bool serving_agrees(void);
/* Starts the threads; after a takeover the kernel sends again what was under way. */
bool serving_start(void);
/* Ends the threads. Requests that were read and not answered are left to a successor. Waits for reads of the hot tier. */
void serving_stop(void);
void serving_close(void);

/* libfuse's input and output. */
ssize_t serving_receive(void *into, size_t size);
ssize_t serving_reply(struct iovec *pieces, int count);

/* How requests come to Python. OPENs and READs it can take in batches and answer itself: by way of libfuse and pyfuse3 each would take
 * a pass of its event loop. From the first call of serving_queue_fd for them on, libfuse gets no more of them. The descriptor is
 * readable while there are any. */
enum way { TO_LIBFUSE, OPENS, READS, WAYS };
struct open_request {
    uint64_t unique, inode;
    uint32_t flags;
};
struct read_request {
    uint64_t unique, inode, offset;
    uint32_t size;
};
int serving_queue_fd(enum way way);
size_t serving_take_opens(struct open_request *into, size_t most);
size_t serving_take_reads(struct read_request *into, size_t most);
/* Of a request that Python took; `fh` as FileInfo has it, and counts where `error` is 0. */
void serving_answer_open(uint64_t unique, int error, uint64_t fh);
void serving_answer(uint64_t unique, int error, const void *bytes, size_t count);
/* The answer is what lies there in the file; `size` not beyond its end. If it is not in the page cache, or anything else fails, the
 * request goes to libfuse. `fd` is only needed until this returns. */
void serving_answer_read_from(const struct read_request *request, int fd);

int serving_fuse_fd(void);
int serving_table_fd(void);
uint64_t serving_offered(void);
uint64_t serving_agreed(void);
/* The errno with which the kernel refuses a file as a backing file; 0: it does not. */
int serving_probe(int fd);
void serving_set_passthrough(bool enabled);

/* Names that the kernel is to ask for again. */
void serving_forget_name(uint64_t parent, const char *name, size_t count);

/* The table, locked. */
struct table *serving_lock(void);
void serving_unlock(void);

#endif
