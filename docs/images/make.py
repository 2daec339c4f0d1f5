#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The pictures of the data layouts on the op pages. usage: docs/images/make.py [--check]"""
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
BLUE, ORANGE, GREEN, GREY, WHITE = "#cfe3f4", "#fbe3c0", "#cdeadb", "#e6e6e6", "#ffffff"


class Picture:
    def __init__(self, width, height, title):
        self.size, self.parts = (width, height), [f"<title>{title}</title>"]

    def box(self, x, y, w, h, fill, text=""):
        self.parts.append(f'<rect x="{x}" y="{y}" width="{w}" height="{h}" fill="{fill}" '
                          'stroke="#333" stroke-width="1"/>')
        if text:
            self.text(x + w / 2, y + h / 2 + 4, text, "middle")

    def text(self, x, y, text, anchor="start", size=12):
        text = text.replace("&", "&amp;").replace("<", "&lt;")
        self.parts.append(f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" '
                          f'font-size="{size}">{text}</text>')

    def arrow(self, x0, y0, x1, y1, text=""):
        self.parts.append(f'<line x1="{x0}" y1="{y0}" x2="{x1}" y2="{y1}" stroke="#333" '
                          'stroke-width="1.5" marker-end="url(#head)"/>')
        if text:
            self.text((x0 + x1) / 2 + 6, (y0 + y1) / 2 + 4, text)

    def svg(self):
        w, h = self.size
        head = ('<defs><marker id="head" markerWidth="8" markerHeight="8" refX="7" refY="3" '
                'orient="auto"><path d="M0,0 L7,3 L0,6 z" fill="#333"/></marker></defs>')
        body = "\n".join([head, f'<rect width="{w}" height="{h}" fill="{WHITE}"/>', *self.parts])
        return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {w} {h}" width="{w}" '
                f'height="{h}" font-family="sans-serif">\n{body}\n</svg>\n')


def stack(p, x, y, w, h, count, fill, labels):
    """count sheets, one behind the other, the first in front."""
    for i in reversed(range(count)):
        p.box(x + 12 * i, y - 12 * i, w, h, fill, labels if i == 0 else "")


def norms():
    p = Picture(760, 330, "A row's columns on 256 threads, and the order of the sum")
    p.text(20, 24, "x [T, D]: one row of D = 8192 columns; thread t holds t*8 + k*2048 + e")
    for k in range(4):
        p.box(20 + 180 * k, 40, 180, 44, WHITE)
        for i, (fill, name) in enumerate(((BLUE, "t=0"), (ORANGE, "t=1"), (GREY, "..."),
                                          (GREEN, "t=255"))):
            p.box(20 + 180 * k + 45 * i, 40, 45, 44, fill, name)
        p.text(20 + 180 * k + 90, 100, f"k = {k}: e = 0..7 each", "middle", 11)
    steps = (("32 values of a thread", "order pair or packed"), ("32 lanes of a warp",
             "xor 16, 8, 4, 2, 1"), ("8 warps", "xor 4, 2, 1"), ("r = rsqrt_ftz", "one per row"))
    for i, (name, how) in enumerate(steps):
        p.box(20 + 185 * i, 140, 150, 50, BLUE, name)
        p.text(95 + 185 * i, 207, how, "middle", 11)
        if i:
            p.arrow(170 + 185 * (i - 1), 165, 204 + 185 * (i - 1), 165)
    stack(p, 20, 270, 300, 40, 4, GREEN, "out [L, T, D]: layer 0, 1, ... one sheet each")
    p.text(390, 280, "h = bf16(norm(x)) feeds all layers; n_l = bf16((r*h)*g_l).")
    return p


def projection():
    p = Picture(760, 330, "One chain of k16 tensor-core steps per output")
    p.text(20, 24, "n [L, T, D]: a row of layer l")
    p.text(20, 104, "W [L, 2*H*head_dim, D]: row c of layer l (K rows, then V rows)")
    for y, fill in ((34, BLUE), (114, ORANGE)):
        for j in range(6):
            name = f"k = {16 * j}..{16 * j + 15}" if j < 5 else "..."
            p.box(20 + 110 * j, y, 110, 36, fill, name)
    for j in range(5):
        p.box(30 + 110 * j, 190, 90, 40, GREEN, "mma16")
        p.arrow(75 + 110 * j, 151, 75 + 110 * j, 188)
        p.arrow(120 + 110 * j, 210, 138 + 110 * j, 210)
    p.text(10, 248, "acc = +0")
    p.box(580, 190, 150, 40, GREY, "bf16(acc + bias[c])")
    p.box(20, 270, 230, 36, BLUE, "kv [l][t]: K, heads 0 .. H-1")
    p.box(250, 270, 230, 36, ORANGE, "V, heads 0 .. H-1")
    p.text(500, 292, "kv [L, T, 2, H, head_dim]")
    return p


