"""Adapters to other libraries: private or version-dependent names that vbrt uses, found by feature probes.

One file per library. Each feature lists the parts that it needs and says what is disabled without them; a missing part
is reported with the installed version. Importing these modules imports no library (except torch).
"""

__all__: list[str] = []
