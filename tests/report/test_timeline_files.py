"""Files of timelines: paths as people write them."""

import pytest

from vbrt.errors import ConfigError
from vbrt.report.timeline_files import check_timeline_path


def test_a_path_may_begin_with_the_home_of_the_user(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert check_timeline_path("~/a.html") == tmp_path / "a.html"
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match=r"timeline: cannot write '~/none/a\.html': No such file.*name a file"):
        check_timeline_path("~/none/a.html")
