"""Pages opened in a real browser, headless and without a network."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

needs_browser = pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium to open the page with")
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--host-resolver-rules=MAP * ~NOTFOUND"),
    "--virtual-time-budget=4000",
)


def open_in_browser(page: Path, folder: Path, *, width: int = 1200) -> str:
    """The document after its scripts have run in a window of `width` pixels (500 at least)."""
    chosen = [f"--user-data-dir={folder / 'profile'}", f"--window-size={width},900", "--dump-dom", page.as_uri()]
    return subprocess.run(["chromium", *_FLAGS, *chosen], capture_output=True, text=True, timeout=60, check=True).stdout


def width_in_browser(page: Path, folder: Path, width: int) -> int:
    """How wide the whole page is in a window of `width` pixels: more than that if something sticks out."""
    script = "<script type=module>document.body.dataset.wide = document.documentElement.scrollWidth</script></body>"
    probe = folder / f"probe-{page.name}"
    probe.write_text(page.read_text(encoding="utf-8").replace("</body>", script), encoding="utf-8")
    found = re.search(r'<body data-wide="(\d+)"', open_in_browser(probe, folder, width=width))
    assert found is not None
    return int(found[1])
