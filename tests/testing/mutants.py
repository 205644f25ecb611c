"""What the tests of broken parts share."""

import pytest


def rejected(check, mutant, match, *args, **settings):
    with pytest.raises(AssertionError, match=match):
        check(mutant, *args, **settings)
