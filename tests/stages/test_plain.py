"""Messages for people, and what a setting may hold."""

import pytest

from stages.plain import LONGEST_MESSAGE, check_plain, for_people
from tests.hostile.subjects import limited


@pytest.mark.parametrize("text", ["x" * 3_000_000, ":" * 3_000_000, ":/" * 500_000, "a:b@ " * 9999])
def test_long_messages_are_short_and_soon_told(text):
    with limited():
        assert len(for_people(text)) <= LONGEST_MESSAGE + 3


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("cannot read s3://key:sec/ret@bucket/x", "cannot read s3://***@bucket/x"),
        ("cluster s3:/key:secret@bucket/x: none", "cluster s3:/***@bucket/x: none"),
        ("http://u:p@ss@host and 'ftp://a:b@c'", "http://***@host and 'ftp://***@c'"),
        ("https://host:80/path, me@example.org", "https://host:80/path, me@example.org"),
        ("\x1b[31mred\x9b", "\\x1b[31mred\\x9b"),
        ("two\nlines\tand a tab", "two\nlines\tand a tab"),
    ],
)
def test_messages_hide_passwords_and_show_control_characters(text, told):
    assert for_people(text) == told


def test_a_setting_holds_plain_data():
    check_plain({"a": [1, 2.5, "é\x85\n", None, True, {"b": []}], "c": -(2**63)})
    for value in (2**63, float("nan"), "\0", {"\0": 1}, [[b""]], object()):
        with pytest.raises(ValueError, match="number|character|text"):
            check_plain({"a": [value]})
