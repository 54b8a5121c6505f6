/* Runs what is pure of the native side on random and recorded input, under sanitizers (`make test-sanitize`).
 *
 * Every random choice comes from a seed, so a failure comes again. Assertions and the sanitizers are the verdict.
 */
#define _GNU_SOURCE
#include <assert.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#include "inflight.h"
#include "names.h"
#include "open_table.h"
#include "requests.h"

#define CHECK(condition)                                                                          \
    do {                                                                                          \
        if (!(condition)) {                                                                       \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);               \
            abort();                                                                              \
        }                                                                                         \
    } while (0)

static uint64_t state;

static uint64_t next(void) /* splitmix64 */
{
    uint64_t z = state += 0x9e3779b97f4a7c15ULL;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ULL;
    z = (z ^ z >> 27) * 0x94d049bb133111ebULL;
    return z ^ z >> 31;
}

static uint32_t below(uint32_t limit)
{
    return (uint32_t)(next() % limit);
}

/* -- requests -------------------------------------------------------------------------------------------------------- */

/* What Linux 6.18 sends, and what libfuse 3.14 answers for pyfuse3 3.5. */
static const uint8_t INIT_REQUEST[] = {
#include "init_request.inc"
};
static const uint8_t INIT_REPLY[] = {
#include "init_reply.inc"
};

static void look_at(const uint8_t *bytes, size_t count)
{
    struct request request;
    struct read_in body;
    uint8_t *exact = malloc(count ? count : 1); /* so that one byte too many is seen */

    memcpy(exact, bytes, count);
    if (request_parse(exact, count, &request)) {
        CHECK(count >= sizeof(struct in_header) && request.body_bytes == count - sizeof(struct in_header));
        CHECK(request_body(&request, &body, sizeof body) == (request.body_bytes >= sizeof body));
        (void)init_offered(&request);
        (void)is_interruptible(request.head.opcode);
    } else
        CHECK(count < sizeof(struct in_header) || request.head.len != count);
    free(exact);
}

static void test_requests(void)
{
    uint8_t bytes[512];
    struct request request;

    CHECK(request_parse(INIT_REQUEST, sizeof INIT_REQUEST, &request) && request.head.opcode == OP_INIT);
    CHECK(init_offered(&request) & INIT_EXT && init_offered(&request) & INIT_PASSTHROUGH);
    CHECK(init_offered(&request) & INIT_HAS_RESEND);
    for (int round = 0; round < 200000; round++) {
        size_t count = below(sizeof bytes + 1);
        if (round % 4 == 0) { /* the recorded one with some bytes changed, or cut */
            memcpy(bytes, INIT_REQUEST, sizeof INIT_REQUEST);
            count = below(3) ? sizeof INIT_REQUEST : below(sizeof INIT_REQUEST + 1);
            for (uint32_t change = below(4); change > 0; change--)
                bytes[below(sizeof INIT_REQUEST)] = (uint8_t)next();
        } else
            for (size_t i = 0; i < count; i++)
                bytes[i] = (uint8_t)next();
        uint32_t length = (uint32_t)count;
        if (round % 3 && count >= sizeof length)
            memcpy(bytes, &length, sizeof length);
        look_at(bytes, count);
    }
}

