"""The corpus a target writes: counts, exact ids, splits that share nothing, and a resume that changes nothing."""

import hashlib
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.data.batch_decode import BatchDecoder
from eyas.data.conversation import Conversation
from eyas.data.corpus import CorpusRow, load_corpus, load_split
from eyas.data.encode import ChatTemplate
from eyas.data.self_prompts import PromptCounts
from eyas.data.styles import AnswerStyle
from eyas.data.synthesize import SynthesisPlan, SynthesisReport, stop_token_ids, synthesize
from eyas.models.errors import UserError
from eyas.models.target import Target
from eyas.tests.data.toys import text_ids, writing_target
from eyas.tests.toys import CHATML, byte_tokenizer

TARGET, TEMPLATE = writing_target()
GIVEN = [
    Conversation(f"g{n}", "maths", "given", ({"role": "user", "content": f"{n} is a number {n * n}"},))
    for n in range(6)
]
PLAN = SynthesisPlan(
    self_prompts=8,
    self_heldout=3,
    validation=4,
    self_prompt_tokens=50,
    prompt_style=AnswerStyle(1.0, 50),
    answer_styles=(AnswerStyle(0.0), AnswerStyle(0.8, 20)),
    self_answer_styles=(AnswerStyle(0.0), AnswerStyle(1.2), AnswerStyle(0.6, 5)),
    max_prompt_tokens=64,
    max_reply_tokens=20,
    positions=512,
    rows_per_part=3,
    seed=7,
)


class Crash(Exception):
    """A kill in the middle of a run."""


def write(
    folder: Path, plan: SynthesisPlan = PLAN, given: list[Conversation] = GIVEN, *, target: Target = TARGET,
    template: ChatTemplate = TEMPLATE, batch: int = 6, crash_at: int | None = None,
) -> tuple[SynthesisReport, list[int]]:  # fmt: skip
    """Synthesize; return the report and the tokens of every row written in this call. Crashes at its n-th row."""
    written: list[int] = []

    def progress(phase: str, done: int, total: int, tokens: int) -> None:
        assert 0 <= done <= total, phase
        if tokens:
            written.append(tokens)
        if len(written) == crash_at:
            raise Crash

    backend = BatchDecoder(target, batch=batch, capacity=plan.capacity)
    report = synthesize(backend, template, given, plan, folder, progress, stop_ids=stop_token_ids(template, target))
    return report, written


def logged(folder: Path, phase: str) -> list[dict[str, Any]]:
    """The replies that lie in the part files of a phase."""
    parts = sorted((folder / phase).glob("part-*.jsonl"))
    return [json.loads(line) for part in parts for line in part.read_text().splitlines()]


