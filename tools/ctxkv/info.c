// SPDX-License-Identifier: Apache-2.0
// ctxkv info: what this build and this machine have.
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "json.h"
#include "place.h"

#ifdef __clang__
#define COMPILER __VERSION__
#else
#define COMPILER "gcc " __VERSION__
#endif

typedef struct info_args {
    cli_options options;
    bool json;
} info_args;

static error_t parse(int key, char *text, struct argp_state *state) {
    info_args *args = state->input;
    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = &args->options;
        return 0;
    case 'j':
        args->json = true;
        return 0;
    case ARGP_KEY_ARG:
        return cli_extra(text);
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static const struct argp_option options[] = {
    {"json", 'j', NULL, 0, "Print one JSON object", 0}, {0}};
static const struct argp_child children[] = {{&cli_device_argp, 0, NULL, 0}, {NULL, 0, NULL, 0}};
static const struct argp info_argp = {
    .options = options,
    .parser = parse,
    .children = children,
    .doc = "Tells the version, the CPU tiers found and used, the GPUs or why there are none, and "
           "the build."};

static json_t *tier_list(uint32_t bits) {
    json_t *list = json_array();
    for (uint32_t bit = 1; bit <= CTXKV_CPU_AVX512; bit *= 2) {
        if (bits & bit) json_array_append_new(list, json_string(cli_tier_name(bit)));
    }
    return list;
}

static json_t *describe_gpu(int index) {
    char name[32];
    snprintf(name, sizeof name, "cuda:%d", index);
    json_t *gpu = json_pack("{s:s}", "device", name);
    ctxkv_device *device = NULL;
    ctxkv_device_info info = {.size = sizeof info};
    if (ctxkv_device_open(name, NULL, &device) || ctxkv_device_get_info(device, &info)) {
        json_object_set_new(gpu, "unusable", json_string(ctxkv_last_error()));
    } else {
        json_object_update_new(
            gpu,
            json_pack(
                "{s:s, s:i, s:i, s:i, s:b}", "name", info.name, "arch", info.cuda_arch, "driver",
                info.driver, "cublas", info.cublas, "bits_verified", info.bits_verified));
    }
    ctxkv_device_close(device);
    return gpu;
}

static json_t *describe_cuda(void) {
    json_t *list = json_array();
    int count = ctxkv_cuda_device_count();
    json_t *cuda = json_pack("{s:o}", "devices", list);
    if (!count) json_object_set_new(cuda, "reason", json_string(ctxkv_last_error()));
    for (int i = 0; i < count; ++i) json_array_append_new(list, describe_gpu(i));
    return cuda;
}

static json_t *describe_build(void) {
    return json_pack(
        "{s:s, s:s, s:s}", "compiler", COMPILER, "language",
#ifdef __STDC_VERSION__
        "C11",
#else
        "C",
#endif
        "memory",
#ifdef CTXKV_HAVE_DEVICE_MEMORY
        "host and device"
#else
        "host"
#endif
    );
}

static void print_text(const json_t *all) {
    const json_t *cpu = json_object_get(all, "cpu"), *cuda = json_object_get(all, "cuda"), *item;
    size_t index;
    printf("ctxkv      %s\n", json_string_value(json_object_get(all, "version")));
    printf("cpu        %s\n", json_string_value(json_object_get(cpu, "name")));
    printf("tiers      found:");
    json_array_foreach(json_object_get(cpu, "found"), index, item) {
        printf(" %s", json_string_value(item));
    }
    printf("; used: %s\n", json_string_value(json_object_get(cpu, "used")));
    printf(
        "threads    %" JSON_INTEGER_FORMAT "\n",
        json_integer_value(json_object_get(cpu, "threads")));
    const char *reason = json_string_value(json_object_get(cuda, "reason"));
    if (reason) printf("cuda       none: %s\n", reason);
    json_array_foreach(json_object_get(cuda, "devices"), index, item) {
        const char *why = json_string_value(json_object_get(item, "unusable"));
        printf("cuda       %s ", json_string_value(json_object_get(item, "device")));
        if (why) {
            printf("unusable: %s\n", why);
            continue;
        }
        printf(
            "%s, sm_%d, driver %d, cuBLAS %d, bits %s\n",
            json_string_value(json_object_get(item, "name")),
            (int)json_integer_value(json_object_get(item, "arch")),
            (int)json_integer_value(json_object_get(item, "driver")),
            (int)json_integer_value(json_object_get(item, "cublas")),
            json_is_true(json_object_get(item, "bits_verified")) ? "verified" : "not verified");
    }
    printf("numerics   %s\n", json_string_value(json_object_get(all, "numerics")));
    printf(
        "build      %s, device memory: %s\n",
        json_string_value(json_object_get(json_object_get(all, "build"), "compiler")),
        json_string_value(json_object_get(json_object_get(all, "build"), "memory")));
}

static void defaults(void *input) {
    cli_options_init(&((info_args *)input)->options);
}

static int run(void *input) {
    info_args *args = input;
    args->options.device = "cpu";
    cli_place place;
    if (!cli_place_open(&place, &args->options)) return 2;
    io_json_begin();
    json_t *all = json_pack(
        "{s:s, s:{s:s, s:o, s:s, s:i}, s:o, s:s, s:o}", "version", ctxkv_version(), "cpu", "name",
        place.info.name, "found", tier_list(place.info.cpu_found), "used",
        cli_tier_name(place.info.cpu_used), "threads", place.info.threads, "cuda", describe_cuda(),
        "numerics",
        "stock = vLLM 0.33.0's chain (row-norm order 'pair' on a CPU and sm_80 to sm_90)", "build",
        describe_build());
    cli_place_close(&place);
    if (!all && io_json_complete()) return cli_fail("a name of this machine is not valid UTF-8");
    if (io_json_complete() && !args->json) print_text(all);
    char *text = io_json_text(all, JSON_INDENT(2));
    if (text && args->json) puts(text);
    if (!text) cli_fail("out of memory for the description");
    free(text);
    return text ? 0 : 2;
}

const cli_command cli_info = {"info",     "Tell what this build and this machine have",
                              &info_argp, sizeof(info_args),
                              defaults,   run};