static void test_init_patch(void)
{
    const uint64_t wanted = INIT_PASSTHROUGH | INIT_HAS_RESEND;
    struct request request;
    struct init_out before, after;
    uint8_t reply[sizeof INIT_REPLY], again[sizeof INIT_REPLY];

    memcpy(reply, INIT_REPLY, sizeof reply);
    memcpy(&before, reply + sizeof(struct out_header), sizeof before);
    CHECK(request_parse(INIT_REQUEST, sizeof INIT_REQUEST, &request));
    uint64_t flags = init_patch(reply, sizeof reply, init_offered(&request), wanted, 256);
    memcpy(&after, reply + sizeof(struct out_header), sizeof after);
    CHECK((flags & (wanted | INIT_EXT)) == (wanted | INIT_EXT) && after.max_stack_depth == 1 && after.max_background == 256);
    CHECK(after.major == before.major && after.max_write == before.max_write && after.time_gran == before.time_gran);
    CHECK((flags & ~(wanted | INIT_EXT)) == (before.flags & ~(uint32_t)INIT_EXT) || before.flags & INIT_EXT);
    memcpy(again, INIT_REPLY, sizeof again);
    init_patch(again, sizeof again, init_offered(&request), wanted, 256);
    CHECK(init_agrees(reply, again, sizeof reply));

    /* Nothing is promised that was not offered. */
    memcpy(again, INIT_REPLY, sizeof again);
    flags = init_patch(again, sizeof again, INIT_EXT | INIT_HAS_RESEND, wanted, 0);
    CHECK(flags & INIT_HAS_RESEND && !(flags & INIT_PASSTHROUGH) && !init_agrees(reply, again, sizeof reply));
    memcpy(again, INIT_REPLY, sizeof again);
    CHECK(!(init_patch(again, sizeof again, wanted, wanted, 0) >> 32)); /* without INIT_EXT the second word means nothing */

    for (int round = 0; round < 20000; round++) {
        size_t count = below(sizeof again + 1);
        uint8_t *exact = malloc(count ? count : 1);
        for (size_t i = 0; i < count; i++)
            exact[i] = (uint8_t)next();
        uint64_t offered = next();
        flags = init_patch(exact, count, offered, wanted, 256);
        CHECK(flags == 0 || count == sizeof again);
        free(exact);
    }
    struct out_header failed = {.len = sizeof failed, .error = -71};
    CHECK(init_patch(&failed, sizeof failed, ~0ULL, wanted, 256) == 0 && failed.error == -71);
}

/* -- requests in flight --------------------------------------------------------------------------------------------- */

static void test_inflight(void)
{
    enum { MOST = 3000 };
    static uint64_t reference[MOST];
    struct inflight inflight = {0};
    size_t count = 0;
    uint64_t counter = 0;

    CHECK(inflight_find(&inflight, 2) == NULL && inflight_take(&inflight, 2).unique == 0);
    for (int round = 0; round < 400000; round++) {
        uint32_t target = round % 100000 < 50000 ? MOST : 20;
        if (count < target && below(2)) {
            uint64_t unique = (below(5) ? counter += 2 : (counter += 2 * (1 + below(300)))) | (below(8) ? 0 : UNIQUE_RESENT);
            CHECK(inflight_add(&inflight, (struct waiting){.unique = unique, .nodeid = unique ^ 7, .opcode = OP_READ}));
            reference[count++] = unique;
        } else if (count) {
            uint32_t at = below((uint32_t)count);
            struct waiting *found = inflight_find(&inflight, reference[at]);
            CHECK(found && found->unique == reference[at]);
            struct waiting taken = inflight_take(&inflight, reference[at]);
            CHECK(taken.unique == reference[at] && taken.nodeid == (reference[at] ^ 7));
            CHECK(!inflight_find(&inflight, reference[at]) && inflight_take(&inflight, reference[at]).unique == 0);
            reference[at] = reference[--count];
        }
        CHECK(inflight.count == count);
        if (round % 5000 == 0)
            for (size_t i = 0; i < count; i++)
                CHECK(inflight_find(&inflight, reference[i]));
    }
    inflight_free(&inflight);
}

/* -- names ----------------------------------------------------------------------------------------------------------- */

static void test_names(size_t most)
{
    enum { NAMES = 200 };
    static struct {
        uint64_t nodeid, until;
    } reference[2][NAMES];
    struct names names;
    struct entry_out entry;
    char text[32];
    uint64_t now = 1000;

    CHECK(names_make(&names, most));
    memset(reference, 0, sizeof reference);
    for (int round = 0; round < 300000; round++) {
        uint32_t parent = below(2), number = below(NAMES);
        size_t length = (size_t)snprintf(text, sizeof text, "%0*u", 1 + (int)(number % 9), number);
        now += below(3) ? 0 : next() % 1000000000;
        switch (below(4)) {
        case 0:
            entry = (struct entry_out){.nodeid = next(), .entry_valid = below(20), .entry_valid_nsec = below(1000000000)};
            names_put(&names, parent, text, length, &entry, now);
            reference[parent][number].nodeid = entry.nodeid;
            reference[parent][number].until = now + entry.entry_valid * 1000000000ULL + entry.entry_valid_nsec;
            break;
        case 1:
            if (below(10) == 0) {
                names_drop(&names, parent, text, length);
                reference[parent][number].until = 0;
            }
            if (below(5000) == 0) {
                names_clear(&names);
                memset(reference, 0, sizeof reference);
                CHECK(names.count == 0);
            }
            break;
        default: {
            bool is_found = names_find(&names, parent, text, length, now, &entry), is_valid = reference[parent][number].until > now;
            CHECK(is_valid || !is_found);
            CHECK(is_found || !is_valid || most < 2 * NAMES); /* what did not fit is only forgotten */
            if (is_found) {
                CHECK(entry.nodeid == reference[parent][number].nodeid);
                CHECK(entry.entry_valid * 1000000000ULL + entry.entry_valid_nsec == reference[parent][number].until - now);
            }
        }
        }
        CHECK(names.count <= most);
    }
    names_free(&names);
}

