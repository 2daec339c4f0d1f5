# SPDX-License-Identifier: Apache-2.0
# The built libctxkv.so: hardening flags, libc floor, writable state.
"""usage: hardening.py LIBRARY (symbols.txt beside this file lists the exported names)
       hardening.py --bad COMPILER       makes a file with these faults: are they seen?"""

import os
import re
import subprocess
import sys
import tempfile

GLIBC_FLOOR = (2, 34)  # docs/testing.md and SECURITY.md name it
NEEDED = {"libc.so.6", "libm.so.6", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
# State that may change after loading: libc's and libgcc's own, and the once-loaded driver tables.
WRITABLE = {
    "completed", "__TMC_END__", "__dso_handle", "__cpu_model", "__cpu_features2",
    "forks", "in_use", "load_lock", "load_message", "load_status", "loaded", "real",
}


def tool(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def sections(library):
    """Name -> (address, size, is thread-local) of the writable sections."""
    found = {}
    for line in tool("readelf", "-SW", library).splitlines():
        match = re.match(r"\s*\[\s*\d+\]\s+(\S+)\s+\S+\s+(\w+)\s+\w+\s+(\w+)\s+\w+\s+(\w+)", line)
        if match and "W" in match.group(4):
            found[match.group(1)] = (
                int(match.group(2), 16), int(match.group(3), 16), "T" in match.group(4))
    return found


def writable_names(library):
    """Objects in .data and .bss: what is relocated once and then read-only does not count."""
    ranges = [(a, a + n) for name, (a, n, tls) in sections(library).items()
              if name in (".data", ".bss") and not tls]
    names = set()
    for line in tool("nm", library).splitlines():
        match = re.match(r"([0-9a-f]+) [dDbB] (\S+)", line)
        if match and any(a <= int(match.group(1), 16) < b for a, b in ranges):
            names.add(match.group(2).split(".")[0])
    return names


def checks(library):
    segments = tool("readelf", "-lW", library)
    dynamic = tool("readelf", "-dW", library)
    names = tool("nm", "-D", library)
    stack = re.search(r"GNU_STACK.*\s(R\S*)\s", segments)
    yield "RELRO", "GNU_RELRO" in segments
    yield "bound at load", "BIND_NOW" in dynamic
    yield "stack not executable", bool(stack) and "E" not in stack.group(1)
    yield "no segment is writable and executable", not re.search(r"LOAD.*RWE", segments)
    yield "no text relocations", "TEXTREL" not in dynamic
    yield "no search path inside", not re.search(r"RPATH|RUNPATH", dynamic)
    yield "stack protector", "__stack_chk_fail" in names
    yield "fortified", bool(re.search(r"\b__\w+_chk\b", names))
    yield "soname libctxkv.so.0", "Library soname: [libctxkv.so.0]" in dynamic
    versions = set(re.findall(r" [TDBRVW] ctxkv_\w+(@\S*)?", names))
    yield f"symbol versions {sorted(versions)}", versions == {"@@CTXKV_0"}
    needed = set(re.findall(r"NEEDED.*\[(.*)\]", dynamic))
    yield f"libraries {sorted(needed - NEEDED)}", needed <= NEEDED
    exported = set(re.findall(r"^[0-9a-f]+ [TDBRVW] (\w+)", names, re.M)) - {"CTXKV_0"}
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "symbols.txt")) as f:
        listed = set(f.read().split())
    yield f"exports, beside symbols.txt: {sorted(exported ^ listed)}", exported == listed
    versions = {tuple(map(int, v.split("."))) for v in re.findall(r"GLIBC_(\d+\.\d+)", names)}
    newest = max(versions, default=())
    yield f"glibc {newest} is the newest needed", newest <= GLIBC_FLOOR
    extra = writable_names(library) - WRITABLE
    yield f"writable state {sorted(extra)}", not extra


def bad_file(compiler):
    """What is not noticed of a file that has every fault it can have."""
    expected = {"RELRO", "bound at load", "stack not executable", "no search path inside",
                "stack protector", "fortified", "soname libctxkv.so.0", "symbol versions",
                "exports, beside symbols.txt", "writable state"}
    with tempfile.TemporaryDirectory() as folder:
        source, library = os.path.join(folder, "bad.c"), os.path.join(folder, "bad.so")
        with open(source, "w") as f:
            f.write("int ctxkv_other = 1; int ctxkv_more(void) { return ctxkv_other; }\n")
        flags = "-shared -fPIC -fno-stack-protector -U_FORTIFY_SOURCE -Wl,-z,norelro,-z,lazy"
        tool(compiler, *flags.split(), "-Wl,-z,execstack,-rpath,/tmp", source, "-o", library)
        noticed = {name for name, good in checks(library) if not good}
    return [(name, any(n.startswith(name) for n in noticed)) for name in sorted(expected)]


def main():
    planted = sys.argv[1] == "--bad"
    results = bad_file(sys.argv[2]) if planted else list(checks(sys.argv[1]))
    bad = [name for name, good in results if not good]
    for name in bad:
        print("FAIL", name)
    print(f"{len(results) - len(bad)} passed, {len(bad)} failed")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
