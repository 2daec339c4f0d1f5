// SPDX-License-Identifier: Apache-2.0
// Finds and loads cuBLAS. Its versions can differ in bits, so the one in use is reported.
#include "cublas.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../api/lock.h"

static struct ctxkv__cublas real;
static bool loaded;
static const struct ctxkv__cublas *in_use;
static struct ctxkv__lock load_lock;

static const char *const sonames[] = {"libcublas.so.13", "libcublas.so.12"};
static const char *const folders[] = {
    "/usr/local/cuda/lib64/libcublas.so.13", "/usr/local/cuda/lib64/libcublas.so.12"};

// A copy outside the loader's path needs its libcublasLt, which lies beside it.
static void load_neighbour(const char *path) {
    const char *slash = strrchr(path, '/'), *name = slash ? strstr(slash, "libcublas.so") : 0;
    char beside[4096];
    if (!name || strlen(path) + 8 > sizeof beside) return;
    snprintf(
        beside, sizeof beside, "%.*slibcublasLt%s", (int)(name - path), path,
        name + strlen("libcublas"));
    dlopen(beside, RTLD_NOW | RTLD_GLOBAL);
}

static void *open_named(const char *path) {
    load_neighbour(path);
    return dlopen(path, RTLD_NOW | RTLD_LOCAL);
}

static void *find(const char *path, ctxkv_status *status) {
    void *library = 0;
    *status = CTXKV_OK;
    for (int i = 0; !library && i < 2; i++) library = dlopen(sonames[i], RTLD_NOW | RTLD_NOLOAD);
    const char *from = path ? "cublas_path" : "CTXKV_CUBLAS";
    if (!path) path = getenv("CTXKV_CUBLAS");
    if (!library && path && *path) {
        library = open_named(path);
        if (library) return library;
        const char *why = dlerror();
        *status = ctxkv__fail(
            CTXKV_DRIVER, "%s is \"%.200s\", which cannot be loaded (%.150s)", from, path,
            why ? why : "unknown reason");
        return 0;
    }
    for (int i = 0; !library && i < 2; i++) library = open_named(sonames[i]);
    for (int i = 0; !library && i < 2; i++) library = open_named(folders[i]);
    if (!library)
        *status = ctxkv__fail(
            CTXKV_DRIVER, "cuBLAS was not found (libcublas.so.13 or .12): set cublas_path or "
                          "CTXKV_CUBLAS to its path, or ask for projection EXACT");
    return library;
}

static ctxkv_status bind(void *library, struct ctxkv__cublas *b) {
    const struct {
        const char *name;
        void *slot;
        bool required;
    } names[] = {
        {"cublasCreate_v2", &b->create, true},
        {"cublasDestroy_v2", &b->destroy, true},
        {"cublasGetVersion_v2", &b->version, true},
        {"cublasSetStream_v2", &b->set_stream, true},
        {"cublasSetWorkspace_v2", &b->set_workspace, true},
        {"cublasGemmStridedBatchedEx", &b->gemm_strided_batched, true},
        {"cublasGetStatusString", &b->text, false},
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        void *address = dlsym(library, names[i].name);
        if (!address && names[i].required)
            return ctxkv__fail(
                CTXKV_DRIVER, "the cuBLAS found has no %s, must be of CUDA 12 or later",
                names[i].name);
        memcpy(names[i].slot, &address, sizeof address);
    }
    return CTXKV_OK;
}

ctxkv_status ctxkv__cublas_get(const char *path, const struct ctxkv__cublas **cublas) {
    ctxkv_status status = CTXKV_OK;
    ctxkv__lock_take(&load_lock);
    if (!in_use && !loaded) {
        void *library = find(path, &status);
        if (library) status = bind(library, &real);
        loaded = !status;
    }
    *cublas = in_use ? in_use : &real;
    ctxkv__lock_give(&load_lock);
    return status;
}

void ctxkv__cublas_use(const struct ctxkv__cublas *fake) {
    ctxkv__lock_take(&load_lock);
    in_use = fake;
    ctxkv__lock_give(&load_lock);
}

struct ctxkv__spare {
    const struct ctxkv__cublas *cublas;
    void *handle;
    struct ctxkv__spare *next;
};

int ctxkv__cublas_take(
    const struct ctxkv__cublas *b, struct ctxkv__cuda_device *gpu, void **handle) {
    ctxkv__lock_take(&gpu->lock);
    struct ctxkv__spare *spare = gpu->spare_handles;
    if (spare) gpu->spare_handles = spare->next;
    ctxkv__lock_give(&gpu->lock);
    if (!spare) return b->create(handle);
    *handle = spare->handle;
    free(spare);
    return 0;
}

void ctxkv__cublas_give(
    const struct ctxkv__cublas *b, struct ctxkv__cuda_device *gpu, void *handle) {
    struct ctxkv__spare *spare = malloc(sizeof *spare);
    if (!spare) {
        b->destroy(handle);
        return;
    }
    ctxkv__lock_take(&gpu->lock);
    *spare = (struct ctxkv__spare){b, handle, gpu->spare_handles};
    gpu->spare_handles = spare;
    ctxkv__lock_give(&gpu->lock);
}

void ctxkv__cublas_close(struct ctxkv__cuda_device *gpu) {
    while (gpu->spare_handles) {
        struct ctxkv__spare *spare = gpu->spare_handles;
        gpu->spare_handles = spare->next;
        spare->cublas->destroy(spare->handle);
        free(spare);
    }
}

ctxkv_status ctxkv__cublas_fail(const struct ctxkv__cublas *b, int result, const char *doing) {
    return ctxkv__fail(
        result == 3 ? CTXKV_OUT_OF_MEMORY : CTXKV_DRIVER, "%s: cuBLAS status %d (%s)", doing,
        result, b->text ? b->text(result) : "no description");
}
