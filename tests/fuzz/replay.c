// SPDX-License-Identifier: Apache-2.0
// Runs a fuzz target on every file of the folders given: for compilers without libFuzzer.
#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

// The input in a block of exactly its size, so that a sanitizer sees a read past the end.
static int run_file(const char *path) {
    FILE *file = fopen(path, "rb");
    if (!file) return 1;
    uint8_t *data = NULL;
    size_t size = 0, room = 0, got = 1;
    while (got) {
        if (size == room) data = realloc(data, room = room * 2 + 4096);
        if (!data) abort();
        got = fread(data + size, 1, room - size, file);
        size += got;
    }
    fclose(file);
    uint8_t *exact = malloc(size ? size : 1);
    if (!exact) abort();
    memcpy(exact, data, size);
    free(data);
    LLVMFuzzerTestOneInput(exact, size);
    // Every cut of a small input is an input, too.
    for (size_t cut = 0; cut < size && size < 4096; ++cut) {
        uint8_t *part = malloc(cut ? cut : 1);
        if (!part) abort();
        memcpy(part, exact, cut);
        LLVMFuzzerTestOneInput(part, cut);
        free(part);
    }
    free(exact);
    return 0;
}

int main(int argc, char **argv) {
    int count = 0;
    for (int i = 1; i < argc; ++i) {
        DIR *folder = opendir(argv[i]);
        if (!folder) return 2;
        for (struct dirent *entry; (entry = readdir(folder));) {
            char path[4096];
            if (entry->d_name[0] == '.') continue;
            snprintf(path, sizeof path, "%s/%s", argv[i], entry->d_name);
            if (run_file(path)) return 2;
            ++count;
        }
        closedir(folder);
    }
    printf("%d inputs\n", count);
    return count ? 0 : 2;
}
