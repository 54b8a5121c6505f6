/* What is open, and what may be opened without asking Python. Pure: no system calls, no locks (the caller holds one).
 *
 * Two kinds of memory:
 *
 * - *Records*, one for each inode that is open, in a memory file that outlives the process: backing ids and modes live in the
 *   kernel's connection, and a successor that did not know them exactly would give users EIO.
 * - *Slots*, one for each inode that is published or open, in this process: where the hot file is, counters.
 *
 * The rule of the kernel (fs/fuse/iomode.c) that all of this serves: as long as an inode is open, all its opens are of
 * one mode, passthrough with one backing id, or cached.
 *
 * Counting survives SIGKILL between any two instructions. An operation first writes a *journal entry* with the request's `unique`
 * and the sequence number that the record will have, then changes the record by one atomic store of counts and sequence number
 * together, then replies, then clears the entry. A successor finds in an entry whether the record was changed: yes, then the
 * request, should it be sent again, is answered and not applied; no, then it counts for nothing.
 */
#ifndef TIERCACHE_OPEN_TABLE_H
#define TIERCACHE_OPEN_TABLE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    OBJECT_ID_BYTES = 20,
    INIT_BYTES = 256,
    JOURNALS = 64,
    APPLIED = 1024,
    RECORDS = 65536,
    RECORD_BYTES = 2048,
    NO_RECORD = -1,
    MAX_OPENS = UINT16_MAX,
};

#define TABLE_MAGIC 0x32306e65706f6374ULL /* "tcopen02": another layout is another number */

/* Opens of one inode by who serves its reads: the kernel, the native thread, Python. `sequence` counts the changes. */
struct opens {
    uint16_t passthrough, native, daemon, sequence;
};

struct record {
    _Atomic uint64_t inode; /* 0: free */
    _Atomic uint64_t opens; /* struct opens, changed as one */
    uint64_t size_bytes;
    int32_t backing_id; /* 0: none */
    uint16_t directory;
    uint16_t blob_bytes;
    uint8_t object_id[OBJECT_ID_BYTES];
    uint8_t has_object;
    uint8_t blob[RECORD_BYTES - 8 - 8 - 8 - 4 - 2 - 2 - OBJECT_ID_BYTES - 1];
};

struct journal {
    _Atomic uint32_t is_set;
    uint32_t opcode;
    uint64_t unique;
    int32_t record;
    uint16_t sequence;
    uint16_t mode;
};

/* The memory file. */
struct memory {
    uint64_t magic;
    uint32_t init_request_bytes, init_reply_bytes;
    uint8_t init_request[INIT_BYTES], init_reply[INIT_BYTES];
    struct journal journals[JOURNALS];
    /* A ring: what predecessors had applied and perhaps not answered. Entries stay until they are overwritten: a successor may be
     * killed before it answers, and a `unique` is never given to another request. */
    struct journal applied[APPLIED];
    uint32_t applied_next;
    uint32_t era; /* which successor serves: tells directory handles of predecessors */
    uint32_t records_used; /* records from this one on were never touched, and take no memory */
    struct record records[RECORDS];
};

struct slot {
    uint64_t inode;
    struct slot *next_of_inode, *next_of_object, *next_touched;
    uint64_t size_bytes;
    int32_t record;    /* NO_RECORD: not open */
    uint32_t opening;  /* opens under way that hold the slot, and the hot copy, in place */
    int32_t fd;        /* for reads by the native thread; -1: not open */
    uint32_t reading;  /* reads under way on `fd` */
    uint32_t opened_count; /* since the last harvest, with the bytes that the native thread read */
    uint64_t read_bytes;
    uint32_t opened_seconds; /* of the last of them */
    uint16_t directory, dataset;
    bool is_published;
    bool has_object; /* `object_id` and what belongs to it is known */
    bool is_busy;    /* somebody acquires or gives up its backing id or descriptor: wait */
    bool is_touched;
    uint8_t object_id[OBJECT_ID_BYTES];
    uint16_t blob_bytes; /* what a successor's Python needs to know of the inode, stored with the record */
    uint8_t *blob;
};

struct table {
    struct memory *memory;
    struct slot **by_inode, **by_object;
    size_t buckets; /* a power of two, for both */
    size_t slot_count, published_count, published_most;
    size_t hand; /* where the search for something to unpublish goes on */
    struct slot *touched;
    int32_t *free_records; /* a stack */
    uint32_t free_count;
};

enum mode { MODE_NONE, MODE_PASSTHROUGH, MODE_NATIVE, MODE_DAEMON };

/* `memory` is zeroed for a fresh mount, or a predecessor's. NULL: of another layout, or no memory. */
struct table *table_new(struct memory *memory, size_t published_most);
void table_free(struct table *table);

struct slot *table_find(struct table *table, uint64_t inode);
struct slot *table_find_object(struct table *table, const uint8_t *object_id);

/* The slot of an inode, made if need be. NULL: no memory. */
struct slot *table_slot(struct table *table, uint64_t inode);
/* Remembers `blob` for the record of the slot. False: no memory, or too long. */
bool table_describe(struct table *table, struct slot *slot, const uint8_t *blob, size_t count);
/* From now on opens of the inode may be answered from this hot file. False: the object is published under another inode, or
 * no memory. */
bool table_publish(struct table *table, struct slot *slot, const uint8_t *object_id, uint16_t directory, uint16_t dataset,
                   uint64_t size_bytes);
void table_withdraw(struct table *table, struct slot *slot);
/* Opens, and opens under way. */
uint32_t table_uses(struct table *table, const struct slot *slot);
/* Forgets the slot if nothing keeps it: not published, not open, `fd` closed. */
void table_forget_unused(struct table *table, struct slot *slot);

struct opens table_opens(struct table *table, const struct slot *slot);
/* The mode in which the next open has to be (MODE_NONE: free to choose). */
enum mode table_mode(struct table *table, const struct slot *slot);
/* Gives the slot a record; false when there are more open inodes than records. */
bool table_record(struct table *table, struct slot *slot);
/* Counts one open more (`by` 1) or less (-1) of `mode`, journalled in `journal` for the request `unique`. False: more opens than can
 * be counted, or none to take back; nothing is changed then. */
bool table_count(struct table *table, struct slot *slot, uint32_t journal, uint32_t opcode, uint64_t unique, enum mode mode,
                 int by);
void table_settled(struct table *table, uint32_t journal);
/* The slot has no opens any more: its record is free. */
void table_close(struct table *table, struct slot *slot);
/* The mode in which a predecessor applied the request; MODE_NONE: it did not. */
enum mode table_was_applied(struct table *table, uint64_t unique, uint32_t opcode);
/* Sets `is_used[i]` for each of the `count` backing ids from `first` on that a record has. */
void table_backing_ids(const struct table *table, int32_t first, bool *is_used, size_t count);

void table_touch(struct table *table, struct slot *slot, uint32_t opened, uint64_t read_bytes, uint32_t now_seconds);
/* One slot that was touched since it was last given out here; NULL when there is none. */
struct slot *table_harvest(struct table *table);

#endif
