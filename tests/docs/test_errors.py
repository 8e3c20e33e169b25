"""docs/troubleshooting.md has every message with which vbrt raises an error, under a topic that says what to do."""

import re

from scripts.docs_errors import CLASSES, PAGE, Message, messages, with_lists


def test_every_message_of_the_source_is_on_the_page():
    page = PAGE.read_text("utf-8")
    found = messages()
    assert {message.raised for message in found} == set(CLASSES)
    again, left = with_lists(page, found)
    assert not left, "add a topic, or widen the expression of one, in docs/troubleshooting.md"
    assert again == page, "run scripts/docs_errors.py, which lists new messages, and read where they went"


def test_every_topic_has_messages_a_cause_and_a_remedy():
    sections = re.split(r"^## ", PAGE.read_text("utf-8"), flags=re.M)[1:]
    for title, text in (section.split("\n", 1) for section in sections):
        assert re.search(r"^- \w+Error: `", text, re.M), title
        assert "**Cause.**" in text and "**What to do.**" in text, title


def test_a_new_error_without_a_topic_is_found(tmp_path):
    (tmp_path / "tides").mkdir()
    (tmp_path / "tides" / "ebb.py").write_text(
        "def f(path, n):\n"
        "    what = f'{path}{n}: low' if n else 'no water'\n"
        "    raise TierError(what)\n"
        "raise errors.WrapError(f'{name!r} is ' + f'dry: {1}{2}; fill it')\n"
        "raise ValueError('not one of ours')\n"
    )
    found = messages(tmp_path)
    assert found == [
        Message("TierError", "tides/ebb", "no water"),
        Message("TierError", "tides/ebb", "…: low"),
        Message("WrapError", "tides/ebb", "… is dry: …; fill it"),
    ]
    page, left = with_lists("<!-- messages: tides/.*low -->\nold\n<!-- end -->", found)
    assert page == "<!-- messages: tides/.*low -->\n\n- TierError: `…: low`\n\n<!-- end -->"
    assert left == [found[0], found[2]]
