"""A text names its numbers: nobody has to look elsewhere for how many there are."""

import re

from testbed.tree import written_text

UNNAMED = re.compile(r"(?<![a-z])so[\s#/*_]+many\b", re.IGNORECASE)


def test_a_number_is_named() -> None:
    found = {path: words for path, text in written_text().items() if (words := UNNAMED.findall(text))}
    assert found == {}, "say which number it is: `size` bytes, at most `count` rows, this number of requests"
