"""What is quoted of other libraries' errors."""

import pytest

from pnn.errors import first_line


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("one"), "one"),
        (ValueError("one\ntwo"), "one"),
        (ValueError("\n  one \r\ntwo\n"), "one"),
        (ValueError(""), "ValueError"),
        (MemoryError(), "MemoryError"),
        (OSError("\n \n"), "OSError"),
    ],
)
def test_the_first_line_that_says_something(error, line):
    assert first_line(error) == line
