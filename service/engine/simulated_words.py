"""The language of the simulated model: words, their token ids, and what comes next.

The word `t{i}` has the token id `FIRST_ID + i`. Every other word has an id below `FIRST_ID`, the same each
time. The model counts: after a prompt that ends with `t0 t1 … tk` comes `t{k+1}`, after any other one `t0`.
So an answer that was cut goes on where it stopped, if what came of it is put behind its prompt, as text or as
token ids; a word may stick to the word before it, as `t0` does that follows a prompt without a space.
"""

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

FIRST_ID = 1000

_TOKEN = r"t(?:0|[1-9][0-9]{0,8})(?![0-9])"
_HAS_TOKEN = re.compile(_TOKEN)
_PARTS = re.compile(rf"{_TOKEN}|(?:(?!{_TOKEN}).)+")


@dataclass(frozen=True)
class Prompt:
    """
    Attributes:
        ids: its tokens.
        first: index of the token that comes next.
        open_ended: it ends with white space, so the next word brings none.
    """

    ids: Sequence[int]
    first: int = 0
    open_ended: bool = False

    def text(self, index: int) -> str:
        """Token `index` of its answer, as the answer's text has it."""
        spaced = index > 0 and not (index == self.first and self.open_ended)
        return f" t{index}" if spaced else f"t{index}"


def of_text(text: str) -> Prompt:
    ids = ids_of(text)
    return Prompt(ids, after(ids), text[-1:].isspace())


def of_ids(ids: Sequence[int]) -> Prompt:
    return Prompt(ids, after(ids))


def ids_of(text: str) -> list[int]:
    """At least one: a prompt without a word has a token, too."""
    return [_id(part) for word in text.split() for part in _parts(word)] or [0]


def token_id(index: int) -> int:
    return FIRST_ID + index


def after(ids: Sequence[int]) -> int:
    """Index of the token that follows these."""
    last = ids[-1] - FIRST_ID
    if 0 <= last < len(ids) and list(ids[-last - 1 :]) == list(range(FIRST_ID, ids[-1] + 1)):
        return last + 1
    return 0


def _parts(word: str) -> list[str]:
    return _PARTS.findall(word) if _HAS_TOKEN.search(word) else [word]


def _id(word: str) -> int:
    if _HAS_TOKEN.fullmatch(word):
        return token_id(int(word[1:]))
    return zlib.crc32(word.encode(errors="replace")) % FIRST_ID
