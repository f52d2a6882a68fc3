"""Releases compare as numbers, not as text, and an invalid release raises an error that names
it.
"""

import pytest
from walk import walked

from policyloss.compat.arguments import at_least
from policyloss.errors import SpecError

# From the oldest to the newest; those on one line are equal.
ORDER = [
    ["0.4.1"],
    ["0.9.0rc1", "0.9.dev3", "v0.9.0-a1"],
    ["0.9", "0.9.0", "v0.9.0", "0.9.0+cu128"],
    ["0.9.0.post1"],
    ["0.9.1"],
    ["0.10.2"],
    ["1", "1.0.0"],
]


def test_releases_are_ordered_by_their_numbers():
    for i, line in enumerate(ORDER):
        for j, other in enumerate(ORDER):
            for release in line:
                for version in other:
                    assert at_least(release, version) is (i >= j), (release, version)


def test_none_is_the_current_release():
    assert at_least(None, "999.0")


@walked("bad", ["", "0.9.", "0..9", "latest", "0.9.x", " 0.9", 0.9, (0, 9)])
def test_an_invalid_release_is_named(bad):
    with pytest.raises(SpecError, match="release="):
        at_least(bad, "0.9.0")
