// SPDX-License-Identifier: Apache-2.0
// ctxkv: the context K/V chain of speculative-decoding draft models, with the same bits everywhere.
//
//   x [T,D] -> hidden norm -> layer norms n [L,T,D] -> K/V projection kv [L,T,2,H,head_dim]
//           -> K norm, RoPE -> paged KV cache of each layer
//
// Conventions. Tensors are DLPack DLTensors: nothing is copied, strides count elements, NULL
// strides mean row-major. T: context rows, D: hidden size, L: draft layers, H: KV heads of this
// rank, R: slots of a layer (R <= T). Option and descriptor structs begin with their own size and
// are filled by their _init function; fields added later keep old callers working. Its _sized form,
// for bindings, fills size bytes: never more than the caller's struct has. "SPEC 3.4" is a rule of
// docs/numerics.md, which says what was measured for it.
//
// Errors. Every function that can fail returns a ctxkv_status and leaves a sentence for
// ctxkv_last_error(). Any may give INVALID_ARGUMENT, or UNSUPPORTED for a request that is valid but
// not covered; then nothing was written. Creating a plan may also give OUT_OF_MEMORY, on a CUDA
// device CAPTURING, NO_KERNEL and DRIVER, too, and leaves NULL in its last argument. A run may give
// NOT_BOUND before caches are bound, OUT_OF_MEMORY on the host, and DRIVER where a launch fails.
// Destroying takes NULL.
//
// Threads. A device may be shared by threads. A plan may run on several threads or streams at once
// if each call brings its own workspace (ctxkv_chain_call); binding caches and destroying may not
// overlap a run. Runs of CUDA plans launch kernels only (no allocation, no synchronisation), so
// they may be captured in CUDA graphs. Create plans before a capture begins: during one it is
// refused where the driver tells of it, and harmless to the capture where it does not.
#ifndef CTXKV_CTXKV_H
#define CTXKV_CTXKV_H

#include <stddef.h>
#include <stdint.h>

#include "dlpack.h"
#include "version.h"

#if defined(_WIN32)
#define CTXKV_API
#define CTXKV_INLINE static inline
#else
#define CTXKV_API __attribute__((visibility("default")))
#define CTXKV_INLINE static inline __attribute__((unused))
#endif

