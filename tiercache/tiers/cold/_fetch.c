/* GETs by threads that never touch Python.
 *
 * Python posts orders to a pool; threads perform them with libcurl and tell over one eventfd what has changed. All judgement
 * stays in Python: a thread compares only the status and the number of bytes with what the order says, and reports the head of the
 * answer, the bytes that landed, their xxh3-64 and, if asked, their MD5. Who may see the bytes is decided by who reads that report.
 *
 * Ownership. A posted order owns all that its thread uses: duplicates of descriptors, a lock on the memory that it receives into
 * (Py_buffer), copies of the strings. The pool holds a reference to it until `changed` has handed it out with `is_done`, so an
 * order that Python has given up lives as long as its thread needs it, even inside a system call of a hanging disk.
 *
 * Locks. `pool.lock` guards the queue, the lists and what an order publishes (the fields under "published"); everything else of
 * an order belongs to its thread while it runs. It is held for a few instructions only, never over a system call that may wait.
 * Threads never take the GIL, so Python may take the lock while it holds the GIL.
 *
 * Cancelling is a flag and curl_multi_wakeup: each thread has a multi handle with one easy handle, because
 * curl_easy_perform cannot be woken while a socket is silent. Each keeps one connection.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <curl/curl.h>
#include <errno.h>
#include <fcntl.h>
#include <openssl/evp.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

enum {
    HEAD_LIMIT_BYTES = 32 << 10,    /* status line and headers; S3 sends about 500 */
    USUAL_HEAD_BYTES = 1 << 10,
    REFUSAL_LIMIT_BYTES = 64 << 10, /* of the body of an answer that is not the wanted one; one byte more tells that it is longer */
    BUFFER_BYTES = 1 << 20,         /* what a thread gathers before it writes; also the most that can be held back */
    FIRST_PIECE_BYTES = 128 << 10,  /* the first reader waits for no more than it asked for; then each piece is twice as large */
    LANDING_MS = 20,                /* of a slow answer what has come lands so often, the first bytes at once */
    RECEIVE_BYTES = 128 << 10,      /* libcurl's own buffer */
    STACK_BYTES = 512 << 10,
    CREATE_ATTEMPTS = 4,     /* open; its directory is missing, open; a leftover is in the way, open; once more for a race */
    EXIT_WAIT_SECONDS = 2,   /* at the end of the process, for threads to leave OpenSSL before its own exit function runs */
    CONNECTING_POLL_MS = 500 /* libcurl has its own timeouts before the request is sent */
};

/* Why a thread stopped a transfer; the names are in Python's `Stop`. */
enum stop { STOP_NONE, STOP_CANCELLED, STOP_SILENT, STOP_HEAD, STOP_BODY, STOP_EXCESS, STOP_CREATE, STOP_WRITE };

struct worker;
struct pool;

typedef struct order {
    PyObject_HEAD
    PyObject *task; /* whom to tell; Python's business */
    struct pool *pool;
    struct order *next; /* in the queue */
    struct order *next_changed; /* in the list of changed ones */
    struct worker *worker; /* while it runs; under the lock */

    /* what is wanted: constant once posted */
    char *target;
    char *lines; /* header lines, each ended by \0 */
    struct curl_slist *headers;
    long status;
    int64_t length;
    bool holds; /* nothing lands before all has come */
    bool wants_md5;
    Py_buffer memory; /* destination in memory: memory.obj != NULL */
    int fd;           /* destination in a file, ours; -1: memory, or the file is still to be made */
    int64_t offset;
    int directory_fd; /* the file is made as `name` in it, of `size` bytes; -1 when it exists */
    char *name;
    int64_t size;

    /* belongs to the thread */
    char *head;
    size_t head_used, head_room;
    bool head_ended;
    long found_status;
    char *refusal;
    size_t refusal_used;
    int64_t received; /* of the wanted body; what is beyond `written` is in the thread's buffer */
    int64_t written;
    size_t piece;

    /* published */
    bool is_listed; /* in the list of changed ones */
    bool is_done;
    bool head_ready;
    int64_t landed;
    int made_fd; /* Python's to take */
    enum stop stop;
    int code; /* CURLcode */
    int error_number;
    long tunnel_status;
    bool was_sent;
    char message[CURL_ERROR_SIZE];
    uint64_t digest;
    unsigned char md5[16];
    bool has_md5;

    atomic_bool cancelled;
    atomic_bool at_disk;
} order;

struct worker {
    struct pool *pool;
    struct worker *next;
    order *current; /* under the lock */
    CURL *easy;
    CURLM *multi;
    char *buffer;
    EVP_MD *md5_algorithm;
    EVP_MD_CTX *md5;
    XXH3_state_t *hash;
    int64_t last_byte_ms, last_landing_ms;
    bool was_sent;
    enum stop stop;
    int error_number;
    char message[CURL_ERROR_SIZE];
};

/* Freed with its last reference: one of the Python object, one of each thread, one of each order. */
struct pool {
    pthread_mutex_t lock;
    pthread_cond_t work;
    atomic_int references;
    struct pool *next, *previous; /* of all pools, under `all_lock` */
    int wake_fd;
    bool is_signalled;
    bool is_closed;
    int thread_limit, thread_count, busy_count, queued_count; /* a woken thread is not busy, and its order queued, until it runs */
    int unfinished_count; /* orders posted and not yet handed out as done */
    order *queue_first, *queue_last;
    order *changed_first, *changed_last;
    struct worker *workers;
    atomic_int socket_count;

