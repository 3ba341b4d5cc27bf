"""Messages of other libraries become one line without escape sequences."""

import pytest

from spherenet._util.text import first_line


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("no such file.", "no such file"),
        ("first:\nsecond", "first"),
        ("\r\n first\r second", "first"),
        ("\x1b[1;31mNOT_IMPLEMENTED\x1b[m : \x1b[0m no kernel\x1b[K.", "NOT_IMPLEMENTED :  no kernel"),
        ("\x1b]0;title\x07text", "text"),
        ("\x1b]8;;https://a.b\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("left \u202e right \x1b", "left \\u202e right \\x1b"),
        ("", "ValueError"),
        ("\x1b[m", "ValueError"),
    ],
)
def test_first_line_of_a_message(message, expected):
    assert first_line(ValueError(message)) == expected


def test_long_message_is_cut():
    assert len(first_line(ValueError("x" * 1_000))) == 300
