"""Headless Chromium: lays an HTML page out in a window of some width, and says what it saw. For tests and pictures."""

import dataclasses
import html
import http.server
import json
import pathlib
import re
import shutil
import subprocess
import threading
from typing import Any

CHROMIUM = shutil.which("chromium")
ABSENT = "chromium is not installed on this machine (Debian: apt-get install chromium), so no page is laid out"
OWN = re.compile(r"(https?://[\w.]+\.google(apis)?\.com/|data:|file:|chrome|blob:)")
"""What Chromium itself asks for at its start, or what is in the page."""
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
         "--disable-background-networking", "--disable-component-update", "--disable-sync"]  # fmt: skip
# A window is no narrower than some 500 pixels, so the page is in a frame. Its document is that of a page opened alone:
# srcdoc keeps policy, style and scripts, and the frame's width is what media queries and the layout see.
FRAME = """<!DOCTYPE html><meta charset="utf-8"><style>body {{ margin: 0 }}</style>
<iframe style="border: 0; width: {width}px; height: {height}px" srcdoc="{page}"></iframe><pre id="seen"></pre>
<script>
document.querySelector("iframe").onload = event => {{
  const page = event.target.contentDocument, root = page.documentElement;
  const wide = [...page.querySelectorAll("body *")].filter(e => !e.closest(".scroll table, svg")
    && e.getBoundingClientRect().right > root.clientWidth + 0.5).map(e => e.outerHTML.slice(0, 80));
  const sizes = [...page.querySelectorAll("svg.chart")].map(e => e.getBoundingClientRect().width);
  document.querySelector("#seen").textContent = JSON.stringify({{
    width: root.clientWidth, content: root.scrollWidth, height: root.scrollHeight, wide: wide, charts: sizes,
    resources: event.target.contentWindow.performance.getEntriesByType("resource").map(e => e.name),
    background: getComputedStyle(page.body).backgroundColor,
  }});
}};
</script>"""

