"""Build the documentation with mkdocs, strictly, and check that no page loads anything from elsewhere."""

import importlib.util
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
SITE = ROOT / "build" / "site"
#: what a browser fetches by itself when it shows a page; links that a person may follow are not among it
_LOADS = re.compile(r"""<(?:script|img|iframe|link)\b[^>]*?\b(?:src|href)=["']?((?:https?:)?//[^"'\s>]+)""")
_NOT_LOADED = re.compile(r"""<link\b[^>]*\brel=["']?(?:canonical|prev|next|alternate)\b""")


def foreign(page: str) -> list[str]:
    """Return the addresses on other hosts that a page would load."""
    return [match[1] for match in _LOADS.finditer(page) if not _NOT_LOADED.match(match[0])]


def main(argv: list[str]) -> int:
    if importlib.util.find_spec("mkdocs") is None:
        print(f"docs: {sys.executable} has no mkdocs; pip install -e '.[docs]'", file=sys.stderr)
        return 1
    command = [sys.executable, "-m", "mkdocs", *(argv or ["build", "--clean"])]
    start = time.monotonic()
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}  # a banner about versions to come
    if argv:
        return subprocess.run(command, cwd=ROOT, env=environment).returncode
    # not --quiet, under which mkdocs counts no warnings and fails for none
    done = subprocess.run(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    said = [line for line in done.stderr.splitlines() if line and not line.startswith("INFO")]
    if done.returncode or said:
        print(*said, "docs: not built", sep="\n", file=sys.stderr)
        return done.returncode or 1
    pages = sorted(SITE.rglob("*.html"))
    wrong = [f"{page.relative_to(SITE)}: loads {url}" for page in pages for url in foreign(page.read_text("utf-8"))]
    print("\n".join(wrong), file=sys.stderr, end="\n" if wrong else "")
    print(f"docs: {len(pages)} pages in {SITE.relative_to(ROOT)}, built in {time.monotonic() - start:.1f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
