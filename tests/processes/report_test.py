#!/usr/bin/env python3
"""A browser opens the report of a run: no errors, no requests, every section, nothing too wide, zoom, tokens, a picture.

    report_test.py WATCHED_RUN FSDP [PICTURES]     ends with "skipped: ..." where Chromium is missing;
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

WATCHED_RUN, FSDP = map(os.path.abspath, sys.argv[1:3])
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
if CHROMIUM is None:
    print("skipped: there is no Chromium; tools/setup.sh --report installs it")
    sys.exit(0)

SECTIONS = ("summary", "loss", "learning-rate", "gradient-norm", "throughput", "step-time", "memory", "timeline",
            "sample", "checkpoints", "settings", "environment")
# The colours of the page's corner, --page in page.html.
LIGHT, DARK = (0xf7, 0xf7, 0xf5), (0x14, 0x16, 0x1a)

# Runs in the page, after its own script, and tells the page around it what it finds.
PROBE = """<script>window.addEventListener('load', function () {
  var root = document.documentElement, wide = [];
  document.querySelectorAll('body *').forEach(function (each) {
    var box = each.getBoundingClientRect();
    if (!each.closest('svg, .scrolls > *') && box.width > 0 && box.right > root.clientWidth + 0.5) wide.push(each.outerHTML.slice(0, 80));
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
  function seen() {
    return {axis: getComputedStyle(document.querySelector('#loss .xlabels'), '::before').content.replace(/"/g, ''),
      x: Array.from(document.querySelectorAll('#loss .xlabels span')).map(function (each) { return each.innerText; }),
      y: document.querySelectorAll('#loss .ylabels span').length, paths: Array.from(area.querySelectorAll('path')).map(
      function (each) { return each.getAttribute('d'); }), reset: !document.querySelector('#loss .reset').hidden}; }
  function drag(from, to) {
    function at(part) { return {clientX: box.left + box.width * part, clientY: box.top + 9, button: 0, bubbles: true}; }
    area.dispatchEvent(new PointerEvent('pointerdown', at(from)));
    area.dispatchEvent(new PointerEvent('pointermove', at(to)));
    area.dispatchEvent(new PointerEvent('pointerup', at(to))); }
  found.whole = seen();
  drag(0.75, 0.5); found.zoomed = seen();
  drag(0.25, 0.75); found.deeper = seen();
  area.dispatchEvent(new MouseEvent('dblclick')); found.again = seen();
  document.querySelectorAll('.axis button')[1].click(); found.tokens = seen();
  drag(0, 0.25); found.zoomed_tokens = seen();
  document.querySelectorAll('.axis button')[0].click(); found.steps = seen();
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


def found_in(page, width, profile):
    """The findings of PROBE in the page at this width, when nothing is too wide or loaded."""
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
    return found


def probe(page, width, profile):
    """The findings of PROBE in a whole report, when all is well with it."""
    found = found_in(page, width, profile)
    assert set(SECTIONS) <= set(found["sections"]), set(SECTIONS) - set(found["sections"])
    assert len(found["drawn"]) == 5 and min(found["drawn"]) > 500, found["drawn"]
    assert found["shown"] and re.search(r"step 1[45]\d\b", found["read"]), found["read"]
    check_zoom(found)
    return found


def check_zoom(found):
    """Checks a run of 300 steps with 8192 tokens each: a drag shows its part, a double click all, over steps and over tokens."""
    def numbers(view):
        return [float(label.replace(",", "").replace("k", "e3").replace("M", "e6")) for label in view["x"]]
    whole, zoomed, deeper, tokens = (found[name] for name in ("whole", "zoomed", "deeper", "tokens"))
    assert whole["axis"] == "step" and numbers(whole) == [50, 100, 150, 200, 250, 300] and not whole["reset"], whole["x"]
    assert 150 <= min(numbers(zoomed)) < max(numbers(zoomed)) <= 226 and zoomed["reset"], zoomed["x"]
    assert 169 <= min(numbers(deeper)) < max(numbers(deeper)) <= 207, deeper["x"]  # of that part
    assert len(zoomed["x"]) >= 3 and zoomed["y"] >= 3 and len(deeper["x"]) >= 3
    assert found["again"]["x"] == whole["x"] and not found["again"]["reset"]
    assert found["steps"]["x"] == whole["x"] and found["steps"]["axis"] == "step"
    assert found["again"]["paths"] == whole["paths"]
    assert tokens["axis"] == "tokens" and tokens["x"] == ["0.5M", "1.0M", "1.5M", "2.0M"], tokens
    assert max(numbers(found["zoomed_tokens"])) <= 8192 * 300 / 4 + 8192, found["zoomed_tokens"]["x"]
    assert not any("NaN" in path for view in (zoomed, deeper, tokens) for path in view["paths"])


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


def check_words(dom):
    """Checks what the script says of a resumed run of 20,001 steps that was stopped."""
    for words in ("<b>Stopped</b> by SIGTERM after step 20,001 of 20,001, resumed after step 200. ", "<p class=\"note\">Dashed: the run was resumed.<",
                  "<small>mean of steps 19,", "33.0 MiB <small>of the process</small>", "all memory of the process: ", "&lt;b&gt;not bold&lt;/b&gt;"):
        assert words in dom, words


def check_wide_values(folder):
    """Values that are far apart get a logarithm, one that is not finite a gap."""
    steps = [{"kind": "step", "step": i, "total_steps": 9, "loss": None if i == 5 else 2, "grad_norm": 10.0 ** i} for i in range(1, 10)]
    (folder / "wide.jsonl").write_text("\n".join(map(json.dumps, steps)))
    subprocess.run([FSDP, "report", "wide.jsonl", "--output", "wide.html"], cwd=folder, check=True, capture_output=True)
    dom, messages = browse(folder / "wide.html", 1200, 900, "--dump-dom", profile=folder / "profile")
    assert not messages, messages
    assert "before clipping, log scale</span>" in dom and "nats per token</span>" in dom
    loss = re.search(r'<path class="main" d="([^"]*)"', dom)[1]
    assert loss.count("M") == 2 and "NaN" not in loss, loss


def check_comparison(folder, pictures):
    """Three runs on one page: ended, stopped after a resume, and one whose last line is being written."""
    names = ("ended", "stopped", "growing")
    for name, sizes in zip(names, (("300",), ("20001", "200"), ("90",))):
        (folder / name).mkdir()
        subprocess.run([WATCHED_RUN, folder / name, *sizes], check=True)
    log = folder / "growing/log.jsonl"
    log.write_bytes(log.read_bytes()[:-100])
    page = folder / "runs.html"
    said = subprocess.run([FSDP, "report", *names], cwd=folder, check=True, capture_output=True, text=True).stdout
    assert said == "report of 3 runs: runs.html\n", said
    for width in (1200, 400):
        found = found_in(page, width, folder / "profile")
        assert {"runs", "loss", "validation", "learning-rate", "throughput", "settings"} <= set(found["sections"]), found
        assert len(found["drawn"]) == 5 * 3, found["drawn"]
        # At half of 20,001 steps there is one run left.
        assert "stopped" in found["read"] and "ended" not in found["read"], found["read"]
        # Over tokens, runs of the same batch look the same.
        assert found["whole"]["x"] == ["5k", "10k", "15k"] and found["tokens"]["x"] == ["50M", "100M", "150M"], (
            found["whole"]["x"], found["tokens"]["x"])
    picture = pictures / "runs.png"
    browse(page, 1200, 1700, f"--screenshot={picture}", profile=folder / "profile")
    check_picture(picture, (1200, 1700), LIGHT)
    # One run is a report as the run itself writes it.
    subprocess.run([FSDP, "report", "ended", "--output", "one.html"], cwd=folder, check=True, capture_output=True)
    found = found_in(folder / "one.html", 1200, folder / "profile")
    assert set(SECTIONS) - {"memory", "timeline", "sample"} <= set(found["sections"]), found["sections"]


def main():
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        pictures = pathlib.Path(sys.argv[3]) if len(sys.argv) > 3 else folder
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
        dom, _ = browse(report, 1200, 900, "--dump-dom", profile=folder / "profile")
        assert re.search(r"The highest value, [\d,]+ at step 1, is outside\.", dom)
        # A resumed run, long and stopped: more than the points of a chart.
        subprocess.run([WATCHED_RUN, folder, "20001", "200"], check=True)
        dom, messages = browse(report, 1200, 900, "--dump-dom", profile=folder / "profile")
        assert not messages, messages
        check_words(dom)
        assert report.stat().st_size < 1_000_000, report.stat().st_size
        check_wide_values(folder)
        check_comparison(folder, pictures)
    print("the report is as it should be, light and dark, wide and narrow")


main()