    /* the route, constant */
    char *url;
    char *proxy; /* "" for none */
    struct curl_slist *proxy_headers;
    char *authorities; /* PEM, NULL without TLS */
    size_t authorities_bytes;
    char *authority_directory;
    long connect_ms, max_idle_seconds;
    int64_t silence_ms;
};

typedef struct {
    PyObject_HEAD
    struct pool *pool;
} PoolObject;

static pthread_mutex_t all_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t all_ended = PTHREAD_COND_INITIALIZER;
static struct pool *all_pools;
static int all_threads_count;

static int64_t now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* -- the pool's book-keeping -------------------------------------------------------------------------------------------- */

static void pool_unref(struct pool *pool)
{
    if (atomic_fetch_sub(&pool->references, 1) != 1)
        return;
    pthread_mutex_lock(&all_lock);
    if (pool->previous)
        pool->previous->next = pool->next;
    else if (all_pools == pool)
        all_pools = pool->next;
    if (pool->next)
        pool->next->previous = pool->previous;
    pthread_mutex_unlock(&all_lock);
    if (pool->wake_fd >= 0)
        close(pool->wake_fd);
    curl_slist_free_all(pool->proxy_headers);
    free(pool->url);
    free(pool->proxy);
    free(pool->authorities);
    free(pool->authority_directory);
    pthread_cond_destroy(&pool->work);
    pthread_mutex_destroy(&pool->lock);
    free(pool);
}

/* Under the lock: puts the order into the list of changed ones and wakes Python, unless that was done already. */
static void publish(struct pool *pool, order *o)
{
    if (o->is_listed)
        return;
    o->is_listed = true;
    o->next_changed = NULL;
    if (pool->changed_last)
        pool->changed_last->next_changed = o;
    else
        pool->changed_first = o;
    pool->changed_last = o;
    if (!pool->is_signalled) {
        pool->is_signalled = true;
        eventfd_write(pool->wake_fd, 1); /* cannot block: nobody writes twice without a read between */
    }
}

static order *dequeue(struct pool *pool)
{
    order *o = pool->queue_first;
    if (o) {
        pool->queue_first = o->next;
        if (!pool->queue_first)
            pool->queue_last = NULL;
        o->next = NULL;
        pool->queued_count--;
    }
    return o;
}

/* Under the lock. An order that waits ends here; one that runs is ended by its thread. */
static void cancel(struct pool *pool, order *o)
{
    if (o->is_done || atomic_exchange(&o->cancelled, true))
        return;
    if (o->worker) {
        curl_multi_wakeup(o->worker->multi);
        return;
    }
    order *before = NULL;
    for (order *each = pool->queue_first; each != o; each = each->next)
        before = each;
    if (before)
        before->next = o->next;
    else
        pool->queue_first = o->next;
    if (pool->queue_last == o)
        pool->queue_last = before;
    pool->queued_count--;
    o->stop = STOP_CANCELLED;
    o->is_done = true;
    publish(pool, o);
}

static void pool_close(struct pool *pool)
{
    pthread_mutex_lock(&pool->lock);
    pool->is_closed = true;
    while (pool->queue_first)
        cancel(pool, pool->queue_first);
    for (struct worker *each = pool->workers; each; each = each->next)
        if (each->current)
            cancel(pool, each->current);
    if (!pool->is_signalled) { /* who waits for changes looks whether anything is left */
        pool->is_signalled = true;
        eventfd_write(pool->wake_fd, 1);
    }
    pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->lock);
}

/* -- landing: what came is put where it belongs ------------------------------------------------------------------------- */

/* The new file's descriptor, or -1 and errno. As `_create` and `_make` of tiers/hot.py. */
static int make_file(order *o)
{
    int fd;
    for (int attempt = 1;; attempt++) {
        fd = openat(o->directory_fd, o->name, O_CREAT | O_EXCL | O_RDWR | O_NOFOLLOW | O_CLOEXEC, 0600);
        if (fd >= 0)
            break;
        if (attempt == CREATE_ATTEMPTS)
            return -1;
        if (errno == ENOENT) {
            char fan_out[3] = {o->name[0], o->name[1], 0};
            if (mkdirat(o->directory_fd, fan_out, 0700) != 0 && errno != EEXIST)
                return -1;
        } else if (errno == EEXIST) {
            if (unlinkat(o->directory_fd, o->name, 0) != 0 && errno != ENOENT)
                return -1;
        } else if (errno != EINTR) {
            return -1;
        }
    }
    int made_fd = ftruncate(fd, o->size) == 0 ? fcntl(fd, F_DUPFD_CLOEXEC, 0) : -1;
    if (made_fd < 0) {
        int error_number = errno;
        close(fd);
        unlinkat(o->directory_fd, o->name, 0);
        errno = error_number;
        return -1;
    }
    pthread_mutex_lock(&o->pool->lock);
    o->made_fd = made_fd;
    pthread_mutex_unlock(&o->pool->lock);
    return fd;
}

/* Writes to the file, made now if need be. False: the worker has the reason. */
static bool write_file(struct worker *w, order *o, const char *bytes, size_t count)
{
    enum stop failure = STOP_NONE;
    atomic_store(&o->at_disk, true);
    if (o->fd < 0 && (o->fd = make_file(o)) < 0) {
        failure = STOP_CREATE;
        w->error_number = errno;
    }
    for (size_t done = 0; failure == STOP_NONE && done < count;) {
        ssize_t written = pwrite(o->fd, bytes + done, count - done, o->offset + o->written + (int64_t)done);
        if (written > 0) {
            done += (size_t)written;
        } else if (written == 0 || errno != EINTR) {
            failure = STOP_WRITE;
            w->error_number = written == 0 ? 0 : errno; /* 0: the file takes no bytes */
        }
    }
    atomic_store(&o->at_disk, false);
    if (failure != STOP_NONE)
        w->stop = failure;
    return failure == STOP_NONE;
}

