#ifndef TIERCACHE_MOUNTING_H
#define TIERCACHE_MOUNTING_H

#include <stdbool.h>

/* Has pyfuse3 mounted, and do our threads serve? */
bool mounting_is_done(void);

#endif
