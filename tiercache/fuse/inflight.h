/* Requests that Python has and has not answered, by their `unique`. Pure; the caller holds a lock. */
#ifndef TIERCACHE_INFLIGHT_H
#define TIERCACHE_INFLIGHT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct waiting {
    uint64_t unique; /* 0: empty place */
    uint64_t nodeid;
    uint32_t opcode, pid;
    char *name; /* of a LOOKUP; owned */
    uint8_t name_bytes;
    uint8_t checks_count; /* how often it was looked at while it waited */
    bool is_interrupted; /* the kernel asked to give it up; its process is looked at until it may be */
    bool is_answered;    /* it was given up: what Python says comes too late */
};

struct inflight {
    struct waiting *places;
    size_t size, count; /* `size` is a power of two */
};

bool inflight_add(struct inflight *inflight, struct waiting waiting);
struct waiting *inflight_find(struct inflight *inflight, uint64_t unique);
/* Takes the request out; one with `unique` 0 when it is not there. */
struct waiting inflight_take(struct inflight *inflight, uint64_t unique);
void inflight_free(struct inflight *inflight);

#endif
