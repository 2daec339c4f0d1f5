// SPDX-License-Identifier: Apache-2.0
// Preloaded into the command line: the n-th call of one kind fails, writes in part, is interrupted
// or stops the process. CTXKV_FAIL is KIND:N:HOW, HOW a number (errno), "short", "interrupt" or
// "stop"; N+ means that call and all after it. A file CTXKV_FAIL_NOTE says that it happened.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum how { FAIL = 1, SHORT, INTERRUPT, STOP };

static char kind[32];
static long target = -1;
static bool and_after;
static enum how how;
static int number;
static const char *note;
static atomic_long calls;

__attribute__((constructor)) static void read_order(void) {
    const char *text = getenv("CTXKV_FAIL");
    note = getenv("CTXKV_FAIL_NOTE");
    size_t size = text ? strcspn(text, ":") : 0;
    if (!text || !text[size] || size >= sizeof kind) return;
    char *end;
    long n = strtol(text + size + 1, &end, 10);
    and_after = *end == '+';
    end += and_after;
    const char *what = *end ? end + 1 : "";
    how = !strcmp(what, "short")       ? SHORT
          : !strcmp(what, "interrupt") ? INTERRUPT
          : !strcmp(what, "stop")      ? STOP
                                       : FAIL;
    number = how == INTERRUPT ? EINTR : atoi(what);
    memcpy(kind, text, size);
    target = n;
}

// What this call of that kind does: 0 the usual, else how; errno is set.
static enum how turn(const char *name) {
    if (target < 0 || strcmp(kind, name)) return 0;
    long call = atomic_fetch_add(&calls, 1);
    if (call != target && !(and_after && call > target)) return 0;
    if (note) {
        int flags = O_WRONLY | O_CREAT;
        syscall(SYS_close, (int)syscall(SYS_openat, AT_FDCWD, note, flags, 0600));
    }
    if (how == STOP) {
        syscall(SYS_kill, syscall(SYS_getpid), SIGSTOP);
        return 0;
    }
    if (how != SHORT) errno = number;
    return how;
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define WRAP(result, name, parameters, arguments, as, failure)                                     \
    result name parameters;                                                                        \
    result name parameters {                                                                       \
        return turn(as) ? failure : NEXT(name) arguments;                                          \
    }

WRAP(int, fsync, (int fd), (fd), "fsync", -1)
WRAP(int, fchmod, (int fd, mode_t mode), (fd, mode), "fchmod", -1)
WRAP(int, rename, (const char *from, const char *to), (from, to), "rename", -1)
WRAP(int, mkostemp, (char *name, int flags), (name, flags), "mkostemp", -1)
WRAP(int, mkostemp64, (char *name, int flags), (name, flags), "mkostemp", -1)
WRAP(int, mkdir, (const char *path, mode_t mode), (path, mode), "mkdir", -1)
WRAP(int, rmdir, (const char *path), (path), "rmdir", -1)
WRAP(int, unlink, (const char *path), (path), "unlink", -1)
WRAP(int, stat, (const char *restrict path, struct stat *restrict to), (path, to), "stat", -1)
WRAP(int, stat64, (const char *restrict path, struct stat64 *restrict to), (path, to), "stat", -1)
WRAP(int, lstat, (const char *restrict path, struct stat *restrict to), (path, to), "lstat", -1)
WRAP(int, lstat64, (const char *restrict path, struct stat64 *restrict to), (path, to), "lstat", -1)
WRAP(int, fstat, (int fd, struct stat *to), (fd, to), "fstat", -1)
WRAP(int, fstat64, (int fd, struct stat64 *to), (fd, to), "fstat", -1)
WRAP(char *, realpath, (const char *restrict path, char *restrict to), (path, to), "realpath", 0)
WRAP(
    void *, mmap, (void *at, size_t size, int rights, int flags, int fd, off_t offset),
    (at, size, rights, flags, fd, offset), "mmap", MAP_FAILED)
WRAP(
    void *, mmap64, (void *at, size_t size, int rights, int flags, int fd, off64_t offset),
    (at, size, rights, flags, fd, offset), "mmap", MAP_FAILED)
WRAP(
    int, pthread_create,
    (pthread_t *restrict thread, const pthread_attr_t *restrict attributes, void *(*start)(void *),
     void *restrict argument),
    (thread, attributes, start, argument), "thread", EAGAIN)

// The descriptor is closed all the same, as Linux does.
int close(int fd) {
    enum how what = turn("close");
    int reason = errno, result = (int)syscall(SYS_close, fd);
    if (what) errno = reason;
    return what ? -1 : result;
}

ssize_t write(int fd, const void *data, size_t size) {
    enum how what = turn("write");
    if (what == SHORT && size > 1) return syscall(SYS_write, fd, data, size / 2);
    return what && what != SHORT ? -1 : syscall(SYS_write, fd, data, size);
}

static int open_as(const char *path, int flags, mode_t mode) {
    return turn("open") ? -1 : (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode);
}

int open(const char *path, int flags, ...) {
    va_list list;
    va_start(list, flags);
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(list, mode_t) : 0;
    va_end(list);
    return open_as(path, flags, mode);
}

int open64(const char *path, int flags, ...) {
    va_list list;
    va_start(list, flags);
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(list, mode_t) : 0;
    va_end(list);
    return open_as(path, flags, mode);
}

// What a build with FORTIFY calls instead.
int __open_2(const char *path, int flags);
int __open64_2(const char *path, int flags);
char *__realpath_chk(const char *path, char *to, size_t size);
int __open_2(const char *path, int flags) {
    return open_as(path, flags, 0);
}
int __open64_2(const char *path, int flags) {
    return open_as(path, flags, 0);
}
WRAP(
    char *, __realpath_chk, (const char *path, char *to, size_t size), (path, to, size), "realpath",
    0)

// dlsym allocates, so these go to libc by its other names.
void *__libc_malloc(size_t size);
void *__libc_calloc(size_t count, size_t size);
void *__libc_realloc(void *old, size_t size);
void *__libc_memalign(size_t alignment, size_t size);
void *malloc(size_t size) {
    return turn("malloc") ? 0 : __libc_malloc(size);
}
void *calloc(size_t count, size_t size) {
    return turn("malloc") ? 0 : __libc_calloc(count, size);
}
void *realloc(void *old, size_t size) {
    return turn("malloc") ? 0 : __libc_realloc(old, size);
}
void *aligned_alloc(size_t alignment, size_t size) {
    return turn("malloc") ? 0 : __libc_memalign(alignment, size);
}
int posix_memalign(void **to, size_t alignment, size_t size) {
    if (turn("malloc")) return ENOMEM;
    *to = __libc_memalign(alignment, size);
    return *to ? 0 : ENOMEM;
}
