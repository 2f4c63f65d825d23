// A stand-in for libxnvme 0.7 over a plain file, for tests on machines without it: the functions and layouts that
// xnvme_library.py declares. The URI is "FILE?sector=512&mdts=65536"; at most four commands complete in a poke. What
// misbehaves is named in it, too: error=LBA, short=LBA, never=LBA (no completion), gone=N (the device is away after
// N commands; 0: it gives no queue), busy=N (refuses so many commands first).
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

struct opts {
    const char *be, *dev, *mem, *sync, *async, *admin;
    uint32_t nsid;
    uint8_t rdonly, wronly, rdwr, create, truncate, direct;
};
struct geo {
    uint32_t type, npugrp, npunit, nzone;
    uint64_t nsect;
    uint32_t nbytes, nbytes_oob;
    uint64_t tbytes, ssw;
    uint32_t mdts, lba_nbytes;
    uint8_t extended, pi_type, rest[6];
};
struct dev {
    int fd;
    struct opts opts;
    struct geo geo;
    long error, is_short, never, gone, busy;
};
struct queue;
struct context {  // 128 bytes
    uint8_t opcode, flags;
    uint16_t cid;
    uint32_t nsid;
    uint64_t slba, nbytes;
    char *data;
    uint64_t writing, next_free, unused[2];
    uint64_t result;
    uint16_t sqhd, sqid, command, status;
    struct dev *dev;
    struct queue *queue;
    void (*cb)(struct context *, void *);
    void *cb_arg;
    uint32_t opts, rest[3];
};
_Static_assert(sizeof(struct context) == 128, "as the library's");
struct queue {
    struct dev *dev;
    uint16_t capacity, waiting, num_free;
    struct context **sent, **free_contexts, *contexts;
};

#ifndef VERSION_MINOR
#define VERSION_MINOR 7
#endif
int xnvme_ver_major(void) { return 0; }
int xnvme_ver_minor(void) { return VERSION_MINOR; }
int xnvme_ver_patch(void) { return 5; }
void xnvme_opts_set_defaults(struct opts *opts) { opts->rdwr = 1; opts->nsid = 1; }

static long setting(const char *uri, const char *name, long otherwise) {
    const char *at = strcasestr(uri, name);
    return at ? atol(at + strlen(name)) : otherwise;
}

struct dev *xnvme_dev_open(const char *uri, struct opts *opts) {
    char path[4096];
    struct stat status;
    struct dev *dev = calloc(1, sizeof *dev);
    snprintf(path, sizeof path, "%.*s", (int)strcspn(uri, "?"), uri);
    dev->fd = open(path, opts->rdonly ? O_RDONLY : O_RDWR);
    if (dev->fd < 0) {
        free(dev);
        return NULL;  // errno is open's
    }
    fstat(dev->fd, &status);
    dev->opts = *opts;
    dev->opts.sync = dev->opts.mem = "fake";
    dev->opts.be = strdup(opts->be);  // the caller's go
    dev->opts.async = strdup(opts->async ? opts->async : "chosen");
    dev->geo.type = setting(uri, "type=", 1);
    dev->geo.lba_nbytes = dev->geo.nbytes = setting(uri, "sector=", 512);
    dev->geo.mdts = setting(uri, "mdts=", 65536);
    dev->geo.tbytes = status.st_size;
    dev->error = setting(uri, "error=", -1);
    dev->is_short = setting(uri, "short=", -1);
    dev->never = setting(uri, "never=", -1);
    dev->gone = setting(uri, "gone=", -1);
    dev->busy = setting(uri, "busy=", 0);
    return dev;
}
void xnvme_dev_close(struct dev *dev) {
    close(dev->fd);
    free((void *)dev->opts.be);
    free((void *)dev->opts.async);
    free(dev);
}
const struct geo *xnvme_dev_get_geo(struct dev *dev) { return &dev->geo; }
uint32_t xnvme_dev_get_nsid(struct dev *dev) { return dev->opts.nsid; }
const struct opts *xnvme_dev_get_opts(struct dev *dev) { return &dev->opts; }
void *xnvme_buf_alloc(struct dev *dev, size_t nbytes) { return aligned_alloc(4096, nbytes + 0 * (size_t)dev); }
void xnvme_buf_free(struct dev *dev, void *buffer) { (void)dev; free(buffer); }

