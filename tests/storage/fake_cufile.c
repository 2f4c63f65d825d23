/* Stands in for libcufile.so.0 and libcuda.so.1 in the tests: device memory is host memory, and every call is checked.

   What a caller may not do is counted as a violation and printed. What a test wants to go wrong is set with fake_set,
   or for a process of its own in the environment: FAKE_CUFILE_OPEN=hang|close0|error|crash, FAKE_GPUS=n. */
#define _GNU_SOURCE /* O_DIRECT */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

typedef struct { int err; int cuda; } status_t;
typedef struct { int type; union { int fd; void *pointer; } handle; const void *operations; } description_t;
typedef struct {
    int mode;
    struct { void *base; off_t offset; off_t within; size_t size; } part;
    void *handle;
    int opcode;
    void *cookie;
} parameters_t;
typedef struct { void *cookie; int status; ssize_t result; } event_t;
typedef struct { int used; int pid; int fd; int plain; int busy; } file_t;
typedef struct { int used; unsigned room; unsigned waiting; event_t events[256]; } batch_t;
typedef struct { char *base; size_t size; } buffer_t;

enum { FILES = 64, BATCHES = 64, BUFFERS = 64 };
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static file_t files[FILES];
static batch_t batches[BATCHES];
static buffer_t buffers[BUFFERS];
static int opened;
static char log_text[1 << 16];

/* Settings. posix: 1 for all, 2 for every other one. */
static long short_bytes, fail_errno, fail_code, fail_from, posix_mode, no_statistics, wrong_bytes, delay_us, uncounted,
    register_code, buffer_code, batch_setup_code, batch_submit_code, batch_fail, batch_silent, statistics_bytes = 624, already_open,
    version = 1200, end_bytes, close_code;
/* Counts. */
static long violations, reads, writes, batches_submitted, largest_batch, most_at_once, at_once, setups, submits_size;
static uint64_t nvfs[2], posix[2], batch_nvfs, batch_posix;

static const struct { const char *name; long *value; long initial; } settings[] = {
    {"short_bytes", &short_bytes, 0}, {"fail_errno", &fail_errno, 0}, {"fail_code", &fail_code, 0},
    {"fail_from", &fail_from, 0}, {"posix", &posix_mode, 0}, {"no_statistics", &no_statistics, 0},
    {"wrong_bytes", &wrong_bytes, 0}, {"delay_us", &delay_us, 0}, {"uncounted", &uncounted, 0},
    {"register_code", &register_code, 0}, {"buffer_code", &buffer_code, 0},
    {"batch_setup_code", &batch_setup_code, 0}, {"batch_submit_code", &batch_submit_code, 0},
    {"batch_fail", &batch_fail, 0}, {"batch_silent", &batch_silent, 0}, {"statistics_bytes", &statistics_bytes, 624},
    {"already_open", &already_open, 0}, {"version", &version, 1200}, {"end_bytes", &end_bytes, 0},
    {"close_code", &close_code, 0},
    {"violations", &violations, 0}, {"reads", &reads, 0}, {"writes", &writes, 0},
    {"batches", &batches_submitted, 0}, {"largest_batch", &largest_batch, 0}, {"most_at_once", &most_at_once, 0},
    {"setups", &setups, 0}, {"batch_parts", &submits_size, 0},
};
enum { SETTINGS = sizeof settings / sizeof *settings };

long fake_get(const char *name) {
    for (int i = 0; i < SETTINGS; i++)
        if (!strcmp(settings[i].name, name)) return *settings[i].value;
    return -1;
}

int fake_set(const char *name, long value) {
    for (int i = 0; i < SETTINGS; i++)
        if (!strcmp(settings[i].name, name)) { *settings[i].value = value; return 0; }
    return -1;
}

void fake_reset(void) {
    for (int i = 0; i < SETTINGS; i++) *settings[i].value = settings[i].initial;
    log_text[0] = 0;
    /* What a test that failed left open is no other test's affair. */
    opened = 0;
    memset(files, 0, sizeof files);
    memset(batches, 0, sizeof batches);
    memset(buffers, 0, sizeof buffers);
}

const char *fake_log(void) { return log_text; }

static void note(const char *what) {
    if (strlen(log_text) + strlen(what) + 2 < sizeof log_text) strcat(strcat(log_text, what), " ");
}

static void violation(const char *what) {
    fprintf(stderr, "fake cuFile: %s\n", what);
    violations++;
}

static status_t answer(long code) { return (status_t){(int)code, 0}; }

static int live_files(void) { int n = 0; for (int i = 0; i < FILES; i++) n += files[i].used; return n; }
static int live_batches(void) { int n = 0; for (int i = 0; i < BATCHES; i++) n += batches[i].used; return n; }
static int live_buffers(void) { int n = 0; for (int i = 0; i < BUFFERS; i++) n += buffers[i].base != NULL; return n; }

long fake_live(void) { return opened + live_files() + live_batches() + live_buffers(); }