/* Lands what was received and not yet written. False: the disk refused. */
static bool land(struct worker *w, order *o, bool is_last)
{
    size_t count = (size_t)(o->received - o->written);
    if (count == 0)
        return true;
    const char *bytes = o->memory.obj ? (char *)o->memory.buf + o->written : w->buffer;
    if (o->wants_md5)
        EVP_DigestUpdate(w->md5, bytes, count);
    if (!o->memory.obj) {
        if (!write_file(w, o, bytes, count))
            return false;
        XXH3_64bits_update(w->hash, bytes, count);
    }
    o->written += (int64_t)count;
    w->last_byte_ms = w->last_landing_ms = now_ms(); /* the time that a slow disk took is not the store's silence */
    if (o->piece < BUFFER_BYTES)
        o->piece *= 2;
    if (!is_last) { /* the last is told of together with the end */
        pthread_mutex_lock(&o->pool->lock);
        o->head_ready = true;
        o->landed = o->written;
        publish(o->pool, o);
        pthread_mutex_unlock(&o->pool->lock);
    }
    return true;
}

/* -- libcurl's callbacks, in the thread --------------------------------------------------------------------------------- */

static size_t on_header(char *bytes, size_t one, size_t count, void *data)
{
    struct worker *w = data;
    order *o = w->current;
    w->last_byte_ms = now_ms();
    if (o->head_ended) { /* an interim answer came before, or these are trailers, which nobody needs */
        if (o->received > 0 || o->refusal_used > 0 || count < 5 || memcmp(bytes, "HTTP/", 5) != 0)
            return count;
        o->head_ended = false;
        o->head_used = 0;
    }
    if (o->head_used + count > HEAD_LIMIT_BYTES) {
        w->stop = STOP_HEAD;
        return 0;
    }
    if (o->head_used + count > o->head_room) {
        size_t room = o->head_room ? HEAD_LIMIT_BYTES : USUAL_HEAD_BYTES;
        char *head = realloc(o->head, room < o->head_used + count ? HEAD_LIMIT_BYTES : room);
        if (!head)
            return 0;
        o->head = head;
        o->head_room = room < o->head_used + count ? HEAD_LIMIT_BYTES : room;
    }
    memcpy(o->head + o->head_used, bytes, count);
    o->head_used += count;
    o->head_ended = count <= 2 && (bytes[0] == '\r' || bytes[0] == '\n');
    return count;
}

static size_t take_refusal(struct worker *w, order *o, const char *bytes, size_t count)
{
    size_t room = REFUSAL_LIMIT_BYTES + 1 - o->refusal_used;
    size_t taken = count < room ? count : room;
    if (o->found_status < 300) { /* a success of another kind: its body tells nothing */
        w->stop = STOP_BODY;
        return 0;
    }
    if (!o->refusal && !(o->refusal = malloc(REFUSAL_LIMIT_BYTES + 1)))
        return 0;
    memcpy(o->refusal + o->refusal_used, bytes, taken);
    o->refusal_used += taken;
    if (taken < count || o->refusal_used > REFUSAL_LIMIT_BYTES) {
        w->stop = STOP_BODY;
        return 0;
    }
    return count;
}

static size_t on_body(char *bytes, size_t one, size_t count, void *data)
{
    struct worker *w = data;
    order *o = w->current;
    w->last_byte_ms = now_ms();
    if (o->found_status == 0)
        curl_easy_getinfo(w->easy, CURLINFO_RESPONSE_CODE, &o->found_status);
    if (o->found_status != o->status)
        return take_refusal(w, o, bytes, count);
    for (size_t done = 0; done < count;) {
        size_t pending = (size_t)(o->received - o->written);
        size_t left = (size_t)(o->length - o->received), taken = count - done;
        if (left == 0) { /* more than was asked for */
            w->stop = STOP_EXCESS;
            return 0;
        }
        if (taken > left)
            taken = left;
        if (taken > o->piece - pending)
            taken = o->piece - pending;
        memcpy(o->memory.obj ? (char *)o->memory.buf + o->received : w->buffer + pending, bytes + done, taken);
        o->received += (int64_t)taken;
        done += taken;
        if (pending + taken == o->piece && !o->holds && o->received < o->length && !land(w, o, false))
            return 0;
    }
    return count;
}

/* Connected, and about to send the request: from now on our own clock runs. */
static int on_sending(void *data, char *there, char *here, int port_there, int port_here)
{
    struct worker *w = data;
    w->was_sent = true;
    w->last_byte_ms = now_ms();
    return CURL_PREREQFUNC_OK;
}

static curl_socket_t on_open(void *data, curlsocktype purpose, struct curl_sockaddr *address)
{
    struct worker *w = data;
    int fd = socket(address->family, address->socktype | SOCK_CLOEXEC, address->protocol);
    if (fd >= 0)
        atomic_fetch_add(&w->pool->socket_count, 1);
    return fd < 0 ? CURL_SOCKET_BAD : fd;
}

static int on_close(void *data, curl_socket_t fd)
{
    struct worker *w = data;
    atomic_fetch_sub(&w->pool->socket_count, 1);
    return close(fd);
}

/* -- the threads -------------------------------------------------------------------------------------------------------- */

