"""What Chromium makes of a page on a phone."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PHONE = 390  # CSS pixels.
# Written into the page: which boxes the pointer reaches, what was loaded, and whether text can be read.
_PROBE = """<script>
const shown = [...document.querySelectorAll("svg rect")].map(rect => {
  rect.scrollIntoView({block: "center", inline: "center"});
  const here = rect.getBoundingClientRect();
  return document.elementFromPoint(here.left + here.width / 2, here.top + here.height / 2) === rect
    ? rect.querySelector("title").textContent : "";
});
const fonts = [...document.querySelectorAll("svg text")].map(text => text.getBoundingClientRect().height);
parent.postMessage(JSON.stringify({
  shown, width: innerWidth, scrolled: document.documentElement.scrollWidth,
  loaded: performance.getEntriesByType("resource").map(entry => entry.name), smallest: Math.min(...fonts)}), "*");
</script>"""
# A window is at least 500 pixels wide, and a frame as narrow as a phone.
_FRAME = f"""<script>onmessage = event => document.body.dataset.probe = event.data</script>
<iframe src="probed.html" style="border: 0; width: {PHONE}px; height: 800px"></iframe>"""


def probe_page(text: str, folder: Path) -> dict[str, Any]:
    """Open a page as wide as a phone, from ``folder``: what :data:`_PROBE` notes."""
    (folder / "probed.html").write_text(text.replace("</body>", f"{_PROBE}</body>"))
    (folder / "frame.html").write_text(_FRAME)
    assert BROWSER is not None
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=3000", "--dump-dom"]
    command += [f"--user-data-dir={folder / 'profile'}", (folder / "frame.html").as_uri()]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    found = re.search(r'data-probe="(.*?)"', ended.stdout)
    assert found is not None, ended.stdout[-2000:]
    return json.loads(found[1].replace("&quot;", '"'))
