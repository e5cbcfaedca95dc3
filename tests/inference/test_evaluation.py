"""Evaluation: interleaved, resumed where it was killed, differences shown with their gap, sums worked out by hand."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.inference.acceptance import AcceptanceStats
from eyas.inference.draft import ChainTree, DynamicTree
from eyas.inference.engine import Engine, Generation, GenerationRequest
from eyas.inference.evaluation import (
    PLAIN,
    EvaluationPlan,
    EvaluationPrompt,
    Measurement,
    evaluate,
    read_measurements,
    summarise,
)
from eyas.models.errors import UserError
from eyas.tests.inference.heads import FlakyHead, greedy, knowing_head, random_prompt
from eyas.tests.toys import tiny_head, tiny_target

TARGET = tiny_target(layers=2, aux_layers=(0, 1))
HEAD = tiny_head(TARGET)
PLAN = EvaluationPlan(
    trees={"chain": ChainTree(2), "tree": DynamicTree(2, 3, 6), "wide": DynamicTree(2, 4, 9)},
    temperatures=(0.0, 1.0),
    sampled_prompts=1,
    max_new_tokens=6,
    stop_ids=frozenset({2}),
    seed=5,
)
PROMPTS = [
    EvaluationPrompt(name, kind, random_prompt(4, seed=n), f"text of {name}")
    for n, (name, kind) in enumerate([("a", "code"), ("b", "code"), ("c", "chat")])
]
# At temperature 1 one prompt of each set.
WORK = [("a", 0.0), ("b", 0.0), ("c", 0.0), ("a", 1.0), ("c", 1.0)]


def run(path: Path, *, plan: EvaluationPlan = PLAN, prompts: list[EvaluationPrompt] = PROMPTS) -> list[Measurement]:
    return evaluate(TARGET, HEAD, prompts, plan, path, lambda *_done: None)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def generations(monkeypatch: pytest.MonkeyPatch) -> list[GenerationRequest]:
    """Collect the requests that engines answer."""
    asked: list[GenerationRequest] = []
    generate = Engine.generate

    def counted(engine: Engine, request: GenerationRequest) -> Generation:
        asked.append(request)
        return generate(engine, request)

    monkeypatch.setattr(Engine, "generate", counted)
    return asked


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """Return the lines of a finished evaluation."""
    path = tmp_path_factory.mktemp("evaluation") / "m.jsonl"
    run(path)
    return path.read_bytes().splitlines(keepends=True)


def test_methods_take_turns_on_every_prompt_and_plain_comes_first(tmp_path: Path) -> None:
    found = run(tmp_path / "m.jsonl")
    written = lines(tmp_path / "m.jsonl")
    assert [(line["prompt_id"], line["temperature"]) for line in written[::4]] == WORK
    order = [[line["method"] for line in written[i : i + 4]] for i in range(0, len(written), 4)]
    turns = [["chain", "tree", "wide"], ["tree", "wide", "chain"], ["wide", "chain", "tree"]]
    assert order == [[PLAIN, *turns[i % 3]] for i in range(5)]
    # What is returned has one order, however the measurements were made.
    assert [m.method for m in found] == [PLAIN, "chain", "tree", "wide"] * 5
    assert [(m.prompt_id, m.temperature) for m in found[::4]] == WORK
    assert {m.prompt_id: m.prompt_set for m in found} == {"a": "code", "b": "code", "c": "chat"}
    assert sorted(map(json.dumps, map(asdict, found))) == sorted(map(json.dumps, written))


def test_every_method_writes_the_plain_text(tmp_path: Path) -> None:
    for m in run(tmp_path / "m.jsonl"):
        assert m.identical_to_plain
        assert m.gap is None
        assert len(m.accepted) == len(m.token_ids)
        assert sum(m.accepted) == m.stats["accepted"]
        if m.temperature == 0:
            prompt = next(p for p in PROMPTS if p.id == m.prompt_id)
            assert m.token_ids == greedy(TARGET, prompt.prompt_ids, 6)[: len(m.token_ids)]
            assert m.finish_reason == ("stop" if m.token_ids[-1] == 2 else "length")
        if m.method == PLAIN:
            assert (m.stats["tau"], m.stats["depth"], any(m.accepted)) == (1.0, 0, False)


def test_accepted_tokens_are_marked_where_they_stand(tmp_path: Path) -> None:
    prompt = PROMPTS[0]
    text = greedy(TARGET, prompt.prompt_ids, 30)
    head = knowing_head(FlakyHead, TARGET, [*prompt.prompt_ids, *text])
    engine = Engine(TARGET, head, ChainTree(3))
    generation = engine.generate(GenerationRequest(prompt.prompt_ids, 20))
    plan = replace(PLAN, trees={"chain": ChainTree(3)}, temperatures=(0.0,), max_new_tokens=20, stop_ids=frozenset())
    measured = evaluate(TARGET, head, [prompt], plan, tmp_path / "m.jsonl", lambda *_done: None)[1]
    place, expected = 1, {0: False}
    for round_ in generation.rounds:
        for i in range(len(round_.tokens)):
            expected[place + i] = i < round_.accepted
        place += len(round_.tokens)
    assert measured.accepted == [expected[i] for i in range(20)]
    assert 0 < sum(measured.accepted) < 19


def test_a_finished_evaluation_is_not_run_again(
    whole: list[bytes], tmp_path: Path, generations: list[GenerationRequest]
) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b"".join(whole))
    assert sorted(json.dumps(asdict(m)) for m in run(path)) == sorted(line.decode().strip() for line in whole)
    assert generations == []
    assert path.read_bytes() == b"".join(whole)


@pytest.mark.parametrize(("kept", "torn"), [(0, 1), (1, 40), (5, 0), (7, -1), (19, 60)])
def test_a_killed_evaluation_goes_on_behind_its_last_whole_line(
    kept: int, torn: int, whole: list[bytes], tmp_path: Path, generations: list[GenerationRequest]
) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b"".join(whole[:kept]) + whole[kept][:torn])  # -1: all of the line but its end
    found = run(path)
    assert len(generations) == 4 + 20 - kept  # every engine warms up once
    again = path.read_bytes().splitlines(keepends=True)
    assert again[:kept] == whole[:kept]
    assert len(again) == len(found) == 20
    keys = [(line["prompt_id"], line["method"], line["temperature"]) for line in lines(path)]
    assert keys == [(old["prompt_id"], old["method"], old["temperature"]) for old in map(json.loads, whole)]


def test_reading_cuts_a_torn_line_off_the_file(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    assert list(read_measurements(path)) == []
    run(path, prompts=PROMPTS[:1])
    data = path.read_bytes()
    path.write_bytes(data + b'{"prompt_id": "b')
    assert len(list(read_measurements(path))) == 8
    assert path.read_bytes() == data


def test_progress_counts_measurements_and_tokens(tmp_path: Path) -> None:
    path, seen = tmp_path / "m.jsonl", []
    evaluate(TARGET, HEAD, PROMPTS, PLAN, path, lambda *done: seen.append(done))
    assert [done[:2] for done in seen] == [(n, 20) for n in range(1, 21)]
    assert [done[2] for done in seen] == [len(line["token_ids"]) for line in lines(path)]


def test_two_prompts_of_one_id_are_refused(tmp_path: Path) -> None:
    twice = [*PROMPTS, replace(PROMPTS[0], prompt_set="chat")]
    with pytest.raises(UserError, match="prompt id 'a' is given more than once"):
        run(tmp_path / "m.jsonl", prompts=twice)
    assert not (tmp_path / "m.jsonl").exists()


@pytest.mark.parametrize("place", [0, 3])
def test_a_difference_is_reported_with_the_gap_of_the_two_best_logits_there(place: int, tmp_path: Path) -> None:
    path, prompt = tmp_path / "m.jsonl", PROMPTS[1]
    run(path, prompts=[prompt])
    plain, *_ = lines(path)
    text = list(plain["token_ids"])
    plain["token_ids"][place] = (text[place] + 1) % 97
    path.write_text(json.dumps(plain) + "\n")
    found = run(path, prompts=[prompt])
    ids = torch.tensor([[*prompt.prompt_ids, *text[:place]]])
    logits = TARGET.model(input_ids=ids).logits[0, -1].sort(descending=True).values
    for m in found[1:4]:
        assert not m.identical_to_plain
        assert m.gap == pytest.approx(float(logits[0] - logits[1]), abs=1e-4)
    assert all(m.identical_to_plain and m.gap is None for m in found[4:])
    entry = next(e for e in summarise(found) if (e["method"], e["temperature"]) == ("tree", 0.0))
    assert entry["identical_to_plain"] == 0
    assert entry["differences"] == [{"prompt_id": "b", "gap": found[2].gap}]


def test_a_tie_has_a_gap_of_zero(tmp_path: Path) -> None:
    target, path, prompt = tiny_target(layers=2, aux_layers=(0, 1)), tmp_path / "m.jsonl", PROMPTS[0]
    first = greedy(target, prompt.prompt_ids, 1)[0]
    twin = (first + 40) % 97
    target.model.lm_head.weight[twin] = target.model.lm_head.weight[first]
    plan = replace(PLAN, temperatures=(0.0,))
    evaluate(target, HEAD, [prompt], plan, path, lambda *_done: None)
    plain, *_ = lines(path)
    plain["token_ids"][0] = twin if plain["token_ids"][0] == first else first
    path.write_text(json.dumps(plain) + "\n")
    found = evaluate(target, HEAD, [prompt], plan, path, lambda *_done: None)
    assert [m.gap for m in found[1:]] == [0.0, 0.0, 0.0]


def measurement(
    id_: str, kind: str, method: str, tokens: int, seconds: float, rounds: list[int], **more: Any
) -> Measurement:
    stats = AcceptanceStats(0 if method == PLAIN else 3)
    for accepted in rounds:
        stats.record(accepted, drafted=stats.depth)
    fields: dict[str, Any] = {"identical_to_plain": True, "gap": None, "temperature": 0.0, **more}
    return Measurement(
        prompt_id=id_, prompt_set=kind, method=method, token_ids=[1] * tokens, accepted=[False] * tokens,
        prompt_tokens=5,
        rounds=[[accepted, stats.depth, accepted + 1] for accepted in rounds],
        finish_reason="length", stats=stats.as_dict(), seconds=seconds, prefill_seconds=0.1, **fields,
    )  # fmt: skip


def test_sums_worked_out_by_hand() -> None:
    found = [
        measurement("a", "code", PLAIN, 10, 2.0, [0] * 9),
        measurement("a", "code", "chain", 10, 1.0, [3, 0, 1, 2]),
        measurement("b", "chat", PLAIN, 30, 3.0, [0] * 29),
        measurement("b", "chat", "chain", 30, 4.0, [0, 0], identical_to_plain=False, gap=0.25),
        measurement("a", "code", PLAIN, 8, 1.0, [0] * 7, temperature=1.0),
        measurement("a", "code", "chain", 8, 0.5, [1], temperature=1.0),
    ]
    entries = {(e["method"], e["temperature"], e["prompt_set"]): e for e in summarise(found)}
    sets = [("code", 0.0), ("chat", 0.0), ("all", 0.0), ("code", 1.0), ("all", 1.0)]
    assert entries.keys() == {(method, t, name) for method in (PLAIN, "chain") for name, t in sets}
    code, chat, both = (entries["chain", 0.0, name] for name in ("code", "chat", "all"))
    assert (code["tau"], code["survival"], code["rounds"], code["prompts"]) == (2.5, [0.75, 0.5, 0.25], 4, 1)
    assert (code["tokens_per_second"], code["plain_tokens_per_second"], code["speedup"]) == (10.0, 5.0, 2.0)
    assert (chat["tau"], chat["tokens_per_second"], chat["speedup"]) == (1.0, 7.5, 0.75)  # slower, and said so
    # 6 accepted in 6 rounds; 40 tokens in 5 s each way: total over total, not the mean of 2.0 and 0.75.
    assert (both["tau"], both["rounds"], both["accepted"], both["drafted"]) == (2.0, 6, 6, 18)
    assert both["survival"] == pytest.approx([0.5, 1 / 3, 1 / 6])
    assert (both["tokens"], both["seconds"], both["speedup"], both["prompts"]) == (40, 5.0, 1.0, 2)
    assert both["identical_to_plain"] == 1
    assert both["differences"] == [{"prompt_id": "b", "gap": 0.25}]
    assert entries["chain", 1.0, "all"]["speedup"] == 2.0
    for name, t in sets:
        plain = entries[PLAIN, t, name]
        assert (plain["tau"], plain["speedup"], plain["survival"], plain["differences"]) == (1.0, 1.0, [], [])


def test_speed_up_compares_with_plain_decoding_of_the_same_prompts() -> None:
    found = [
        measurement("a", "code", PLAIN, 10, 1.0, [0] * 9),
        measurement("b", "code", PLAIN, 10, 9.0, [0] * 9),  # slow, and not decoded by the chain
        measurement("a", "code", "chain", 10, 0.5, [3]),
    ]
    entries = {(e["method"], e["prompt_set"]): e for e in summarise(found)}
    assert entries["chain", "all"]["plain_tokens_per_second"] == 10.0
    assert entries["chain", "all"]["speedup"] == 2.0