static bool set_up_easy(struct worker *w)
{
    struct pool *pool = w->pool;
    CURL *easy = w->easy;
    int bad = 0;
#define SET(option, value) (bad |= curl_easy_setopt(easy, option, value) != CURLE_OK)
    SET(CURLOPT_URL, pool->url);
    SET(CURLOPT_PROTOCOLS_STR, "http,https");
    SET(CURLOPT_HTTP_VERSION, (long)CURL_HTTP_VERSION_1_1);
    SET(CURLOPT_NOSIGNAL, 1L);
    SET(CURLOPT_QUICK_EXIT, 1L); /* a host name look-up that hangs is left behind */
    SET(CURLOPT_FOLLOWLOCATION, 0L);
    SET(CURLOPT_PROXY, pool->proxy); /* "" also keeps libcurl from looking into the environment */
    SET(CURLOPT_NOPROXY, "");
    SET(CURLOPT_SUPPRESS_CONNECT_HEADERS, 1L);
    SET(CURLOPT_HEADEROPT, (long)CURLHEADER_SEPARATE);
    SET(CURLOPT_PROXYHEADER, pool->proxy_headers);
    SET(CURLOPT_CONNECTTIMEOUT_MS, pool->connect_ms);
    SET(CURLOPT_MAXAGE_CONN, pool->max_idle_seconds);
    SET(CURLOPT_BUFFERSIZE, (long)RECEIVE_BYTES);
    SET(CURLOPT_ERRORBUFFER, w->message);
    SET(CURLOPT_HEADERFUNCTION, on_header);
    SET(CURLOPT_HEADERDATA, w);
    SET(CURLOPT_WRITEFUNCTION, on_body);
    SET(CURLOPT_WRITEDATA, w);
    SET(CURLOPT_PREREQFUNCTION, on_sending);
    SET(CURLOPT_PREREQDATA, w);
    SET(CURLOPT_OPENSOCKETFUNCTION, on_open);
    SET(CURLOPT_OPENSOCKETDATA, w);
    SET(CURLOPT_CLOSESOCKETFUNCTION, on_close);
    SET(CURLOPT_CLOSESOCKETDATA, w);
    if (pool->authorities) {
        struct curl_blob blob = {pool->authorities, pool->authorities_bytes, CURL_BLOB_NOCOPY};
        SET(CURLOPT_CAINFO_BLOB, &blob);
        SET(CURLOPT_CAPATH, pool->authority_directory);
    }
#undef SET
    return !bad && curl_multi_setopt(w->multi, CURLMOPT_MAXCONNECTS, 1L) == CURLM_OK;
}

/* Performs one transfer. The callbacks note in the worker why they stopped it. */
static CURLcode transfer(struct worker *w, order *o)
{
    CURLcode code = CURLE_OUT_OF_MEMORY;
    bool ended = false;
    if (curl_multi_add_handle(w->multi, w->easy) != CURLM_OK)
        return code;
    while (!ended) {
        int count;
        if (curl_multi_perform(w->multi, &count) != CURLM_OK)
            break;
        for (CURLMsg *said; (said = curl_multi_info_read(w->multi, &count));)
            if (said->msg == CURLMSG_DONE) {
                code = said->data.result;
                ended = true;
            }
        if (ended)
            break;
        int64_t now = now_ms(), wait_ms = CONNECTING_POLL_MS;
        if (w->was_sent && (wait_ms = w->last_byte_ms + w->pool->silence_ms - now) <= 0)
            w->stop = STOP_SILENT;
        if (!o->holds && o->received > o->written && o->received < o->length) { /* nothing more is here, so what there is lands */
            int64_t due_ms = w->last_landing_ms + LANDING_MS - now;
            if (due_ms <= 0)
                land(w, o, false);
            else if (due_ms < wait_ms)
                wait_ms = due_ms;
        }
        if (atomic_load(&o->cancelled))
            w->stop = STOP_CANCELLED;
        if (w->stop != STOP_NONE) {
            code = CURLE_ABORTED_BY_CALLBACK;
            break;
        }
        curl_multi_poll(w->multi, NULL, 0, (int)(wait_ms > 3600000 ? 3600000 : wait_ms), NULL);
    }
    if (code != CURLE_OK) {
        long number = 0;
        curl_easy_getinfo(w->easy, CURLINFO_OS_ERRNO, &number);
        if (w->stop == STOP_NONE)
            w->error_number = (int)number;
        curl_easy_getinfo(w->easy, CURLINFO_HTTP_CONNECTCODE, &o->tunnel_status);
    }
    curl_easy_getinfo(w->easy, CURLINFO_RESPONSE_CODE, &o->found_status);
    curl_multi_remove_handle(w->multi, w->easy); /* closes the connection of a transfer that has not ended */
    return code;
}

static void perform(struct worker *w, order *o)
{
    w->stop = STOP_NONE;
    w->error_number = 0;
    w->was_sent = false;
    w->last_landing_ms = 0;
    w->message[0] = 0;
    o->piece = o->holds ? BUFFER_BYTES : FIRST_PIECE_BYTES;
    XXH3_64bits_reset(w->hash);
    if (o->wants_md5)
        o->wants_md5 = EVP_DigestInit_ex2(w->md5, w->md5_algorithm, NULL) == 1;
    curl_easy_setopt(w->easy, CURLOPT_REQUEST_TARGET, o->target);
    curl_easy_setopt(w->easy, CURLOPT_HTTPHEADER, o->headers);
    o->code = transfer(w, o);
    bool cancelled = w->stop == STOP_CANCELLED;
    bool disk_failed = w->stop == STOP_CREATE || w->stop == STOP_WRITE;
    bool is_whole = o->received == o->length;
    /* What came of an answer that broke off is right and stays useful; not so where a checksum over all of it was to decide. */
    if (!cancelled && !disk_failed && (is_whole || !(o->holds && o->wants_md5)))
        land(w, o, true);
    if (o->wants_md5 && o->written == o->length)
        o->has_md5 = EVP_DigestFinal_ex(w->md5, o->md5, NULL) == 1;
    o->digest = XXH3_64bits_digest(w->hash);
    if (o->fd >= 0)
        close(o->fd);
    if (o->directory_fd >= 0)
        close(o->directory_fd);
    o->fd = o->directory_fd = -1;
}

