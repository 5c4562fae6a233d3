#!/usr/bin/env python3
"""A browser opens the report of a run: no errors, no requests, every section, nothing too wide, a picture.

    report_test.py WATCHED_RUN [PICTURES]     ends with "skipped: ..." where Chromium is missing;
                                              PICTURES is a folder that keeps the screenshots
"""

import html
import json
import os
import pathlib
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import zlib

WATCHED_RUN = sys.argv[1]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
if CHROMIUM is None:
    print("skipped: there is no Chromium; tools/setup.sh --report installs it")
    sys.exit(0)

SECTIONS = ("summary", "loss", "learning-rate", "gradient-norm", "throughput", "step-time", "memory", "timeline",
            "sample", "checkpoints", "settings", "environment")
# The colours of the page's corner, --page in report_parts.cpp.
LIGHT, DARK = (0xf7, 0xf7, 0xf5), (0x14, 0x16, 0x1a)

# Runs in the page, after its own script, and tells the page around it what it finds.
PROBE = """<script>window.addEventListener('load', function () {
  var root = document.documentElement, wide = [];
  document.querySelectorAll('body *').forEach(function (each) {
    var box = each.getBoundingClientRect();
    if (!each.closest('svg') && box.width > 0 && box.right > root.clientWidth + 0.5) wide.push(each.outerHTML.slice(0, 80));
  });
  var area = document.querySelector('#loss .area'), box = area.getBoundingClientRect();
  area.dispatchEvent(new PointerEvent('pointermove', {clientX: box.left + box.width * 0.5, clientY: box.top + 9}));
  var read = document.querySelector('#loss .read');
  var found = {width: root.clientWidth, scroll: root.scrollWidth, height: root.scrollHeight, wide: wide,
    requests: performance.getEntriesByType('resource').map(function (each) { return each.name; }),
    read: read ? read.innerText : null, shown: read !== null && !read.hidden,
    sections: Array.from(document.querySelectorAll('[id]')).filter(function (each) {
      return each.getBoundingClientRect().height > 20; }).map(function (each) { return each.id; }),
    drawn: Array.from(document.querySelectorAll('.chart path.main')).map(function (each) {
      return Math.round(each.getTotalLength()); })};
  area.dispatchEvent(new PointerEvent('pointerleave'));
  parent.postMessage(JSON.stringify(found), '*');
});</script>"""
# Windows have a least width, frames have none.
FRAME = """<!DOCTYPE html><body><div id="found"></div><script>addEventListener('message', function (event) {
  document.getElementById('found').textContent = event.data; });</script>
<iframe src="probed.html" style="border:0;width:%dpx;height:900px"></iframe></body>"""


def browse(page, width, height, *options, profile):
    """Chromium without a network; returns its standard output and the messages of the page's console."""
    result = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
         "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-extensions",
         "--host-resolver-rules=MAP * ~NOTFOUND", "--enable-logging=stderr", f"--user-data-dir={profile}",
         f"--window-size={width},{height}", *options, page.as_uri()],
        check=True, capture_output=True, text=True, timeout=120, env={**os.environ, "HOME": str(profile)})
    return result.stdout, [line for line in result.stderr.splitlines() if "CONSOLE" in line]


def probe(page, width, profile):
    """What PROBE finds in the page at this width, when all is well with it."""
    probed = page.with_name("probed.html")
    probed.write_text(page.read_text().replace("</body>", PROBE + "</body>"))
    frame = page.with_name("frame.html")
    frame.write_text(FRAME % width)
    dom, messages = browse(frame, 1300, 950, "--dump-dom", "--virtual-time-budget=3000", profile=profile)
    assert not messages, messages
    found = json.loads(html.unescape(re.search(r'id="found">(.*?)</div>', dom, re.DOTALL).group(1)))
    assert found["width"] == width, (found["width"], width)
    assert found["scroll"] <= width and not found["wide"], f"too wide at {width}: {found}"
    assert not found["requests"], found["requests"]
    assert set(SECTIONS) <= set(found["sections"]), set(SECTIONS) - set(found["sections"])
    assert len(found["drawn"]) == 5 and min(found["drawn"]) > 500, found["drawn"]
    assert found["shown"] and re.search(r"step 1[45]\d\b", found["read"]), found["read"]
    return found


def check_picture(path, size, background):
    """The size asked for, the page's background in the corner, and hundreds of different lines."""
    data = path.read_bytes()
    assert struct.unpack(">II", data[16:24]) == size, path
    depth, kind = data[24], data[25]
    assert depth == 8 and kind in (2, 6), (depth, kind)
    chunks, at = b"", 8
    while at < len(data):
        length, name = struct.unpack(">I4s", data[at:at + 8])
        if name == b"IDAT":
            chunks += data[at + 8:at + 8 + length]
        at += 12 + length
    pixels = zlib.decompress(chunks)
    row = 1 + size[0] * (4 if kind == 6 else 3)
    # The first pixel has no neighbours to be told from: every filter of the format leaves it as it is.
    assert tuple(pixels[1:4]) == background, (path, tuple(pixels[1:4]))
    num_different = len({pixels[i:i + row] for i in range(0, len(pixels), row)})
    assert num_different > size[1] / 5, f"{path}: only {num_different} different lines"


def check_without_script(page, profile):
    """With scripts forbidden the charts are drawn just the same."""
    still = page.with_name("still.html")
    still.write_text(page.read_text().replace("script-src 'unsafe-inline'", "script-src 'none'"))
    dom, _ = browse(still, 1200, 900, "--dump-dom", profile=profile)
    assert dom.count("<svg") == 5 + 4, dom.count("<svg")  # charts, rows of the timeline
    assert 'class="rule"' not in dom, "the script ran"


def main():
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        pictures = pathlib.Path(sys.argv[2]) if len(sys.argv) > 2 else folder
        subprocess.run([WATCHED_RUN, folder, "300"], check=True)
        report = folder / "report.html"
        for width in (1200, 400):
            height = probe(report, width, folder / "profile")["height"]
            for scheme, background in (("light", LIGHT), ("dark", DARK)):
                picture = pictures / f"report_{scheme}_{width}.png"
                _, messages = browse(report, width, height, f"--screenshot={picture}",
                                     f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}",
                                     profile=folder / "profile")
                assert not messages, messages
                check_picture(picture, (width, height), background)
        check_without_script(report, folder / "profile")
        # A resumed run, long and stopped: more than the points of a chart.
        subprocess.run([WATCHED_RUN, folder, "20001", "200"], check=True)
        dom, messages = browse(report, 1200, 900, "--dump-dom", profile=folder / "profile")
        assert not messages, messages
        assert "Stopped" in dom and "resumed after step 200" in dom
        assert report.stat().st_size < 1_000_000, report.stat().st_size
    print("the report is as it should be, light and dark, wide and narrow")


main()
