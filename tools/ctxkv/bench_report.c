// SPDX-License-Identifier: Apache-2.0
// Tables, JSON and comparison of bench results.
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "bench.h"
#include "file.h"
#include "json.h"

static const char *device_text(const bench *all, char *to, size_t size) {
    const ctxkv_device_info *info = &all->place.info;
    if (all->place.memory) {
        snprintf(to, size, "%s, sm_%d", info->name, info->cuda_arch);
    } else {
        snprintf(
            to, size, "%s, %s tier, %d threads", info->name, cli_tier_name(info->cpu_used),
            info->threads);
    }
    return to;
}

static void add(char *to, size_t size, const char *text) {
    size_t used = strlen(to);
    snprintf(to + used, size - used, "%s%s", used ? ", " : "", text);
}

const char *bench_options(const bench *all, char *to, size_t size) {
    static const char *const tables[] = {"", "fp16 table", "fp32 table"};
    const io_config *draft = &all->draft;
    char scale[32], rotary[48];
    snprintf(scale, sizeof scale, "V scale %g", (double)draft->v_scale);
    snprintf(rotary, sizeof rotary, "rotary_dim %" PRId64, draft->rotary_dim);
    *to = 0;
    if (draft->bias) add(to, size, "bias");
    if (draft->v_scale != 0) add(to, size, scale);
    if (draft->zero_centered) add(to, size, "1 + w");
    if (!draft->affine) add(to, size, "norms without weights");
    if (!draft->rope) add(to, size, "no RoPE");
    if (!draft->rope) return to;
    if (draft->rotary_dim != all->head_dim) add(to, size, rotary);
    if (all->family != IO_FAMILY_MUSE && !draft->neox) add(to, size, "GPT-J pairs");
    if (all->table_type) add(to, size, tables[all->table_type]);
    if (all->layer_tables) add(to, size, "a table for each layer");
    return to;
}

void bench_print_header(const bench *all) {
    char text[256], options[160];
    if (all->csv) {
        puts(
            "op,heads,rows,layers,hidden_size,head_dim,median_us,p10_us,p90_us,samples,gmac_s,gb_s,"
            "copy_share,floor_us,ratio");
        return;
    }
    bench_options(all, options, sizeof options);
    printf(
        "%s; %s, %s caches%s%s\ncopy %.1f GB/s, read %.1f GB/s, %.1f GMAC/s",
        device_text(all, text, sizeof text), io_family_name((io_family)all->family),
        cli_cache_names[all->cache_type], *options ? ", " : "", options, all->copy, all->read,
        all->rate);
    if (all->replay) printf(", an empty kernel %.2f us", all->launch);
    printf(
        "%s\n%-10s %5s %6s %11s %11s %11s %10s %8s %11s %8s%s\n",
        all->unchecked ? "; bits not compared" : "", "op", "heads", "rows", "median us", "p10",
        "p90", "GMAC/s", "GB/s", "floor us", "of floor", all->compare ? "  new/old" : "");
}

void bench_print(const bench *all, const bench_result *r) {
    double ratio = r->old > 0 ? r->median / r->old : 0;
    if (all->csv) {
        printf(
            "%s,%" PRId64 ",%" PRId64 ",%" PRId64 ",%" PRId64 ",%" PRId64
            ",%.3f,%.3f,%.3f,%d,%.4f,%.4f,%.4f,%.4f,",
            r->op, r->heads, r->rows, r->layers, r->hidden_size, r->head_dim, r->median, r->p10,
            r->p90, r->samples, r->gmac, r->gigabytes, r->share, r->floor);
        printf(ratio > 0 ? "%.4f\n" : "\n", ratio);
        return;
    }
    char gmac[32] = "-";
    if (r->gmac > 0) snprintf(gmac, sizeof gmac, "%.2f", r->gmac);
    printf(
        "%-10s %5" PRId64 " %6" PRId64 " %11.2f %11.2f %11.2f %10s %8.2f %11.2f %6.0f %%", r->op,
        r->heads, r->rows, r->median, r->p10, r->p90, gmac, r->gigabytes, r->floor,
        100 * r->floor / r->median);
    if (ratio > 0) printf("%9.3f", ratio);
    putchar('\n');
    fflush(stdout);
}

