"""Which of two weight versions is the newer one.

Versions are names. What orders them is the trainer's epoch, then when the router first saw them.
Of those that were there before the router it can only tell by their names, with numbers in them
taken as numbers.
"""

import re
from collections.abc import Iterable

INITIAL = "default"
"""What an instance was started with; older than anything a trainer brings."""

_Rank = tuple[int, int, int, tuple[tuple[int, int | str], ...]]


class Versions:
    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, int]] = {}
        """Epoch, and order of appearance; 0 for all that were there at the start."""
        self._count = 0

    def started(self) -> None:
        """What is noted from now on has come later than what is known."""
        self._count = max(self._count, 1)

    def note(self, version: str, epoch: int | None) -> None:
        """An instance holds this version."""
        known = self._seen.get(version)
        if known is None:
            self._seen[version] = (epoch or 0, self._count)
            self._count += self._count > 0
        elif epoch is not None and epoch > known[0]:
            self._seen[version] = (epoch, known[1])

    def newest(self, versions: Iterable[str]) -> str | None:
        return max(versions, key=self._rank, default=None)

    def at_least(self, version: str, least: str) -> bool:
        """Whether `version` is `least` or newer."""
        if least in (version, INITIAL):
            return True
        if least in self._seen and version in self._seen:
            return self._rank(version) > self._rank(least)
        # Nothing is known about one of them but its name; names of another kind tell nothing.
        return _kind(version) == _kind(least) and _by_name(version) > _by_name(least)

    def _rank(self, version: str) -> _Rank:
        epoch, order = self._seen.get(version, (0, 0))
        return int(version != INITIAL), epoch, order, _by_name(version)


def _kind(version: str) -> str:
    """A name without its numbers: `step-7` and `step-12` are of one kind."""
    return re.sub(r"\d+", "0", version)


def _by_name(version: str) -> tuple[tuple[int, int | str], ...]:
    if version == INITIAL:
        return ()
    parts = re.split(r"(\d+)", version)
    return tuple((0, int(part)) if part.isdigit() else (1, part) for part in parts if part)
