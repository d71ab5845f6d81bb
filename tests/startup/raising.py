"""``pytest.raises`` for the programs of jobs: reading pytest takes as long as all else that most of them read."""

import re


class raises:
    """``with raises(ERROR, match=PATTERN) as caught:`` the block must raise it; ``caught.value`` is what was raised."""

    def __init__(self, expected, *, match=None):
        self._expected = expected
        self._match = match
        self.value = None

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        assert error is not None, f"not raised: {self._expected}"
        if not isinstance(error, self._expected):
            return False
        self.value = error
        if self._match is not None:
            assert re.search(self._match, str(error)), f"{self._match!r} is not in {str(error)!r}"
        return True
