"""Which conversation is answered in which style: all of them, or one by shares, stable by name."""

from collections import Counter

from eyas.data.styles import AnswerStyle, seed_of, styles_for


def test_without_shares_every_conversation_is_answered_in_every_style() -> None:
    styles = (AnswerStyle(0.0), AnswerStyle(0.7, 50))
    assert styles_for("any", styles, seed=3) == [(0, styles[0]), (1, styles[1])]


def test_with_shares_each_is_answered_once_and_the_shares_are_met() -> None:
    styles = (AnswerStyle(0.0, share=0.25), AnswerStyle(0.8, top_p=0.95, share=0.6), AnswerStyle(1.0, share=0.15))
    drawn = [styles_for(f"c{n}", styles, seed=3) for n in range(4000)]
    assert all(len(one) == 1 and styles[one[0][0]] == one[0][1] for one in drawn)
    counts = Counter(one[0][0] for one in drawn)
    for number, share in enumerate((0.25, 0.6, 0.15)):
        assert abs(counts[number] / 4000 - share) < 0.03


def test_the_style_belongs_to_the_name_and_the_seed() -> None:
    styles = (AnswerStyle(0.0, share=0.5), AnswerStyle(1.0, share=0.5))
    names = [f"c{n}" for n in range(64)]
    first = [styles_for(name, styles, seed=1)[0][0] for name in names]
    assert first == [styles_for(name, styles, seed=1)[0][0] for name in names]
    assert first != [styles_for(name, styles, seed=2)[0][0] for name in names]


def test_seeds_are_fixed_and_differ() -> None:
    assert seed_of(0, "a/0") == seed_of(0, "a/0")
    assert len({seed_of(s, name) for s in (0, 1) for name in ("a/0", "a/1", "b/0")}) == 6