static void finish(struct worker *w, order *o)
{
    struct pool *pool = w->pool;
    pthread_mutex_lock(&pool->lock);
    w->current = NULL;
    o->worker = NULL;
    o->stop = w->stop;
    o->error_number = w->error_number;
    o->was_sent = w->was_sent;
    o->landed = o->written;
    o->head_ready = o->head_ended;
    memcpy(o->message, w->message, sizeof o->message);
    o->is_done = true;
    pool->busy_count--;
    publish(pool, o);
    pthread_mutex_unlock(&pool->lock);
}

static void free_worker(struct worker *w)
{
    if (w->easy)
        curl_easy_cleanup(w->easy);
    if (w->multi)
        curl_multi_cleanup(w->multi);
    EVP_MD_CTX_free(w->md5);
    EVP_MD_free(w->md5_algorithm);
    if (w->hash)
        XXH3_freeState(w->hash);
    free(w->buffer);
    free(w);
}

static struct worker *new_worker(struct pool *pool)
{
    struct worker *w = calloc(1, sizeof *w);
    if (!w)
        return NULL;
    w->pool = pool;
    w->easy = curl_easy_init();
    w->multi = curl_multi_init();
    w->buffer = malloc(BUFFER_BYTES);
    w->md5_algorithm = EVP_MD_fetch(NULL, "MD5", "?fips=no"); /* a checksum, not a secret */
    w->md5 = EVP_MD_CTX_new();
    w->hash = XXH3_createState();
    if (w->easy && w->multi && w->buffer && w->md5_algorithm && w->md5 && w->hash && set_up_easy(w))
        return w;
    free_worker(w);
    return NULL;
}

static void *run(void *data)
{
    struct worker *w = data;
    struct pool *pool = w->pool;
    pthread_setname_np(pthread_self(), "s3-get");
    pthread_mutex_lock(&pool->lock);
    for (;;) {
        order *o = dequeue(pool);
        if (o) {
            o->worker = w;
            w->current = o;
            pool->busy_count++;
            pthread_mutex_unlock(&pool->lock);
            perform(w, o);
            finish(w, o);
            pthread_mutex_lock(&pool->lock);
        } else if (pool->is_closed) {
            break;
        } else {
            pthread_cond_wait(&pool->work, &pool->lock);
        }
    }
    struct worker **at = &pool->workers;
    while (*at != w)
        at = &(*at)->next;
    *at = w->next;
    pool->thread_count--;
    pthread_mutex_unlock(&pool->lock);
    free_worker(w);
    pool_unref(pool);
    pthread_mutex_lock(&all_lock);
    all_threads_count--;
    pthread_cond_broadcast(&all_ended);
    pthread_mutex_unlock(&all_lock);
    return NULL;
}

/* One more thread; false when there cannot be one. Called with the GIL, without the lock. */
static bool start_thread(struct pool *pool)
{
    struct worker *w = new_worker(pool);
    if (!w)
        return false;
    pthread_attr_t attributes;
    pthread_t thread;
    sigset_t all, before;
    pthread_mutex_lock(&pool->lock);
    w->next = pool->workers;
    pool->workers = w;
    pool->thread_count++;
    pthread_mutex_unlock(&pool->lock);
    pthread_mutex_lock(&all_lock);
    all_threads_count++;
    pthread_mutex_unlock(&all_lock);
    atomic_fetch_add(&pool->references, 1);
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are Python's */
    int error = pthread_create(&thread, &attributes, run, w);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    if (error == 0)
        return true;
    pthread_mutex_lock(&pool->lock);
    struct worker **at = &pool->workers;
    while (*at != w)
        at = &(*at)->next;
    *at = w->next;
    pool->thread_count--;
    pthread_mutex_unlock(&pool->lock);
    pthread_mutex_lock(&all_lock);
    all_threads_count--;
    pthread_mutex_unlock(&all_lock);
    free_worker(w);
    atomic_fetch_sub(&pool->references, 1);
    return false;
}

/* The process ends: OpenSSL's exit function must not run under threads that use it. One that hangs in a disk is not waited for. */
static void end_all(void)
{
    struct timespec until;
    pthread_mutex_lock(&all_lock);
    for (struct pool *each = all_pools; each; each = each->next)
        pool_close(each);
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += EXIT_WAIT_SECONDS;
    while (all_threads_count > 0 && pthread_cond_timedwait(&all_ended, &all_lock, &until) == 0)
        ;
    pthread_mutex_unlock(&all_lock);
}

/* -- Order, seen from Python -------------------------------------------------------------------------------------------- */

