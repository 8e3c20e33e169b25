"""What the operating system does for us: files, mapped memory, threads that Ctrl-C cannot lock."""

__all__: list[str] = []
