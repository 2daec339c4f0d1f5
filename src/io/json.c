// SPDX-License-Identifier: Apache-2.0
// jansson's allocator, with a note of its failures.
#include "json.h"

#include <pthread.h>
#include <stdlib.h>

static _Thread_local bool short_of_memory;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void *allocate(size_t size) {
    void *memory = malloc(size);
    if (!memory) short_of_memory = true;
    return memory;
}

static void install(void) {
    json_set_alloc_funcs(allocate, free);
}

void io_json_begin(void) {
    pthread_once(&once, install);
    short_of_memory = false;
}

bool io_json_complete(void) {
    return !short_of_memory;
}

json_t *io_json_parse(
    const char *data, size_t size, size_t flags, const char *what, const char *path,
    io_error *error) {
    json_error_t problem = {.text = ""};
    io_json_begin();
    json_t *root = json_loadb(size ? data : "", size, flags, &problem);
    if (root && io_json_complete()) return root;
    json_decref(root);
    if (!io_json_complete()) {
        io_fail(error, "%s: out of memory for its JSON", path);
    } else {
        io_fail(error, "%s: %sis not valid JSON: %s", path, what, problem.text);
    }
    return NULL;
}

char *io_json_text(json_t *root, size_t flags) {
    char *text = root && io_json_complete() ? json_dumps(root, flags) : NULL;
    json_decref(root);
    if (io_json_complete()) return text;
    free(text);
    return NULL;
}