static void order_dealloc(order *o)
{
    Py_CLEAR(o->task);
    if (o->memory.obj)
        PyBuffer_Release(&o->memory);
    if (o->fd >= 0)
        close(o->fd);
    if (o->directory_fd >= 0)
        close(o->directory_fd);
    if (o->made_fd >= 0)
        close(o->made_fd);
    free(o->target);
    free(o->lines);
    free(o->headers);
    free(o->name);
    free(o->head);
    free(o->refusal);
    if (o->pool)
        pool_unref(o->pool);
    Py_TYPE(o)->tp_free((PyObject *)o);
}

static PyObject *order_cancel(order *o, PyObject *unused)
{
    pthread_mutex_lock(&o->pool->lock);
    cancel(o->pool, o);
    pthread_mutex_unlock(&o->pool->lock);
    Py_RETURN_NONE;
}

static PyObject *order_take_fd(order *o, PyObject *unused)
{
    pthread_mutex_lock(&o->pool->lock);
    int fd = o->made_fd;
    o->made_fd = -1;
    pthread_mutex_unlock(&o->pool->lock);
    return PyLong_FromLong(fd);
}

/* (bytes landed, is it done): one look for all that changes. */
static PyObject *order_progress(order *o, PyObject *unused)
{
    pthread_mutex_lock(&o->pool->lock);
    long long landed = o->landed;
    bool is_done = o->is_done;
    pthread_mutex_unlock(&o->pool->lock);
    return Py_BuildValue("LO", landed, is_done ? Py_True : Py_False);
}

static PyObject *order_head(order *o, void *unused)
{
    pthread_mutex_lock(&o->pool->lock);
    bool is_ready = o->head_ready;
    pthread_mutex_unlock(&o->pool->lock);
    if (!is_ready)
        Py_RETURN_NONE;
    return PyUnicode_DecodeLatin1(o->head, (Py_ssize_t)o->head_used, NULL);
}

static PyObject *order_at_disk(order *o, void *unused)
{
    return PyBool_FromLong(atomic_load(&o->at_disk));
}

static PyObject *order_message(order *o, void *unused)
{
    const char *said = o->message[0] ? o->message : curl_easy_strerror((CURLcode)o->code);
    return PyUnicode_DecodeUTF8(said, (Py_ssize_t)strlen(said), "replace");
}

static PyObject *order_md5(order *o, void *unused)
{
    if (!o->has_md5)
        Py_RETURN_NONE;
    return PyBytes_FromStringAndSize((char *)o->md5, sizeof o->md5);
}

static PyObject *order_refusal(order *o, void *unused)
{
    return PyBytes_FromStringAndSize(o->refusal, o->refusal ? (Py_ssize_t)o->refusal_used : 0);
}

static PyMethodDef order_methods[] = {
    {"cancel", (PyCFunction)order_cancel, METH_NOARGS, "End it as soon as possible; idempotent, from any thread."},
    {"take_fd", (PyCFunction)order_take_fd, METH_NOARGS, "The descriptor of a file that was made, once; the caller owns it. -1: none."},
    {"progress", (PyCFunction)order_progress, METH_NOARGS, "(bytes landed, is_done)"},
    {NULL},
};

static PyGetSetDef order_fields[] = {
    {"head", (getter)order_head, NULL, "Status line and headers, ended by an empty line; None before they are complete.", NULL},
    {"at_disk", (getter)order_at_disk, NULL, "Is its thread inside an operation of the cache disk?", NULL},
    {"message", (getter)order_message, NULL, "libcurl's.", NULL},
    {"md5", (getter)order_md5, NULL, "Of all bytes; None when it was not asked for or not all of them came.", NULL},
    {"refusal", (getter)order_refusal, NULL, "The body of an answer of another status, cut after 64 KiB and one byte.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef order_members[] = {
    {"task", T_OBJECT, offsetof(order, task), 0, "For the poster's own use."},
    {"stop", T_INT, offsetof(order, stop), READONLY, "Why the thread broke off."},
    {"code", T_INT, offsetof(order, code), READONLY, "libcurl's."},
    {"errno", T_INT, offsetof(order, error_number), READONLY, "Of the disk or of the connection; 0 when there is none."},
    {"status", T_LONG, offsetof(order, found_status), READONLY, "Of the answer; 0 when there was none."},
    {"tunnel_status", T_LONG, offsetof(order, tunnel_status), READONLY, "A proxy's answer to CONNECT."},
    {"was_sent", T_BOOL, offsetof(order, was_sent), READONLY, "Was there a connection over which the request could be sent?"},
    {"digest", T_ULONGLONG, offsetof(order, digest), READONLY, "xxh3-64 of what landed in a file."},
    {NULL, 0, 0, 0, NULL},
};

static PyTypeObject OrderType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "tiercache.tiers.cold._fetch.Order",
    .tp_basicsize = sizeof(order),
    .tp_dealloc = (destructor)order_dealloc,
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_doc = "One GET. All fields but `head`, `at_disk` and `task` are to be read when it is done.",
    .tp_methods = order_methods,
    .tp_getset = order_fields,
    .tp_members = order_members,
};

/* -- Pool, seen from Python --------------------------------------------------------------------------------------------- */

/* Splits "name: value\r\n" lines in place and links them, with one that keeps libcurl from adding Accept. */
static bool link_headers(order *o)
{
    size_t count = 2;
    for (char *end = o->lines; (end = strstr(end, "\r\n")); end += 2)
        count++;
    o->headers = calloc(count, sizeof *o->headers);
    if (!o->headers)
        return false;
    struct curl_slist *at = o->headers;
    at->data = (char *)"accept:";
    for (char *line = o->lines, *end; (end = strstr(line, "\r\n")); line = end + 2) {
        *end = 0;
        at->next = at + 1;
        at++;
        at->data = line;
    }
    return true;
}