static json_t *result_json(const bench_result *r) {
    return json_pack(
        "{s:s, s:I, s:I, s:I, s:I, s:I, s:f, s:f, s:f, s:i, s:i, s:f, s:f, s:f, s:f}", "op", r->op,
        "heads", (json_int_t)r->heads, "rows", (json_int_t)r->rows, "layers", (json_int_t)r->layers,
        "hidden_size", (json_int_t)r->hidden_size, "head_dim", (json_int_t)r->head_dim, "median_us",
        r->median, "p10_us", r->p10, "p90_us", r->p90, "samples", r->samples, "graph_calls",
        r->calls, "gmac_s", r->gmac, "gb_s", r->gigabytes, "copy_share", r->share, "floor_us",
        r->floor);
}

bool bench_write_json(const bench *all) {
    if (!all->json) return true;
    const ctxkv_device_info *info = &all->place.info;
    char options[160];
    io_json_begin();
    json_t *list = json_array();
    for (size_t i = 0; i < all->count; ++i) {
        json_array_append_new(list, result_json(&all->results[i]));
    }
    json_t *root = json_pack(
        "{s:s, s:s, s:s, s:s, s:i, s:i, s:i, s:s, s:s, s:s, s:b, s:f, s:f, s:f, s:f, s:o}",
        "version", ctxkv_version(), "device", all->place.memory ? "cuda" : "cpu", "name",
        info->name, "tier", all->place.memory ? "cuda" : cli_tier_name(info->cpu_used), "threads",
        info->threads, "driver", info->driver, "cublas", info->cublas, "family",
        io_family_name((io_family)all->family), "cache_type", cli_cache_names[all->cache_type],
        "options", bench_options(all, options, sizeof options), "checked",
        !all->unchecked && all->options.projection != CTXKV_PROJECTION_CUBLAS, "copy_gb_s",
        all->copy, "read_gb_s", all->read, "gmac_s", all->rate, "empty_kernel_us", all->launch,
        "results", list);
    char *text = io_json_text(root, JSON_INDENT(2) | JSON_REAL_PRECISION(8));
    io_error error;
    if (!text) io_fail(&error, "%s", io_json_complete() ? "no JSON" : "out of memory for the JSON");
    bool ok = text && io_write_text(all->json, text, &error);
    if (!ok) cli_fail("--json: %s", error.text);
    free(text);
    return ok;
}

bool bench_load_old(bench *all, void **old) {
    io_map map;
    io_error error;
    if (!all->compare) return true;
    if (!io_map_open(&map, all->compare, &error)) {
        cli_fail("--compare: %s", error.text);
        return false;
    }
    json_t *root = io_json_parse((const char *)map.data, map.size, 0, "", all->compare, &error);
    io_map_close(&map);
    bool ok = json_is_array(json_object_get(root, "results"));
    if (!root) {
        cli_fail("--compare: %s; must be a file written by bench --json", error.text);
    } else if (!ok) {
        cli_fail("--compare: %s: must be a file written by bench --json", all->compare);
    }
    if (!ok) json_decref(root);
    *old = ok ? root : NULL;
    return ok;
}

const char *bench_old_name(const bench *all, const void *old) {
    const char *name = json_string_value(json_object_get(old, "name"));
    return name && strcmp(name, all->place.info.name) ? name : NULL;
}

// Files of before these keys were written had neither.
static bool same_text(const json_t *root, const char *key, const char *usual, const char *value) {
    const char *text = json_string_value(json_object_get(root, key));
    return !strcmp(text ? text : usual, value);
}

static bool same_kind(const bench *all, const json_t *root) {
    char options[160];
    const char *family = io_family_name((io_family)all->family);
    return same_text(root, "family", family, family) &&
           same_text(root, "cache_type", "bf16", cli_cache_names[all->cache_type]) &&
           same_text(root, "options", "", bench_options(all, options, sizeof options));
}

static bool same(const json_t *item, const char *key, int64_t value) {
    const json_t *number = json_object_get(item, key);
    return json_is_integer(number) && json_integer_value(number) == value;
}

void bench_match_old(const bench *all, bench_result *r, const void *old) {
    size_t index;
    const json_t *item;
    if (!old || !same_kind(all, old)) return;
    json_array_foreach(json_object_get(old, "results"), index, item) {
        const char *op = json_string_value(json_object_get(item, "op"));
        if (op && !strcmp(op, r->op) && same(item, "heads", r->heads) &&
            same(item, "rows", r->rows) && same(item, "layers", r->layers) &&
            same(item, "hidden_size", r->hidden_size) && same(item, "head_dim", r->head_dim)) {
            r->old = json_number_value(json_object_get(item, "median_us"));
        }
    }
}

void bench_free_old(void *old) {
    json_decref((json_t *)old);
}
