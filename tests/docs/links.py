#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every link and picture of README.md and docs/ leads somewhere, and so does every one of the built site.

usage: links.py [SITE_FOLDER]. Prints what is dead; the last line is N checked, N dead.
"""
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parent.parent.parent
LINK = re.compile(r"\]\(([^)\s#]+)(#[^)\s]*)?\)")


class Links(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attrs):
        self.found += [v for k, v in attrs if k in ("href", "src", "data") and v]


def outside(link):
    return link.startswith(("http:", "https:", "mailto:", "data:", "javascript:", "#"))


def of_markdown():
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.S | re.M)
        for match in LINK.finditer(text):
            yield path, match[1]


def of_site(site):
    for path in sorted(site.rglob("*.html")):
        parser = Links()
        parser.feed(path.read_text(errors="replace"))
        for link in parser.found:
            yield path, unquote(link.split("#")[0])


def main():
    links = list(of_markdown())
    if len(sys.argv) > 1:
        links += of_site(Path(sys.argv[1]).resolve())
    links = [(path, link) for path, link in links if link and not outside(link)]
    dead = sorted({(str(path), link) for path, link in links if not (path.parent / link).exists()})
    for path, link in dead:
        print(f"dead: {path}: {link}")
    print(f"{len(links)} checked, {len(dead)} dead")
    return 1 if dead or not links else 0


if __name__ == "__main__":
    sys.exit(main())