/* The CUDA driver. */
int cuInit(unsigned flags) { (void)flags; return getenv("FAKE_CUDA_ERROR") ? atoi(getenv("FAKE_CUDA_ERROR")) : 0; }
int cuDeviceGetCount(int *count) { *count = getenv("FAKE_GPUS") ? atoi(getenv("FAKE_GPUS")) : 1; return 0; }

/* cuFile's driver. */
status_t cuFileDriverOpen(void) {
    const char *want = getenv("FAKE_CUFILE_OPEN");
    note("open");
    if (want && !strcmp(want, "hang")) for (;;) sleep(1000);
    if (want && !strcmp(want, "crash")) abort();
    if (want && !strcmp(want, "close0")) { close(0); return answer(5001); }
    if (want && !strcmp(want, "error")) return answer(5007);
    if (already_open) return answer(5026);
    if (opened) violation("opened twice");
    opened = 1;
    return answer(0);
}

status_t cuFileDriverClose_v2(void) {
    note("close");
    if (close_code) { opened = 0; return answer(close_code); }
    if (!opened) violation("closed, but not open");
    if (live_files() || live_batches() || live_buffers()) violation("closed while something is registered");
    opened = 0;
    return answer(0);
}
status_t cuFileDriverClose(void) { return cuFileDriverClose_v2(); }
long cuFileUseCount(void) { return opened; }
status_t cuFileGetVersion(int *out) { *out = (int)version; return answer(0); }

status_t cuFileHandleRegister(void **handle, description_t *description) {
    char name[64];
    if (register_code) return answer(register_code);
    if (!opened && !already_open) { violation("file registered, driver not open"); return answer(5001); }
    if (description->type != 1) { violation("not a file descriptor"); return answer(5022); }
    if (!(fcntl(description->handle.fd, F_GETFL) & O_DIRECT)) return answer(5020);
    pthread_mutex_lock(&lock);
    for (int i = 0; i < FILES; i++)
        if (!files[i].used) {
            /* Without O_DIRECT: host memory that stands for a GPU's need not be aligned. */
            snprintf(name, sizeof name, "/proc/self/fd/%d", description->handle.fd);
            int access = fcntl(description->handle.fd, F_GETFL) & O_ACCMODE;
            files[i] = (file_t){1, getpid(), description->handle.fd, open(name, access | O_CLOEXEC), 0};
            *handle = &files[i];
            break;
        }
    note("register");
    pthread_mutex_unlock(&lock);
    return answer(0);
}

void cuFileHandleDeregister(void *handle) {
    file_t *file = handle;
    pthread_mutex_lock(&lock);
    note("deregister");
    if (!file->used) violation("deregistered twice");
    if (file->busy) violation("deregistered while I/O is under way");
    if (fcntl(file->fd, F_GETFD) < 0) violation("deregistered after its file was closed");
    if (live_batches() && live_files() == 1) violation("the last file deregistered before its batches");
    close(file->plain);
    file->used = 0;
    pthread_mutex_unlock(&lock);
}

status_t cuFileBufRegister(const void *base, size_t size, int flags) {
    if (buffer_code) return answer(buffer_code);
    pthread_mutex_lock(&lock);
    note("pin");
    if (flags) violation("flags of a buffer");
    for (int i = 0; i < BUFFERS; i++)
        if (buffers[i].base && buffers[i].base < (char *)base + size && (char *)base < buffers[i].base + buffers[i].size) {
            pthread_mutex_unlock(&lock);
            return answer(5023);
        }
    for (int i = 0; i < BUFFERS; i++)
        if (!buffers[i].base) { buffers[i] = (buffer_t){(char *)base, size}; break; }
    pthread_mutex_unlock(&lock);
    return answer(0);
}

status_t cuFileBufDeregister(const void *base) {
    status_t result = answer(5024);
    pthread_mutex_lock(&lock);
    note("unpin");
    for (int i = 0; i < BUFFERS; i++)
        if (buffers[i].base == (char *)base) { buffers[i].base = NULL; result = answer(0); }
    if (result.err) violation("a buffer deregistered that is not registered");
    pthread_mutex_unlock(&lock);
    return result;
}

static ssize_t move(int write, file_t *file, char *base, size_t size, off_t offset, off_t within) {
    ssize_t count;
    char *address = base + within;
    pthread_mutex_lock(&lock);
    if (!file->used || file->pid != getpid()) violation("I/O on a handle that is not registered in this process");
    if (offset % 4096 || size % 4096 || !size) violation("I/O that is not aligned");
    for (int i = 0; i < BUFFERS; i++)
        if (buffers[i].base && address >= buffers[i].base && address < buffers[i].base + buffers[i].size)
            if (base != buffers[i].base || address + size > buffers[i].base + buffers[i].size)
                violation("registered memory not named by its base");
    file->busy++;
    if (++at_once > most_at_once) most_at_once = at_once;
    long number = write ? ++writes : ++reads;
    pthread_mutex_unlock(&lock);
    if (delay_us) usleep((useconds_t)delay_us);
    if ((fail_errno || fail_code) && number > fail_from) {
        count = fail_code ? -fail_code : -1;
        errno = (int)fail_errno;
    } else {
        if (short_bytes && size > (size_t)short_bytes) size = (size_t)short_bytes;
        count = write ? pwrite(file->plain, address, size, offset) : pread(file->plain, address, size, offset);
        if (end_bytes && number > fail_from) count = 0;
        if (wrong_bytes && !write && count > 0) address[count / 2] ^= 1;
    }
    int saved = errno;
    pthread_mutex_lock(&lock);
    at_once--;
    file->busy--;
    if (count >= 0 && !uncounted) (posix_mode == 1 || (posix_mode == 2 && number % 2) ? posix : nvfs)[write]++;
    pthread_mutex_unlock(&lock);
    errno = saved;
    return count;
}