/* `where`: writable memory, (descriptor, offset) or (directory descriptor, name, size). */
static bool set_destination(order *o, PyObject *where)
{
    int given_fd;
    long long number;
    const char *name;
    if (!PyTuple_Check(where)) {
        if (PyObject_GetBuffer(where, &o->memory, PyBUF_CONTIG) != 0)
            return false;
        if (o->memory.len >= o->length)
            return true;
        PyErr_SetString(PyExc_ValueError, "the memory is too small");
        return false;
    }
    if (PyTuple_GET_SIZE(where) == 2) {
        if (!PyArg_ParseTuple(where, "iL", &given_fd, &number))
            return false;
        o->offset = number;
        o->fd = fcntl(given_fd, F_DUPFD_CLOEXEC, 0);
        if (o->fd < 0)
            PyErr_SetFromErrno(PyExc_OSError);
        return o->fd >= 0;
    }
    if (!PyArg_ParseTuple(where, "isL", &given_fd, &name, &number))
        return false;
    o->size = number;
    o->name = strdup(name);
    o->directory_fd = fcntl(given_fd, F_DUPFD_CLOEXEC, 0);
    if (o->directory_fd < 0)
        PyErr_SetFromErrno(PyExc_OSError);
    return o->name && o->directory_fd >= 0;
}

static PyObject *pool_post(PoolObject *self, PyObject *const *given, Py_ssize_t count)
{
    struct pool *pool = self->pool;
    if (count != 8 || !PyBytes_Check(given[1]) || !PyBytes_Check(given[2])) {
        PyErr_SetString(PyExc_TypeError, "post(task, target, lines, status, length, holds, wants_md5, where)");
        return NULL;
    }
    order *o = (order *)PyType_GenericAlloc(&OrderType, 0); /* zeroed */
    if (!o)
        return NULL;
    o->fd = o->directory_fd = o->made_fd = -1;
    o->pool = pool;
    atomic_fetch_add(&pool->references, 1);
    o->task = Py_NewRef(given[0]);
    o->target = strdup(PyBytes_AS_STRING(given[1]));
    o->lines = strdup(PyBytes_AS_STRING(given[2]));
    o->status = PyLong_AsLong(given[3]);
    o->length = PyLong_AsLongLong(given[4]);
    o->holds = given[5] == Py_True;
    o->wants_md5 = given[6] == Py_True;
    if (PyErr_Occurred())
        goto failed;
    if (!o->target || !o->lines || !link_headers(o)) {
        PyErr_NoMemory();
        goto failed;
    }
    if (o->length <= 0 || (o->holds && o->length > BUFFER_BYTES)) {
        PyErr_SetString(PyExc_ValueError, "length");
        goto failed;
    }
    if (!set_destination(o, given[7]))
        goto failed;
    pthread_mutex_lock(&pool->lock);
    bool is_closed = pool->is_closed;
    bool is_first = pool->thread_count == 0;
    bool needs_thread =
        pool->queued_count >= pool->thread_count - pool->busy_count && pool->thread_count < pool->thread_limit;
    pthread_mutex_unlock(&pool->lock);
    if (!is_closed && needs_thread && !start_thread(pool) && is_first) {
        PyErr_SetString(PyExc_OSError, "no thread can be started");
        goto failed;
    }
    pthread_mutex_lock(&pool->lock);
    if (!(is_closed = pool->is_closed)) {
        if (pool->queue_last)
            pool->queue_last->next = o;
        else
            pool->queue_first = o;
        pool->queue_last = o;
        pool->queued_count++;
        pool->unfinished_count++;
        Py_INCREF(o); /* the pool's, until it is handed out as done */
    }
    pthread_mutex_unlock(&pool->lock);
    if (!is_closed) {
        pthread_cond_signal(&pool->work); /* without the lock, which the woken thread wants at once */
        return (PyObject *)o;
    }
    PyErr_SetString(PyExc_RuntimeError, "the pool is closed");
failed:
    Py_DECREF(o);
    return NULL;
}

/* The orders about which something is new, each once. The pool's reference goes to the list with those that are done. */
static PyObject *pool_changed(PoolObject *self, PyObject *unused)
{
    struct pool *pool = self->pool;
    PyObject *list = PyList_New(0);
    eventfd_t ignored;
    if (!list)
        return NULL;
    pthread_mutex_lock(&pool->lock);
    if (pool->is_signalled) {
        eventfd_read(pool->wake_fd, &ignored);
        pool->is_signalled = false;
    }
    order *o = pool->changed_first;
    pool->changed_first = pool->changed_last = NULL;
    while (o) {
        order *next = o->next_changed;
        bool is_done = o->is_done;
        o->is_listed = false;
        pool->unfinished_count -= is_done;
        if (PyList_Append(list, (PyObject *)o) != 0) /* out of memory: nobody hears of the rest */
            Py_FatalError("tiercache: no memory for a list of orders");
        if (is_done)
            Py_DECREF(o); /* not the last: the list has one */
        o = next;
    }
    pthread_mutex_unlock(&pool->lock);
    return list;
}

static PyObject *pool_close_method(PoolObject *self, PyObject *unused)
{
    pool_close(self->pool);
    Py_RETURN_NONE;
}

static PyObject *pool_fileno(PoolObject *self, PyObject *unused)
{
    return PyLong_FromLong(self->pool->wake_fd);
}

