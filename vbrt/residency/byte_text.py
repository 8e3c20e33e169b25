"""Formatting of byte counts."""

__all__ = ["format_bytes"]


def format_bytes(nbytes: float) -> str:
    """Return a byte count as text: 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"