/* Whole and cut READDIRPLUS bodies, and noise. */
static void test_listed_names(void)
{
    for (int round = 0; round < 20000; round++) {
        struct names names;
        struct entry_out found;
        uint8_t body[4096];
        size_t filled = 0, whole = 0;
        uint32_t count = below(12);

        CHECK(names_make(&names, 100));
        memset(body, 0, sizeof body);
        for (uint32_t i = 0; i < count; i++) {
            char text[8];
            struct listed listed = {.entry = {.nodeid = 100 + i, .entry_valid = 5}};
            listed.name_bytes = (uint32_t)snprintf(text, sizeof text, "n%u", i);
            memcpy(body + filled, &listed, sizeof listed);
            memcpy(body + filled + sizeof listed, text, listed.name_bytes);
            filled += (sizeof listed + listed.name_bytes + 7) & ~(size_t)7;
        }
        whole = filled;
        bool is_noise = below(3) == 0;
        if (is_noise)
            for (int i = 0; i < 8; i++)
                body[below(sizeof body)] = (uint8_t)next();
        else if (below(2))
            filled = below((uint32_t)filled + 1);
        uint8_t *exact = malloc(filled ? filled : 1);
        memcpy(exact, body, filled);
        names_put_listed(&names, 7, exact, filled, 0);
        free(exact);
        if (!is_noise && filled == whole)
            for (uint32_t i = 0; i < count; i++) {
                char text[8];
                size_t length = (size_t)snprintf(text, sizeof text, "n%u", i);
                CHECK(names_find(&names, 7, text, length, 1, &found) && found.nodeid == 100 + i);
            }
        names_free(&names);
    }
}

static void test_directory_requests(void)
{
    for (int round = 0; round < 20000; round++) {
        struct {
            struct in_header head;
            uint64_t fh, offset;
        } request = {.head = {.opcode = below(2) ? OP_READDIRPLUS : OP_RELEASEDIR, .nodeid = 1 + next() / 4}, .offset = below(1000)};
        uint32_t era = below(40000), other = below(2) ? era : era + 1;
        uint64_t handle = 2 * below(1000) + below(2), offset = request.offset;

        request.fh = directory_handle(handle, era);
        CHECK(!(request.fh & STRANGE_HANDLE) && !directory_request((uint8_t *)&request, sizeof request - 1, era));
        CHECK(directory_request((uint8_t *)&request, sizeof request, other));
        if (other == era) {
            CHECK(request.fh == handle && request.offset == offset);
        } else {
            bool is_listed = handle & 1 && request.head.opcode == OP_READDIRPLUS;
            CHECK(request.fh == (request.head.nodeid | STRANGE_HANDLE));
            CHECK(request.offset == (offset | (is_listed ? LISTED_POSITION : 0)));
        }
    }
}

/* -- the open table ------------------------------------------------------------------------------------------------- */

