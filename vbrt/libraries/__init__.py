"""Other libraries: the names that vbrt asks of each, found by probing, and what is off where a name is missing.

One file for each library. Enters: features that rooms below want. Leaves: functions, classes and argument names of the
installed version, or a refusal that names version and missing part. Nothing here imports a library before it is asked
for one of its parts.
"""

__all__: list[str] = []
