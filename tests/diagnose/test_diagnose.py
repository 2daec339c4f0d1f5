# SPDX-License-Identifier: Apache-2.0
"""Every known fault, planted alone and beside another, must be named by ctxkv diagnose."""
import array
import concurrent.futures
import json
import os
import random
import subprocess
import sys
import tempfile

CTXKV, PLANT = sys.argv[1:3]
ONLY = sys.argv[3:]
WORK = tempfile.mkdtemp(prefix="ctxkv-diagnose-")
T, L = 8, 3
SLOTS = [[3, -1, 47, 130, 300, 511, 77, 250], [9, 24, 11, -1, 399, 60, 610, 2],
         [100, 8, 16, 421, -1, 30, 7, 580]]


def call(*arguments, status=(0,)):
    done = subprocess.run(arguments, capture_output=True, text=True)
    if done.returncode not in status:
        raise RuntimeError(f"{arguments}: {done.returncode}: {done.stderr}{done.stdout}")
    return done.stdout


def read(path):
    data = open(path, "rb").read()
    size = int.from_bytes(data[:8], "little")
    head = json.loads(data[8:8 + size])
    head.pop("__metadata__", None)
    return {name: (info["dtype"], info["shape"],
                   data[8 + size + info["data_offsets"][0]:8 + size + info["data_offsets"][1]])
            for name, info in head.items()}