static struct memory *new_memory(void)
{
    void *memory = mmap(NULL, sizeof(struct memory), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    return memory;
}

static void copy_image(struct memory *into, const struct memory *from)
{
    memcpy(into, from, offsetof(struct memory, records) + from->records_used * sizeof(struct record));
}

enum { INODES = 300 };

/* What the table should say of each inode. */
struct expected {
    bool is_published, has_slot;
    uint32_t opens[MODE_DAEMON + 1];
    uint32_t opened_count;
};
static struct expected expected[INODES];

static uint64_t inode_of(uint32_t number)
{
    return (number * 0x9e3779b97f4a7c15ULL | 2) & ~(1ULL << 63); /* some share their buckets */
}

static void object_of(uint32_t number, uint8_t *object_id)
{
    memset(object_id, 0, OBJECT_ID_BYTES);
    object_id[0] = (uint8_t)(number % 16);
    memcpy(object_id + 8, &number, sizeof number);
}

static uint32_t opens_of(uint32_t number)
{
    const uint32_t *opens = expected[number].opens;
    return opens[MODE_PASSTHROUGH] + opens[MODE_NATIVE] + opens[MODE_DAEMON];
}

static void check_counts(struct table *table)
{
    for (uint32_t number = 0; number < INODES; number++) {
        struct slot *slot = table_find(table, inode_of(number));
        struct opens opens = slot ? table_opens(table, slot) : (struct opens){0};
        const uint32_t *wanted = expected[number].opens;
        CHECK(opens.passthrough == wanted[MODE_PASSTHROUGH] && opens.native == wanted[MODE_NATIVE]);
        CHECK(opens.daemon == wanted[MODE_DAEMON]);
        CHECK(opens_of(number) == 0 || (slot && slot->record != NO_RECORD));
    }
}

static void check_successor(const struct memory *memory, struct memory *scratch)
{
    copy_image(scratch, memory);
    struct table *successor = table_new(scratch, INODES);
    CHECK(successor && successor->published_count == 0);
    check_counts(successor);
    for (uint32_t number = 0; number < INODES; number++) {
        struct slot *slot = table_find(successor, inode_of(number));
        if (opens_of(number)) {
            CHECK(slot->blob_bytes == sizeof number && memcmp(slot->blob, &number, sizeof number) == 0);
            CHECK(slot->size_bytes == number && slot->has_object);
        }
    }
    table_free(successor);
}

static struct slot *known(struct table *table, uint32_t number)
{
    struct slot *slot = table_slot(table, inode_of(number));
    CHECK(slot && table_describe(table, slot, (uint8_t *)&number, sizeof number));
    return slot;
}

static void publish(struct table *table, uint32_t number)
{
    uint8_t object_id[OBJECT_ID_BYTES], other[OBJECT_ID_BYTES];
    struct slot *slot = known(table, number);

    object_of(number, object_id);
    object_of(number + INODES, other);
    if (slot->has_object)
        CHECK(slot->is_published || !table_publish(table, slot, other, 0, 0, number));
    CHECK(table_publish(table, slot, object_id, 0, 0, number));
    CHECK(slot->is_published && table_find_object(table, object_id) == slot);
    struct slot *stranger = table_slot(table, 1); /* one object, one inode */
    CHECK(stranger && !table_publish(table, stranger, object_id, 0, 0, number));
    table_forget_unused(table, stranger);
    CHECK(!table_find(table, 1));
}

static void open_one(struct table *table, uint32_t number, uint64_t unique, uint32_t journal)
{
    struct slot *slot = known(table, number);
    if (!slot->has_object)
        return; /* never published: check_successor wants to see objects */
    slot->opening++;
    CHECK(table_record(table, slot));
    enum mode mode = table_mode(table, slot);
    CHECK((mode == MODE_NONE) == (opens_of(number) == 0));
    CHECK((mode == MODE_PASSTHROUGH) == (expected[number].opens[MODE_PASSTHROUGH] > 0));
    if (mode != MODE_PASSTHROUGH)
        mode = mode == MODE_NONE ? (enum mode)(MODE_PASSTHROUGH + below(3)) : (enum mode)(MODE_NATIVE + below(2));
    CHECK(table_count(table, slot, journal, OP_OPEN, unique, mode, 1));
    expected[number].opens[mode]++;
    if (slot->is_published) {
        table_touch(table, slot, 1, 10, 7);
        expected[number].opened_count++;
    }
    table_settled(table, journal);
    slot->opening--;
}

static void release_one(struct table *table, uint32_t number, uint64_t unique, uint32_t journal)
{
    struct slot *slot = table_find(table, inode_of(number));
    enum mode mode = (enum mode)(MODE_PASSTHROUGH + below(3));

    if (!slot || slot->record == NO_RECORD)
        return;
    bool is_open = expected[number].opens[mode] > 0;
    CHECK(table_count(table, slot, journal, OP_RELEASE, unique, mode, -1) == is_open);
    expected[number].opens[mode] -= is_open;
    table_settled(table, journal);
    if (table_uses(table, slot) == 0)
        table_close(table, slot);
    table_forget_unused(table, slot);
}

static void harvest(struct table *table)
{
    struct slot *slot;
    while ((slot = table_harvest(table))) {
        uint32_t number = 0;
        memcpy(&number, slot->blob, sizeof number);
        CHECK(slot->opened_count == expected[number].opened_count && slot->read_bytes == 10 * slot->opened_count);
        expected[number].opened_count = 0;
        slot->opened_count = 0;
        slot->read_bytes = 0;
        table_forget_unused(table, slot);
    }
    for (uint32_t number = 0; number < INODES; number++)
        CHECK(expected[number].opened_count == 0);
}

static void test_table(size_t published_most)
{
    struct memory *memory = new_memory(), *scratch = new_memory();
    struct table *table = table_new(memory, published_most);

    CHECK(table);
    memset(expected, 0, sizeof expected);
    for (uint32_t round = 0; round < 60000; round++) {
        uint32_t number = below(INODES), journal = below(JOURNALS);
        uint64_t unique = 2 * (uint64_t)round + 2;
        switch (below(8)) {
        case 0:
        case 1:
            publish(table, number);
            break;
        case 2:
        case 3:
        case 4:
            open_one(table, number, unique, journal);
            break;
        case 5:
        case 6:
            release_one(table, number, unique, journal);
            break;
        case 7: {
            struct slot *slot = table_find(table, inode_of(number));
            if (slot) {
                table_withdraw(table, slot);
                table_forget_unused(table, slot);
            }
        }
        }
        size_t published = 0;
        for (uint32_t each = 0; each < INODES; each++) {
            struct slot *slot = table_find(table, inode_of(each));
            published += slot && slot->is_published;
        }
        CHECK(published == table->published_count);
        if (round % 500 == 0) {
            check_counts(table);
            check_successor(memory, scratch);
            harvest(table);
        }
        if (round % 7919 == 7918) { /* killed: nothing but the memory is left */
            table_free(table);
            table = table_new(memory, published_most);
            CHECK(table);
            check_counts(table);
            for (uint32_t each = 0; each < INODES; each++)
                expected[each].opened_count = 0;
        }
    }
    harvest(table);
    for (uint32_t number = 0; number < INODES; number++) /* all closed, all withdrawn: nothing is left */
        for (int mode = MODE_PASSTHROUGH; mode <= MODE_DAEMON; mode++)
            while (expected[number].opens[mode]) {
                struct slot *slot = table_find(table, inode_of(number));
                CHECK(table_count(table, slot, 0, OP_RELEASE, 2, (enum mode)mode, -1));
                if (--expected[number].opens[mode] == 0 && table_uses(table, slot) == 0)
                    table_close(table, slot);
            }
    for (uint32_t number = 0; number < INODES; number++) {
        struct slot *slot = table_find(table, inode_of(number));
        if (slot) {
            table_withdraw(table, slot);
            table_forget_unused(table, slot);
        }
    }
    CHECK(table->slot_count == 0 && table->published_count == 0 && table->free_count == RECORDS);
    table_free(table);
    munmap(memory, sizeof *memory);
    munmap(scratch, sizeof *scratch);
}

static void test_limits(void)
{
    struct memory *memory = new_memory();
    struct table *table = table_new(memory, 10);
    uint8_t long_blob[RECORD_BYTES] = {0};

    for (uint64_t inode = 2; inode < RECORDS + 2; inode++) {
        struct slot *slot = table_slot(table, inode);
        CHECK(slot && table_record(table, slot) && table_count(table, slot, 0, OP_OPEN, 2, MODE_DAEMON, 1));
    }
    struct slot *one_more = table_slot(table, RECORDS + 2), *first = table_find(table, 2);
    CHECK(!table_record(table, one_more) && one_more->record == NO_RECORD);
    CHECK(!table_describe(table, one_more, long_blob, sizeof long_blob));
    for (uint32_t count = 1; count < MAX_OPENS; count++)
        CHECK(table_count(table, first, 0, OP_OPEN, 2, MODE_DAEMON, 1));
    CHECK(!table_count(table, first, 0, OP_OPEN, 2, MODE_DAEMON, 1) && table_opens(table, first).daemon == MAX_OPENS);
    table_free(table);
    table = table_new(memory, 10); /* as many are taken over */
    CHECK(table && table->free_count == 0 && table_opens(table, table_find(table, 2)).daemon == MAX_OPENS);
    memory->records[3].backing_id = 107;
    memory->records[4].backing_id = 99;
    bool is_used[10] = {false};
    table_backing_ids(table, 100, is_used, 10);
    for (int i = 0; i < 10; i++)
        CHECK(is_used[i] == (i == 7));
    table_free(table);
    memory->magic++;
    CHECK(!table_new(memory, 10));
    munmap(memory, sizeof *memory);
}

/* -- killed at any instruction --------------------------------------------------------------------------------------- */

enum { INODE = 77, OTHER = 78 };

enum { UNIQUE = 1000 };

/* One request each: what happens between the table and the reply, as serving.c does it. Returns at the reply. */
static void open_until_reply(struct table *table)
{
    struct slot *slot = table_slot(table, INODE);
    slot->opening++;
    CHECK(table_record(table, slot) && table_count(table, slot, 5, OP_OPEN, UNIQUE, MODE_PASSTHROUGH, 1));
}

static void release_until_reply(struct table *table)
{
    CHECK(table_count(table, table_find(table, INODE), 5, OP_RELEASE, UNIQUE, MODE_PASSTHROUGH, -1));
}

static void child_serves(struct memory *memory, bool releases)
{
    struct table *table = table_new(memory, 10);
    CHECK(table_slot(table, INODE) && ptrace(PTRACE_TRACEME, 0, NULL, NULL) == 0);
    raise(SIGSTOP);
    (releases ? release_until_reply : open_until_reply)(table);
    _exit(0); /* the reply was not sent: the request comes again */
}

static void prepare(struct memory *memory, bool releases)
{
    memset(memory, 0, offsetof(struct memory, records) + 8 * sizeof(struct record));
    struct table *table = table_new(memory, 10);
    struct slot *other = table_slot(table, OTHER), *slot = table_slot(table, INODE);
    CHECK(table_record(table, other) && table_count(table, other, 1, OP_OPEN, 10, MODE_NATIVE, 1));
    table_settled(table, 1);
    if (releases) {
        CHECK(table_record(table, slot) && table_count(table, slot, 1, OP_OPEN, 12, MODE_PASSTHROUGH, 1));
        table_settled(table, 1);
    }
    table_free(table);
}

static void check_exact(struct memory *memory, bool releases)
{
    struct table *table = table_new(memory, 10);
    struct slot *slot = table_find(table, INODE);
    uint16_t count = slot ? table_opens(table, slot).passthrough : 0;
    uint32_t opcode = releases ? OP_RELEASE : OP_OPEN;
    bool applied = table_was_applied(table, UNIQUE | UNIQUE_RESENT, opcode) == MODE_PASSTHROUGH;

    CHECK(count == (releases ? !applied : applied));
    if (!applied) /* it comes again */
        (releases ? release_until_reply : open_until_reply)(table);
    CHECK(table_opens(table, table_find(table, INODE)).passthrough == !releases);
    CHECK(table_opens(table, table_find(table, OTHER)).native == 1);
    table_free(table);
}

/* A process that stands still between two instructions has left what one leaves that is killed there. */
static void test_killed_at_any_instruction(bool releases)
{
    struct memory *memory = new_memory(), *before = new_memory(), *image = new_memory();
    int status, images_count = 0;

    prepare(memory, releases);
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0)
        child_serves(memory, releases);
    CHECK(waitpid(pid, &status, 0) == pid && WIFSTOPPED(status));
    for (;;) {
        if (images_count == 0 || memcmp(before, memory, offsetof(struct memory, records) + 8 * sizeof(struct record)) != 0) {
            images_count++;
            copy_image(before, memory);
            copy_image(image, memory);
            check_exact(image, releases);
            copy_image(image, memory); /* a successor that is killed as well, before it answers */
            table_free(table_new(image, 10));
            check_exact(image, releases);
        }
        CHECK(ptrace(PTRACE_SINGLESTEP, pid, NULL, NULL) == 0 && waitpid(pid, &status, 0) == pid);
        if (WIFEXITED(status))
            break;
        CHECK(WIFSTOPPED(status) && WSTOPSIG(status) == SIGTRAP);
    }
    CHECK(WEXITSTATUS(status) == 0 && images_count > 5);
    munmap(memory, sizeof *memory);
    munmap(before, sizeof *before);
    munmap(image, sizeof *image);
}

int main(int argc, char **argv)
{
    state = argc > 1 ? strtoull(argv[1], NULL, 0) : 1;
    test_killed_at_any_instruction(false);
    test_killed_at_any_instruction(true);
    test_requests();
    test_init_patch();
    test_inflight();
    test_names(1000);
    test_names(50);
    test_listed_names();
    test_directory_requests();
    test_table(INODES);
    test_table(40);
    test_limits();
    return 0;
}
