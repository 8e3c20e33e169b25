"""Plug-ins: installed packages that register their own formats and kernels.

    [project.entry-points."vbrt.plugins"]
    int4 = "my_package.int4"       # a module that calls `register_format` and `register_kernel` as it is imported

They are imported at the first lookup of formats, at the latest by the first config, so every process has them:
commands, ranks, readers of saved models. `import vbrt` alone imports none.
"""

import functools

from vbrt.errors import ConfigError, first_line

__all__ = ["load_plugins"]


@functools.cache
def load_plugins() -> None:
    """Import the installed plug-ins, once per process. Raises ConfigError: one cannot be imported."""
    from importlib.metadata import entry_points  # lazy: takes 0.1 s, unless torch has imported it

    for entry in entry_points(group="vbrt.plugins"):
        try:
            entry.load()
        except Exception as error:
            package = entry.dist.name if entry.dist else "?"
            raise ConfigError(
                f"plug-in {entry.name} = {entry.value} of {package}: {type(error).__name__}: {first_line(error)}; "
                "expected a module that can be imported: repair the package, or uninstall it"
            ) from error
