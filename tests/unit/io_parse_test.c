// SPDX-License-Identifier: Apache-2.0
// config.json, the shard index and the golden csv: what is taken, and what is refused by name.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "checkpoint.h"
#include "config.h"
#include "csv.h"

static bool config_of(const char *text, io_config *config, io_error *error) {
    return io_config_parse(config, text, strlen(text), "config.json", error);
}

#define MUSE "\"hidden_size\": 8192, \"num_hidden_layers\": 5, \"num_key_value_heads\": 16"
#define QWEN                                                                                       \
    "\"architectures\": [\"DFlashDraftModel\"], \"hidden_size\": 4096, \"num_hidden_layers\": 5"

#define LAGUNA                                                                                     \
    "\"architectures\": [\"DFlashLagunaForCausalLM\"], \"hidden_size\": 2048, "                    \
    "\"num_hidden_layers\": 2, \"num_key_value_heads\": 8, \"head_dim\": 128"
#define GEMMA                                                                                      \
    "\"architectures\": [\"Gemma4DSparkModel\"], \"hidden_size\": 2560, \"num_hidden_layers\": "   \
    "2, "                                                                                          \
    "\"num_key_value_heads\": 8, \"head_dim\": 256, \"global_head_dim\": 512, "                    \
    "\"num_global_key_value_heads\": 2"

static void muse_defaults(void **state) {
    (void)state;
    io_config config;
    io_error error;
    assert_true(config_of("{" MUSE "}", &config, &error));
    assert_int_equal(config.family, IO_FAMILY_MUSE);
    assert_int_equal(config.head_dim, 64);
    assert_int_equal(config.kv_heads, 16);
    assert_int_equal(config.max_position, 0);
    assert_true(config.eps == 1e-5f && config.theta == 500000.0f);
    assert_true(config.affine && config.rope && !config.zero_centered && !config.bias);
    assert_true(config_of(
        "{" MUSE
        ", \"rms_norm_eps\": 1e-6, \"norm_affine\": false, \"draft_position_mode\": \"nope\","
        "\"norm_zero_centered_gamma\": true, \"rope_theta\": 10000, \"head_dim\": 64}",
        &config, &error));
    assert_true(config.eps == 1e-6f && config.theta == 10000.0f);
    assert_true(!config.affine && !config.rope && config.zero_centered);
}

static void qwen3_kind(void **state) {
    (void)state;
    io_config config;
    io_error error;
    assert_true(config_of(
        "{" QWEN
        ", \"num_attention_heads\": 32, \"num_key_value_heads\": 8, \"attention_bias\": true,"
        "\"rope_parameters\": {\"rope_theta\": 1000000, \"rope_type\": \"default\"}}",
        &config, &error));
    assert_int_equal(config.family, IO_FAMILY_QWEN3);
    assert_int_equal(config.head_dim, 128);
    assert_true(config.theta == 1e6f && config.bias && !config.rope_scaling[0]);
    assert_true(config.eps == 1e-6f);
    assert_true(config_of(
        "{" QWEN ", \"num_key_value_heads\": 8, \"head_dim\": 256,"
        "\"rope_scaling\": {\"rope_type\": \"yarn\"}}",
        &config, &error));
    assert_string_equal(config.rope_scaling, "yarn");
    assert_true(config_of(
        "{" QWEN ", \"num_key_value_heads\": 8, \"head_dim\": 256, \"norm_affine\": false}",
        &config, &error));
    assert_false(config.affine);
    // As the speculators library writes it: the layers' keys lie one level down.
    assert_true(config_of(
        "{\"speculators_model_type\": \"dspark\", \"architectures\": [\"TrainingOnly\"], "
        "\"head_dim\": 512, \"transformer_layer_config\": {\"model_type\": \"llama\", "
        "\"hidden_size\": 4096, \"num_hidden_layers\": 3, \"num_attention_heads\": 32, "
        "\"rope_theta\": 5}}",
        &config, &error));
    assert_int_equal(config.family, IO_FAMILY_QWEN3);
    assert_int_equal(config.layers, 3);
    assert_int_equal(config.head_dim, 128);
    assert_true(config.theta == 5.0f);
}

