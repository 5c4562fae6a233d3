#!/usr/bin/env python3
"""Checks that links between the project's own pages and files lead somewhere.

    tools/check_links.py FILE.md...
"""

import pathlib
import re
import sys

LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def broken_links(page, text):
    """Yields the targets of relative links in `text` that do not exist, seen from `page`."""
    for target in LINK.findall(FENCE.sub("", text)):
        if re.match(r"[a-z]+:", target) or target.startswith("#"):
            continue
        if not (page.parent / target.split("#")[0]).exists():
            yield target


def main():
    broken = [f"{name}: link to '{target}' leads nowhere"
              for name in sys.argv[1:]
              for target in broken_links(pathlib.Path(name), pathlib.Path(name).read_text())]
    print("\n".join(broken), end="\n" if broken else "")
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main()
