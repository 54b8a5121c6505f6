/* What the parts of the native side share: serving.c (set-up, threads), queues.c (what waits for Python), hot_files.c (what needs no
 * Python), placed.c (what Python only finds), replies.c (what it says) and interrupts.c. All of this is hidden from other modules of
 * the process.
 */
#ifndef TIERCACHE_PARTS_H
#define TIERCACHE_PARTS_H

#include <pthread.h>
#include <time.h>

#include "inflight.h"
#include "names.h"
#include "requests.h"
#include "serving.h"

enum {
    MAX_READ_BYTES = 1 << 20,
    LOOP_JOURNAL = JOURNALS - 1, /* replies of Python, one at a time */
};

/* Requests that only Python is to hear of: no reply of theirs reaches the kernel, whose own numbers are far below. */
#define SYNTHETIC (1ULL << 62)

extern pthread_mutex_t lock;       /* of all that follows and changes */
extern pthread_cond_t not_busy;    /* a slot's is_busy was cleared */
extern pthread_cond_t is_to_stop;
extern _Atomic bool is_stopping;
extern struct settings settings;
extern bool is_takeover, passthrough;
extern int fuse_fd, table_fd;
extern struct memory *memory;
extern struct table *table;
extern struct inflight inflight;
extern struct names names;
extern uint64_t init_unique, offered, agreed;
extern bool agrees;
extern int waits_count; /* threads that a failing disk of the hot tier might hold for ever: never all of them */
extern _Atomic uint64_t handled[MAX_THREADS]; /* the request that each thread is at */
extern uint64_t broken_in_on[MAX_THREADS];    /* the last of them that the kernel asked to give up */

uint64_t now_ns(void);
uint32_t now_seconds(void);
/* The moment in so many milliseconds, less than a second, as waiting for conditions and threads wants it. */
struct timespec moment_in(long milliseconds);
/* Answers the kernel. */
bool reply(uint64_t unique, int error, const void *body, size_t count);

/* queues.c. A message belongs to the queue that it is in. */
struct message {
    struct message *next;
    size_t count;
    uint8_t bytes[];
};
bool queues_open(void);
void queues_close(void);
/* Unmounted: libfuse is told. */
void queues_end(void);
struct message *copy_of(const void *bytes, size_t count); /* NULL: no memory */
/* Both under the lock. */
enum way way_of(const struct request *request);
void enqueue(enum way way, struct message *message);
/* Tells Python of a release that the kernel was answered, or never asked for. Under the lock. */
void tell_release(uint32_t opcode, uint64_t nodeid, uint64_t fh);

/* placed.c. When `is_stopping` is set and nobody hands over reads any more. */
void stop_reading(void);

/* hot_files.c. False: Python has to answer. */
bool answer_open(const struct request *request, uint32_t journal);
bool answer_release(const struct request *request, uint32_t journal);
bool answer_read(const struct request *request, uint8_t *buffer);
struct open_out answer_in(const struct slot *slot, enum mode mode);
int open_natively(struct slot *slot, uint64_t unique, uint32_t journal, bool may_wait, struct open_out *answer);
void take_back(struct slot *slot, uint64_t fh, uint64_t unique, uint32_t journal);
void give_up(struct slot *slot);
/* After a takeover, before the threads run. */
void close_orphans(void);
void finish_closing(void);

/* replies.c */
bool answer_lookup(const struct request *request);

/* interrupts.c */
void take_interrupt(const struct request *request);
void *watch_waiting(void *unused);

#endif