int xnvme_queue_init(struct dev *dev, uint16_t capacity, int opts, struct queue **made) {
    if (dev->gone == 0 || opts) return -ENOSYS;
    struct queue *queue = calloc(1, sizeof *queue);
    queue->dev = dev;
    queue->capacity = capacity;
    queue->contexts = calloc(capacity + 1, sizeof *queue->contexts);
    queue->sent = calloc(capacity + 1, sizeof(void *));
    queue->free_contexts = calloc(capacity + 1, sizeof(void *));
    for (int i = 0; i <= capacity; i++) {
        queue->contexts[i].dev = dev;
        queue->contexts[i].queue = queue;
        queue->free_contexts[queue->num_free++] = &queue->contexts[i];
    }
    *made = queue;
    return 0;
}
int xnvme_queue_term(struct queue *queue) {
    free(queue->contexts);
    free(queue->sent);
    free(queue->free_contexts);
    free(queue);
    return 0;
}
int xnvme_queue_set_cb(struct queue *queue, void (*cb)(struct context *, void *), void *arg) {
    for (int i = 0; i <= queue->capacity; i++) {
        queue->contexts[i].cb = cb;
        queue->contexts[i].cb_arg = arg;
    }
    return 0;
}
struct context *xnvme_queue_get_cmd_ctx(struct queue *queue) {
    return queue->num_free ? queue->free_contexts[--queue->num_free] : NULL;
}
int xnvme_queue_put_cmd_ctx(struct queue *queue, struct context *context) {
    queue->free_contexts[queue->num_free++] = context;
    return 0;
}

static int send(struct context *context, uint32_t nsid, uint64_t slba, uint16_t nlb, void *data, int writing) {
    struct queue *queue = context->queue;
    struct dev *dev = queue->dev;
    if (nsid != dev->opts.nsid || (nlb + 1ul) * dev->geo.lba_nbytes > dev->geo.mdts) return -EINVAL;
    if (queue->waiting == queue->capacity) return -EBUSY;
    if (dev->busy > 0 && dev->busy--) return -EAGAIN;
    context->slba = slba;
    context->nbytes = (nlb + 1ul) * dev->geo.lba_nbytes;
    context->data = data;
    context->writing = writing;
    queue->sent[queue->waiting++] = context;
    return 0;
}
int xnvme_nvm_read(struct context *context, uint32_t nsid, uint64_t slba, uint16_t nlb, void *data, void *meta) {
    (void)meta;
    return send(context, nsid, slba, nlb, data, 0);
}
int xnvme_nvm_write(struct context *context, uint32_t nsid, uint64_t slba, uint16_t nlb, void *data, void *meta) {
    (void)meta;
    return send(context, nsid, slba, nlb, data, 1);
}

static int has(struct context *context, long sector) {
    uint64_t count = context->nbytes / context->dev->geo.lba_nbytes;
    return sector >= 0 && (uint64_t)sector >= context->slba && (uint64_t)sector < context->slba + count;
}

// Newest first, so that nobody relies on the order; like the library, writes the status only of what failed.
int xnvme_queue_poke(struct queue *queue, uint32_t max) {
    struct dev *dev = queue->dev;
    int completed = 0;
    (void)max;
    for (int at = queue->waiting - 1; at >= 0 && completed < 4; at--) {
        struct context *context = queue->sent[at];
        off_t offset = context->slba * dev->geo.lba_nbytes;
        if (has(context, dev->never)) continue;
        memmove(&queue->sent[at], &queue->sent[at + 1], (queue->waiting - at - 1) * sizeof(void *));
        queue->waiting--;
        completed++;
        if (dev->gone > 0 && --dev->gone == 0) dev->gone = -2;
        if (dev->gone == -2) {
            context->status = 7 << 9 | (256 - ENODEV) << 1;
        } else if (has(context, dev->error)) {
            context->status = 2 << 9 | 0x81 << 1;
        } else {
            ssize_t moved = context->writing ? pwrite(dev->fd, context->data, context->nbytes, offset)
                                             : pread(dev->fd, context->data, context->nbytes, offset);
            context->result = has(context, dev->is_short) ? moved / 2 : moved;
        }
        context->cb(context, context->cb_arg);
    }
    return completed;
}

struct context xnvme_cmd_ctx_from_dev(struct dev *dev) {
    struct context context = {.dev = dev};
    return context;
}
int xnvme_cmd_pass(struct context *context, void *data, size_t nbytes, void *meta, size_t meta_nbytes) {
    if (context->opcode != 0 || context->nsid != context->dev->opts.nsid || data || nbytes || meta || meta_nbytes)
        return -EINVAL;
    return context->dev->gone == -2 ? -ENODEV : 0;
}
