#include "open_table.h"

#include <stdlib.h>
#include <string.h>

_Static_assert(sizeof(struct record) == RECORD_BYTES, "records are found by their number");
_Static_assert(sizeof(struct opens) == sizeof(uint64_t), "counts change as one");

enum { FIRST_BUCKETS = 1024 };

static uint64_t packed(struct opens opens)
{
    uint64_t bits;
    memcpy(&bits, &opens, sizeof bits);
    return bits;
}

static struct opens unpacked(uint64_t bits)
{
    struct opens opens;
    memcpy(&opens, &bits, sizeof opens);
    return opens;
}

/* Inode numbers and object ids are hashes already. */
static struct slot **bucket_of_inode(struct table *table, uint64_t inode)
{
    return &table->by_inode[inode & (table->buckets - 1)];
}

static struct slot **bucket_of_object(struct table *table, const uint8_t *object_id)
{
    uint64_t number;
    memcpy(&number, object_id, sizeof number);
    return &table->by_object[number & (table->buckets - 1)];
}

static void grow(struct table *table)
{
    size_t before = table->buckets, buckets = before * 2;
    struct slot **old_inode = table->by_inode, **old_object = table->by_object;
    struct slot **by_inode = calloc(buckets, sizeof *by_inode), **by_object = calloc(buckets, sizeof *by_object);

    if (!by_inode || !by_object) { /* longer chains, nothing worse */
        free(by_inode);
        free(by_object);
        return;
    }
    table->by_inode = by_inode;
    table->by_object = by_object;
    table->buckets = buckets;
    table->hand = 0;
    for (size_t i = 0; i < before; i++) {
        for (struct slot *slot = old_inode[i], *next; slot; slot = next) {
            next = slot->next_of_inode;
            slot->next_of_inode = *bucket_of_inode(table, slot->inode);
            *bucket_of_inode(table, slot->inode) = slot;
        }
        for (struct slot *slot = old_object[i], *next; slot; slot = next) {
            next = slot->next_of_object;
            slot->next_of_object = *bucket_of_object(table, slot->object_id);
            *bucket_of_object(table, slot->object_id) = slot;
        }
    }
    free(old_inode);
    free(old_object);
}

static void set_object(struct table *table, struct slot *slot, const uint8_t *object_id)
{
    struct slot **bucket = bucket_of_object(table, object_id);
    memcpy(slot->object_id, object_id, OBJECT_ID_BYTES);
    slot->has_object = true;
    slot->next_of_object = *bucket;
    *bucket = slot;
}

/* A predecessor's journal: which of its requests were applied. */
static void read_journals(struct memory *memory)
{
    for (int i = 0; i < JOURNALS; i++) {
        struct journal *journal = &memory->journals[i];
        if (atomic_load(&journal->is_set) && journal->record >= 0 && journal->record < RECORDS) {
            struct record *record = &memory->records[journal->record];
            uint16_t sequence = unpacked(atomic_load(&record->opens)).sequence;
            if (atomic_load(&record->inode) != 0 && (int16_t)(sequence - journal->sequence) >= 0)
                memory->applied[memory->applied_next++ % APPLIED] = *journal;
        }
        atomic_store(&journal->is_set, 0);
    }
}

static bool read_records(struct table *table)
{
    for (int32_t i = RECORDS - 1; i >= 0; i--) {
        struct record *record = &table->memory->records[i];
        uint64_t inode = (uint32_t)i < table->memory->records_used ? atomic_load(&record->inode) : 0;
        if (!inode) {
            table->free_records[table->free_count++] = i;
            continue;
        }
        struct slot *slot = table_slot(table, inode);
        if (!slot || record->blob_bytes > sizeof record->blob)
            return false;
        slot->record = i;
        slot->size_bytes = record->size_bytes;
        slot->directory = record->directory;
        if (record->has_object && !table_find_object(table, record->object_id))
            set_object(table, slot, record->object_id);
        if (!table_describe(table, slot, record->blob, record->blob_bytes))
            return false;
    }
    return true;
}

struct table *table_new(struct memory *memory, size_t published_most)
{
    struct table *table = calloc(1, sizeof *table);

