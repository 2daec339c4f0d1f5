# SPDX-License-Identifier: Apache-2.0
# The ctypes declarations against the header, by a C compiler; what an import does and does not do.
from __future__ import annotations

import ctypes
import re
import shutil
import subprocess

import pytest
from ctxkv import _abi, _library

from helpers import python

HEADER = "include/ctxkv/ctxkv.h"


def header_text(root) -> str:
    text = (root / HEADER).read_text()
    return re.sub(r"//[^\n]*", "", text)


def c_output(root, tmp_path, body: str) -> list[str]:
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler, "these tests need a C compiler"
    source, program = tmp_path / "t.c", tmp_path / "t"
    source.write_text(
        f'#include "ctxkv/ctxkv.h"\n#include <stdio.h>\nint main(void) {{\n{body}\nreturn 0;\n}}\n'
    )
    subprocess.run([compiler, f"-I{root}/include", source, "-o", program], check=True)
    return subprocess.run([program], capture_output=True, text=True, check=True).stdout.split("\n")


def expected_layout(name: str, struct: type) -> list[str]:
    lines = [f"{name} {ctypes.sizeof(struct)}"]
    for field, _ in struct._fields_:
        at = getattr(struct, field)
        lines.append(f"{name}.{field} {at.offset} {at.size}")
    return lines


def test_structs_have_the_compilers_layout(root, tmp_path) -> None:
    names = {struct._c_name_: struct for struct in _abi.STRUCTS}
    names.update(DLTensor=_abi.DLTensor, DLDevice=_abi.DLDevice, DLDataType=_abi.DLDataType)
    body, expected = [], []
    for name, struct in names.items():
        body.append(f'printf("{name} %zu\\n", sizeof({name}));')
        for field, _ in struct._fields_:
            body.append(
                f'printf("{name}.{field} %zu %zu\\n", offsetof({name}, {field}), '
                f"sizeof((({name} *)0)->{field}));"
            )
        expected += expected_layout(name, struct)
    assert c_output(root, tmp_path, "\n".join(body))[:-1] == expected


def test_every_struct_and_field_of_the_header_is_declared(root) -> None:
    ours = {struct._c_name_: [f for f, _ in struct._fields_] for struct in _abi.STRUCTS}
    theirs = {}
    for name, body in re.findall(r"typedef struct (\w+) \{(.*?)\} \w+;", header_text(root), re.S):
        fields: list[str] = []
        for declaration in filter(None, (d.strip() for d in body.split(";"))):
            words = re.sub(r"\[\d+\]", "", declaration).split(",")
            fields += [re.findall(r"\w+", word)[-1] for word in words]
        theirs[name] = fields
    assert ours == theirs


def test_every_function_of_the_header_has_a_prototype(root) -> None:
    found = {}
    pattern = r"CTXKV_API ([^;(]*?)(ctxkv_\w+)\s*\(([^;]*)\);"
    for result, name, arguments in re.findall(pattern, header_text(root)):
        count = 0 if arguments.strip() == "void" else arguments.count(",") + 1
        found[name] = (bool(result.strip() != "void"), count)
    ours = {name: (r is not None, len(a)) for name, (r, a) in _abi.PROTOTYPES.items()}
    assert ours == found and len(ours) > 35


@pytest.mark.parametrize(
    "prefix, table",
    [
        ("NORM", _abi.NORM_KINDS),
        ("NUMERICS", _abi.NUMERICS),
        ("PROJECTION", _abi.PROJECTION_MODES),
        ("K_NORM", _abi.K_NORMS),
        ("ROPE", _abi.ROPES),
        ("V_NORM", _abi.V_NORMS),
        ("BIAS", _abi.BIAS_ADDS),
        ("CACHE", _abi.CACHE_TYPES),
        ("CPU", _abi.CPU_TIERS),
        ("FAULT", {name: value for value, name in _abi.FAULT_KINDS.items()}),
    ],
)
def test_constants_are_the_librarys(prefix: str, table: dict[str, int]) -> None:
    constant = _library.library().ctxkv_constant
    for name, value in table.items():
        assert constant(f"CTXKV_{prefix}_{name.upper()}".encode()) == value


def test_unknown_constant_is_minus_one() -> None:
    assert _library.library().ctxkv_constant(b"CTXKV_NORM_NOPE") == -1


