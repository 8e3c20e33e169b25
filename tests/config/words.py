"""What refusals say."""

import pytest

from vbrt.config import VBConfig
from vbrt.errors import ConfigError

BUDGET = 'expected "auto", bytes, "8GiB" or "40%"'


def refusal(function, *args, **kwargs) -> str:
    """Call a function that must refuse; return the words."""
    with pytest.raises(ConfigError) as caught:
        function(*args, **kwargs)
    return str(caught.value)


def refused(**sections) -> str:
    """Return the words with which sections are refused as those of my.toml."""
    return refusal(VBConfig.from_dict, sections, source="my.toml")