    if (!table || (memory->magic != 0 && memory->magic != TABLE_MAGIC)) {
        free(table);
        return NULL;
    }
    memory->magic = TABLE_MAGIC;
    table->memory = memory;
    table->published_most = published_most;
    table->buckets = FIRST_BUCKETS;
    table->by_inode = calloc(table->buckets, sizeof *table->by_inode);
    table->by_object = calloc(table->buckets, sizeof *table->by_object);
    table->free_records = malloc(RECORDS * sizeof *table->free_records);
    if (!table->by_inode || !table->by_object || !table->free_records) {
        table_free(table);
        return NULL;
    }
    read_journals(memory);
    if (!read_records(table)) {
        table_free(table);
        return NULL;
    }
    return table;
}

void table_free(struct table *table)
{
    for (size_t i = 0; table->by_inode && i < table->buckets; i++)
        for (struct slot *slot = table->by_inode[i], *next; slot; slot = next) {
            next = slot->next_of_inode;
            free(slot->blob);
            free(slot);
        }
    free(table->by_inode);
    free(table->by_object);
    free(table->free_records);
    free(table);
}

struct slot *table_find(struct table *table, uint64_t inode)
{
    struct slot *slot = *bucket_of_inode(table, inode);
    while (slot && slot->inode != inode)
        slot = slot->next_of_inode;
    return slot;
}

struct slot *table_find_object(struct table *table, const uint8_t *object_id)
{
    struct slot *slot = *bucket_of_object(table, object_id);
    while (slot && memcmp(slot->object_id, object_id, OBJECT_ID_BYTES) != 0)
        slot = slot->next_of_object;
    return slot;
}

struct slot *table_slot(struct table *table, uint64_t inode)
{
    struct slot *slot = table_find(table, inode);

    if (slot)
        return slot;
    slot = calloc(1, sizeof *slot);
    if (!slot)
        return NULL;
    if (table->slot_count >= table->buckets)
        grow(table);
    slot->inode = inode;
    slot->record = NO_RECORD;
    slot->fd = -1;
    slot->next_of_inode = *bucket_of_inode(table, inode);
    *bucket_of_inode(table, inode) = slot;
    table->slot_count++;
    return slot;
}

bool table_describe(struct table *table, struct slot *slot, const uint8_t *blob, size_t count)
{
    uint8_t *copy;

    if (count > sizeof table->memory->records[0].blob)
        return false;
    if (slot->blob && slot->blob_bytes == count && memcmp(slot->blob, blob, count) == 0)
        return true;
    copy = malloc(count ? count : 1);
    if (!copy)
        return false;
    memcpy(copy, blob, count);
    free(slot->blob);
    slot->blob = copy;
    slot->blob_bytes = (uint16_t)count;
    return true;
}

/* The clock goes round the buckets and unpublishes the first slot that nobody has open. */
static void make_place(struct table *table)
{
    for (size_t steps = 0; steps < table->buckets; steps++) {
        struct slot *slot = table->by_inode[table->hand++ & (table->buckets - 1)];
        for (; slot; slot = slot->next_of_inode)
            if (slot->is_published && table_uses(table, slot) == 0 && !slot->is_busy && !slot->reading) {
                table_withdraw(table, slot);
                table_forget_unused(table, slot);
                return;
            }
    }
}

bool table_publish(struct table *table, struct slot *slot, const uint8_t *object_id, uint16_t directory, uint16_t dataset,
                   uint64_t size_bytes)
{
    if (slot->is_published)
        return true;
    if (slot->has_object) {
        if (memcmp(slot->object_id, object_id, OBJECT_ID_BYTES) != 0)
            return false; /* an inode is one version, hence one object: somebody else's number */
    } else {
        if (table_find_object(table, object_id))
            return false;
        set_object(table, slot, object_id);
    }
    slot->is_published = true; /* before a place is made: not this one's */
    slot->directory = directory;
    slot->dataset = dataset;
    slot->size_bytes = size_bytes;
    slot->opening++;
    if (++table->published_count > table->published_most)
        make_place(table);
    slot->opening--;
    return true;
}

void table_withdraw(struct table *table, struct slot *slot)
{
    if (slot->is_published)
        table->published_count--;
    slot->is_published = false;
}

uint32_t table_uses(struct table *table, const struct slot *slot)
{
    struct opens opens = table_opens(table, slot);
    return (uint32_t)opens.passthrough + opens.native + opens.daemon + slot->opening;
}

