/* What names lead to, as Python told the kernel, for as long as the kernel was told to believe it. Pure; the caller holds a lock.
 *
 * The kernel forgets names when memory is short. Asked again within the time to live, the answer is the same, with what is left of
 * that time, so nobody sees anything that the kernel's own memory would not have shown.
 */
#ifndef TIERCACHE_NAMES_H
#define TIERCACHE_NAMES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { ATTRIBUTES_BYTES = 88, NAME_BYTES = 255 };

/* struct fuse_entry_out of linux/fuse.h; `nodeid` 0: the name does not exist. */
struct entry_out {
    uint64_t nodeid, generation, entry_valid, attr_valid;
    uint32_t entry_valid_nsec, attr_valid_nsec;
    uint8_t attributes[ATTRIBUTES_BYTES];
};

/* struct fuse_direntplus without its name; the next one begins at a multiple of 8. */
struct listed {
    struct entry_out entry;
    uint64_t inode, offset;
    uint32_t name_bytes, type;
};

struct known_name;

struct names {
    struct known_name **buckets;
    size_t size, count, most, hand; /* `size` is a power of two */
};

/* At most `most` names. False: no memory. */
bool names_make(struct names *names, size_t most);
void names_free(struct names *names);
void names_put(struct names *names, uint64_t parent, const char *name, size_t count, const struct entry_out *entry, uint64_t now_ns);
/* All names of a READDIRPLUS reply's body. */
void names_put_listed(struct names *names, uint64_t parent, const uint8_t *body, size_t count, uint64_t now_ns);
bool names_find(struct names *names, uint64_t parent, const char *name, size_t count, uint64_t now_ns, struct entry_out *entry);
void names_drop(struct names *names, uint64_t parent, const char *name, size_t count);
void names_clear(struct names *names);

#endif
