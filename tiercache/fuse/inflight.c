#include "inflight.h"

#include <stdlib.h>

enum { FIRST_SIZE = 256 };

/* The kernel numbers requests 2, 4, 6...; the highest bit marks one that is sent again. */
static size_t home(const struct inflight *inflight, uint64_t unique)
{
    return (size_t)(unique >> 1) & (inflight->size - 1);
}

static void put(struct inflight *inflight, struct waiting waiting)
{
    size_t at = home(inflight, waiting.unique);
    while (inflight->places[at].unique)
        at = (at + 1) & (inflight->size - 1);
    inflight->places[at] = waiting;
}

bool inflight_add(struct inflight *inflight, struct waiting waiting)
{
    if (inflight->count * 2 >= inflight->size) {
        struct inflight grown = {.size = inflight->size ? inflight->size * 2 : FIRST_SIZE};
        grown.places = calloc(grown.size, sizeof *grown.places);
        if (!grown.places)
            return false;
        for (size_t i = 0; i < inflight->size; i++)
            if (inflight->places[i].unique)
                put(&grown, inflight->places[i]);
        grown.count = inflight->count;
        free(inflight->places);
        *inflight = grown;
    }
    put(inflight, waiting);
    inflight->count++;
    return true;
}

struct waiting *inflight_find(struct inflight *inflight, uint64_t unique)
{
    if (!inflight->size)
        return NULL;
    for (size_t at = home(inflight, unique); inflight->places[at].unique; at = (at + 1) & (inflight->size - 1))
        if (inflight->places[at].unique == unique)
            return &inflight->places[at];
    return NULL;
}

struct waiting inflight_take(struct inflight *inflight, uint64_t unique)
{
    struct waiting *found = inflight_find(inflight, unique), taken = {0};

    if (!found)
        return taken;
    taken = *found;
    inflight->count--;
    /* Those that follow may have been pushed on by this one: move up whoever is nearer to his home in the gap. */
    size_t gap = (size_t)(found - inflight->places), mask = inflight->size - 1;
    for (size_t at = (gap + 1) & mask; inflight->places[at].unique; at = (at + 1) & mask) {
        size_t wanted = home(inflight, inflight->places[at].unique);
        if (((at - wanted) & mask) >= ((at - gap) & mask)) {
            inflight->places[gap] = inflight->places[at];
            gap = at;
        }
    }
    inflight->places[gap].unique = 0;
    return taken;
}

void inflight_free(struct inflight *inflight)
{
    for (size_t i = 0; i < inflight->size; i++)
        if (inflight->places[i].unique)
            free(inflight->places[i].name);
    free(inflight->places);
    *inflight = (struct inflight){0};
}
