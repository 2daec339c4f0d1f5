// SPDX-License-Identifier: Apache-2.0
// From a draft's weights to a chain: descriptors of both families.
#include <stdlib.h>

#include "place.h"

typedef struct parts {
    const DLTensor **layer_norms, **weights;
    DLTensor hidden, bias, k_norm;
    DLTensor *copies; // device copies of the layer norms and weights
} parts;

// The view with its data where the device can read it.
static bool moved(cli_place *place, DLTensor *to, const DLTensor *from) {
    size_t bytes = from->dtype.bits / 8u;
    for (int i = 0; i < from->ndim; ++i) bytes *= (size_t)from->shape[i];
    *to = *from;
    to->device = place->where;
    to->data = cli_share(place, from->data, bytes);
    return to->data != NULL;
}

static bool gather(parts *all, cli_place *place, const io_draft *draft) {
    size_t layers = (size_t)draft->config.layers;
    all->layer_norms = calloc(layers, sizeof *all->layer_norms);
    all->weights = calloc(layers * 2, sizeof *all->weights);
    all->copies = calloc(layers * 3, sizeof *all->copies);
    if (!all->layer_norms || !all->weights || !all->copies) {
        cli_fail("out of memory for the weights' addresses");
        return false;
    }
    for (size_t i = 0; i < layers * 2; ++i) {
        if (!moved(place, &all->copies[i], &draft->weights[i].tensor)) return false;
        all->weights[i] = &all->copies[i];
    }
    for (size_t i = 0; draft->layer_norms && i < layers; ++i) {
        DLTensor *copy = &all->copies[layers * 2 + i];
        if (!moved(place, copy, &draft->layer_norms[i].tensor)) return false;
        all->layer_norms[i] = copy;
    }
    return (!draft->hidden.tensor.data || moved(place, &all->hidden, &draft->hidden.tensor)) &&
           (!draft->bias.tensor.data || moved(place, &all->bias, &draft->bias.tensor)) &&
           (!draft->k_norm.tensor.data || moved(place, &all->k_norm, &draft->k_norm.tensor));
}

typedef struct descriptors {
    ctxkv_chain_desc chain;
    ctxkv_norms_desc norms;
    ctxkv_projection_desc projection;
    ctxkv_store_desc store;
} descriptors;

static void describe_norms(
    ctxkv_norms_desc *desc, const parts *all, const io_draft *draft, const cli_options *options) {
    const io_config *config = &draft->config;
    bool muse = config->family == IO_FAMILY_MUSE;
    float centre = config->zero_centered ? 1.0f : 0.0f;
    ctxkv_norms_desc_init(desc);
    desc->hidden_size = config->hidden_size;
    desc->num_layers = config->layers;
    desc->hidden = (ctxkv_norm){muse ? CTXKV_NORM_ROW : CTXKV_NORM_RMS, config->eps, centre, 0};
    desc->layer = desc->hidden;
    if (!muse) desc->layer.kind = CTXKV_NORM_ABSENT;
    if (all->hidden.data) desc->hidden_weight = &all->hidden;
    if (draft->layer_norms) {
        desc->layer_weights = all->layer_norms;
        desc->layer_weight_count = config->layers;
    }
    desc->numerics = (ctxkv_numerics)options->numerics;
}

static void describe(
    descriptors *desc, const parts *all, const io_draft *draft, const DLTensor *table,
    const cli_options *options, int64_t max_rows, bool checked) {
    const io_config *config = &draft->config;
    bool muse = config->family == IO_FAMILY_MUSE;
    describe_norms(&desc->norms, all, draft, options);
    ctxkv_projection_desc_init(&desc->projection);
    desc->projection.hidden_size = config->hidden_size;
    desc->projection.num_layers = config->layers;
    desc->projection.num_kv_heads = draft->kv_heads;
    desc->projection.head_dim = config->head_dim;
    desc->projection.weights = all->weights;
    desc->projection.weight_count = config->layers * 2;
    if (all->bias.data) desc->projection.bias = &all->bias;
    desc->projection.mode = (ctxkv_projection_mode)options->projection;
    desc->projection.max_rows = max_rows;
    ctxkv_store_desc_init(&desc->store);
    desc->store.num_layers = config->layers;
    desc->store.num_kv_heads = draft->kv_heads;
    desc->store.head_dim = config->head_dim;
    desc->store.k_norm = muse ? CTXKV_K_NORM_PLAIN : CTXKV_K_NORM_RMS;
    desc->store.k_eps = config->eps;
    if (all->k_norm.data) desc->store.k_norm_weight = &all->k_norm;
    desc->store.rope = !table ? CTXKV_ROPE_NONE : muse ? CTXKV_ROPE_GPTJ : CTXKV_ROPE_NEOX;
    desc->store.cos_sin = table;
    desc->store.checked = checked;
    ctxkv_chain_desc_init(&desc->chain);
    desc->chain.norms = &desc->norms;
    desc->chain.projection = &desc->projection;
    desc->chain.store = &desc->store;
    desc->chain.max_rows = max_rows;
}

bool cli_chain_make(
    ctxkv_chain **chain, cli_place *place, const io_draft *draft, const DLTensor *table,
    const cli_options *options, int64_t max_rows, bool checked) {
    parts all = {0};
    bool ok = gather(&all, place, draft);
    if (ok) {
        descriptors desc;
        describe(&desc, &all, draft, table, options, max_rows, checked);
        ok = !ctxkv_chain_create(place->device, &desc.chain, chain);
        if (!ok) cli_fail_status("the chain cannot be made");
    }
    free(all.layer_norms);
    free(all.weights);
    free(all.copies);
    return ok;
}
