"""Everything vbrt raises on purpose.

    VBError
    ├── ArgumentError (ValueError)    a shape, dtype or value that a layer or function of vbrt cannot take
    ├── ConfigError   (ValueError)    a config file, key or value: names file, key, what came, what would do
    │   └── NoRoomError               a model that does not fit into the memory or the budgets that there are
    ├── FormatError   (ValueError)    a weight or page that a number format cannot hold or read
    ├── TierError     (RuntimeError)  a page that cannot be stored, read or verified: names layer and file
    ├── WrapError     (ValueError)    a model, or a use of a wrapped model, that vbrt refuses
    ├── KernelError   (RuntimeError)  no implementation of an op for this backend and device
    ├── LibraryError  (RuntimeError)  an installed library lacks a part that is needed: names its version
    ├── NonfiniteError (ArithmeticError)  NaN or Inf that a module has computed: names the first one
    ├── MissingFileError (FileNotFoundError)  a path of a model, checkpoint (also a CheckpointError), TOML file (also a
    │                                 ConfigError) or other file at which there is nothing
    └── CheckpointError (RuntimeError)  a save or checkpoint that cannot be written, read, or does not fit the model

Each message says where it happened, what came, and what would do.
"""

import errno

__all__ = [
    "ArgumentError",
    "CheckpointError",
    "ConfigError",
    "FormatError",
    "KernelError",
    "LibraryError",
    "MissingCheckpointError",
    "MissingConfigError",
    "MissingFileError",
    "NoRoomError",
    "NonfiniteError",
    "TierError",
    "VBError",
    "WrapError",
    "describe_os_error",
    "first_line",
]


class VBError(Exception):
    """Base class: `except VBError` catches everything that vbrt raises on purpose."""


class ArgumentError(VBError, ValueError):
    """A layer or function was given a shape, dtype or value that it cannot take; nothing was computed."""


class ConfigError(VBError, ValueError):
    """A config file, key or value is wrong, or asks for more than the machine has."""


class NoRoomError(ConfigError):
    """A model's pages, or what is not swapped of it, do not fit into the memory or the budgets; nothing was changed."""


class FormatError(VBError, ValueError):
    """A weight cannot be encoded (NaN, Inf, dtype) or a page cannot be decoded (layout version, size)."""


class TierError(VBError, RuntimeError):
    """A page cannot be written, read or verified; the model stays usable once the cause is gone."""


class WrapError(VBError, ValueError):
    """The model, or the way it is used, is not something vbrt can serve."""


class KernelError(VBError, RuntimeError):
    """No implementation of an op exists for the asked backend and device."""


class LibraryError(VBError, RuntimeError):
    """An installed version of another library lacks a part that a feature needs; nothing was changed."""


class NonfiniteError(VBError, ArithmeticError):
    """A module has computed NaN or Inf; raised on request only (`watch_nonfinite`)."""


class CheckpointError(VBError, RuntimeError):
    """A save or checkpoint cannot be written or read, is damaged, or is not one of this model."""


class MissingFileError(VBError, FileNotFoundError):
    """A path at which there is nothing."""


class MissingConfigError(ConfigError, MissingFileError):
    """A TOML file that is not there."""


class MissingCheckpointError(CheckpointError, MissingFileError):
    """A save or checkpoint, or a file of it, that is not there."""


def describe_os_error(error: OSError) -> str:
    """The reason for people: "the disk is full", or what the system says."""
    return "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror or str(error)


def first_line(error: BaseException, most: int = 200) -> str:
    """What an error says, as far as its first line goes, and no more than so many characters."""
    return next(iter(str(error).splitlines()), "")[:most]
