// SPDX-License-Identifier: Apache-2.0
// JSON by jansson, with what it leaves out: whether memory was short on the way.
#ifndef CTXKV_IO_JSON_H
#define CTXKV_IO_JSON_H

#include <jansson.h>
#include <stddef.h>

#include "error.h"

// The document, or NULL after io_fail. what: "" or "head " and the like, before "is not valid".
json_t *io_json_parse(
    const char *data, size_t size, size_t flags, const char *what, const char *path,
    io_error *error);

// Building goes without a check at every value: call begin first, and ask at the end. A value that
// found no memory is missing from its parent, so a text is made only of complete values.
void io_json_begin(void);
bool io_json_complete(void);
// The text, from malloc; NULL when anything since begin is missing. Takes the reference to root.
char *io_json_text(json_t *root, size_t flags);

#endif
