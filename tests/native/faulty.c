/* Preloaded into a daemon by tests: a kernel that offers less, a disk that fails.
 *
 * FAULTY_INIT_MASK: bits (hexadecimal) of FUSE_INIT's flags and flags2 that the kernel does not offer.
 * FAULTY_READS: while this file exists, every pread fails with EIO.
 * FAULTY_RESIDENT: while this file exists, every preadv2 of the extension gets half of what it asks for, and adds a byte to the file.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { OP_INIT = 26, INIT_BYTES = 104, FLAGS_AT = 40 + 12 };

ssize_t read(int fd, void *into, size_t size)
{
    static ssize_t (*real)(int, void *, size_t);
    if (!real)
        *(void **)&real = dlsym(RTLD_NEXT, "read");
    ssize_t count = real(fd, into, size);
    const char *mask = getenv("FAULTY_INIT_MASK");
    uint32_t head[2], flags[2];
    if (count == INIT_BYTES && mask) {
        memcpy(head, into, sizeof head);
        if (head[0] == INIT_BYTES && head[1] == OP_INIT) {
            uint64_t bits = strtoull(mask, NULL, 16);
            memcpy(flags, (char *)into + FLAGS_AT, sizeof flags);
            flags[0] &= ~(uint32_t)bits;
            flags[1] &= ~(uint32_t)(bits >> 32);
            memcpy((char *)into + FLAGS_AT, flags, sizeof flags);
        }
    }
    return count;
}

ssize_t pread(int fd, void *into, size_t size, off_t offset)
{
    static ssize_t (*real)(int, void *, size_t, off_t);
    if (!real)
        *(void **)&real = dlsym(RTLD_NEXT, "pread");
    const char *trigger = getenv("FAULTY_READS");
    if (trigger && access(trigger, F_OK) == 0) {
        errno = EIO;
        return -1;
    }
    return real(fd, into, size, offset);
}

ssize_t preadv2(int fd, const struct iovec *pieces, int count, off_t offset, int flags)
{
    static ssize_t (*real)(int, const struct iovec *, int, off_t, int);
    if (!real)
        *(void **)&real = dlsym(RTLD_NEXT, "preadv2");
    const char *trigger = getenv("FAULTY_RESIDENT");
    int log = trigger ? open(trigger, O_WRONLY | O_APPEND | O_CLOEXEC) : -1;
    if (log < 0 || count != 1)
        return real(fd, pieces, count, offset, flags);
    ssize_t noted = write(log, "x", 1);
    close(log);
    struct iovec half = {pieces[0].iov_base, pieces[0].iov_len / 2};
    return noted == 1 ? real(fd, &half, 1, offset, flags) : -1;
}