static PyObject *pool_is_over(PoolObject *self, void *unused)
{
    pthread_mutex_lock(&self->pool->lock);
    bool is_over = self->pool->is_closed && self->pool->unfinished_count == 0;
    pthread_mutex_unlock(&self->pool->lock);
    return PyBool_FromLong(is_over);
}

static PyObject *pool_idle_count(PoolObject *self, void *unused)
{
    pthread_mutex_lock(&self->pool->lock);
    int count = atomic_load(&self->pool->socket_count) - self->pool->busy_count;
    pthread_mutex_unlock(&self->pool->lock);
    return PyLong_FromLong(count > 0 ? count : 0);
}

static PyObject *pool_thread_count(PoolObject *self, void *unused)
{
    pthread_mutex_lock(&self->pool->lock);
    int count = self->pool->thread_count;
    pthread_mutex_unlock(&self->pool->lock);
    return PyLong_FromLong(count);
}

static void pool_dealloc(PoolObject *self)
{
    if (self->pool) {
        pool_close(self->pool);
        pool_unref(self->pool);
    }
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *pool_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"url", "proxy", "proxy_header", "authorities", "authority_directory",
                            "connect_seconds", "silence_seconds", "max_idle_seconds", "threads", NULL};
    const char *url, *proxy, *proxy_header, *authority_directory;
    Py_buffer authorities;
    double connect_seconds, silence_seconds, max_idle_seconds;
    int threads;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "sszz*zdddi", names, &url, &proxy, &proxy_header, &authorities,
                                     &authority_directory, &connect_seconds, &silence_seconds, &max_idle_seconds, &threads))
        return NULL;
    PoolObject *self = (PoolObject *)type->tp_alloc(type, 0);
    struct pool *pool = calloc(1, sizeof *pool);
    if (!self || !pool) {
        PyBuffer_Release(&authorities);
        Py_XDECREF(self);
        free(pool);
        return PyErr_NoMemory();
    }
    self->pool = pool;
    pool->references = 1;
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->work, NULL);
    pool->url = strdup(url);
    pool->proxy = strdup(proxy);
    if (proxy_header)
        pool->proxy_headers = curl_slist_append(NULL, proxy_header);
    if (authorities.buf && (pool->authorities = malloc((size_t)authorities.len + 1))) {
        memcpy(pool->authorities, authorities.buf, (size_t)authorities.len);
        pool->authorities_bytes = (size_t)authorities.len;
    }
    PyBuffer_Release(&authorities);
    pool->authority_directory = authority_directory ? strdup(authority_directory) : NULL;
    pool->connect_ms = (long)(connect_seconds * 1000);
    pool->max_idle_seconds = (long)max_idle_seconds;
    pool->silence_ms = (int64_t)(silence_seconds * 1000);
    pool->thread_limit = threads > 0 ? threads : 1;
    pool->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (pool->wake_fd < 0) {
        PyErr_SetFromErrno(PyExc_OSError);
        Py_DECREF(self);
        return NULL;
    }
    pthread_mutex_lock(&all_lock);
    pool->next = all_pools;
    if (all_pools)
        all_pools->previous = pool;
    all_pools = pool;
    pthread_mutex_unlock(&all_lock);
    return (PyObject *)self;
}

static PyMethodDef pool_methods[] = {
    {"post", (PyCFunction)(void (*)(void))pool_post, METH_FASTCALL,
     "post(task, target, lines, status, length, holds, wants_md5, where) -> Order"},
    {"changed", (PyCFunction)pool_changed, METH_NOARGS, "The orders about which something is new; never waits."},
    {"fileno", (PyCFunction)pool_fileno, METH_NOARGS, "Readable when `changed` has something."},
    {"close", (PyCFunction)pool_close_method, METH_NOARGS, "Cancel everything; threads end. Idempotent, never waits."},
    {NULL},
};

static PyGetSetDef pool_fields[] = {
    {"is_over", (getter)pool_is_over, NULL, "Closed, and nothing will change any more.", NULL},
    {"idle_count", (getter)pool_idle_count, NULL, "Connections kept; exact while no order runs.", NULL},
    {"thread_count", (getter)pool_thread_count, NULL, "Threads that exist.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyTypeObject PoolType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "tiercache.tiers.cold._fetch.Pool",
    .tp_basicsize = sizeof(PoolObject),
    .tp_dealloc = (destructor)pool_dealloc,
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "Threads that perform GETs over one route.",
    .tp_new = pool_new,
    .tp_methods = pool_methods,
    .tp_getset = pool_fields,
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "tiercache.tiers.cold._fetch",
    .m_doc = "GETs by threads that never touch Python.",
    .m_size = -1,
};

PyMODINIT_FUNC PyInit__fetch(void)
{
    if (curl_global_init(CURL_GLOBAL_DEFAULT) != CURLE_OK) {
        PyErr_SetString(PyExc_ImportError, "libcurl cannot be initialised");
        return NULL;
    }
    if (PyType_Ready(&OrderType) < 0 || PyType_Ready(&PoolType) < 0)
        return NULL;
    PyObject *made = PyModule_Create(&module);
    if (!made)
        return NULL;
    if (PyModule_AddObjectRef(made, "Pool", (PyObject *)&PoolType) < 0 ||
        PyModule_AddObjectRef(made, "Order", (PyObject *)&OrderType) < 0 ||
        PyModule_AddIntConstant(made, "HELD_BYTES", BUFFER_BYTES) < 0 ||
        PyModule_AddIntConstant(made, "REFUSAL_BYTES", REFUSAL_LIMIT_BYTES) < 0 || Py_AtExit(end_all) < 0) {
        Py_DECREF(made);
        return NULL;
    }
    return made;
}
