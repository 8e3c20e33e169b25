"""docs/troubleshooting.md has every message with which vbrt raises an error, under a topic that says what to do."""

import re

from scripts.docs_errors import CLASSES, PAGE, Message, by_topic, main, messages, with_lists


def test_every_message_of_the_source_has_a_topic_with_a_cause_and_a_remedy():
    page, found = PAGE.read_text("utf-8"), messages()
    assert {message.raised for message in found} == set(CLASSES)
    topics, left = by_topic(page, found)
    assert not left, "add a topic to docs/troubleshooting.md, or widen the expression of one; say cause and remedy"
    assert all(topics.values()), "a topic without messages"
    for section in re.split(r"^## ", page, flags=re.M)[1:]:
        assert re.search(r"\*\*Cause\.\*\*.*\*\*What to do\.\*\*.*<!-- messages: ", section, re.S), section[:80]


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
    assert by_topic("<!-- messages: tides/.*low -->", found) == ({"tides/.*low": [found[1]]}, [found[0], found[2]])


def test_the_site_lists_messages_and_the_script_finds_their_topic(capsys):
    page = with_lists("## Wrapped\n<!-- messages: is wrapped already -->\n")
    assert "- WrapError: `the model is wrapped already; unwrap() it first`\n" in page
    assert main("do not fit into") == 0
    assert capsys.readouterr().out.startswith("The model does not fit, or a budget is too small\n  TierError tiers/")