def fingerprint(rows: list[CorpusRow]) -> str:
    """A hash of all that matters of single-turn rows, as the corpus files before multi-turn rows held it."""
    digest = hashlib.sha256()
    for row in rows:
        (text,) = row.reply_texts
        fields = [
            row.id, row.source, row.category, row.split, row.temperature, list(row.prompt_ids), list(row.reply_ids),
            row.finish_reason, row.prompt_text, text,
        ]  # fmt: skip
        digest.update((json.dumps(fields, ensure_ascii=False) + "\n").encode())
    return digest.hexdigest()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus written in one go."""
    folder = tmp_path_factory.mktemp("whole")
    write(folder)
    return folder


@pytest.fixture(scope="module")
def corpus(whole: Path) -> list[CorpusRow]:
    return load_corpus(whole / "corpus.jsonl")


@torch.inference_mode()
def greedy_alone(prompt_ids: tuple[int, ...], *, new_tokens: int = 20) -> tuple[int, ...]:
    ids = torch.tensor([prompt_ids])
    out = TARGET.model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new_tokens, pad_token_id=0
    )  # fmt: skip
    return tuple(out[0, ids.shape[1] :].tolist())


def test_every_prompt_is_answered_once_per_style_and_kept_ones_once(tmp_path: Path, corpus: list[CorpusRow]) -> None:
    report, _ = write(tmp_path)
    count = Counter((row.split, row.source) for row in corpus)
    self_train = count["train", "self"] // 3
    assert count == {
        ("heldout", "self"): 3, ("validation", "self"): 2, ("validation", "given"): 2,
        ("train", "given"): 4 * 2, ("train", "self"): self_train * 3,
    }  # fmt: skip
    assert 3 <= self_train <= 8
    assert [row.id for row in corpus if row.split == "validation" and row.source == "given"] == ["g0/0", "g3/0"]
    assert {row.id for row in corpus if row.source == "given" and row.split == "train"} == {
        f"g{n}/{style}" for n in (1, 2, 4, 5) for style in (0, 1)
    }
    assert len({row.id for row in corpus}) == len(corpus) == report.rows
    assert (report.heldout_rows, report.validation_rows) == (3, 4)
    assert report.reply_tokens == sum(len(row.reply_ids) for row in corpus)
    assert report.cut_replies == sum(row.finish_reason == "length" for row in corpus) > 0


def test_self_written_prompts_are_all_accounted_for(whole: Path, corpus: list[CorpusRow], tmp_path: Path) -> None:
    report, _ = write(tmp_path)
    asked = logged(whole, "prompts")
    assert len(asked) == 13 + 13 // 3
    used = {row.prompt_text for row in corpus if row.source == "self"}
    assert len(used) == min(13, 17 - report.dropped_prompts - report.duplicate_prompts)
    decode = TEMPLATE.tokenizer.decode
    assert used <= {decode(row["token_ids"][:-1]) for row in asked if row["finish_reason"] == "stop"}
    assert min(map(len, used)) >= 8
    prefix = " ".join(map(str, text_ids(TEMPLATE.tokenizer, "<|im_start|>user\n")))
    assert {row["prompt"] for row in asked} == {hashlib.sha256(prefix.encode()).hexdigest()[:16]}
    assert report.self_written == {
        "self": PromptCounts(13, 17, len(used), report.dropped_prompts, report.duplicate_prompts)
    }


def test_prompt_ids_are_the_served_rendering_of_the_prompt_text(corpus: list[CorpusRow]) -> None:
    for row in corpus:
        rendered = f"<|im_start|>user\n{row.prompt_text}<|im_end|>\n<|im_start|>assistant\n"
        assert list(row.prompt_ids) == text_ids(TEMPLATE.tokenizer, rendered)
        assert row.category == ("self" if row.source == "self" else "maths")


def test_greedy_replies_are_exactly_what_generate_writes(corpus: list[CorpusRow]) -> None:
    greedy = [row for row in corpus if row.temperature == 0]
    assert [row.reply_ids for row in greedy] == [greedy_alone(row.prompt_ids) for row in greedy]
    assert {row.finish_reason for row in greedy} == {"stop", "length"}


def test_replies_end_with_the_end_of_turn_or_are_cut_without_one(corpus: list[CorpusRow]) -> None:
    end = TEMPLATE.end_of_turn
    for row in corpus:
        assert end not in row.reply_ids[:-1]
        if row.finish_reason == "stop":
            assert row.reply_ids[-1] == end
            assert text_ids(TEMPLATE.tokenizer, row.reply_texts[0] + "<|im_end|>") == list(row.reply_ids)
        else:
            assert len(row.reply_ids) == 20
            assert text_ids(TEMPLATE.tokenizer, row.reply_texts[0]) == list(row.reply_ids)
        example = row.example()
        assert example.input_ids_T.tolist() == [*row.prompt_ids, *row.reply_ids]
        assert int(example.generated_mask_T.sum()) == len(row.reply_ids)
    assert {row.finish_reason for row in corpus} == {"stop", "length"}


def test_heldout_and_validation_are_greedy_and_share_no_prompt_with_training(whole: Path) -> None:
    splits = {name: load_split(whole, name) for name in ("train", "validation", "heldout")}
    assert {row.temperature for row in splits["validation"] + splits["heldout"]} == {0.0}
    styles = {"self": set(), "given": set()}  # type: dict[str, set[float]]
    for row in splits["train"]:
        styles[row.source].add(row.temperature)
    assert styles == {"self": {0.0, 1.2, 0.6}, "given": {0.0, 0.8}}
    prompts = {name: {row.prompt_ids for row in rows} for name, rows in splits.items()}
    assert not prompts["train"] & (prompts["validation"] | prompts["heldout"])
    assert not prompts["validation"] & prompts["heldout"]


def test_training_prompts_that_equal_a_held_back_one_are_left_out_and_counted(tmp_path: Path) -> None:
    copy = replace(GIVEN[1], messages=GIVEN[0].messages)  # g0 is kept for validation
    plain, _ = write(tmp_path / "plain")
    report, _ = write(tmp_path / "copied", given=[GIVEN[0], copy, *GIVEN[2:]])
    rows = load_corpus(tmp_path / "copied" / "corpus.jsonl")
    assert "g0/0" in {row.id for row in rows}
    assert not [row.id for row in rows if row.id.startswith("g1/")]
    assert report.duplicate_prompts == plain.duplicate_prompts + 1


@pytest.mark.parametrize("batch", [1, 40])
def test_corpus_does_not_depend_on_the_batch_or_the_parts(whole: Path, tmp_path: Path, batch: int) -> None:
    write(tmp_path, replace(PLAN, rows_per_part=1000), batch=batch)
    assert (tmp_path / "corpus.jsonl").read_bytes() == (whole / "corpus.jsonl").read_bytes()


def test_seeds_change_sampled_text_and_given_greedy_replies_stay(corpus: list[CorpusRow], tmp_path: Path) -> None:
    write(tmp_path, replace(PLAN, seed=8))
    other = {row.id: row for row in load_corpus(tmp_path / "corpus.jsonl")}
    given = [row for row in corpus if row.source == "given"]
    assert all(other[row.id] == row for row in given if row.temperature == 0)
    assert any(other[row.id] != row for row in given if row.temperature > 0)


@pytest.mark.parametrize("crash_at", [1, 4, 17, 18, 25, 41])
def test_resume_after_a_crash_gives_the_corpus_of_an_uninterrupted_run(
    whole: Path, tmp_path: Path, crash_at: int
) -> None:
    with pytest.raises(Crash):
        write(tmp_path, crash_at=crash_at)
    assert not (tmp_path / "corpus.jsonl").exists()
    kept = {path: path.read_bytes() for path in tmp_path.rglob("part-*.jsonl")}
    assert sum(data.count(b"\n") for data in kept.values()) >= crash_at - 3 - 1
    _, written = write(tmp_path)
    assert (tmp_path / "corpus.jsonl").read_bytes() == (whole / "corpus.jsonl").read_bytes()
    assert all(path.read_bytes() == data for path, data in kept.items())
    for phase in ("prompts", "replies"):
        ids = [row["id"] for row in logged(tmp_path, phase)]
        assert len(ids) == len(set(ids))
    in_parts = sum(data.count(b"\n") for data in kept.values())
    assert len(written) == 17 + len(load_corpus(tmp_path / "corpus.jsonl")) - in_parts


@pytest.mark.parametrize(
    "lost", [("replies", "part-000-00001"), ("replies", "part-000-00000"), ("prompts", "part-000-00002")]
)
def test_lost_parts_are_written_again_and_the_others_left_alone(
    whole: Path, tmp_path: Path, lost: tuple[str, str]
) -> None:
    write(tmp_path)
    gone = tmp_path / lost[0] / f"{lost[1]}.jsonl"
    count = gone.read_bytes().count(b"\n")
    gone.unlink()
    (tmp_path / "corpus.jsonl").unlink()
    (gone.parent / ".part-000-00009.jsonl.4711.tmp").write_text('{"id": "torn", "sou')
    kept = {path: path.read_bytes() for path in tmp_path.rglob("part-*.jsonl")}
    _, written = write(tmp_path)
    assert (tmp_path / "corpus.jsonl").read_bytes() == (whole / "corpus.jsonl").read_bytes()
    assert len(written) == count
    assert {path: path.read_bytes() for path in kept} == kept
    ids = [row["id"] for row in logged(tmp_path, lost[0])]
    assert len(ids) == len(set(ids))


def test_reply_to_another_prompt_is_not_taken_over(whole: Path, tmp_path: Path) -> None:
    other = [replace(GIVEN[0], messages=({"role": "user", "content": "something else"},)), *GIVEN[1:]]
    write(tmp_path, given=other)
    write(tmp_path)
    assert (tmp_path / "corpus.jsonl").read_bytes() == (whole / "corpus.jsonl").read_bytes()


def test_self_written_prompts_that_render_too_long_are_dropped_and_counted(tmp_path: Path) -> None:
    # Prompts of up to 50 tokens, and a template whose generation prompt takes 18 more: not all of them fit into 54.
    end = "assistant\n' }}{% endif %}"
    assert CHATML.endswith(end)
    long = ChatTemplate(byte_tokenizer(CHATML.removesuffix(end) + "assistant\n" + "<>" * 9 + "' }}{% endif %}"))
    plan = replace(PLAN, self_prompts=12, max_prompt_tokens=54)
    report, _ = write(tmp_path, plan, [], template=long)
    rows = load_corpus(tmp_path / "corpus.jsonl")
    assert max(len(row.prompt_ids) for row in rows) <= 54
    overlong = [
        row for row in logged(tmp_path, "prompts") if row["finish_reason"] == "stop" and len(row["token_ids"]) > 54 - 36
    ]
    assert overlong
    assert report.dropped_prompts >= len(overlong)
    assert report.heldout_rows == 3


def test_given_prompts_alone_need_no_self_prompts(tmp_path: Path) -> None:
    report, _ = write(tmp_path, replace(PLAN, self_prompts=0, self_heldout=0, validation=2))
    assert (report.rows, report.validation_rows, report.heldout_rows) == (2 + 4 * 2, 2, 0)


def test_all_validation_is_self_written_without_given_prompts(tmp_path: Path) -> None:
    report, _ = write(tmp_path, replace(PLAN, self_prompts=6), [])
    assert (report.validation_rows, report.heldout_rows) == (4, 3)
    assert {row.source for row in load_split(tmp_path, "validation")} == {"self"}


@pytest.mark.parametrize(
    ("change", "given", "message"),
    [
        ({"validation": 12}, GIVEN, "6 given prompts are too few to keep 6 for validation"),
        ({"self_prompts": 0, "self_heldout": 0, "validation": 0}, [], "synthesis wrote no reply"),
        (
            {"max_prompt_tokens": 30},
            GIVEN,
            r"prompt 'g0' is 34 tokens long, more than the 30 .*max_prompt_tokens = 30 ",
        ),
        ({"max_reply_tokens": 490}, GIVEN, r"prompt 'g0' is 34 tokens long, more than the 22 .*512 positions"),
        (
            {"max_prompt_tokens": 20},
            [],
            r"only 0 of the 20 prompts the target wrote are usable .* for 7 held-back ones",
        ),
        ({}, [*GIVEN, GIVEN[2]], "prompt id 'g2'"),
        ({}, [*GIVEN, replace(GIVEN[2], id="self-000001")], "prompt id 'self-000001'"),
        ({"self_prompts": 1, "self_heldout": 60}, GIVEN, r"only \d+ of the 84 prompts .* too few for 62 held-back"),
    ],
)
def test_plan_that_cannot_be_met_is_refused(
    tmp_path: Path, change: dict[str, int], given: list[Conversation], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        write(tmp_path, replace(PLAN, **change), given)
    assert not (tmp_path / "corpus.jsonl").exists()


def test_given_prompts_are_checked_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="prompt 'g0' is 34 tokens long"):
        write(tmp_path, replace(PLAN, max_prompt_tokens=30))
    assert not list(tmp_path.rglob("part-*"))


def test_stop_ids_are_the_end_of_turn_and_the_models_own() -> None:
    target, template = writing_target()
    end = template.end_of_turn
    for listed, expected in ((None, {end}), (end, {end}), (7, {end, 7}), ([7, 8], {end, 7, 8})):
        target.model.generation_config.eos_token_id = listed
        assert stop_token_ids(template, target) == expected


def test_single_turn_corpora_are_what_they_were_before_multi_turn_ones(corpus: list[CorpusRow], tmp_path: Path) -> None:
    """The hashes are of the corpora that the code before multi-turn rows wrote, with these settings and this target."""
    assert (len(corpus), fingerprint(corpus)) == (
        30,
        "16ac0c1701ccf06b6f7152ec76c87e2a97df8cee5abecbcf7991d9f49c019e36",
    )
    plan = SynthesisPlan(
        self_prompts=40,
        self_heldout=4,
        validation=6,
        self_prompt_tokens=64,
        prompt_style=AnswerStyle(1.0, 50),
        answer_styles=(AnswerStyle(0.0), AnswerStyle(0.7, 50)),
        self_answer_styles=(AnswerStyle(0.0),),
        max_prompt_tokens=256,
        max_reply_tokens=96,
        positions=512,
        rows_per_part=16,
        seed=0,
    )
    asked = [f"say {chr(97 + n) * 5} and {n * n}" for n in range(12)]
    given = [
        Conversation(f"q{n}", "words", "given", ({"role": "user", "content": text},)) for n, text in enumerate(asked)
    ]
    write(tmp_path, plan, given, batch=16)
    rows = load_corpus(tmp_path / "corpus.jsonl")
    assert (len(rows), fingerprint(rows)) == (54, "e2d0a8653edfff8780b9e34a1184a1e3af3890f8487f9ca8523f2a159398cbfd")
