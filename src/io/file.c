// SPDX-License-Identifier: Apache-2.0
// Maps and atomic writing on POSIX.
#include "file.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static volatile sig_atomic_t unfinished;
static char unfinished_path[PATH_MAX];

static const char *kind_of(mode_t mode) {
    if (S_ISDIR(mode)) return "a folder";
    if (S_ISFIFO(mode)) return "a pipe";
    if (S_ISCHR(mode) || S_ISBLK(mode)) return "a device";
    return S_ISSOCK(mode) ? "a socket" : "no regular file";
}

bool io_map_open(io_map *map, const char *path, io_error *error) {
    *map = (io_map){0};
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) return io_fail(error, "%s: cannot be opened: %s", path, strerror(errno));
    struct stat status;
    bool ok = false;
    if (fstat(fd, &status)) {
        io_fail(error, "%s: cannot be examined: %s", path, strerror(errno));
    } else if (!S_ISREG(status.st_mode)) {
        io_fail(error, "%s: is %s, must be a file", path, kind_of(status.st_mode));
    } else if (status.st_size > 0) {
        void *data = mmap(NULL, (size_t)status.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
        ok = data != MAP_FAILED;
        if (ok) *map = (io_map){data, (size_t)status.st_size};
        if (!ok) io_fail(error, "%s: cannot be mapped: %s", path, strerror(errno));
    } else {
        ok = true;
    }
    close(fd);
    return ok;
}

void io_map_close(io_map *map) {
    if (map->data) munmap((void *)map->data, map->size);
    *map = (io_map){0};
}

bool io_exists(const char *path, bool *there, io_error *error) {
    struct stat status;
    *there = !lstat(path, &status);
    if (*there || errno == ENOENT || errno == ENOTDIR) return true;
    return io_fail(error, "%s: cannot be examined: %s", path, strerror(errno));
}

static void forget(io_writer *writer) {
    unfinished = 0;
    if (writer->fd >= 0) close(writer->fd);
    free(writer->path);
    free(writer->temporary);
    *writer = (io_writer){.fd = -1};
}

void io_writer_abort(io_writer *writer) {
    if (writer->temporary) unlink(writer->temporary);
    forget(writer);
}

void io_writer_abort_on_signal(void) {
    if (unfinished) unlink(unfinished_path);
}

// A link is followed, so that the file it names is replaced and not the link.
static char *target_of(const char *path, io_error *error) {
    struct stat status;
    char *target = NULL;
    bool fresh = stat(path, &status) != 0;
    if (fresh && errno != ENOENT) {
        io_fail(error, "%s: cannot be used: %s", path, strerror(errno));
        return NULL;
    }
    if (!fresh && !S_ISREG(status.st_mode)) {
        io_fail(error, "%s: is %s, must be a file or not exist", path, kind_of(status.st_mode));
        return NULL;
    }
    target = fresh ? strdup(path) : realpath(path, NULL);
    if (!target) io_fail(error, "%s: cannot be resolved: %s", path, strerror(errno));
    return target;
}

bool io_writer_open(io_writer *writer, const char *path, io_error *error) {
    *writer = (io_writer){.fd = -1};
    if (unfinished) {
        io_fail(error, "%s: another file is still being written", path);
    } else if (!*path) {
        io_fail(error, "the output path is empty, must name a file");
    } else {
        writer->path = target_of(path, error);
    }
    if (!writer->path) return false;
    // A name of its own in the same folder: the target's may already be as long as one can be.
    const char *slash = strrchr(writer->path, '/');
    int folder = slash ? (int)(slash - writer->path) + 1 : 0;
    size_t size = (size_t)folder + sizeof ".ctxkv-XXXXXX";
    writer->temporary = size > sizeof unfinished_path ? NULL : malloc(size);
    if (!writer->temporary) {
        forget(writer);
        return io_fail(
            error, size > sizeof unfinished_path ? "%s: the path is too long" : "%s: out of memory",
            path);
    }
    snprintf(writer->temporary, size, "%.*s.ctxkv-XXXXXX", folder, writer->path);
    // Signals wait until the name that the handler would unlink is known.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    writer->fd = mkostemp(writer->temporary, O_CLOEXEC);
    int reason = errno;
    if (writer->fd >= 0) {
        memcpy(unfinished_path, writer->temporary, size);
        unfinished = 1;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (writer->fd >= 0) return true;
    forget(writer);
    return io_fail(error, "%s: cannot be created: %s", path, strerror(reason));
}

bool io_writer_write(io_writer *writer, const void *data, size_t size, io_error *error) {
    const uint8_t *from = data;
    while (size) {
        ssize_t count = write(writer->fd, from, size < (1u << 30) ? size : (1u << 30));
        if (count < 0 && errno == EINTR) continue;
        if (count <= 0) {
            const char *reason = count ? strerror(errno) : "nothing more is taken";
            return io_fail(error, "%s: cannot be written: %s", writer->path, reason);
        }
        from += count;
        size -= (size_t)count;
        writer->written += (uint64_t)count;
    }
    return true;
}

static void sync_folder(const char *path) {
    char *copy = strdup(path);
    if (!copy) return;
    char *slash = strrchr(copy, '/');
    if (slash) slash[slash == copy] = 0;
    int fd = open(slash ? copy : ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd >= 0) {
        fsync(fd);
        close(fd);
    }
    free(copy);
}

bool io_writer_commit(io_writer *writer, io_error *error) {
    mode_t mask = umask(0);
    umask(mask);
    // A file system may tell only at close that it could not keep the data.
    bool ok = !fchmod(writer->fd, 0666 & ~mask) && !fsync(writer->fd);
    int reason = errno;
    if (close(writer->fd) && ok) {
        reason = errno;
        ok = false;
    }
    writer->fd = -1;
    if (ok && rename(writer->temporary, writer->path)) {
        reason = errno;
        ok = false;
    }
    if (!ok) {
        io_fail(error, "%s: cannot be completed: %s", writer->path, strerror(reason));
        io_writer_abort(writer);
        return false;
    }
    sync_folder(writer->path);
    forget(writer);
    return true;
}

bool io_write_text(const char *path, const char *text, io_error *error) {
    io_writer writer;
    if (!io_writer_open(&writer, path, error)) return false;
    if (io_writer_write(&writer, text, strlen(text), error) &&
        io_writer_write(&writer, "\n", 1, error)) {
        return io_writer_commit(&writer, error);
    }
    io_writer_abort(&writer);
    return false;
}

char *io_join(const char *folder, const char *name) {
    size_t size = strlen(folder) + strlen(name) + 2;
    char *path = malloc(size);
    bool slash = *folder && folder[strlen(folder) - 1] == '/';
    if (path) snprintf(path, size, "%s%s%s", folder, slash ? "" : "/", name);
    return path;
}
