"""Headless Chromium: lays an HTML page out in a window of some width, and says what it saw. For tests and pictures."""

import dataclasses
import html
import json
import pathlib
import re
import shutil
import subprocess

CHROMIUM = shutil.which("chromium")
ABSENT = "chromium is not installed on this machine (Debian: apt-get install chromium), so no page is laid out"
OWN = re.compile(r"(https?://[\w.]+\.google\.com/|data:|file:|chrome|blob:)")
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
    if CHROMIUM is None:
        raise FileNotFoundError(ABSENT)
    file, netlog, picture = folder / "frame.html", folder / "net.json", folder / f"{width}.png"
    file.write_text(FRAME.format(width=width, height=height, page=html.escape(page, quote=True)))
    flags = [*FLAGS, f"--user-data-dir={folder / 'profile'}", f"--log-net-log={netlog}", "--enable-logging=stderr",
             f"--window-size={width},{height}", f"--blink-settings=preferredColorScheme={int(not dark)}"]  # fmt: skip
    run = [CHROMIUM, *flags, "--virtual-time-budget=5000", "--dump-dom", f"--screenshot={picture}", file.as_uri()]
    done = subprocess.run(run, capture_output=True, text=True, timeout=120, check=True)
    layout = json.loads(html.unescape(re.search(r'<pre id="seen">(.+?)</pre>', done.stdout)[1]))
    asked = set(re.findall(r'"url":"([^"]+)"', netlog.read_text()))
    return Seen(
        layout=layout,
        console=[line for line in done.stderr.splitlines() if ":CONSOLE" in line],
        requests=sorted(url for url in asked if not OWN.match(url)),
    )
