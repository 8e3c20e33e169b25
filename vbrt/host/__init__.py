"""Services of the operating system: files, memory, mapped files, threads that Ctrl-C cannot lock."""

__all__: list[str] = []