def store():
    p = Picture(760, 360, "A row's heads in the paged cache")
    p.text(20, 24, "kv [L][T][2][H][head_dim]: one row t of one layer, H = 3")
    for i in range(6):
        p.box(20 + 110 * i, 34, 110, 36, BLUE if i < 3 else ORANGE, f"{'KV'[i // 3]} head {i % 3}")
    p.arrow(75, 72, 75, 108, "K norm, RoPE, both rounded to BF16; V as it is")
    p.text(20, 132, "slot = slots[l][t]: block = slot / block_size, offset = slot % block_size")
    p.text(20, 158, "cache [num_blocks, H, block_size, 2*head_dim] (stock storage), one block:")
    for h in range(3):
        y = 170 + 56 * h
        p.text(20, y + 28, f"head {h}")
        for o in range(3):
            x = 80 + 220 * o
            used = o == 1
            p.box(x, y, 105, 44, BLUE if used else WHITE, f"K[{h}]" if used else "")
            p.box(x + 105, y, 105, 44, ORANGE if used else WHITE, f"V[{h}]" if used else "")
    for o in range(3):
        p.text(185 + 220 * o, 350, f"offset {o}", "middle")
    return p


def prefill():
    p = Picture(760, 330, "A tile of the prefill kernel")
    p.box(20, 40, 150, 50, BLUE, "h [T, D] BF16")
    p.box(20, 110, 150, 50, GREY, "r [T], gains [L, D]")
    p.box(20, 180, 150, 50, ORANGE, "W, by TMA")
    inputs = ((65, "rows of the tile"), (135, "64 gains a block"), (205, "both CTAs: multicast"))
    for y, name in inputs:
        p.arrow(170, y, 318, y)
        p.text(180, y - 6, name, size=11)
    p.box(320, 30, 150, 210, WHITE)
    p.text(395, 22, "ring of stages", "middle")
    for i in range(3):
        p.box(330, 40 + 66 * i, 130, 56, GREEN, f"columns 64*{i} ..")
    p.arrow(470, 135, 528, 135)
    p.box(530, 90, 210, 90, BLUE)
    p.text(635, 115, "n = bf16((r*h)*g)", "middle")
    p.text(635, 135, "in registers, then wgmma", "middle")
    p.text(635, 155, "acc over all of K", "middle")
    p.arrow(635, 182, 635, 258)
    p.box(530, 260, 210, 46, ORANGE, "K norm, RoPE, cache[l][slot]")
    p.text(20, 285, "n [L, T, D] is never written. Grid: row tiles x column tiles x layers;")
    p.text(20, 303, "the two CTAs of a cluster have neighbouring rows.")
    return p


def decode():
    p = Picture(760, 340, "Packed n and packed weights of the decode kernel")
    p.text(20, 24, "n [layer][batch tile][D/64][batch_rows][64]: the lines of one 64-column block")
    for r in range(3):
        p.text(20, 56 + 34 * r, f"row {r}")
        for v in range(8):
            fill = (BLUE, ORANGE, GREEN)[r]
            p.box(80 + 80 * v, 34 + 34 * r, 80, 30, fill, f"cols {8 * (v ^ r)}..{8 * (v ^ r) + 7}")
    p.text(80, 156, "vector v of row r has chunk v ^ (r mod 8): wgmma's swizzle; one copy a stage")
    p.text(20, 186, "W [layer][tile][D/8][tile_rows][8]: 8 columns, all rows of the tile")
    for c in range(3):
        p.box(20 + 240 * c, 196, 230, 34, GREY)
        for r in range(3):
            p.box(20 + 240 * c + 60 * r, 196, 60, 34, (BLUE, ORANGE, GREEN)[r], f"row {r}")
        p.text(20 + 240 * c + 205, 218, "...", "middle")
        p.text(20 + 240 * c + 115, 246, f"columns {8 * c}..{8 * c + 7}", "middle", 11)
    p.arrow(130, 256, 130, 282)
    p.box(20, 284, 220, 40, GREEN, "one chain a column, one CTA")
    p.arrow(242, 304, 298, 304)
    p.box(300, 284, 200, 40, BLUE, "K norm, RoPE")
    p.arrow(502, 304, 558, 304)
    p.box(560, 284, 180, 40, ORANGE, "cache[l][slot]")
    return p


def main():
    stale = []
    for make in (norms, projection, store, prefill, decode):
        path, text = HERE / f"{make.__name__}.svg", make().svg()
        if not path.exists() or path.read_text() != text:
            stale.append(path.name)
            if "--check" not in sys.argv:
                path.write_text(text)
    if stale:
        print("out of date:" if "--check" in sys.argv else "written:", *stale)
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