ssize_t cuFileRead(void *handle, void *base, size_t size, off_t offset, off_t within) {
    return move(0, handle, base, size, offset, within);
}
ssize_t cuFileWrite(void *handle, const void *base, size_t size, off_t offset, off_t within) {
    return move(1, handle, (char *)base, size, offset, within);
}

status_t cuFileBatchIOSetUp(void **out, unsigned room) {
    if (batch_setup_code) return answer(batch_setup_code);
    if (room > 128) violation("a batch of more than 128");
    pthread_mutex_lock(&lock);
    setups++;
    for (int i = 0; i < BATCHES; i++)
        if (!batches[i].used) {
            batches[i] = (batch_t){.used = 1, .room = room};
            *out = &batches[i];
            break;
        }
    note("setup");
    pthread_mutex_unlock(&lock);
    return answer(0);
}

status_t cuFileBatchIOSubmit(void *handle, unsigned number, parameters_t *parts, unsigned flags) {
    batch_t *batch = handle;
    if (batch_submit_code) return answer(batch_submit_code);
    if (!batch->used || number > batch->room || batch->waiting || flags) violation("a batch misused");
    pthread_mutex_lock(&lock);
    batches_submitted++;
    submits_size += number;
    if (number > largest_batch) largest_batch = number;
    *(posix_mode ? &batch_posix : &batch_nvfs) += posix_mode ? number : 1;
    pthread_mutex_unlock(&lock);
    for (unsigned i = number; i-- > 0;) { /* the last first: events come in any order */
        parameters_t *p = &parts[i];
        event_t event = {p->cookie, 16, 0};
        if (p->mode != 1) violation("a part of a batch without its mode");
        if (batch_fail && i % 2) event = (event_t){p->cookie, 64, -5};
        else {
            event.result = move(p->opcode, p->handle, p->part.base, p->part.size, p->part.offset, p->part.within);
            if (event.result < 0) event.status = 64;
        }
        batch->events[batch->waiting++] = event;
    }
    return answer(0);
}

status_t cuFileBatchIOGetStatus(void *handle, unsigned least, unsigned *number, event_t *events, struct timespec *timeout) {
    batch_t *batch = handle;
    unsigned most = *number > 3 ? 3 : *number; /* in several portions */
    if (!least || least > *number || !timeout) violation("a batch's status misused");
    *number = 0;
    if (batch_silent) { usleep(1000); return answer(0); }
    if (batch->waiting == batch->room) { /* one that is told of before it has ended */
        events[(*number)++] = (event_t){batch->events[0].cookie, 2, 0};
    }
    while (batch->waiting && *number < most) events[(*number)++] = batch->events[--batch->waiting];
    return answer(0);
}

status_t cuFileBatchIOCancel(void *handle) { ((batch_t *)handle)->waiting = 0; note("cancel"); return answer(0); }

void cuFileBatchIODestroy(void *handle) {
    batch_t *batch = handle;
    note("destroy");
    if (!batch->used) violation("a batch destroyed twice");
    if (batch->waiting) violation("a batch destroyed while it is under way");
    batch->used = 0;
}

/* Statistics: the first level is `statistics_bytes` long (it grew from version to version), then come two histograms,
   the number of GPUs, and what each of them did. Nothing is written beyond the GPUs that there are. */
status_t cuFileSetStatsLevel(int level) { return answer(no_statistics || level != 3 ? 5022 : 0); }
status_t cuFileStatsStart(void) { return answer(no_statistics ? 5022 : 0); }

static status_t fill(char *out, int everything) {
    if (no_statistics) return answer(5022);
    memset(out, 0, (size_t)statistics_bytes);
    ((uint64_t *)(out + 304 - 32))[0] = batch_posix; /* batch_posix_enqueued_ops.ok */
    ((uint64_t *)(out + 320))[0] = batch_nvfs;       /* batch_nvfs_submit_ops.ok */
    if (!everything) return answer(0);
    char *rest = out + statistics_bytes + 2 * 32 * 8;
    *(uint32_t *)rest = 2;
    for (int gpu = 0; gpu < 2; gpu++) {
        char *one = rest + 8 + gpu * 248;
        memset(one, 0, 248);
        uint64_t *count = (uint64_t *)(one + 16);
        if (gpu) { count[6] = nvfs[0]; count[7] = posix[0]; count[19] = nvfs[1]; count[20] = posix[1]; }
    }
    return answer(0);
}
status_t cuFileGetStatsL1(void *out) { return fill(out, 0); }
status_t cuFileGetStatsL3(void *out) { return fill(out, 1); }