#ifdef __cplusplus
extern "C" {
#endif

// ---- status --------------------------------------------------------------------------------
typedef enum ctxkv_status {
#define CTXKV_ERROR(name, value, text) CTXKV_##name = value,
#include "errors.inc"
#undef CTXKV_ERROR
    CTXKV_STATUS_FORCE_INT = 0x7fffffff
} ctxkv_status;

// "0.1.0"
CTXKV_API const char *ctxkv_version(void);
// "INVALID_ARGUMENT" and the like; "?" for a value that is no status.
CTXKV_API const char *ctxkv_status_name(ctxkv_status status);
// What the status means, in a few words.
CTXKV_API const char *ctxkv_status_text(ctxkv_status status);
// The calling thread's last failure as one sentence (argument, what it was, what it must be); "" if
// none. Valid until the thread's next failing call.
CTXKV_API const char *ctxkv_last_error(void);

// ---- devices -------------------------------------------------------------------------------
typedef struct ctxkv_device ctxkv_device;

// CPU tiers, as bits of a mask. The environment variable CTXKV_CPU_MASK ("scalar", "avx2",
// "avx512": the best tier allowed) applies where the option is 0.
#define CTXKV_CPU_SCALAR 1u
#define CTXKV_CPU_AVX2 2u
#define CTXKV_CPU_AVX512 4u

// The message is valid during the call.
typedef void (*ctxkv_log_fn)(void *user, const char *message);

typedef struct ctxkv_device_options {
    size_t size;
    int32_t threads;             // CPU worker threads; 0: as many as CPUs this process may use
    uint32_t cpu_mask;           // tiers allowed; 0: the environment's, else all that the CPU has
    const char *cublas_path;     // CUDA: path of libcublas; NULL: look in the usual places
    int32_t programmatic_launch; // CUDA: 0 turns programmatic dependent launch off; default 1
    ctxkv_log_fn log;            // called with short notes; NULL: silent
    void *log_user;
} ctxkv_device_options;

CTXKV_API void ctxkv_device_options_init_sized(ctxkv_device_options *options, size_t size);
CTXKV_INLINE void ctxkv_device_options_init(ctxkv_device_options *options) {
    ctxkv_device_options_init_sized(options, sizeof *options);
}
// name: "cpu", "cuda" (= "cuda:0") or "cuda:N". options may be NULL. NO_DEVICE: no driver, one
// before CUDA 12.0, no such GPU; NO_KERNEL: this build has no code for it; DRIVER; OUT_OF_MEMORY.
CTXKV_API ctxkv_status
ctxkv_device_open(const char *name, const ctxkv_device_options *options, ctxkv_device **device);
// Plans must be destroyed before their device. NULL is allowed.
CTXKV_API void ctxkv_device_close(ctxkv_device *device);

typedef struct ctxkv_device_info {
    size_t size;
    char name[128];     // "cpu" tier and model, or the GPU's name
    uint32_t cpu_found; // CTXKV_CPU_* bits that this CPU has
    uint32_t cpu_used;  // the bit of the tier in use
    int32_t threads;
    int32_t cuda_arch;     // 90 for sm_90; 0 on a CPU
    int32_t driver;        // CUDA driver version, 13000 for 13.0; 0 when none
    int32_t cublas;        // cuBLAS version in use; 0 when none
    int32_t bits_verified; // 1 where the tensor-core arithmetic was measured (sm_90) or on a CPU
} ctxkv_device_info;

// info->size must be set: sizeof *info.
CTXKV_API ctxkv_status ctxkv_device_get_info(const ctxkv_device *device, ctxkv_device_info *info);
// Number of CUDA devices; 0 with the reason in ctxkv_last_error().
CTXKV_API int32_t ctxkv_cuda_device_count(void);

// ---- names shared by the plans --------------------------------------------------------------
typedef enum ctxkv_norm_kind {
    CTXKV_NORM_ROW = 0,   // Muse Spark's row norm (SPEC 3.1): D = 8192
    CTXKV_NORM_RMS = 1,   // vLLM's rms_norm of the Qwen3 family (SPEC 5): D a multiple of 8
    CTXKV_NORM_ABSENT = 2 // this step is not there: its input is its output
} ctxkv_norm_kind;

typedef enum ctxkv_numerics {
    CTXKV_NUMERICS_STOCK = 0,    // as vLLM 0.33.0's stock chain on this device (a CPU: sm_90);
                                 // an RMS norm's order has its threshold at 256 rows of a call: T
                                 // for the hidden norm, L*T for the layers' one call
    CTXKV_NUMERICS_PAIR = 1,     // row-norm sum order of sm_80..sm_90
    CTXKV_NUMERICS_PACKED = 2,   // row-norm sum order of sm_100 and later
    CTXKV_NUMERICS_INVARIANT = 3 // rms_norm with one order for any number of rows
} ctxkv_numerics;

typedef enum ctxkv_projection_mode {
    CTXKV_PROJECTION_AUTO = 0,  // exact, by cuBLAS where it is known to equal the exact chain
    CTXKV_PROJECTION_EXACT = 1, // one chain of k16 tensor-core steps per output (SPEC 3.3)
    CTXKV_PROJECTION_CUBLAS = 2 // whatever cuBLAS gives; CUDA devices only
} ctxkv_projection_mode;

// Where a bias meets the accumulator.
typedef enum ctxkv_bias_add {
    CTXKV_BIAS_FUSED = 0, // BF16(acc + bias): F.linear
    CTXKV_BIAS_AFTER = 1  // BF16(BF16(acc) + bias): a GEMM, then an addition (Laguna)
} ctxkv_bias_add;

typedef enum ctxkv_k_norm {
    CTXKV_K_NORM_PLAIN = 0, // weightless, torch's mean order (SPEC 3.4): head_dim 64
    CTXKV_K_NORM_RMS = 1,   // vLLM's rms_norm (SPEC 5), with or without a weight
    CTXKV_K_NORM_ABSENT = 2
} ctxkv_k_norm;

typedef enum ctxkv_v_norm {
    CTXKV_V_NORM_ABSENT = 0,
    CTXKV_V_NORM_RMS = 1 // weightless vLLM rms_norm of each head (Gemma 4)
} ctxkv_v_norm;

// What a cache holds. Keys and values are BF16 first; FP16 and FP8 round them once more, to nearest
// even, a NaN to 0x7FFF or 0x7F. FP8 is of x / scale in FP32 and saturates, infinities too.
typedef enum ctxkv_cache_type {
    CTXKV_CACHE_BF16 = 0,
    CTXKV_CACHE_FP16 = 1,
    CTXKV_CACHE_FP8_E4M3 = 2, // at most 448
    CTXKV_CACHE_FP8_E5M2 = 3  // at most 57344
} ctxkv_cache_type;

typedef enum ctxkv_rope {
    CTXKV_ROPE_NONE = 0,
    CTXKV_ROPE_GPTJ = 1, // pairs (2j, 2j+1)
    CTXKV_ROPE_NEOX = 2  // pairs (j, j + rotary_dim/2)
} ctxkv_rope;

typedef enum ctxkv_fault_kind {
    CTXKV_FAULT_NONE = 0,
    CTXKV_FAULT_SLOT = 1,    // slot >= num_blocks * block_size
    CTXKV_FAULT_POSITION = 2 // position outside the cos/sin table on a row that would be stored
} ctxkv_fault_kind;

// What runs skipped since the last read (SPEC 4.2): count of (layer, row) pairs, and the first of
// them in (layer, row) order. A skipped row is not stored and its position never read.
typedef struct ctxkv_faults {
    uint64_t count;
    int32_t kind; // ctxkv_fault_kind of the first
    int32_t reserved;
    int64_t layer, row, value;
    int64_t limit; // the value must have been below this
} ctxkv_faults;

// ---- norms ---------------------------------------------------------------------------------
typedef struct ctxkv_norm {
    ctxkv_norm_kind kind;
    float eps;           // finite, >= 0
    float gain_centre;   // added to the weight in FP32; ignored without a weight
    int32_t input_scale; // 1: the weight multiplies the input, else the norm's output (ROW only)
} ctxkv_norm;

typedef struct ctxkv_norms ctxkv_norms;

typedef struct ctxkv_norms_desc {
    size_t size;
    int64_t hidden_size; // D
    int64_t num_layers;  // L >= 1
    ctxkv_norm hidden, layer;
    const DLTensor *hidden_weight; // [D] BF16 or FP32; NULL: weightless
    // One [L, D] tensor, or L tensors [D]; BF16 or FP32; count 0: weightless. Copied by create.
    const DLTensor *const *layer_weights;
    int64_t layer_weight_count;
    ctxkv_numerics numerics;
} ctxkv_norms_desc;

CTXKV_API void ctxkv_norms_desc_init_sized(ctxkv_norms_desc *desc, size_t size);
CTXKV_INLINE void ctxkv_norms_desc_init(ctxkv_norms_desc *desc) {
    ctxkv_norms_desc_init_sized(desc, sizeof *desc);
}
// The rules are SPEC 3.1 (ROW) and 5 (RMS).
CTXKV_API ctxkv_status
ctxkv_norms_create(ctxkv_device *device, const ctxkv_norms_desc *desc, ctxkv_norms **norms);
CTXKV_API void ctxkv_norms_destroy(ctxkv_norms *norms);
// x: BF16 [T, D], unit column stride. out: BF16 [L, T, D], unit column stride ([1, T, D] when the
// layer norm is ABSENT). T = 0 succeeds. x and out may not overlap. stream: a CUstream (NULL: the
// default stream), ignored on a CPU; so in all runs.
CTXKV_API ctxkv_status
ctxkv_norms_run(ctxkv_norms *norms, const DLTensor *x, const DLTensor *out, void *stream);

// ---- projection ------------------------------------------------------------------------------
typedef struct ctxkv_projection ctxkv_projection;

typedef struct ctxkv_projection_desc {
    size_t size;
    int64_t hidden_size;  // D, a multiple of 16
    int64_t num_layers;   // L
    int64_t num_kv_heads; // H >= 1
    int64_t head_dim;     // 64, 128, 256 or 512
    // BF16 weights, unit column stride: one [L, 2*H*head_dim, D] (or [L*2*H*head_dim, D]); or L of
    // [2*H*head_dim, D] (K rows, then V rows); or 2*L of [H*head_dim, D] in the order K0, V0, K1,
    // V1 ... Used where they lie: they must stay valid and unchanged until destroy.
    const DLTensor *const *weights;
    int64_t weight_count;
    const DLTensor *bias; // BF16 [L, 2*H*head_dim], or NULL. Copied by create.
    ctxkv_projection_mode mode;
    int64_t max_rows; // most rows of one run (CUDA workspace); 0: any on a CPU
    ctxkv_bias_add bias_add;
    // 1: no V rows (Gemma 4's V is the norm of raw K). One [L, H*head_dim, D] weight or L of
    // [H*head_dim, D], bias [L, H*head_dim], kv [L, T, H*head_dim].
    int32_t k_only;
} ctxkv_projection_desc;

CTXKV_API void ctxkv_projection_desc_init_sized(ctxkv_projection_desc *desc, size_t size);
CTXKV_INLINE void ctxkv_projection_desc_init(ctxkv_projection_desc *desc) {
    ctxkv_projection_desc_init_sized(desc, sizeof *desc);
}
// The rules are SPEC 3.3; DRIVER where mode is CUBLAS and there is none.
CTXKV_API ctxkv_status ctxkv_projection_create(
    ctxkv_device *device, const ctxkv_projection_desc *desc, ctxkv_projection **projection);
CTXKV_API void ctxkv_projection_destroy(ctxkv_projection *projection);
// normed: BF16 [L, T, D], or [1, T, D] shared by all layers. kv: BF16 [L, T, 2*H*head_dim] of any
// layer and row strides (so [T, L, ...] storage fits, too). T = 0 succeeds. They may not overlap.
CTXKV_API ctxkv_status ctxkv_projection_run(
    ctxkv_projection *projection, const DLTensor *normed, const DLTensor *kv, void *stream);

// ---- store -----------------------------------------------------------------------------------
typedef struct ctxkv_store ctxkv_store;

typedef struct ctxkv_store_desc {
    size_t size;
    int64_t num_layers, num_kv_heads, head_dim;
    ctxkv_k_norm k_norm;
    float k_eps;
    // RMS K norm: one [L, head_dim] tensor, BF16 or FP32; NULL: weightless. Copied by create.
    const DLTensor *k_norm_weight;
    ctxkv_rope rope;
    int64_t rotary_dim; // elements of a head that rotate, the first ones; 0: all, or as the tables
    // [max_position, rotary_dim]: cos, then sin; BF16, FP16 or FP32. Used where it lies until
    // destroy.
    const DLTensor *cos_sin;
    int32_t checked; // CPU: 1 makes a run fail, nothing written, instead of skipping faulty rows
    // FP8 caches: what each layer's K and V are divided by, FP32, one value each ([] or [1]), on
    // the device; read by each run, so used where they lie until destroy. scale_count L, or 0:
    // all 1.
    const DLTensor *const *k_scales, *const *v_scales;
    int64_t scale_count;
    // In place of cos_sin: a table for each layer, all of one dtype, each of its own length and,
    // where rotary_dim is 0, of its own rotary_dim. layer_cos_sin_count L, or 0.
    const DLTensor *const *layer_cos_sin;
    int64_t layer_cos_sin_count;
    ctxkv_cache_type cache_type;
    float k_gain_centre; // added to the K norm's weight in FP32; ignored without a weight
    ctxkv_v_norm v_norm;
    float v_eps;
    float v_scale;    // 0: V is not scaled; else it becomes BF16(V * v_scale), after its norm
    int32_t v_from_k; // 1: V is made from K as it was before its norm; runs take no v
} ctxkv_store_desc;

CTXKV_API void ctxkv_store_desc_init_sized(ctxkv_store_desc *desc, size_t size);
CTXKV_INLINE void ctxkv_store_desc_init(ctxkv_store_desc *desc) {
    ctxkv_store_desc_init_sized(desc, sizeof *desc);
}
// The rules are SPEC 3.4 and 5 (RMS).
CTXKV_API ctxkv_status
ctxkv_store_create(ctxkv_device *device, const ctxkv_store_desc *desc, ctxkv_store **store);
CTXKV_API void ctxkv_store_destroy(ctxkv_store *store);
// Layer l's cache: views keys[l], values[l] of [num_blocks, block_size, H, head_dim], unit stride
// in the last dimension, any other strides, each layer its own; of the plan's cache_type (FP8 also
// as uint8). count = L. The addresses and strides are copied; the memory must stay until the next
// bind or destroy.
CTXKV_API ctxkv_status ctxkv_store_bind_caches(
    ctxkv_store *store, const DLTensor *const *keys, const DLTensor *const *values, int64_t count);
// k, v: BF16 [L, T, H, head_dim], unit last stride (v NULL with v_from_k). positions: int64 [T]
// (NULL without RoPE). slots: int64 [R_l] per layer, contiguous, R_l <= T; NULL entries: nothing
// stored in that layer. slot_count is L, or 1: shared by all layers. Slot s is row s % block_size
// of block s / block_size; a negative one is not stored (SPEC 4.2). T = 0 succeeds.
CTXKV_API ctxkv_status ctxkv_store_run(
    ctxkv_store *store, const DLTensor *k, const DLTensor *v, const DLTensor *positions,
    const DLTensor *const *slots, int64_t slot_count, void *stream);
// Reads and clears. On a CUDA device it waits for the work already given to the device, which a
// capture does not survive.
CTXKV_API ctxkv_status ctxkv_store_faults(ctxkv_store *store, ctxkv_faults *faults);

// ---- chain -----------------------------------------------------------------------------------
typedef struct ctxkv_chain ctxkv_chain;

typedef struct ctxkv_chain_desc {
    size_t size;
    // By address, so that each may grow on its own; read by create only.
    const ctxkv_norms_desc *norms;
    const ctxkv_projection_desc *projection;
    const ctxkv_store_desc *store;
    int64_t max_rows; // T of a run is at most this; sizes the workspace
} ctxkv_chain_desc;

CTXKV_API void ctxkv_chain_desc_init_sized(ctxkv_chain_desc *desc, size_t size);
CTXKV_INLINE void ctxkv_chain_desc_init(ctxkv_chain_desc *desc) {
    ctxkv_chain_desc_init_sized(desc, sizeof *desc);
}
CTXKV_API ctxkv_status
ctxkv_chain_create(ctxkv_device *device, const ctxkv_chain_desc *desc, ctxkv_chain **chain);
CTXKV_API void ctxkv_chain_destroy(ctxkv_chain *chain);
CTXKV_API ctxkv_status ctxkv_chain_bind_caches(
    ctxkv_chain *chain, const DLTensor *const *keys, const DLTensor *const *values, int64_t count);
// The operands as for ctxkv_norms_run and ctxkv_store_run; max_rows rows at the most.
CTXKV_API ctxkv_status ctxkv_chain_run(
    ctxkv_chain *chain, const DLTensor *x, const DLTensor *positions, const DLTensor *const *slots,
    int64_t slot_count, void *stream);

// The same call from raw addresses, for bindings that cannot afford tensors per call.
typedef struct ctxkv_chain_call {
    size_t size;
    const void *x;               // BF16 [rows, D]
    int64_t x_row_stride;        // elements; D when contiguous (0 reads row 0 T times)
    int64_t rows;                // T
    const int64_t *positions;    // [rows]; may be NULL without RoPE
    const int64_t *const *slots; // slot_count addresses (host array; entries in device memory)
    const int64_t *slot_rows;    // slot_count lengths
    int64_t slot_count;          // L or 1
    void *workspace;             // NULL: the plan's own (then one run at a time)
    void *stream;
} ctxkv_chain_call;

CTXKV_API void ctxkv_chain_call_init_sized(ctxkv_chain_call *call, size_t size);
CTXKV_INLINE void ctxkv_chain_call_init(ctxkv_chain_call *call) {
    ctxkv_chain_call_init_sized(call, sizeof *call);
}
CTXKV_API ctxkv_status ctxkv_chain_run_call(ctxkv_chain *chain, const ctxkv_chain_call *call);
// Bytes of a workspace for max_rows rows, 256-byte aligned, in the device's memory. 0 for NULL.
CTXKV_API size_t ctxkv_chain_workspace_size(const ctxkv_chain *chain);
// As ctxkv_store_faults.
CTXKV_API ctxkv_status ctxkv_chain_faults(ctxkv_chain *chain, ctxkv_faults *faults);
// Bytes the plan holds beside the caller's tensors: packed weights, copies, workspace. 0 for NULL.
CTXKV_API size_t ctxkv_chain_memory(const ctxkv_chain *chain);

// ---- cos/sin table ---------------------------------------------------------------------------
// The table that vLLM builds on the GPU from theta (SPEC 3.5), bit for bit, in host memory:
// table: BF16, FP16 or FP32 [positions, rotary_dim], unit last stride: cos, then sin. theta > 1 and
// finite, rotary_dim even and in 2..65536, positions in 0..2^32.
CTXKV_API ctxkv_status
ctxkv_rope_table(float theta, int64_t rotary_dim, int64_t positions, const DLTensor *table);
// Its FP32 inverse frequencies [rotary_dim/2], and cos and sin [count] of one position (0..2^40) at
// count of them (0..32768), before rounding.
CTXKV_API ctxkv_status ctxkv_rope_inv_freq(float theta, int64_t rotary_dim, float *inv_freq);
CTXKV_API ctxkv_status
ctxkv_rope_row(const float *inv_freq, int64_t count, int64_t position, float *cosine, float *sine);

// ---- arithmetic, one value at a time (for tests, diagnosis and other implementations) ----------
// rsqrt.approx.f32 of sm_90, exactly (SPEC 3.2); ftz: 1 for rsqrt.approx.ftz.f32.
CTXKV_API float ctxkv_rsqrt(float x, int32_t ftz);
// One k16 step of BF16 mma on sm_90: acc + sum of a[i]*b[i], exactly as the tensor core rounds it
// (SPEC 3.3). a, b: bits of BF16 values.
CTXKV_API float ctxkv_mma16(const uint16_t a[16], const uint16_t b[16], float acc);
// FP32 to BF16, round to nearest even, NaN to 0x7FFF.
CTXKV_API uint16_t ctxkv_bf16(float x);
// FP32 to FP16, round to nearest even, NaN to 0x7FFF.
CTXKV_API uint16_t ctxkv_fp16(float x);
// FP32 to FP8 as a cache of this type holds x (scale 1); 0x7F for a type that is not FP8.
CTXKV_API uint8_t ctxkv_fp8(float x, ctxkv_cache_type type);

// ---- the constants above, for bindings ----------------------------------------------------------
// Value of "CTXKV_NORM_RMS" and the like; -1 for an unknown name.
CTXKV_API int32_t ctxkv_constant(const char *name);

#ifdef __cplusplus
}
#endif
#endif
