"""Which prompts are read side by side: parts worked out by hand."""

from eyas.inference.padding import SHARE, SPARE, alike


def lengths(*given: int) -> list[list[int]]:
    return alike(list(given), key=lambda row: row)


def test_rows_of_one_length_are_one_part_in_their_order() -> None:
    rows = [("a", 5), ("b", 5), ("c", 5)]
    assert alike(rows, key=lambda row: row[1]) == [rows]
    assert lengths() == []
    assert lengths(7) == [[7]]


def test_a_little_padding_is_cheaper_than_another_forward() -> None:
    assert (SPARE, SHARE) == (64, 0.125)
    assert lengths(10, 74, 10) == [[74, 10], [10]]  # 64 tokens of padding, then 128
    assert lengths(10, 75) == [[75], [10]]
    # 800 and 720: 80 of padding are less than an eighth of 1520; with 600 it would be 280 of 2120.
    assert lengths(600, 720, 800) == [[800, 720], [600]]


def test_of_many_rows_little_is_padding_and_none_is_lost() -> None:
    given = [(37 * place) % 251 + 1 for place in range(200)]
    parts = lengths(*given)
    assert sorted(row for part in parts for row in part) == sorted(given)
    assert [row for part in parts for row in part] == sorted(given, reverse=True)
    padded = sum(max(part) * len(part) for part in parts)
    assert padded < 1.2 * sum(given), "padded to the longest it would be twice"
    assert len(parts) < 40
