"""Adapters to other libraries: private or version-dependent names that vbrt uses, found by feature probes.

One file for each library. Enters: features that rooms below want. Leaves: functions, classes and argument names of the
installed version, or a refusal that names version and missing part. Nothing here imports a library before it is asked
for one of its parts.

A `Feature` names the classes, functions and parameters that something of vbrt needs and finds them by name and
signature, never by version. Where one is missing, what is off is said once, in a warning and in `stats().fallbacks`;
what cannot go another way is refused with the version (`LibraryError`). `tests/libraries` takes each name away, and
reads all files for parts of libraries that are touched elsewhere.
"""

__all__: list[str] = []
