/* FUSE requests and replies as bytes: taking them apart and putting them together. Pure: no system calls, no state.
 *
 * Layouts: include/uapi/linux/fuse.h of Linux, protocol 7.36 and later. They are repeated here because the header that a
 * machine has may be older than the kernel that the daemon runs on.
 */
#ifndef TIERCACHE_REQUESTS_H
#define TIERCACHE_REQUESTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum opcode {
    OP_LOOKUP = 1,
    OP_FORGET = 2,
    OP_GETATTR = 3,
    OP_OPEN = 14,
    OP_READ = 15,
    OP_STATFS = 17,
    OP_RELEASE = 18,
    OP_GETXATTR = 22,
    OP_LISTXATTR = 23,
    OP_FLUSH = 25,
    OP_INIT = 26,
    OP_OPENDIR = 27,
    OP_READDIR = 28,
    OP_RELEASEDIR = 29,
    OP_INTERRUPT = 36,
    OP_DESTROY = 38,
    OP_BATCH_FORGET = 42,
    OP_READDIRPLUS = 44,
};

/* A handle with this bit belongs to an open that was answered here; other handles are plain inode numbers (63 bits). */
#define NATIVE_HANDLE (1ULL << 63)
/* The kernel sets this bit in `unique` of a request that it sends once more. */
#define UNIQUE_RESENT (1ULL << 63)

/* A directory handle, as the kernel has it: the era of the daemon that gave it, and what Python called it, the lowest bit of which says
 * how it is being listed. One of another era reaches Python as the directory's inode with STRANGE_HANDLE, and that bit goes into
 * the position that is asked for. */
#define STRANGE_HANDLE (1ULL << 63)
#define LISTED_POSITION (1ULL << 62)

/* `fh` as Python gave it. */
uint64_t directory_handle(uint64_t fh, uint32_t era);
/* Makes a request for a directory, in place, one that Python understands. False: it is too short. */
bool directory_request(uint8_t *bytes, size_t count, uint32_t era);

#define FOPEN_KEEP_CACHE (1u << 1)
#define FOPEN_PASSTHROUGH (1u << 7)

/* FUSE_INIT's flags, both words together. */
#define INIT_EXT (1ULL << 30)
#define INIT_PASSTHROUGH (1ULL << 37)
#define INIT_HAS_RESEND (1ULL << 39)

struct in_header {
    uint32_t len, opcode;
    uint64_t unique, nodeid;
    uint32_t uid, gid, pid, padding;
};

struct out_header {
    uint32_t len;
    int32_t error;
    uint64_t unique;
};

struct open_out {
    uint64_t fh;
    uint32_t open_flags;
    int32_t backing_id;
};

struct open_in {
    uint32_t flags, open_flags;
};

struct read_in {
    uint64_t fh, offset;
    uint32_t size, read_flags;
    uint64_t lock_owner;
    uint32_t flags, padding;
};

struct release_in {
    uint64_t fh;
    uint32_t flags, release_flags;
    uint64_t lock_owner;
};

struct init_out {
    uint32_t major, minor, max_readahead, flags;
    uint16_t max_background, congestion_threshold;
    uint32_t max_write, time_gran;
    uint16_t max_pages, map_alignment;
    uint32_t flags2, max_stack_depth;
    uint32_t unused[6];
};

struct request {
    struct in_header head;
    const uint8_t *body;
    size_t body_bytes;
};

/* False when the bytes are no whole request. */
bool request_parse(const void *bytes, size_t count, struct request *request);

/* Copies the body's fixed part; false when it is too short. */
bool request_body(const struct request *request, void *into, size_t size);

/* All flags that a FUSE_INIT request offers. */
uint64_t init_offered(const struct request *request);

/* Adds `wanted` flags (as far as they are in `offered`) to a FUSE_INIT reply, header included, in place, with the stack depth
 * that passthrough needs, and `max_background` requests of read-ahead. Returns all flags of the patched reply; 0, and nothing is
 * changed, when the reply is an error or not of protocol 7.36. */
uint64_t init_patch(void *reply, size_t count, uint64_t offered, uint64_t wanted, uint16_t max_background);

/* Would a kernel that got `saved` be deceived by a daemon that answers with `now`? Both are patched replies with their header. */
bool init_agrees(const void *saved, const void *now, size_t count);

/* May a waiting request of this kind be answered with EINTR? */
bool is_interruptible(uint32_t opcode);

#endif
