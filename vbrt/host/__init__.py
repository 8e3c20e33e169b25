"""Operating-system services: files, pinned and mapped memory, Ctrl-C-safe threads, stats endpoint."""

__all__: list[str] = []