# Pages of a site, one after another in one frame, which is of their origin. Contrast as in WCAG 2: a text's colour over
# the backgrounds under it.
TOUR = """<!DOCTYPE html><meta charset="utf-8"><iframe style="border: 0; width: {width}px; height: 2000px"></iframe>
<pre id="seen"></pre><script>
const rgba = text => (c => [c[0], c[1], c[2], c[3] ?? 1])(text.match(/[\\d.]+/g).map(Number));
const over = (top, below) => [0, 1, 2].map(i => top[i] * top[3] + below[i] * (1 - top[3]));
const light = c => c.map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
  .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
function contrast(element, style) {{
  const layers = [];
  for (let e = element; e; e = e.parentElement) layers.push(rgba(style(e).backgroundColor));
  const below = layers.reverse().reduce((c, top) => over(top, c), [255, 255, 255]);
  const [a, b] = [light(over(rgba(style(element).color), below)), light(below)];
  return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
}}
const frame = document.querySelector("iframe"), pages = {pages}, seen = {{}};
function next() {{
  if (!pages.length) {{ document.querySelector("#seen").textContent = JSON.stringify(seen); return; }}
  const name = pages.shift();
  frame.onload = () => setTimeout(() => {{
    const page = frame.contentDocument, root = page.documentElement;
    const style = e => frame.contentWindow.getComputedStyle(e);
    const article = page.querySelector("article") ?? page.body;
    const shown = [...article.querySelectorAll("*")].filter(e => e.checkVisibility());
    const texts = shown.filter(e => !e.closest("svg, .headerlink")
      && [...e.childNodes].some(n => n.nodeType == 3 && n.data.trim()));
    const cut = e => ["auto", "scroll"].includes(style(e).overflowX);
    const scrolled = e => {{ for (let p = e.parentElement; p; p = p.parentElement) if (cut(p)) return true; }};
    seen[name] = {{
      content: root.scrollWidth, texts: texts.length,
      wide: shown.filter(e => e.getBoundingClientRect().right > root.clientWidth + 0.5 && !scrolled(e))
        .map(e => e.outerHTML.slice(0, 80)),
      faint: texts.filter(e => contrast(e, style) < 4.5)
        .map(e => contrast(e, style).toFixed(1) + " " + e.outerHTML.slice(0, 80)),
      broken: [...page.images].filter(i => !i.naturalWidth).map(i => i.src),
    }};
    next();
  }}, 20);
  frame.src = name;
}}
next();
</script>"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seen:
    """A page that was laid out.

    Attributes:
      layout: Widths of window and content, elements that are too wide, widths of charts, loaded resources, background.
      console: Lines that the page wrote to the console, errors and broken policies among them.
      requests: URLs that the browser asked the network for.
    """

    layout: dict
    console: list[str]
    requests: list[str]


def look_at(page: str, folder: pathlib.Path, *, width: int, height: int = 2000, dark: bool = False) -> Seen:
    """Lays a page out.

    Args:
      page: The page.
      folder: Where the browser has its profile and its logs, and leaves ``WIDTH.png``; an empty one.
      width, height: Pixels of the frame.
      dark: Whether the reader prefers dark pages.

    Raises:
      FileNotFoundError: If Chromium is not installed.
    """
    file, netlog, picture = folder / "frame.html", folder / "net.json", folder / f"{width}.png"
    file.write_text(FRAME.format(width=width, height=height, page=html.escape(page, quote=True)))
    more = [f"--log-net-log={netlog}", "--enable-logging=stderr", f"--screenshot={picture}"]
    layout, log = _opened(file.as_uri(), folder, more, window=(width, height), dark=dark, seconds=5)
    asked = set(re.findall(r'"url":"([^"]+)"', netlog.read_text()))
    return Seen(
        layout=layout,
        console=[line for line in log.splitlines() if ":CONSOLE" in line],
        requests=sorted(url for url in asked if not OWN.match(url)),
    )


def _opened(
    address: str, folder: pathlib.Path, more: list[str], *, window: tuple[int, int], dark: bool, seconds: int
) -> tuple[dict, str]:
    """What a page wrote into its ``seen``, after at most so many seconds of its own time, and the browser's log."""
    if CHROMIUM is None:
        raise FileNotFoundError(ABSENT)
    own = [f"--user-data-dir={folder / 'profile'}", f"--blink-settings=preferredColorScheme={int(not dark)}",
           f"--window-size={window[0]},{window[1]}", f"--virtual-time-budget={1000 * seconds}"]  # fmt: skip
    run = [CHROMIUM, *FLAGS, *own, *more, "--dump-dom", address]
    done = subprocess.run(run, capture_output=True, text=True, timeout=115 + 5 * seconds, check=True)
    seen = re.search(r'<pre id="seen">(.+?)</pre>', done.stdout, re.DOTALL)[1]
    return json.loads(html.unescape(seen)), done.stderr


def look_at_site(site: pathlib.Path, folder: pathlib.Path, *, width: int, dark: bool = False) -> dict[str, dict]:
    """Lays every page of a built site out, served on the loopback interface.

    Args:
      site: Folder with the pages, as mkdocs builds it.
      folder: Where the browser has its profile; an empty one.
      width: Pixels of the frame.
      dark: Whether the reader prefers dark pages.

    Returns:
      By page: ``content``, its width; ``texts``, how many elements of its article (or of all of a page without one)
      have text; ``wide``, those that reach out of the window and of every box that scrolls; ``faint``, those whose
      contrast is below 4.5; ``broken`` pictures.

    Raises:
      FileNotFoundError: If Chromium is not installed.
    """
    pages = sorted(str(page.relative_to(site)) for page in site.rglob("*.html") if page.name != "404.html")
    tour = TOUR.format(width=width, pages=json.dumps([f"/{page}" for page in pages])).encode()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, directory=site)

        def do_GET(self) -> None:
            if self.path != "/tour":
                super().do_GET()
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(tour)

        def log_message(self, *_: Any) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/tour"
        try:
            found, _ = _opened(address, folder, [], window=(1400, 2100), dark=dark, seconds=120)
        finally:
            server.shutdown()
    return {name.removeprefix("/"): seen for name, seen in found.items()}
