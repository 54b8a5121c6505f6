/* The way in between pyfuse3 and libfuse.
 *
 * Interposition: the extension is loaded before pyfuse3 and with RTLD_GLOBAL, so that pyfuse3's `fuse_session_mount` is the one below.
 * It calls libfuse's, then gives the session our input and output (fuse_session_custom_io, libfuse 3.14 and later): requests
 * are read by the threads of serving.c, and pyfuse3 gets from its "fuse descriptor", an eventfd, only those that they leave over.
 * Where libfuse is older everything stays as pyfuse3 alone would have it, and `mounting_is_done()` says false.
 */
#define _GNU_SOURCE
#define FUSE_USE_VERSION 34
#include "mounting.h"

#include <dlfcn.h>
#include <fuse_lowlevel.h>

#include "serving.h"

static bool is_done;

bool mounting_is_done(void)
{
    return is_done;
}

/* libfuse's struct fuse_custom_io, with the member that 3.17 added. */
struct custom_io {
    ssize_t (*writev)(int, struct iovec *, int, void *);
    ssize_t (*read)(int, void *, size_t, void *);
    void *splice_receive, *splice_send, *clone_fd;
};

static ssize_t give_request(int fd, void *into, size_t size, void *userdata)
{
    return serving_receive(into, size);
}

static ssize_t take_reply(int fd, struct iovec *pieces, int count, void *userdata)
{
    return serving_reply(pieces, count);
}

static void *libfuse(void)
{
    void *library = dlopen("libfuse3.so.4", RTLD_LAZY | RTLD_NOLOAD);
    return library ? library : dlopen("libfuse3.so.3", RTLD_LAZY | RTLD_NOLOAD);
}

static bool set_io(void *library, struct fuse_session *session, int fd)
{
    static const struct custom_io io = {.writev = take_reply, .read = give_request};
    int (*with_size)(struct fuse_session *, const struct custom_io *, size_t, int);
    int (*without)(struct fuse_session *, const struct custom_io *, int);

    *(void **)&with_size = dlsym(library, "fuse_session_custom_io_317");
    if (with_size)
        return with_size(session, &io, sizeof io, fd) == 0;
    *(void **)&without = dlsym(library, "fuse_session_custom_io");
    return without && without(session, &io, fd) == 0;
}

/* Has libfuse (and pyfuse3) process the INIT request of the predecessor. */
static bool repeat_init(void *library, struct fuse_session *session)
{
    void (*process)(struct fuse_session *, const struct fuse_buf *);
    struct fuse_buf buffer = {.fd = -1};
    const void *request = serving_init_request(&buffer.size);

    if (buffer.size == 0)
        return true;
    *(void **)&process = dlsym(library, "fuse_session_process_buf");
    buffer.mem = (void *)request;
    if (process)
        process(session, &buffer);
    return serving_agrees();
}

__attribute__((visibility("default"))) int fuse_session_mount(struct fuse_session *session, const char *mountpoint)
{
    int (*mount)(struct fuse_session *, const char *);
    int (*descriptor)(struct fuse_session *);
    void *library = libfuse();

    if (!library)
        return -1;
    *(void **)&mount = dlsym(library, "fuse_session_mount");
    *(void **)&descriptor = dlsym(library, "fuse_session_fd");
    if (!mount || !descriptor || mount(session, mountpoint) != 0)
        return -1;
    if (!serving_is_prepared() || !dlsym(library, "fuse_session_custom_io"))
        return 0;
    int fd = serving_begin(descriptor(session));
    if (fd < 0 || !set_io(library, session, fd) || !repeat_init(library, session) || !serving_start())
        return -1;
    is_done = true;
    return 0;
}
