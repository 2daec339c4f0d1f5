// SPDX-License-Identifier: Apache-2.0
// Files: read-only maps, and writing that either completes or leaves nothing.
#ifndef CTXKV_IO_FILE_H
#define CTXKV_IO_FILE_H

#include <stddef.h>
#include <stdint.h>

#include "error.h"

typedef struct io_map {
    const uint8_t *data; // NULL when the file is empty
    size_t size;
} io_map;

// Regular files only; the size is that of the open descriptor.
bool io_map_open(io_map *map, const char *path, io_error *error);
void io_map_close(io_map *map);

// False, with the error, when that cannot be found out.
bool io_exists(const char *path, bool *there, io_error *error);

// A file under a temporary name in the target's folder, renamed at commit. One at a time.
typedef struct io_writer {
    int fd;
    char *path, *temporary;
    uint64_t written;
} io_writer;

// Refuses a target that exists and is no regular file. Nothing appears at path before commit.
bool io_writer_open(io_writer *writer, const char *path, io_error *error);
bool io_writer_write(io_writer *writer, const void *data, size_t size, io_error *error);
// Ends the writer in every case; on failure nothing is left.
bool io_writer_commit(io_writer *writer, io_error *error);
void io_writer_abort(io_writer *writer);
// Removes the unfinished file, if any. Async-signal-safe: for handlers.
void io_writer_abort_on_signal(void);

// The text and a newline, all of it or nothing.
bool io_write_text(const char *path, const char *text, io_error *error);

// folder + "/" + name, from malloc; NULL when memory is out.
char *io_join(const char *folder, const char *name);

#endif