def write(path, tensors):
    head, at = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        head[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as to:
        to.write(len(text).to_bytes(8, "little") + text)
        for _, _, data in tensors.values():
            to.write(data)


def int64(values):
    return array.array("q", values).tobytes()


def scaled(tensor, power):
    """BF16 values times 2^power, as long as they stay normal."""
    dtype, shape, data = tensor
    words = array.array("H", data)
    for i, word in enumerate(words):
        exponent = (word >> 7 & 255) + power
        words[i] = (word & 0x807F) | exponent << 7 if word & 0x7FFF and exponent > 0 else 0
    return dtype, shape, words.tobytes()


class Model:
    def __init__(self, name, *synth, slots=SLOTS, config=None, weights=None, context=None):
        self.folder = os.path.join(WORK, name)
        call(CTXKV, "synth", *synth, self.folder)
        self.context = os.path.join(self.folder, "context.safetensors")
        tensors = read(self.context)
        if slots:
            flat = [slot for row in slots for slot in row]
            tensors["slot_mapping"] = ("I64", [len(slots), len(slots[0])], int64(flat))
        if context:
            context(tensors)
        write(self.context, tensors)
        if weights:
            path = os.path.join(self.folder, "model.safetensors")
            tensors = read(path)
            weights(tensors)
            write(path, tensors)
        path = os.path.join(self.folder, "config.json")
        values = json.load(open(path)) | (config or {})
        json.dump(values, open(path, "w"))


def small_values(power_k, power_x):
    def weights(tensors):
        for name in list(tensors):
            if "k_proj" in name:
                tensors[name] = scaled(tensors[name], power_k)

    def context(tensors):
        tensors["hidden_states"] = scaled(tensors["hidden_states"], power_x)
    return {"weights": weights, "context": context}


def with_q(tensors):
    for layer in range(L):
        rows = b""
        for k in (1, 2):
            for part in "kv":
                rows += tensors[f"layers.{(layer + k) % L}.self_attn.{part}_proj.weight"][2]
        tensors[f"layers.{layer}.self_attn.q_proj.weight"] = ("BF16", [512, 8192], rows)


def one_value_a_row(tensors):
    for name in list(tensors):
        if "k_proj" not in name:
            continue
        dtype, (rows, width), data = tensors[name]
        words, kept = array.array("H", data), array.array("H", bytes(len(data)))
        for i in range(rows):
            at = i * width + i * 61 % width
            kept[at] = words[at] or 0x3F80
        tensors[name] = (dtype, [rows, width], kept.tobytes())


def rows_model(name, faults, *synth, tp=(2, 0), weights=None):
    """Few rows show a change of a last bit in a norm: plant looks for some."""
    model = Model(name, *synth, slots=None, weights=weights)
    found = os.path.join(WORK, name + "-rows")
    call(PLANT, model.folder, model.context, found, "20", "32", "0", *map(str, tp), "bf16",
         "find_rows", *faults)
    tensors = read(model.context) | read(found)
    rows = tensors["hidden_states"][1][0]
    # Rows of slot -1 are not compared: all rows have slots here.
    tensors["slot_mapping"] = ("I64", [rows], int64([7 * i + 3 for i in range(rows)]))
    write(model.context, tensors)
    return model


def own_table(tensors):
    tensors["positions"] = ("I64", [T], int64([5, 44, 17, 63, 2, 30, 31, 9]))
    words = array.array("H", [0x3F00 + random.Random(1).getrandbits(7) for _ in range(64 * 64)])
    words[::3] = array.array("H", [word | 0x8000 for word in words[::3]])
    tensors["cos_sin_cache"] = ("BF16", [64, 64], words.tobytes())


def scales(*of_v):
    """A division by 7/2^n is seldom the product with its reciprocal, which is not exact."""
    def context(tensors):
        of_k = [7 / 32, 7 / 16, 7 / 8]
        for name, values in (("k_scales", of_k), ("v_scales", of_v or of_k)):
            tensors[name] = ("F32", [L], array.array("f", values).tobytes())
    return context


# With and without fma is the same where squares of BF16 values are summed, which are exact.
ROWS = ["order_packed", "order_thread_fma", "order_thread", "order_row_fma", "order_row",
        "norm_rsqrt_nearest", "norm_rsqrt_divide"]
MUSE = ("--kv-heads", "2", "--layers", str(L), "--rows", str(T), "--zero-centered")
QWEN = ("--family", "qwen3", "--kv-heads", "1", "--hidden-size", "4096", "--head-dim", "64")
SMALL = ("--kv-heads", "2", "--hidden-size", "256", "--layers", str(L), "--rows", str(T),
         "--max-position", "256")
# Every option of the Qwen3 kind at once, and the other kinds.
OPTIONS = ("--family", "qwen3", *SMALL, "--head-dim", "64", "--bias", "--v-scale", "0.7",
           "--rotary-dim", "32", "--zero-centered", "--fp32-norms", "--layer-tables",
           "--table-type", "fp32")
LAGUNA = ("--family", "laguna", *SMALL, "--head-dim", "64", "--bias", "--rotary-dim", "48")
GEMMA = ("--family", "gemma4", *SMALL[:-2], "--head-dim", "128", "--bias")
MODELS = {}


def make_models():
    make = {
        "muse": lambda: Model("muse", *MUSE, weights=with_q),
        "table": lambda: Model("table", *MUSE, context=own_table),
        "theta": lambda: Model("theta", *MUSE, config={"rope_theta": 10000.0}),
        "small5": lambda: Model("small5", *MUSE, **small_values(-10, -6)),
        "small6": lambda: Model("small6", *MUSE, config={"rms_norm_eps": 1e-6},
                                **small_values(-10, -6)),
        "tiny": lambda: Model("tiny", *MUSE, config={"rms_norm_eps": 0.0},
                              **small_values(-70, 0)),
        "sparse": lambda: rows_model(
            "sparse", ["k_norm_rsqrt_nearest", "k_norm_rsqrt_divide"], "--kv-heads", "2",
            "--layers", "2", "--rows", "4", weights=one_value_a_row),
        "rows": lambda: rows_model("rows", ROWS, "--kv-heads", "2", "--layers", "2", "--rows",
                                   str(3 * len(ROWS))),
        "qwen4": lambda: rows_model("qwen4", ["order_rms_256"], *QWEN, "--layers", "3", "--rows",
                                    "4", tp=(1, 0)),
        "qwen": lambda: Model("qwen", *QWEN, "--layers", "3", "--rows", str(T)),
        "options": lambda: Model("options", *OPTIONS),
        "half": lambda: Model("half", *OPTIONS[:-1], "fp16", "--gptj"),
        "laguna": lambda: Model("laguna", *LAGUNA),
        # 86 rows in three layers are 258 rows of its norms.
        "laguna4": lambda: rows_model("laguna4", ["order_rms_256"], *LAGUNA, "--hidden-size",
                                      "4096", "--rows", "4"),
        "laguna86": lambda: Model("laguna86", *LAGUNA, "--hidden-size", "4096", "--rows", "86",
                                  slots=None),
        "gemma": lambda: Model("gemma", *GEMMA),
        "gemma5": lambda: Model("gemma5", *GEMMA, config={"rms_norm_eps": 1e-5},
                                **small_values(-10, 0)),
        "gemma6": lambda: Model("gemma6", *GEMMA, **small_values(-10, 0)),
        "bare": lambda: Model("bare", "--family", "qwen3", *SMALL, "--no-affine", "--nope"),
        "fp8": lambda: Model("fp8", *OPTIONS, context=scales(0.3, 0.7, 1.1)),
        "loud": lambda: Model("loud", *OPTIONS, context=scales(1e-3, 2e-3, 3e-3)),
        "louder": lambda: Model("louder", *OPTIONS, context=scales(1e-5, 2e-5, 1e-5)),
        "qwen256": lambda: Model("qwen256", *QWEN, "--layers", "1", "--rows", "256", slots=None)}
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for name, model in zip(make, pool.map(lambda f: f(), make.values())):
            MODELS[name] = model


class Case:
    """faults: what is planted; names: what must be told, where that is another list."""

    def __init__(self, faults, names=None, model="muse", tp=(2, 0), fill="5a5a", before=False,
                 shape=(20, 32), options=(), edit=None, check=None, cache="bf16"):
        self.faults, self.names = list(faults), list(names if names is not None else faults)
        self.model, self.tp, self.fill, self.before = model, tp, fill, before
        self.shape, self.options, self.edit, self.check = shape, options, edit, check
        self.cache = cache

    def __str__(self):
        return "+".join(self.faults or ["none"]) + f" on {self.model}, {self.cache}, fill {self.fill}"

    def plant(self, path, faults):
        model = MODELS[self.model]
        call(PLANT, model.folder, model.context, path, *map(str, self.shape), self.fill,
             *map(str, self.tp), self.cache, *faults)

    def run(self):
        try:
            return self.judge()
        except RuntimeError as error:
            return str(error)

    def judge(self):
        model = MODELS[self.model]
        with tempfile.TemporaryDirectory(dir=WORK) as folder:
            cache, before = os.path.join(folder, "cache"), os.path.join(folder, "before")
            self.plant(cache, self.faults)
            options = list(self.options)
            if self.before:
                self.plant(before, ["nothing_written"])
                options += ["--before", before]
            if self.edit:
                tensors = read(cache)
                self.edit(tensors)
                write(cache, tensors)
            text = call(CTXKV, "diagnose", "--model", model.folder, "--context", model.context,
                        "--cache", cache, "--tp-size", str(self.tp[0]), "--tp-rank",
                        str(self.tp[1]), "--threads", "1", "--json", *options, status=(0, 1))
        report = json.loads(text)
        told = [report["verdict"]] + report["same_bytes"]
        if sorted(self.names) not in [sorted(names) for names in told]:
            return f"told {told}, explained {report['explained']}, {report['sentence']}"
        if len(report["verdict"]) != len(self.names):
            return f"the verdict {told[0]} is not the smallest"
        if report["equal"] != (not self.names and not self.edit):
            return f"equal is {report['equal']}"
        if (report["explained"] == 1.0) == bool(self.edit):
            return f"explained is {report['explained']}"
        return self.check(report) if self.check else None


def flip(layer, block, head, offset, column, mask):
    """A changed bit, and the check that its place is told."""
    def edit(tensors):
        name = f"kv_cache.{layer}"
        dtype, (blocks, heads, size, width), data = tensors[name]
        words = array.array("H", data)
        words[((block * heads + head) * size + offset) * width + column] ^= mask
        tensors[name] = (dtype, [blocks, heads, size, width], words.tobytes())

    def check(report):
        first = report["clean"]["first"]
        want = {"layer": layer, "block": block, "offset": offset, "head": head,
                "part": "KV"[column // 64], "column": column % 64}
        if any(first[key] != value for key, value in want.items()):
            return f"told {first}, must be {want}"
        if int(first["recorded"], 16) ^ int(first["expected"], 16) != mask:
            return f"told {first['recorded']} and {first['expected']}, must differ in {mask:#x}"
        if report["clean"]["elements"] != 1 or "no known fault" not in report["sentence"]:
            return f"told {report['sentence']}"
        return None
    return {"edit": edit, "check": check}


def closest(name, total):
    def check(report):
        first = report["closest"][0] if report["closest"] else None
        if not first or first["names"] != [name] or first["elements"] != 1:
            return f"closest is {first}, must be {name} but for one element"
        if (first["matched"], first["rows"]) != (total - 1, total):
            return f"{first['matched']} of {first['rows']} rows, must be {total - 1} of {total}"
        if sum(count for layer in report["grid"] for head in layer for count in head
               if count > 0) != report["clean"]["elements"]:
            return "the grid does not add up to the elements that differ"
        return None
    return check


BLOCKS = ["1", "8", "16", "32", "64", "128", "256", "half", "double"]
WIDE = {"tp": (1, 0)}
SPECIAL = {  # faults that show only in other surroundings
    "theta_500000": {"model": "theta"}, "table_from_theta": {"model": "table"},
    "k_norm_rsqrt_ftz": {"model": "tiny"}, "heads_after_rows": WIDE,
    "rope_gptj": {"model": "qwen", "tp": (1, 0)},
    "k_norm_weight_missing": {"model": "qwen", "tp": (1, 0)},
    "layer0_k_norm_weight": {"model": "qwen", "tp": (1, 0)},
    "order_rms_256": {"model": "qwen4", "tp": (1, 0)},
    "k_norm_rsqrt_nearest": {"model": "sparse"}, "k_norm_rsqrt_divide": {"model": "sparse"},
    "order_rms_1024": {"model": "qwen256", "tp": (1, 0)}}
E4M3, E5M2 = ({"model": "fp8", "cache": f"fp8_{name}"} for name in ("e4m3", "e5m2"))
NEW = {  # faults of the options, each where it shows
    "gain_centre_missing_k": "options", "gain_centre_twice_k": "options",
    "eps_1e_5_v": "gemma6", "eps_1e_6_v": "gemma5", "eps_0_v": "gemma5",
    "bias_missing": "options", "bias_missing_k": "gemma", "bias_missing_v": "options",
    "bias_before_rounding": "laguna", "bias_after_rounding": "gemma", "layer0_bias": "options",
    "kv_bias_swapped": "laguna", "rope_whole_head": "laguna", "rope_half_head": "laguna",
    "rope_quarter_head": "options", "rope_last_columns": "laguna",
    "rope_angles_of_head": "laguna", "layer0_table": "options", "table_bf16": "options",
    "table_fp16": "options", "v_norm_missing": "gemma", "v_norm_added": "laguna",
    "v_norm_weighted": "gemma", "v_of_k": "options", "v_of_normed_k": "gemma",
    "v_of_rotated_k": "gemma", "v_scale_missing": "options", "v_scale_twice": "options",
    "v_scale_inverse": "options", "v_scale_bf16": "options"}
SPECIAL |= {name: {"model": model} for name, model in NEW.items()}
SPECIAL |= {"bf16_bits": {"model": "options", "cache": "fp16"},
            "cast_unrounded": {"model": "options", "cache": "fp16"},
            "e4m3_bits": E5M2, "e5m2_bits": E4M3,
            "fp8_unsaturated": {"model": "loud", "cache": "fp8_e4m3"}}
SCALES = ["missing", "multiplied", "reciprocal", "swapped"]
SPECIAL |= {f"scales_{name}": E4M3 for name in SCALES}
SPECIAL |= {"k_scales_for_v": E4M3, "layer0_scales": E5M2}
NEW |= {name: None for name in SPECIAL if "scales" in name or "bits" in name or name in (
    "cast_unrounded", "fp8_unsaturated")}
SPECIAL |= {f"block_size_{name}": WIDE for name in BLOCKS}
SPECIAL |= {name: {"model": "rows"} for name in ROWS}
for where in ("", "_hidden", "_layer", "_k"):
    SPECIAL[f"eps_1e_5{where}"] = {"model": "small6"}
    SPECIAL[f"eps_1e_6{where}"] = SPECIAL[f"eps_0{where}"] = {"model": "small5"}
PARTNERS = ["rope_neox", "slots_plus_1", "layer0_norm_weight", "kv_swapped"]
PARTNER_OF = {"order_thread": "weight_side", "order_row": "weight_side",
              "rope_gptj": "slots_plus_1", "order_rms_256": "rope_gptj",
              "order_rms_1024": "rope_gptj", "k_norm_weight_missing": "rope_gptj",
              "layer0_k_norm_weight": "rope_gptj", "slots_plus_1": "rope_neox",
              "rope_neox": "layer0_norm_weight", "kv_swapped": "rope_neox"}


def single(name):
    if name == "order_pair":  # what sm_90 does is a fault where sm_100's order is right
        return Case([], ["order_pair"], model="rows", options=("--numerics", "packed"))
    if name == "projection_bf16_parts":
        return Case(["projection_bf16_parts_4"], [name])
    return Case([name], **SPECIAL.get(name, {}))


def pair(name, changes, turn):
    case = single(name)
    stage = changes.split(":")[0].split(",")[0]
    near = {"hidden and layer norm", "layer norm", "hidden norm"} if "norm" in stage else {stage}
    rows = {"rope_neox": "RoPE", "slots_plus_1": "placement", "layer0_norm_weight": "layer norm",
            "kv_swapped": "store"}
    fits = [p for p in PARTNERS if p != name and rows[p] not in near]
    partner = PARTNER_OF.get(name, "slots_plus_1" if name in NEW else fits[turn % len(fits)])
    case.faults.append(partner)
    case.names.append(partner)
    return case


def all_cases():
    table = json.loads(call(CTXKV, "diagnose", "--list", "--json"))
    names = call(CTXKV, "diagnose", "--list").split()
    assert names == [entry["name"] for entry in table] and len(set(names)) == len(names)
    cases = [single(name) for name in names]
    cases += [pair(entry["name"], entry["changes"], i) for i, entry in enumerate(table)]
    cases += [Case([], model=model, tp=tp, fill=fill)
              for model, tp in (("muse", (2, 0)), ("muse", (2, 1)), ("muse", (1, 0)),
                                ("table", (1, 0)), ("qwen", (1, 0)), ("tiny", (2, 0)))
              for fill in ("5a5a", "random")]
    cases += [Case([], model=model, cache=cache, tp=tp, fill=fill)
              for model, cache in (("options", "bf16"), ("options", "fp16"), ("half", "bf16"),
                                   ("fp8", "fp8_e4m3"), ("loud", "fp8_e5m2"), ("bare", "bf16"),
                                   ("laguna", "bf16"), ("laguna86", "bf16"), ("gemma", "fp16"))
              for tp, fill in (((2, 1), "5a5a"), ((1, 0), "random"))]
    cases += [Case([name], model=model, cache=cache) for name, model, cache in (
        ("rope_neox", "half", "bf16"), ("gain_centre_missing", "options", "bf16"),
        ("gain_centre_twice", "laguna", "bf16"), ("layer0_weights", "laguna", "bf16"),
        ("layer0_norm_weight", "laguna", "bf16"), ("layer0_kv_weight", "gemma", "bf16"),
        ("layer0_k_norm_weight", "fp8", "fp8_e4m3"), ("other_tp_rank", "gemma", "fp16"),
        ("other_tp_rank", "laguna", "bf16"), ("weights_transposed", "gemma", "bf16"),
        ("weights_transposed_stacked", "laguna", "bf16"), ("kv_swapped", "fp8", "fp8_e5m2"),
        ("kv_weights_swapped", "options", "fp16"), ("k_norm_missing", "gemma", "bf16"),
        ("rope_missing", "gemma", "bf16"), ("hidden_norm_skipped", "gemma", "bf16"),
        ("layer_norm_skipped", "laguna", "bf16"), ("positions_other_order", "half", "bf16"),
        ("theta_10000", "laguna", "bf16"), ("table_fp64", "gemma", "bf16"),
        ("stale_rows", "fp8", "fp8_e4m3"), ("slots_layer0", "loud", "fp8_e4m3"),
        ("fp8_unsaturated", "louder", "fp8_e5m2"), ("v_norm_weighted", "options", "bf16"),
        ("v_of_rotated_k", "options", "bf16"), ("bias_missing_v", "fp8", "fp8_e4m3"),
        ("cast_unrounded", "fp8", "fp8_e4m3"), ("gain_in_bf16", "options", "bf16"),
        ("order_rms_256", "laguna4", "bf16"), ("order_rms_1024", "laguna86", "bf16"))]
    cases += [Case([f"block_size_{n}_shape"], [f"block_size_{n}"], tp=(1, 0)) for n in BLOCKS]
    cases += [Case([f"projection_bf16_parts_{n}"], ["projection_bf16_parts"]) for n in (2, 7)]
    cases += [Case(["positions_permuted"], ["positions_other_order"])]
    cases += [Case(["stale_rows"], fill=fill, before=before)
              for fill, before in (("0000", False), ("7fff", False), ("random", True))]
    cases += [Case(["nothing_written"], ["stale_rows"])]
    cases += [Case(["layer0_norm_weight"], fill="random"), Case(["rope_missing"], fill="0000")]
    cases += [Case([], tp=(1, 0), **flip(*where)) for where in
              ((1, 3, 0, 0, 17, 4), (0, 2, 1, 7, 64 + 5, 0x8000), (2, 29, 1, 0, 63, 1),
               (1, 31, 0, 19, 3, 0x100))]
    # A fault and a changed bit: nothing is exact, the fault is the closest. 21 of the 24 rows are
    # stored; layer 1's row 0 lies in slot 9.
    cases += [Case(["rope_neox"], [], edit=flip(1, 0, 0, 9, 70, 2)["edit"],
                   check=closest("rope_neox", 21))]
    return cases


def main():
    make_models()
    cases = all_cases()
    if ONLY:
        cases = [case for case in cases if any(name in str(case) for name in ONLY)]
    failed = 0
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for done, (case, wrong) in enumerate(zip(cases, pool.map(Case.run, cases))):
            if done % 20 == 0:
                print(f"{done} of {len(cases)}", flush=True)
            if wrong:
                print(f"FAILED {case}: {wrong}", flush=True)
            failed += bool(wrong)
    print(f"{len(cases)} cases, {failed} failed")
    return 1 if failed or not cases else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    finally:
        subprocess.run(["rm", "-rf", WORK])
