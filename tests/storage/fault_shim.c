/* A disk that fails when told to: preloaded, it stands before the C library's calls that move a file's bytes.

   Python sets the fault with fault_set() through ctypes, and asks with fault_hits() how often it has struck. One fault
   at a time; it strikes calls on files whose path ends in `path` and whose bytes meet [start, stop). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { READS = 1, WRITES = 2, SYNCS = 4 };

static struct {
    char path[PATH_MAX];
    int calls;            /* which of the above */
    long long start, stop;
    int error;            /* errno to fail with; 0 for none */
    long most;            /* bytes that one call moves at most; 0 for all */
    int delay_ms;         /* before the call */
} fault;
static atomic_long left, hits;

void fault_set(const char *path, int calls, long long start, long long stop, int error, long most, int delay_ms,
               long times) {
    atomic_store(&left, 0);
    snprintf(fault.path, sizeof fault.path, "%s", path);
    fault.calls = calls;
    fault.start = start;
    fault.stop = stop;
    fault.error = error;
    fault.most = most;
    fault.delay_ms = delay_ms;
    atomic_store(&hits, 0);
    atomic_store(&left, times);
}

long fault_hits(void) { return atomic_load(&hits); }

static int strikes(int call, int fd, long long offset, long long nbytes) {
    char link[64], path[PATH_MAX];
    if (!(fault.calls & call) || atomic_load(&left) <= 0) return 0;
    if (call != SYNCS && (offset >= fault.stop || offset + nbytes <= fault.start)) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    size_t wanted = strlen(fault.path);
    if (length < (ssize_t)wanted || memcmp(path + length - wanted, fault.path, wanted)) return 0;
    if (atomic_fetch_sub(&left, 1) <= 0) return 0;
    atomic_fetch_add(&hits, 1);
    struct timespec delay = {fault.delay_ms / 1000, fault.delay_ms % 1000 * 1000000L};
    if (fault.delay_ms) nanosleep(&delay, NULL);
    return 1;
}

static long long total(const struct iovec *parts, int count) {
    long long nbytes = 0;
    for (int part = 0; part < count; part++) nbytes += parts[part].iov_len;
    return nbytes;
}

#define NEXT(name) static __typeof__(&name) next; if (!next) next = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

/* Calls on one buffer, and calls on several, of which Python passes one. */
#define ONE(name, call, pointer)                                                                                       \
    ssize_t name(int fd, pointer data, size_t nbytes, off_t offset) {                                                  \
        NEXT(name);                                                                                                    \
        if (strikes(call, fd, offset, nbytes)) {                                                                       \
            if (fault.error) return errno = fault.error, -1;                                                           \
            if (fault.most && nbytes > (size_t)fault.most) nbytes = fault.most;                                        \
        }                                                                                                              \
        return next(fd, data, nbytes, offset);                                                                         \
    }
#define SEVERAL(name, call, parameters, arguments)                                                                     \
    ssize_t name parameters {                                                                                          \
        NEXT(name);                                                                                                    \
        struct iovec first = parts[0];                                                                                 \
        if (strikes(call, fd, offset, total(parts, count))) {                                                          \
            if (fault.error) return errno = fault.error, -1;                                                           \
            if (fault.most && count == 1 && first.iov_len > (size_t)fault.most) {                                      \
                first.iov_len = fault.most;                                                                            \
                parts = &first;                                                                                        \
            }                                                                                                          \
        }                                                                                                              \
        return next arguments;                                                                                         \
    }
#define PLAIN (int fd, const struct iovec *parts, int count, off_t offset)
#define FLAGS (int fd, const struct iovec *parts, int count, off_t offset, int flags)

ONE(pread, READS, void *)
ONE(pread64, READS, void *)
ONE(pwrite, WRITES, const void *)
ONE(pwrite64, WRITES, const void *)
SEVERAL(preadv, READS, PLAIN, (fd, parts, count, offset))
SEVERAL(preadv64, READS, PLAIN, (fd, parts, count, offset))
SEVERAL(pwritev, WRITES, PLAIN, (fd, parts, count, offset))
SEVERAL(pwritev64, WRITES, PLAIN, (fd, parts, count, offset))
SEVERAL(preadv2, READS, FLAGS, (fd, parts, count, offset, flags))
SEVERAL(preadv64v2, READS, FLAGS, (fd, parts, count, offset, flags))
SEVERAL(pwritev2, WRITES, FLAGS, (fd, parts, count, offset, flags))
SEVERAL(pwritev64v2, WRITES, FLAGS, (fd, parts, count, offset, flags))

#define SYNC(name)                                                                                                     \
    int name(int fd) {                                                                                                 \
        NEXT(name);                                                                                                    \
        if (strikes(SYNCS, fd, 0, 0) && fault.error) return errno = fault.error, -1;                                   \
        return next(fd);                                                                                               \
    }
SYNC(fsync)
SYNC(fdatasync)
