#include "requests.h"

#include <string.h>

_Static_assert(sizeof(struct in_header) == 40 && sizeof(struct out_header) == 16, "fuse.h");
_Static_assert(sizeof(struct init_out) == 64 && sizeof(struct open_out) == 16 && sizeof(struct read_in) == 40, "fuse.h");

enum { INIT_REPLY_BYTES = sizeof(struct out_header) + sizeof(struct init_out) };

bool request_parse(const void *bytes, size_t count, struct request *request)
{
    if (count < sizeof request->head)
        return false;
    memcpy(&request->head, bytes, sizeof request->head);
    if (request->head.len != count)
        return false;
    request->body = (const uint8_t *)bytes + sizeof request->head;
    request->body_bytes = count - sizeof request->head;
    return true;
}

bool request_body(const struct request *request, void *into, size_t size)
{
    if (request->body_bytes < size)
        return false;
    memcpy(into, request->body, size);
    return true;
}

uint64_t init_offered(const struct request *request)
{
    struct {
        uint32_t major, minor, max_readahead, flags, flags2;
    } offer = {0};

    if (!request_body(request, &offer, offsetof(struct init_out, max_background)))
        return 0;
    if (offer.flags & INIT_EXT)
        if (!request_body(request, &offer, sizeof offer))
            return 0;
    return offer.flags | (uint64_t)offer.flags2 << 32;
}

uint64_t init_patch(void *reply, size_t count, uint64_t offered, uint64_t wanted, uint16_t max_background)
{
    struct out_header head;
    struct init_out init;
    uint64_t flags;

    if (count != INIT_REPLY_BYTES)
        return 0;
    memcpy(&head, reply, sizeof head);
    memcpy(&init, (uint8_t *)reply + sizeof head, sizeof init);
    if (head.error != 0)
        return 0;
    flags = init.flags | (init.flags & INIT_EXT ? (uint64_t)init.flags2 << 32 : 0);
    if (offered & INIT_EXT) {
        flags |= wanted & offered;
        if (flags >> 32)
            flags |= INIT_EXT;
    }
    init.flags = (uint32_t)flags;
    init.flags2 = (uint32_t)(flags >> 32);
    if (flags & INIT_PASSTHROUGH)
        init.max_stack_depth = 1;
    if (max_background) {
        init.max_background = max_background;
        init.congestion_threshold = max_background - max_background / 4;
    }
    memcpy((uint8_t *)reply + sizeof head, &init, sizeof init);
    return flags;
}

bool init_agrees(const void *saved, const void *now, size_t count)
{
    return count == INIT_REPLY_BYTES && memcmp((const uint8_t *)saved + sizeof(struct out_header),
                                               (const uint8_t *)now + sizeof(struct out_header), sizeof(struct init_out)) == 0;
}

enum { ERA_SHIFT = 48, ERA_MASK = 0x7fff };

uint64_t directory_handle(uint64_t fh, uint32_t era)
{
    return fh | (uint64_t)(era & ERA_MASK) << ERA_SHIFT;
}

bool directory_request(uint8_t *bytes, size_t count, uint32_t era)
{
    struct in_header head;
    struct {
        uint64_t fh, offset; /* the beginning of both, fuse_read_in and fuse_release_in */
    } wanted;

    if (count < sizeof head + sizeof wanted)
        return false;
    memcpy(&head, bytes, sizeof head);
    memcpy(&wanted, bytes + sizeof head, sizeof wanted);
    if ((wanted.fh >> ERA_SHIFT & ERA_MASK) == (era & ERA_MASK)) {
        wanted.fh &= (1ULL << ERA_SHIFT) - 1;
    } else {
        if (wanted.fh & 1 && (head.opcode == OP_READDIR || head.opcode == OP_READDIRPLUS))
            wanted.offset |= LISTED_POSITION;
        wanted.fh = head.nodeid | STRANGE_HANDLE;
    }
    memcpy(bytes + sizeof head, &wanted, sizeof wanted);
    return true;
}

bool is_interruptible(uint32_t opcode)
{
    switch (opcode) {
    case OP_LOOKUP:
    case OP_GETATTR:
    case OP_OPEN:
    case OP_READ:
    case OP_STATFS:
    case OP_GETXATTR:
    case OP_LISTXATTR:
    case OP_OPENDIR:
    case OP_READDIR:
    case OP_READDIRPLUS:
        return true;
    default:
        return false;
    }
}
