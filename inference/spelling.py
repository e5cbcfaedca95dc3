"""From token ids to text as it grows: pieces that can be shown, each marked as drafted or the target's own."""

from collections.abc import Callable
from dataclasses import dataclass, field

from eyas.inference.request import Round


@dataclass(frozen=True)
class Piece:
    """A bit of text and whether the token that completed it was drafted."""

    text: str
    drafted: bool


@dataclass
class Spelling:
    """The text of one reply. A token that ends inside a character is held back until the character is whole."""

    decode: Callable[[list[int]], str]
    tokens: list[int] = field(default_factory=list)
    shown: str = ""

    def add(self, made: Round) -> list[Piece]:
        """Return the new pieces of a round."""
        pieces = []
        for place, token in enumerate(made.tokens):
            self.tokens.append(token)
            text = self.decode(self.tokens)
            if text.endswith("\ufffd") or not text.startswith(self.shown):
                continue
            if len(text) > len(self.shown):
                pieces.append(Piece(text[len(self.shown) :], place < made.accepted))
                self.shown = text
        return pieces
