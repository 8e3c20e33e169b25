"""Presets shipped as TOML files, and reading of TOML files."""

import tomllib
from pathlib import Path
from typing import Any

from vbrt.config.value_checks import did_you_mean, quoted, shown
from vbrt.errors import ConfigError, MissingConfigError, describe_os_error
from vbrt.host.safe_files import read_bounded

__all__ = ["DEFAULT_PRESET", "preset_names", "preset_path", "read_toml"]

DEFAULT_PRESET = "fp4"

_MAX_TOML_BYTES = 1 << 20


def read_toml(path: Path, source: str) -> dict[str, Any]:
    """Return the tables of a TOML file. Raises ConfigError that names `source`: it cannot be read or parsed."""
    try:
        text = read_bounded(path, _MAX_TOML_BYTES).decode("utf-8-sig")  # editors on Windows write a BOM, TOML has none
    except FileNotFoundError:
        hint = f'; for the preset write "{path.stem}"' if path.stem in preset_names() else ""
        raise MissingConfigError(f"{source}: no such file; expected a TOML file{hint}") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{source}: not UTF-8 (at line {line}); expected a TOML file in UTF-8") from error
    except OSError as error:
        raise ConfigError(f"{source}: cannot be read ({describe_os_error(error)}); expected a TOML file") from error
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # plain ValueError: a number of thousands of digits
        reason = str(error).replace("at end of document", f"at line {text.count(chr(10)) + 1}, the end of the file")
        raise ConfigError(f'{source}: not valid TOML: {reason}; expected lines such as budget = "8GiB"') from error


def _preset_dir() -> Path:
    # presets are inside the package in an installed wheel, next to it in a checkout
    package = Path(__file__).parent.parent
    for folder in (package / "configs", package.parent / "configs"):
        if (folder / f"{DEFAULT_PRESET}.toml").is_file():
            return folder
    raise ConfigError(
        f"presets: no configs/{DEFAULT_PRESET}.toml in {package} or {package.parent}; "
        "expected the presets that ship with vbrt: reinstall it"
    )


def preset_names() -> tuple[str, ...]:
    """Return the names of the presets that ship with vbrt, sorted."""
    folder = _preset_dir()
    try:
        return tuple(sorted(path.stem for path in folder.glob("*.toml")))
    except OSError as error:
        raise ConfigError(
            f"presets: {folder} cannot be listed ({describe_os_error(error)}); give a config as a dict, "
            "or try again once that is mended"
        ) from error


def preset_path(name: str) -> Path:
    """Return the path of a preset's TOML file. Raises ConfigError, listing the presets, for an unknown name."""
    names = preset_names()
    if name not in names:
        raise ConfigError(
            f"{shown(name)} is not a preset{did_you_mean(str(name), names)}; "
            f"expected {quoted(names)}, or the path of a TOML file"
        )
    return _preset_dir() / f"{name}.toml"
