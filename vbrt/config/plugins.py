"""Plug-ins: installed packages that register formats and kernels of their own.

    [project.entry-points."vbrt.plugins"]
    int4 = "my_package.int4"       # a module that calls `register_format` and `register_kernel` as it is imported

They are imported where formats are first asked for, which the first config does, so every process knows them: commands,
ranks, a saved model's reader. `import vbrt` looks for none.
"""

import functools

from vbrt.errors import ConfigError, first_line

__all__ = ["load_plugins"]


@functools.cache
def load_plugins() -> None:
    """Import the plug-ins that are installed, once a process. Raises ConfigError for one that cannot be imported."""
    from importlib.metadata import entry_points  # 0.1 s, which torch has paid wherever weights are computed with

    for entry in entry_points(group="vbrt.plugins"):
        try:
            entry.load()
        except Exception as error:
            package = entry.dist.name if entry.dist else "?"
            raise ConfigError(
                f"plug-in {entry.name} = {entry.value} of {package}: {type(error).__name__}: {first_line(error)}; "
                "expected a module that can be imported: repair the package, or uninstall it"
            ) from error
