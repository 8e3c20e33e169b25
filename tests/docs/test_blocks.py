"""How blocks of a page are tried: what is wrong in one is found, and what is marked does not run."""

import pytest

from tests.docs import pages

FENCE = "```"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A function that runs the text of a page and returns its names."""

    def run(text, *, setup="nothing", gpu=False):
        path = tmp_path / "page.md"
        path.write_text(f"<!-- setup: {setup} -->\n\n{text}" if setup else text)
        monkeypatch.setitem(pages.PAGES, "page.md", path)
        scope = {}
        pages.Page("page.md").run(scope, gpu=gpu)
        return scope

    return run


def block(language, text, mark=""):
    return f"{mark}\n{FENCE}{language}\n{text}\n{FENCE}\n"


def test_blocks_share_names_and_marked_ones_run_where_they_can(run):
    page = (
        block("python", "a = 1")
        + block("python", "b = a + 1")
        + block("python", "c = 1", "<!-- gpu: takes one -->")
        + block("python", "1 / 0", "<!-- parsed: takes long -->")
        + block("python", "d = 1", "<!-- needs: torch -->")
        + block("python", "1 / 0", "<!-- needs: no_such_package -->")
        + block("py", "import other_library")
    )
    scope = run(page)
    assert scope["b"] == 2 and scope["d"] == 1 and "c" not in scope
    assert run(page, gpu=True)["c"] == 1
    assert "b" not in run(page, setup=None)


@pytest.mark.parametrize(
    ("language", "text", "error"),
    [
        ("python", "1 / 0", ZeroDivisionError),
        ("py", "a =", SyntaxError),
        ("sh", "vbrt inspect /no/such/model", AssertionError),
        ("sh", "scripts/none", AssertionError),
        ("sh", "scripts/train --no-such-option", AssertionError),
        ("sh", "python examples/none.py", AssertionError),
        ("sh", "echo a | rm -r b", AssertionError),
        ("toml", "[weights]\nformt = 'nvfp4'", ValueError),
        ("json", '"a": [1,', ValueError),
        ("yaml", "a: b", AssertionError),
    ],
)
def test_what_is_wrong_in_a_block_is_found(run, language, text, error):
    with pytest.raises(error):
        run(block(language, text))


def test_commands_that_do_not_run_are_parsed(run):
    with pytest.raises(SystemExit):
        run(block("sh", "vbrt plan DIR --no-such-option", "<!-- parsed: takes a model -->"))
    run(block("sh", "VBRT_TOP=1 vbrt plan DIR \\\n  --json  # words", "<!-- parsed: takes a model -->"))


def test_an_error_names_the_line_of_the_page(run, tmp_path):
    with pytest.raises(ZeroDivisionError) as caught:
        run("words\n" + block("python", "a = 1\n1 / 0"))
    place = caught.traceback[-1]
    assert (place.path, place.lineno + 1) == (tmp_path / "page.md", 7)
