"""`python -m vbrt` is the command `vbrt`."""

import sys

from vbrt.cli.main import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
