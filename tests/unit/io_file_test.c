// SPDX-License-Identifier: Apache-2.0
// Maps, atomic writing, and the safetensors writer read back.
#define _GNU_SOURCE
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "safetensors.h"

static char folder[] = "/tmp/ctxkv-io-XXXXXX";

static int make_folder(void **state) {
    (void)state;
    return !mkdtemp(folder) || chdir(folder);
}

static int drop_folder(void **state) {
    (void)state;
    return chdir("/") || rmdir(folder);
}

static void nothing_before_commit(void **state) {
    (void)state;
    io_error error;
    io_writer writer, second;
    assert_true(io_writer_open(&writer, "out", &error));
    assert_true(io_writer_write(&writer, "hello", 5, &error));
    assert_int_equal(access("out", F_OK), -1);
    assert_false(io_writer_open(&second, "other", &error));
    assert_true(io_writer_commit(&writer, &error));
    io_map map;
    assert_true(io_map_open(&map, "out", &error));
    assert_int_equal(map.size, 5);
    assert_memory_equal(map.data, "hello", 5);
    io_map_close(&map);
    unlink("out");
}

static void abort_leaves_nothing(void **state) {
    (void)state;
    io_error error;
    io_writer writer;
    for (int by_signal = 0; by_signal < 2; ++by_signal) {
        assert_true(io_writer_open(&writer, "out", &error));
        assert_true(io_writer_write(&writer, "x", 1, &error));
        assert_int_equal(access(writer.temporary, F_OK), 0);
        char *temporary = strdup(writer.temporary);
        if (by_signal) io_writer_abort_on_signal();
        if (by_signal) assert_int_equal(access(temporary, F_OK), -1);
        io_writer_abort(&writer);
        assert_int_equal(access(temporary, F_OK), -1);
        assert_int_equal(access("out", F_OK), -1);
        free(temporary);
    }
}

static void wrong_targets(void **state) {
    (void)state;
    io_error error;
    io_writer writer;
    io_map map;
    assert_int_equal(mkdir("d", 0700), 0);
    static const char *const names[] = {"", "d", "/dev/null", "none/out"};
    for (size_t i = 0; i < sizeof names / sizeof *names; ++i) {
        error.text[0] = 0;
        assert_false(io_writer_open(&writer, names[i], &error));
        assert_true(strlen(error.text) > 10);
    }
    assert_false(io_map_open(&map, "d", &error));
    assert_non_null(strstr(error.text, "folder"));
    assert_false(io_map_open(&map, "none", &error));
    rmdir("d");
}

static void written_is_read(void **state) {
    (void)state;
    io_error error;
    uint16_t words[6] = {1, 2, 3, 4, 5, 0xFFFF};
    int64_t number = -7;
    const io_entry entries[] = {
        {"n", IO_I64, 0, {0}, &number},
        {"w", IO_BF16, 2, {2, 3}, words},
        {"e", IO_F32, 1, {0}, words}};
    assert_true(io_safetensors_write("f", entries, 3, NULL, NULL, &error));
    io_safetensors file;
    assert_true(io_safetensors_open(&file, "f", &error));
    assert_int_equal(file.count, 3);
    const io_tensor *w = io_safetensors_find(&file, "w");
    assert_non_null(w);
    assert_int_equal(w->dtype, IO_BF16);
    assert_int_equal(w->rank, 2);
    assert_int_equal(w->shape[1], 3);
    assert_memory_equal(w->data, words, sizeof words);
    assert_int_equal((uintptr_t)io_safetensors_find(&file, "n")->data % 8, 0);
    assert_int_equal(io_safetensors_find(&file, "e")->bytes, 0);
    assert_null(io_safetensors_find(&file, "x"));
    io_safetensors_close(&file);
    unlink("f");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nothing_before_commit), cmocka_unit_test(abort_leaves_nothing),
        cmocka_unit_test(wrong_targets), cmocka_unit_test(written_is_read)};
    return cmocka_run_group_tests(tests, make_folder, drop_folder);
}
