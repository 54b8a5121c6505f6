#include "names.h"

#include <stdlib.h>
#include <string.h>

_Static_assert(sizeof(struct entry_out) == 128 && sizeof(struct listed) == 152, "fuse.h");

#define SECOND_NS 1000000000ULL

enum { SIZE = 1 << 16 };

struct known_name {
    struct known_name *next;
    uint64_t parent, until_ns;
    struct entry_out entry;
    uint8_t count;
    char name[];
};

/* FNV-1a; the parent's number is a hash already. */
static size_t bucket_of(const struct names *names, uint64_t parent, const char *name, size_t count)
{
    uint64_t hash = 0xcbf29ce484222325ULL ^ parent;
    for (size_t i = 0; i < count; i++)
        hash = (hash ^ (uint8_t)name[i]) * 0x100000001b3ULL;
    return (size_t)(hash ^ hash >> 32) & (names->size - 1);
}

static struct known_name **place_of(struct names *names, uint64_t parent, const char *name, size_t count)
{
    struct known_name **at = &names->buckets[bucket_of(names, parent, name, count)];
    while (*at && !((*at)->parent == parent && (*at)->count == count && memcmp((*at)->name, name, count) == 0))
        at = &(*at)->next;
    return at;
}

static void take_out(struct names *names, struct known_name **at)
{
    struct known_name *known = *at;
    *at = known->next;
    names->count--;
    free(known);
}

bool names_make(struct names *names, size_t most)
{
    *names = (struct names){.size = SIZE, .most = most, .buckets = calloc(SIZE, sizeof *names->buckets)};
    return names->buckets;
}

void names_clear(struct names *names)
{
    for (size_t i = 0; i < names->size && names->count; i++)
        while (names->buckets[i])
            take_out(names, &names->buckets[i]);
}

void names_free(struct names *names)
{
    names_clear(names);
    free(names->buckets);
    *names = (struct names){0};
}

void names_drop(struct names *names, uint64_t parent, const char *name, size_t count)
{
    struct known_name **at;
    if (names->size && *(at = place_of(names, parent, name, count)))
        take_out(names, at);
}

void names_put(struct names *names, uint64_t parent, const char *name, size_t count, const struct entry_out *entry, uint64_t now_ns)
{
    struct known_name **at, *known;

    if (!names->size || count == 0 || count > NAME_BYTES)
        return;
    at = place_of(names, parent, name, count);
    if (*at)
        take_out(names, at);
    if (entry->entry_valid == 0 && entry->entry_valid_nsec == 0)
        return;
    known = malloc(sizeof *known + count);
    if (!known)
        return;
    known->parent = parent;
    known->until_ns = entry->entry_valid > UINT64_MAX / 4 / SECOND_NS
                          ? UINT64_MAX / 2
                          : now_ns + entry->entry_valid * SECOND_NS + entry->entry_valid_nsec;
    known->entry = *entry;
    known->count = (uint8_t)count;
    memcpy(known->name, name, count);
    known->next = *at;
    *at = known;
    for (names->count++; names->count > names->most; names->hand++) {
        struct known_name **bucket = &names->buckets[names->hand & (names->size - 1)];
        while (*bucket && names->count > names->most)
            take_out(names, bucket);
    }
}

void names_put_listed(struct names *names, uint64_t parent, const uint8_t *body, size_t count, uint64_t now_ns)
{
    struct listed listed;

    for (size_t at = 0; count - at >= sizeof listed;) {
        memcpy(&listed, body + at, sizeof listed);
        if (listed.name_bytes > NAME_BYTES || listed.name_bytes > count - at - sizeof listed)
            return;
        if (listed.entry.nodeid != 0)
            names_put(names, parent, (const char *)body + at + sizeof listed, listed.name_bytes, &listed.entry, now_ns);
        size_t step = (sizeof listed + listed.name_bytes + 7) & ~(size_t)7;
        if (step > count - at)
            return;
        at += step;
    }
}

bool names_find(struct names *names, uint64_t parent, const char *name, size_t count, uint64_t now_ns, struct entry_out *entry)
{
    struct known_name **at;

    if (!names->size || !*(at = place_of(names, parent, name, count)))
        return false;
    if ((*at)->until_ns <= now_ns) {
        take_out(names, at);
        return false;
    }
    uint64_t left_ns = (*at)->until_ns - now_ns;
    *entry = (*at)->entry;
    entry->entry_valid = left_ns / SECOND_NS;
    entry->entry_valid_nsec = (uint32_t)(left_ns % SECOND_NS);
    return true;
}