static void other_kinds(void **state) {
    (void)state;
    io_config config;
    io_error error;
    assert_true(config_of(
        "{" LAGUNA ", \"layer_types\": [\"sliding_attention\", \"sliding_attention\"],"
        "\"rope_parameters\": {\"full_attention\": {\"rope_theta\": 5}, \"sliding_attention\": "
        "{\"rope_theta\": 7, \"partial_rotary_factor\": 0.5}}}",
        &config, &error));
    assert_int_equal(config.family, IO_FAMILY_LAGUNA);
    assert_int_equal(config.rotary_dim, 64);
    assert_true(config.theta == 7.0f && config.neox);
    assert_true(config_of(
        "{" LAGUNA ", \"layer_types\": [\"sliding_attention\", \"sliding_attention\"],"
        "\"rope_theta\": 3, \"swa_rope_parameters\": {\"rope_theta\": 9}}",
        &config, &error));
    assert_true(config.theta == 9.0f && config.rotary_dim == 128);
    assert_true(config_of(
        "{\"architectures\": [\"LagunaForCausalLM\"], \"dflash_config\": {}, \"hidden_size\": 64, "
        "\"num_hidden_layers\": 1, \"num_attention_heads\": 1}",
        &config, &error));
    assert_int_equal(config.family, IO_FAMILY_LAGUNA);
    assert_true(config_of(
        "{" GEMMA ", \"attention_k_eq_v\": true, \"rope_parameters\": {\"full_attention\": "
        "{\"rope_type\": \"proportional\", \"partial_rotary_factor\": 0.25}}}",
        &config, &error));
    assert_int_equal(config.family, IO_FAMILY_GEMMA4);
    assert_int_equal(config.head_dim, 512);
    assert_int_equal(config.kv_heads, 2);
    assert_int_equal(config.rotary_dim, 512); // such a table spans the head
    assert_string_equal(config.rope_scaling, "proportional");
    assert_true(config_of(
        "{" QWEN ", \"num_key_value_heads\": 8, \"head_dim\": 128, \"is_neox_style\": false,"
        "\"partial_rotary_factor\": 0.25, \"dflash_config\": {\"attention_value_scale\": 0.5}}",
        &config, &error));
    assert_true(!config.neox && config.rotary_dim == 32 && config.v_scale == 0.5f);
    static const char *const qwen3[] = {
        "DFlash2DraftModel", "Qwen3XPressModel", "LiLiCorrDraftModel", "MuseGlimmerAssistantModel"};
    for (int i = 0; i < 4; ++i) {
        char text[256];
        snprintf(
            text, sizeof text,
            "{\"architectures\": [\"%s\"], \"hidden_size\": 64, \"num_hidden_layers\": 1, "
            "\"num_key_value_heads\": 1, \"head_dim\": 64}",
            qwen3[i]);
        assert_true(config_of(text, &config, &error));
        assert_int_equal(config.family, IO_FAMILY_QWEN3);
    }
}

