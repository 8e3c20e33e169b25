"""Chromium without a window: where it is, and pictures of pages.

python3 scripts/chromium.py run.html run.png [--size 1400x1000] [--dark] [--at "from=1000&to=9000&find=q_proj"]
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

__all__ = ["find_chromium", "screenshot"]

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
#: root's Chromium has no sandbox; the page under test is ours, and loads nothing
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--no-first-run")


def find_chromium() -> str | None:
    """Return the path of Chromium or Chrome; None where neither is installed."""
    return next(filter(None, map(shutil.which, NAMES)), None)


def screenshot(page: Path, picture: Path, *, size: tuple[int, int] = (1400, 1000), dark: bool = False, at: str = ""):
    """Write a picture of a page.

    Args:
        size: of the window, in pixels.
        at: what comes behind the # of the address: from and to in microseconds, find.

    Raises:
        RuntimeError: there is no Chromium, or it made no picture.
    """
    chromium = find_chromium()
    if chromium is None:
        raise RuntimeError(f"no Chromium on PATH ({', '.join(NAMES)}); on Debian: apt-get install chromium")
    address = page.resolve().as_uri() + (f"#{at}" if at else "")
    look = [f"--screenshot={picture.resolve()}", "--window-size={},{}".format(*size), "--virtual-time-budget=3000"]
    theme = [f"--blink-settings=preferredColorScheme={0 if dark else 1}"]
    command = [chromium, "--headless=new", *FLAGS, *look, *theme, address]
    picture.unlink(missing_ok=True)
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if not picture.exists():
        raise RuntimeError(f"{chromium} made no picture of {page}: {done.stderr[-400:]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("page", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--size", default="1400x1000")
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--at", default="", help="what comes behind the # of the address")
    args = parser.parse_args()
    width, _, height = args.size.partition("x")
    screenshot(args.page, args.picture, size=(int(width), int(height)), dark=args.dark, at=args.at)
    return 0


if __name__ == "__main__":
    sys.exit(main())