void table_forget_unused(struct table *table, struct slot *slot)
{
    struct slot **at;

    if (slot->is_published || slot->record != NO_RECORD || slot->opening || slot->is_busy || slot->fd >= 0 || slot->reading ||
        slot->is_touched)
        return;
    for (at = bucket_of_inode(table, slot->inode); *at != slot; at = &(*at)->next_of_inode)
        ;
    *at = slot->next_of_inode;
    if (slot->has_object) {
        for (at = bucket_of_object(table, slot->object_id); *at != slot; at = &(*at)->next_of_object)
            ;
        *at = slot->next_of_object;
    }
    table->slot_count--;
    free(slot->blob);
    free(slot);
}

struct opens table_opens(struct table *table, const struct slot *slot)
{
    if (slot->record == NO_RECORD)
        return (struct opens){0};
    return unpacked(atomic_load(&table->memory->records[slot->record].opens));
}

enum mode table_mode(struct table *table, const struct slot *slot)
{
    struct opens opens = table_opens(table, slot);
    if (opens.passthrough)
        return MODE_PASSTHROUGH;
    return opens.native || opens.daemon ? MODE_NATIVE : MODE_NONE;
}

bool table_record(struct table *table, struct slot *slot)
{
    struct record *record;

    if (slot->record != NO_RECORD)
        return true;
    if (table->free_count == 0)
        return false;
    slot->record = table->free_records[--table->free_count];
    if (table->memory->records_used <= (uint32_t)slot->record)
        table->memory->records_used = (uint32_t)slot->record + 1;
    record = &table->memory->records[slot->record];
    atomic_store(&record->opens, 0);
    record->backing_id = 0;
    record->size_bytes = slot->size_bytes;
    record->directory = slot->directory;
    record->has_object = slot->has_object;
    memcpy(record->object_id, slot->object_id, OBJECT_ID_BYTES);
    record->blob_bytes = slot->blob_bytes;
    if (slot->blob)
        memcpy(record->blob, slot->blob, slot->blob_bytes);
    atomic_store(&record->inode, slot->inode);
    return true;
}

bool table_count(struct table *table, struct slot *slot, uint32_t journal_number, uint32_t opcode, uint64_t unique, enum mode mode,
                 int by)
{
    struct journal *journal = &table->memory->journals[journal_number];
    struct record *record = &table->memory->records[slot->record];
    struct opens opens = unpacked(atomic_load(&record->opens));
    uint16_t *count = mode == MODE_PASSTHROUGH ? &opens.passthrough : mode == MODE_NATIVE ? &opens.native : &opens.daemon;

    if (by > 0 ? *count == MAX_OPENS : *count == 0)
        return false;
    *count = (uint16_t)(*count + by);
    opens.sequence++;
    journal->opcode = opcode;
    journal->unique = unique & ~(1ULL << 63);
    journal->record = slot->record;
    journal->sequence = opens.sequence;
    journal->mode = mode;
    atomic_store(&journal->is_set, 1);
    atomic_store(&record->opens, packed(opens));
    return true;
}

void table_settled(struct table *table, uint32_t journal)
{
    atomic_store(&table->memory->journals[journal].is_set, 0);
}

void table_close(struct table *table, struct slot *slot)
{
    struct record *record = &table->memory->records[slot->record];
    atomic_store(&record->inode, 0);
    table->free_records[table->free_count++] = slot->record;
    slot->record = NO_RECORD;
}

enum mode table_was_applied(struct table *table, uint64_t unique, uint32_t opcode)
{
    for (int i = 0; i < APPLIED; i++) {
        const struct journal *applied = &table->memory->applied[i];
        if (applied->is_set && applied->unique == (unique & ~(1ULL << 63)) && applied->opcode == opcode)
            return (enum mode)applied->mode;
    }
    return MODE_NONE;
}

void table_backing_ids(const struct table *table, int32_t first, bool *is_used, size_t count)
{
    for (uint32_t i = 0; i < table->memory->records_used; i++) {
        const struct record *record = &table->memory->records[i];
        if (record->inode && record->backing_id >= first && (size_t)(record->backing_id - first) < count)
            is_used[record->backing_id - first] = true;
    }
}

void table_touch(struct table *table, struct slot *slot, uint32_t opened, uint64_t read_bytes, uint32_t now_seconds)
{
    slot->opened_count += opened;
    slot->read_bytes += read_bytes;
    slot->opened_seconds = now_seconds;
    if (!slot->is_touched) {
        slot->is_touched = true;
        slot->next_touched = table->touched;
        table->touched = slot;
    }
}

struct slot *table_harvest(struct table *table)
{
    struct slot *slot = table->touched;
    if (slot) {
        table->touched = slot->next_touched;
        slot->is_touched = false;
    }
    return slot;
}