static void refused_configs(void **state) {
    (void)state;
    static const char *const cases[][2] = {
        {"{" QWEN ", \"num_key_value_heads\": 8, \"head_dim\": 96}", "head_dim"},
        {"{" LAGUNA ", \"is_neox_style\": false}", "is_neox_style is false, must be true"},
        {"{" LAGUNA ", \"layer_types\": [\"full_attention\"]}", "layer_types"},
        {"{" LAGUNA ", \"layer_types\": [\"full_attention\", \"sliding_attention\"]}",
         "one type for all layers"},
        {"{" GEMMA "}", "attention_k_eq_v is missing, must be true"},
        {"{" GEMMA ", \"attention_k_eq_v\": true, \"layer_types\": [\"full_attention\", "
         "\"sliding_attention\"]}",
         "must be full_attention for every layer"},
        {"{" LAGUNA ", \"partial_rotary_factor\": 0}", "partial_rotary_factor is 0, must be in"},
        {"{" LAGUNA ", \"partial_rotary_factor\": 0.26}", "even number of columns"},
        {"{" QWEN ", \"num_key_value_heads\": 8, \"head_dim\": 128, \"dflash_config\": "
         "{\"attention_value_scale\": 0}}",
         "attention_value_scale is 0, must be a finite number, not 0"},
        {"{" QWEN ", \"num_key_value_heads\": 8, \"head_dim\": 128, \"rope_parameters\": "
         "{\"full_attention\": {}}}",
         "one set for all layers"},
        {"{\"architectures\": [\"DSparkDraftModel\"]}", "MLA draft"},
        {"{\"architectures\": [\"DSparkV41DraftModel\"]}", "MLA draft"},
        {"{\"architectures\": [\"K3DSparkModel\"]}", "MLA draft"},
        {"{\"architectures\": [\"Qwen3DSparkModel\"], \"model_type\": \"deepseek_v4\"}", "MLA"},
        {"{\"architectures\": [\"DFlash2BeamDraftModel\"]}", "a kernel of its own"},
        {"{" QWEN ", \"num_key_value_heads\": 8, \"head_dim\": 128, \"kv_lora_rank\": 512}",
         "kv_lora_rank"},
        {"{\"architectures\": [\"LagunaForCausalLM\"]}", "LagunaForCausalLM, must be a MuseSpark"},
        {"{\"speculators_model_type\": \"eagle3\", \"transformer_layer_config\": {}}",
         "speculators_model_type is \"eagle3\", must be dflash, dflash2 or dspark"},
        {"{\"speculators_model_type\": \"dflash\", " QWEN "}",
         "transformer_layer_config is missing, must be an object"},
        {"{\"speculators_model_type\": \"dflash\", \"transformer_layer_config\": {" QWEN "}, "
         "\"quantization_config\": {}}",
         "quantised weights are not supported"},
        {"{\"architectures\": [\"KimiK3DraftModel\"]}", "Kimi"},
        {"{\"architectures\": [\"Qwen3ForCausalLM\"]}", "Qwen3ForCausalLM"},
        {"{" MUSE ", \"rms_norm_eps\": 1e999}", "JSON"},
        {"{" MUSE ", \"rms_norm_eps\": 1e39}", "rms_norm_eps"},
        {"{" MUSE ", \"num_hidden_layers\": 5}", "duplicate"},
        {"{" MUSE ", \"max_position_embeddings\": 99999999999}", "max_position_embeddings"},
        {"{\"hidden_size\": 8192.0}", "hidden_size"},
        {"[7]", "object"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; ++i) {
        io_config config;
        io_error error;
        assert_false(config_of(cases[i][0], &config, &error));
        if (!strstr(error.text, cases[i][1])) fail_msg("%s: %s", cases[i][1], error.text);
        assert_non_null(strstr(error.text, "config.json"));
    }
}

static void index_names(void **state) {
    (void)state;
    io_error error;
    io_checkpoint index;
    const char *good = "{\"weight_map\": {\"a\": \"x\", \"b\": \"y z\", \"c\": \"x\"}}";
    assert_true(io_index_parse(&index, good, strlen(good), "i", &error));
    assert_int_equal(index.count, 2);
    assert_string_equal(index.shard_names[1], "y z");
    io_checkpoint_close(&index);
    static const char *const bad[] = {
        "{\"weight_map\": {\"a\": \"../x\"}}",
        "{\"weight_map\": {\"a\": \"/x\"}}",
        "{\"weight_map\": {\"a\": \".\"}}",
        "{\"weight_map\": {\"a\": null}}",
        "{\"weight_map\": {\"a\": \"x\\u0000y\"}}",
        "{}",
        ""};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; ++i) {
        assert_false(io_index_parse(&index, bad[i], strlen(bad[i]), "i", &error));
    }
}

static void csv_cells(void **state) {
    (void)state;
    io_error error;
    io_csv csv;
    const char *text = "name,n,x,crc\r\none,12,1e-05,0012abCD 00000001\n\ntwo,-1,nan,12\n";
    assert_true(io_csv_parse(&csv, text, strlen(text), "t.csv", &error));
    assert_int_equal(csv.rows, 2);
    assert_int_equal(csv.columns, 4);
    int64_t number;
    float real;
    uint32_t words[2];
    assert_true(io_csv_integer(&csv, 0, "n", 0, 12, &number, &error));
    assert_int_equal(number, 12);
    assert_false(io_csv_integer(&csv, 0, "n", 0, 11, &number, &error));
    assert_false(io_csv_integer(&csv, 1, "n", 0, 12, &number, &error));
    assert_false(io_csv_integer(&csv, 0, "x", 0, 12, &number, &error));
    assert_false(io_csv_integer(&csv, 0, "none", 0, 12, &number, &error));
    assert_true(io_csv_number(&csv, 0, "x", &real, &error) && real == 1e-5f);
    assert_false(io_csv_number(&csv, 1, "x", &real, &error));
    assert_true(io_csv_words(&csv, 0, "crc", words, 2, &error));
    assert_int_equal(words[0], 0x12ABCD);
    assert_false(io_csv_words(&csv, 0, "crc", words, 1, &error));
    assert_false(io_csv_words(&csv, 1, "crc", words, 1, &error));
    io_csv_free(&csv);
    static const char *const bad[] = {"", "\n\n", "a,b\n1\n", "a\n1,2\n"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; ++i) {
        assert_false(io_csv_parse(&csv, bad[i], strlen(bad[i]), "t.csv", &error));
    }
    assert_false(io_csv_parse(&csv, "a\0b", 3, "t.csv", &error));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(muse_defaults), cmocka_unit_test(qwen3_kind),
        cmocka_unit_test(other_kinds),   cmocka_unit_test(refused_configs),
        cmocka_unit_test(index_names),   cmocka_unit_test(csv_cells)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
