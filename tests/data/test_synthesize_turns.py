"""Corpora of several turns, of steered prompts and of styles by share."""

from dataclasses import replace
from pathlib import Path

import pytest

from eyas.data.conversation import Conversation
from eyas.data.corpus import load_corpus, load_split
from eyas.data.self_prompts import Steering
from eyas.data.styles import AnswerStyle
from eyas.tests.data.test_synthesize import GIVEN, PLAN, TEMPLATE, Crash, greedy_alone, logged, write


def talk(name: str, *users: str) -> Conversation:
    """A conversation whose own answers are somebody else's."""
    messages = [m for text in users for m in ({"role": "user", "content": text}, {"role": "assistant", "content": "I"})]
    return Conversation(name, "maths", "given", tuple(messages[:-1]))


def test_every_turn_is_written_by_the_target_behind_its_own_earlier_turns(tmp_path: Path) -> None:
    given = [talk(f"t{n}", f"{n} and {n}", "so what", "and then") for n in range(8)]
    plan = replace(PLAN, self_prompts=0, self_heldout=0, validation=2, max_prompt_tokens=200, max_reply_tokens=40)
    report, _ = write(tmp_path, plan, given)
    rows = load_corpus(tmp_path / "corpus.jsonl")
    assert {len(row.generated) for row in rows} == {2, 3}
    for row in rows:
        for start, end in row.generated:
            if row.temperature == 0:
                assert row.input_ids[start:end] == greedy_alone(row.input_ids[:start], new_tokens=40)
        for (_, end), (start, _) in zip(row.generated, row.generated[1:], strict=False):
            assert row.input_ids[end - 1] == TEMPLATE.end_of_turn
            between = TEMPLATE.tokenizer.decode(list(row.input_ids[end:start]))
            assert between in {
                f"\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in ("so what", "and then")
            }
    assert report.turns == sum(len(row.generated) for row in rows)
    cut = sum(row.finish_reason == "length" and len(row.generated) < 3 for row in rows)
    assert report.early_ends == {"reply cut by the limit": cut}
    assert (report.rewritten_turns, report.reencoded_replies) == (0, 0)


def test_multi_turn_corpora_resume_to_the_same_bytes(tmp_path: Path) -> None:
    given = [talk(f"t{n}", f"{n} and {n}", "so what", "and then") for n in range(5)]
    plan = replace(PLAN, max_prompt_tokens=200)
    _, written = write(tmp_path / "whole", plan, given)
    assert max(len(row.generated) for row in load_corpus(tmp_path / "whole" / "corpus.jsonl")) == 3
    for crash_at in (20, len(written) * 2 // 3, len(written)):
        broken = tmp_path / str(crash_at)
        with pytest.raises(Crash):
            write(broken, plan, given, crash_at=crash_at)
        write(broken, plan, given, batch=5)
        names = [folder / "corpus.jsonl" for folder in (tmp_path / "whole", broken)]
        assert names[0].read_bytes() == names[1].read_bytes()


def test_steered_prompts_have_their_categories_and_shares_and_are_answered_unsteered(tmp_path: Path) -> None:
    steerings = (Steering("maths", "You like sums.", 2.0), Steering("any", None, 1.0))
    plan = replace(PLAN, self_prompts=12, validation=2, self_heldout=4, steerings=steerings)
    report, _ = write(tmp_path, plan, [])
    wanted = {name: counts.wanted for name, counts in report.self_written.items()}
    assert wanted == {"maths": 12, "any": 6}
    for counts in report.self_written.values():
        assert counts.asked == counts.wanted + counts.wanted // 3
        assert counts.kept == min(counts.wanted, counts.asked - counts.dropped - counts.duplicates)
    rows = load_corpus(tmp_path / "corpus.jsonl")
    assert {row.category for row in rows if row.split == "heldout"} == {"maths", "any"}
    assert all("sums" not in TEMPLATE.tokenizer.decode(list(row.prompt_ids)) for row in rows)
    prompts = {row["id"]: row["prompt"] for row in logged(tmp_path, "prompts")}
    assert len({key for name, key in prompts.items() if name.startswith("self-maths-")}) == 1
    assert prompts["self-maths-000000"] != prompts["self-any-000000"]


def test_shares_answer_every_training_conversation_once(tmp_path: Path) -> None:
    styles = (AnswerStyle(0.0, share=0.5), AnswerStyle(1.0, top_p=0.9, share=0.5))
    given = [replace(GIVEN[0], id=f"s{n}", messages=({"role": "user", "content": f"{n}, go on"},)) for n in range(20)]
    plan = replace(PLAN, self_prompts=0, self_heldout=0, validation=2, answer_styles=styles)
    write(tmp_path, plan, given)
    rows = load_split(tmp_path, "train")
    assert len(rows) == 18 == len({row.id.split("/")[0] for row in rows})
    assert {row.temperature for row in rows} == {0.0, 1.0}
    assert {row.id.split("/")[1] for row in rows if row.temperature == 1.0} == {"1"}