def test_import_needs_no_library_and_no_torch() -> None:
    done = python(
        "import sys, ctxkv\n"
        "assert not {'torch', 'numpy', 'vllm'} & set(sys.modules), 'imported too much'\n"
        "try:\n    ctxkv.Device('cpu')\nexcept RuntimeError as error:\n    print(error)\n",
        CTXKV_LIBRARY="/nowhere/libctxkv.so",
    )
    assert done.returncode == 0, done.stderr
    assert "/nowhere/libctxkv.so" in done.stdout and "CTXKV_LIBRARY" in done.stdout


def test_importing_everything_does_not_initialise_cuda() -> None:
    done = python(
        "import torch, ctxkv, ctxkv.torch, ctxkv.context\n"
        "ctxkv.device('cpu')\n"
        "assert not torch.cuda.is_initialized()\n"
        "maps = open('/proc/self/maps').read()\n"
        "print('libcuda.so' in maps)\n"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "False", "the driver was loaded"


def test_fork_after_import_and_after_use() -> None:
    done = python(
        "import os, torch\n"
        "from ctxkv import ContextNorms\n"
        "x = torch.full((300, 8192), 2.0, dtype=torch.bfloat16)\n"
        "def work():\n"  # no torch loop in it: torch's own threads do not survive a fork
        "    y = ContextNorms(None, None, 2, 1e-5, 1e-5, device='cpu')(x)\n"
        "    return [y[0, 0, 0].item(), y[1, 299, 8191].item()]\n"
        "def child():\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "        os._exit(0 if work() == [1.0, 1.0] else 1)\n"
        "    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])\n"
        "print(child(), work() == [1.0, 1.0], child(), work() == [1.0, 1.0])\n"
    )
    assert done.stdout.split() == ["0", "True", "0", "True"], done.stderr


def test_fork_while_another_thread_runs() -> None:
    """The child's copy of every lock is free, whoever held it in the parent."""
    done = python(
        "import os, signal, threading, torch\n"
        "from ctxkv import ContextNorms\n"
        "x = torch.full((64, 8192), 2.0, dtype=torch.bfloat16)\n"
        "norms = ContextNorms(None, None, 2, 1e-5, 1e-5, device='cpu')\n"
        "def right():\n"
        "    y = norms(x)\n"
        "    return [y[0, 0, 0].item(), y[1, 63, 8191].item()] == [1.0, 1.0]\n"
        "going = True\n"
        "def loop():\n"
        "    while going:\n"
        "        norms(x)\n"
        "thread = threading.Thread(target=loop)\n"
        "thread.start()\n"
        "ends = []\n"
        "for i in range(40):\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "        signal.alarm(60)\n"
        "        os._exit(0 if right() else 1)\n"
        "    ends.append(os.waitpid(pid, 0)[1])\n"
        "going = False\n"
        "thread.join()\n"
        "print(set(ends), right())\n"
    )
    assert done.stdout.split() == ["{0}", "True"], (done.stdout, done.stderr)


def test_version_is_the_headers(root) -> None:
    import ctxkv

    text = (root / "include/ctxkv/version.h").read_text()
    assert ctxkv.__version__ == re.search(r'VERSION_STRING "([\d.]+)"', text).group(1)


def test_public_names_all_resolve() -> None:
    import ctxkv

    for name in ctxkv.__all__:
        assert getattr(ctxkv, name) is not None and name in dir(ctxkv)
    with pytest.raises(AttributeError, match="Nothing"):
        ctxkv.Nothing


def test_plans_show_their_arguments() -> None:
    import inspect

    import ctxkv

    for plan, some in (
        (ctxkv.Norms, ["num_layers", "hidden_weight", "numerics"]),
        (ctxkv.Projection, ["weights", "num_kv_heads", "max_rows"]),
        (ctxkv.Store, ["k_norm", "cos_sin", "checked"]),
    ):
        shown = inspect.signature(plan).parameters
        assert list(shown)[0] == "device" and set(some) <= set(shown)
    with pytest.raises(TypeError, match="num_layer"):
        ctxkv.Norms(ctxkv.device("cpu"), num_layer=1)
    with ctxkv.Norms(device=ctxkv.device("cpu"), num_layers=1) as plan:
        assert plan.handle
