// SPDX-License-Identifier: Apache-2.0
// From a draft's weights to a chain: the descriptors of each family.
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
    size_t layers = (size_t)draft->config.layers, weights = layers * (size_t)draft->parts;
    all->layer_norms = calloc(layers, sizeof *all->layer_norms);
    all->weights = calloc(weights, sizeof *all->weights);
    all->copies = calloc(layers * 3, sizeof *all->copies);
    if (!all->layer_norms || !all->weights || !all->copies) {
        cli_fail("out of memory for the weights' addresses");
        return false;
    }
    for (size_t i = 0; i < weights; ++i) {
        if (!moved(place, &all->copies[i], &draft->weights[i].tensor)) return false;
        all->weights[i] = &all->copies[i];
    }
    for (size_t i = 0; draft->layer_norms && i < layers; ++i) {
        DLTensor *copy = &all->copies[weights + i];
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
    if (config->family == IO_FAMILY_LAGUNA)
        desc->hidden.kind = CTXKV_NORM_ABSENT;
    else if (!muse)
        desc->layer.kind = CTXKV_NORM_ABSENT;
    if (all->hidden.data) desc->hidden_weight = &all->hidden;
    if (draft->layer_norms) {
        desc->layer_weights = all->layer_norms;
        desc->layer_weight_count = config->layers;
    }
    desc->numerics = (ctxkv_numerics)options->numerics;
}

static void describe_store(
    ctxkv_store_desc *desc, const parts *all, const io_draft *draft, const cli_store *store) {
    const io_config *config = &draft->config;
    bool muse = config->family == IO_FAMILY_MUSE;
    ctxkv_store_desc_init(desc);
    desc->num_layers = config->layers;
    desc->num_kv_heads = draft->kv_heads;
    desc->head_dim = config->head_dim;
    desc->k_norm = muse ? CTXKV_K_NORM_PLAIN : CTXKV_K_NORM_RMS;
    desc->k_eps = config->eps;
    if (all->k_norm.data) desc->k_norm_weight = &all->k_norm;
    desc->k_gain_centre = config->zero_centered ? 1.0f : 0.0f;
    if (store->tables) {
        desc->rope = config->neox ? CTXKV_ROPE_NEOX : CTXKV_ROPE_GPTJ;
        desc->rotary_dim = config->rotary_dim;
        if (store->table_count == 1) desc->cos_sin = store->tables[0];
        if (store->table_count > 1) {
            desc->layer_cos_sin = store->tables;
            desc->layer_cos_sin_count = store->table_count;
        }
    }
    desc->v_scale = config->v_scale;
    if (draft->parts == 1) {
        desc->v_from_k = 1;
        desc->v_norm = CTXKV_V_NORM_RMS;
        desc->v_eps = config->eps;
    }
    desc->cache_type = store->cache_type;
    if (store->k_scales) {
        desc->k_scales = store->k_scales;
        desc->v_scales = store->v_scales;
        desc->scale_count = config->layers;
    }
    desc->checked = store->checked;
}

static void describe(
    descriptors *desc, const parts *all, const io_draft *draft, const cli_store *store,
    const cli_options *options, int64_t max_rows) {
    const io_config *config = &draft->config;
    describe_norms(&desc->norms, all, draft, options);
    ctxkv_projection_desc_init(&desc->projection);
    desc->projection.hidden_size = config->hidden_size;
    desc->projection.num_layers = config->layers;
    desc->projection.num_kv_heads = draft->kv_heads;
    desc->projection.head_dim = config->head_dim;
    desc->projection.weights = all->weights;
    desc->projection.weight_count = config->layers * draft->parts;
    desc->projection.k_only = draft->parts == 1;
    if (all->bias.data) desc->projection.bias = &all->bias;
    if (config->family == IO_FAMILY_LAGUNA) desc->projection.bias_add = CTXKV_BIAS_AFTER;
    desc->projection.mode = (ctxkv_projection_mode)options->projection;
    desc->projection.max_rows = max_rows;
    describe_store(&desc->store, all, draft, store);
    ctxkv_chain_desc_init(&desc->chain);
    desc->chain.norms = &desc->norms;
    desc->chain.projection = &desc->projection;
    desc->chain.store = &desc->store;
    desc->chain.max_rows = max_rows;
}

bool cli_chain_make(
    ctxkv_chain **chain, cli_place *place, const io_draft *draft, const cli_store *store,
    const cli_options *options, int64_t max_rows) {
    parts all = {0};
    bool ok = gather(&all, place, draft);
    if (ok) {
        descriptors desc;
        describe(&desc, &all, draft, store, options, max_rows);
        ok = !ctxkv_chain_create(place->device, &desc.chain, chain);
        if (!ok) cli_fail_status("the chain cannot be made");
    }
    free(all.layer_norms);
    free(all.weights);
    free(all.copies);
    return ok;
}
