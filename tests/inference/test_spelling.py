"""Text as it grows: pieces with their marks, and no half characters."""

from eyas.inference.request import Round
from eyas.inference.spelling import Piece, Spelling
from eyas.tests.toys import byte_tokenizer

TOKENIZER = byte_tokenizer()


def spelling() -> Spelling:
    return Spelling(lambda tokens: str(TOKENIZER.decode(tokens, skip_special_tokens=True)))


def test_pieces_carry_the_mark_of_the_token_that_completed_them() -> None:
    ids = TOKENIZER("abcd").input_ids
    words = spelling()
    assert words.add(Round(0, 0, (ids[0],))) == [Piece("a", drafted=False)]
    assert words.add(Round(3, 2, tuple(ids[1:]))) == [Piece("b", True), Piece("c", True), Piece("d", False)]
    assert words.shown == "abcd"


def test_a_character_of_several_tokens_is_shown_when_it_is_whole() -> None:
    ids = TOKENIZER("é🦅").input_ids
    assert len(ids) == 6
    words = spelling()
    assert words.add(Round(0, 0, (ids[0],))) == []
    assert words.add(Round(3, 1, tuple(ids[1:4]))) == [Piece("é", drafted=True)]
    assert words.add(Round(3, 2, tuple(ids[4:]))) == [Piece("🦅", drafted=True)]


def test_special_tokens_have_no_text() -> None:
    words = spelling()
    assert words.add(Round(2, 1, (TOKENIZER.eos_token_id, TOKENIZER("x").input_ids[0]))) == [Piece("x", False)]
