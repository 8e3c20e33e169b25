"""`python -m vbrt` is the command `vbrt`."""

from vbrt.cli.process_start import program

__all__: list[str] = []

if __name__ == "__main__":
    program()
