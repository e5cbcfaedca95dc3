"""`eyas generate` and `eyas chat` on a tiny chat model and a saved head: text, marks, traces, and clear refusals."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from eyas.inference.cost_aware_tree import CostAwareTree
from eyas.inference.draft import ChainTree, DynamicTree, StaticTree
from eyas.inference.request import Round
from eyas.inference.spelling import Piece
from eyas.models.checkpoint import save_head
from eyas.models.errors import UserError
from eyas.models.target import Target
from eyas.scripts.terminal import LiveReply
from eyas.scripts.tree_option import parse_tree
from eyas.tests.inference.costs import costs, unchanged
from eyas.tests.scripts.command import Eyas, Outcome
from eyas.tests.toys import save_tiny_model, tiny_head


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), initializer_range=0.1)


@pytest.fixture(scope="module")
def head(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = Target.load(str(model), dtype=torch.float32, aux_layers=(1, 2, 4))
    folder = tmp_path_factory.mktemp("heads") / "head"
    save_head(tiny_head(target), folder, metadata={"target": str(model)}, dtype=torch.float32)
    return folder


def report(outcome: Outcome) -> dict[str, Any]:
    assert outcome.code == 0, outcome.err
    assert outcome.err == ""
    return dict(json.loads(outcome.out))


COUNT = ("--max-new-tokens", 12)
KNOWN = unchanged()


@pytest.mark.parametrize("verb", [("generate", "--prompt", "hello"), ("chat",), ("calibrate",), ("bench", "decode")])
def test_a_device_that_is_not_here_is_refused(eyas: Eyas, head: Path, verb: tuple[str, ...]) -> None:
    outcome = eyas(*verb, head, "--device", "cuda:99")
    assert outcome.code == 2
    assert "--device 'cuda:99' cannot be used here" in outcome.err
    assert "set it to auto or cpu" in outcome.err


def test_every_way_of_drafting_writes_the_plain_text(eyas: Eyas, model: Path, head: Path) -> None:
    ways: list[tuple[Any, ...]] = [
        ("none", "--target", model),
        (head,),
        (head, "--tree", "chain:3"),
        (head, "--tree", "static"),
        ("lookup", "--target", model, "--tree", "chain:4"),
        (f"model:{model}", "--target", model, "--tree", "chain:3"),
    ]
    found = [report(eyas("generate", *way, "--prompt", "hello", *COUNT, "--json")) for way in ways]
    (plain,) = found[0]["results"]
    assert (plain["tau"], found[0]["tree"], len(plain["token_ids"])) == (1.0, "plain", 12)
    for one in found[1:]:
        (result,) = one["results"]
        assert result["text"] == plain["text"]
        assert result["token_ids"] == plain["token_ids"]
        emitted = [plain["token_ids"][0], *(token for made in result["rounds"] for token in made["tokens"])]
        assert emitted == result["token_ids"]
        assert sum(result["accepted"]) == sum(made["accepted"] for made in result["rounds"])
    (itself,) = found[-1]["results"]
    assert itself["tau"] > 3.0, "a model that drafts for itself is accepted"


def test_with_an_fp8_cache_trees_write_the_text_of_plain_decoding_with_one(eyas: Eyas, model: Path, head: Path) -> None:
    fp8 = ("--prompt", "hello", *COUNT, "--kv-dtype", "fp8", "--json")
    (plain,) = report(eyas("generate", "none", "--target", model, *fp8))["results"]
    for way in ((head,), (f"model:{model}", "--target", model, "--tree", "chain:3")):
        (result,) = report(eyas("generate", *way, *fp8))["results"]
        assert result["token_ids"] == plain["token_ids"]
    assert result["tau"] > 2.0
    said = eyas("chat", head, *COUNT, "--kv-dtype", "fp8", "--json", said="hello\n")
    assert json.loads(said.out)["token_ids"] == plain["token_ids"]
    found = report(
        eyas("bench", "decode", head, "--kv-dtype", "fp8", "--per-set", 1, "--method", "chain:2", "--tree", "chain:2",
             "--max-new-tokens", 5, "--json")
    )  # fmt: skip
    assert found["kv_dtype"] == "fp8"
    assert {one["method"] for one in found["results"]} == {"plain", "chain:2"}
    assert all(one["same"] == one["prompts"] for one in found["results"])


def test_many_prompts_run_side_by_side_and_keep_their_order(eyas: Eyas, head: Path) -> None:
    Path("p.jsonl").write_text(
        "".join(
            json.dumps({"id": f"p{n}", "messages": [{"role": "user", "content": "x" * (1 + 5 * n)}]}) + "\n"
            for n in range(4)
        )
    )
    alone = report(eyas("generate", head, "--prompts", "p.jsonl", *COUNT, "--json"))
    batched = report(eyas("generate", head, "--prompts", "p.jsonl", *COUNT, "--json", "--batch", 3))
    assert [one["id"] for one in batched["results"]] == ["p0", "p1", "p2", "p3"]
    for a, b in zip(alone["results"], batched["results"], strict=True):
        assert (a["token_ids"], a["rounds"]) == (b["token_ids"], b["rounds"])
    printed = eyas("generate", head, "--prompts", "p.jsonl", *COUNT)
    assert printed.code == 0
    for number, one in enumerate(batched["results"]):
        assert f"[p{number}] xx"[: 6 + number] in printed.out
        assert f"tau {one['tau']:.2f} | " in printed.out


def test_sampling_settings_reach_the_engine(eyas: Eyas, head: Path) -> None:
    def tokens(*options: object) -> list[int]:
        found = report(eyas("generate", head, "--prompt", "hi", *COUNT, "--json", *options))
        return list(found["results"][0]["token_ids"])

    assert tokens("--temperature", 1, "--seed", 3) == tokens("--temperature", 1, "--seed", 3)
    assert tokens("--temperature", 1, "--seed", 3) != tokens("--temperature", 1, "--seed", 4)
    assert tokens("--temperature", 1, "--top-k", 1) == tokens()
    assert tokens("--temperature", 1, "--top-p", 1e-9) == tokens()
    penalised = tokens("--repetition-penalty", 50.0, "--ignore-eos")
    assert len(set(penalised)) == len(penalised)
    with_logprobs = report(eyas("generate", head, "--prompt", "hi", *COUNT, "--json", "--logprobs"))["results"][0]
    assert len(with_logprobs["logprobs"]) == len(with_logprobs["token_ids"])


def test_a_stop_text_ends_the_reply_before_it(eyas: Eyas, head: Path) -> None:
    (free,) = report(eyas("generate", head, "--prompt", "hi", *COUNT, "--json"))["results"]
    letters = [letter for letter in free["text"][1:] if letter.isascii() and letter != free["text"][0]]
    (cut,) = report(eyas("generate", head, "--prompt", "hi", *COUNT, "--json", "--stop", letters[0]))["results"]
    assert cut["text"] == free["text"][: free["text"].index(letters[0])]
    assert cut["finish_reason"] == "stop"
    printed = eyas("generate", head, "--prompt", "hi", *COUNT, "--stop", letters[0])
    assert letters[0] not in printed.out.splitlines()[1]


def test_one_prompt_is_streamed_and_its_numbers_are_on_stderr(eyas: Eyas, head: Path) -> None:
    (result,) = report(eyas("generate", head, "--prompt", "hi", *COUNT, "--json"))["results"]
    streamed = eyas("generate", head, "--prompt", "hi", *COUNT)
    assert streamed.out.rstrip("\n") == result["text"].rstrip("\n")
    assert "tau " in streamed.err
    assert "12 tokens in" in streamed.err


def test_a_chat_remembers_its_turns_until_it_is_reset(eyas: Eyas, head: Path) -> None:
    said = "one\n\ntwo\n/reset\none\n/exit\nnever\n"
    outcome = eyas("chat", head, *COUNT, "--json", said=said)
    assert outcome.code == 0, outcome.err
    first, second, again = (json.loads(line) for line in outcome.out.splitlines())
    assert [first["prompt"], second["prompt"], again["prompt"]] == ["one", "two", "one"]
    assert first["token_ids"] == again["token_ids"]
    alone = json.loads(eyas("chat", head, *COUNT, "--json", said="two\n").out)
    assert alone["token_ids"] != second["token_ids"]
    plain = eyas("chat", "none", "--target", json.loads((head / "eyas.json").read_text())["target"], *COUNT, said=said)
    assert plain.out == "".join(f"{one['text']}\n" for one in (first, second, again))
    assert plain.err.count("tau 1.00") == 3


def test_a_conversation_that_outgrows_the_target_is_told_and_goes_on(eyas: Eyas, head: Path) -> None:
    outcome = eyas("chat", head, *COUNT, "--json", said="a\n" + "long " * 120 + "\nb\n")
    assert [json.loads(line)["prompt"] for line in outcome.out.splitlines()] == ["a", "b"]
    assert "the conversation fills the target's 512 positions. /reset forgets" in outcome.err.replace("\n", " ")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("generate", "{head}"), ["nothing to answer; give --prompt TEXT or --prompts FILE"]),
        (("generate", "{head}", "--prompt", " "), ["a --prompt is empty"]),
        (("generate", "none", "--prompt", "x"), ["name the target: --target MODEL"]),
        (
            ("generate", "gone", "--target", "{model}", "--prompt", "x"),
            ["there is no head folder 'gone'"],
        ),
        (("generate", "{head}", "--prompt", "x", "--tree", "chian:3"), ["--tree 'chian:3'", "Did you mean 'chain'?"]),
        (("generate", "{head}", "--prompt", "x", "--tree", "dynamic:3,4"), ["dynamic:DEPTH,TOP_K,NODES"]),
        (("generate", "{head}", "--prompt", "x", "--tree", "chain:x"), ["chain:DEPTH"]),
        (("generate", "{head}", "--prompt", "x", "--tree", "chain:0"), ["depth of at least 1, given 0"]),
        (("generate", "{head}", "--prompt", "x", "--tree", "auto"), ["needs a calibrated head", "eyas calibrate HEAD"]),
        (("calibrate", "gone"), ["cannot read a head from 'gone'"]),
        (("calibrate", "{head}", "--temperature", "1"), ["--temperature must be given 0 and at least one above it"]),
        (("calibrate", "{head}", "--dtype", "int8"), ["--dtype 'int8' must be float32 or bfloat16"]),
        (("generate", "{head}", "--prompt", "x", "--dtype", "int8"), ["--dtype 'int8' must be float32 or bfloat16"]),
        (("generate", "{head}", "--prompt", "x", "--kv-dtype", "int4"), ["--kv-dtype 'int4' must be fp8"]),
        (("generate", "{head}", "--prompt", "x", "--top-p", "0"), ["top_p 0.0 in (0, 1]"]),
        (("generate", "{head}", "--prompt", "x", "--batch", "0"), ["at least one request at a time"]),
        (("generate", "{head}", "--prompt", "x", "--max-new-tokens", "600"), ["exceed the target's 512 positions"]),
        (("generate", "{head}", "--prompt", "x", "--repetition-penalty", "0"), ["must be above 0"]),
        (("chat", "{head}", "--target", "/no/such"), ["no model folder '/no/such'"]),
    ],
    ids=str,
)
def test_wrong_input_is_one_sentence(
    eyas: Eyas, model: Path, head: Path, arguments: tuple[str, ...], parts: list[str]
) -> None:
    outcome = eyas(*(argument.format(head=head, model=model) for argument in arguments))
    assert (outcome.code, outcome.out) == (2, "")
    (line,) = outcome.err.splitlines()
    for part in ("error: ", *parts):
        assert part in line


def test_trees_are_read_as_written() -> None:
    never = lambda *_: pytest.fail("these trees need no latency table")  # noqa: E731 - one line that is not to be called
    assert parse_tree("chain:5").maker(None, never) == ChainTree(5)
    assert parse_tree("dynamic:5,8,16").maker(None, never) == DynamicTree(5, 8, 16)
    assert parse_tree("static").maker(None, never) == StaticTree()
    assert parse_tree("dynamic:5,8,16,calibrated").maker(KNOWN, never) == DynamicTree(5, 8, 16, KNOWN)
    table = costs()
    assert parse_tree("auto").maker(KNOWN, lambda *_: table) == CostAwareTree(8, 6, 32, KNOWN, table, ngram=5)
    assert parse_tree("auto:head").maker(KNOWN, lambda *_: table) == CostAwareTree(8, 6, 32, KNOWN, table, ngram=0)
    assert parse_tree("auto:4,3,9,head").maker(KNOWN, lambda *_: table) == CostAwareTree(4, 3, 9, KNOWN, table, ngram=0)
    assert parse_tree("auto:4,3,9").maker(KNOWN, lambda *_: table) == CostAwareTree(4, 3, 9, KNOWN, table)
    for wrong in ("static:3", "auto:3", "chain:3,calibrated", "dynamic:5,8,calibrated", "auto:1,2,3", ""):
        with pytest.raises(UserError):
            parse_tree(wrong)


def test_drafted_tokens_are_coloured_and_finished_lines_stay() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=60, color_system="standard", highlight=False)
    with LiveReply(console) as reply:
        reply.add(Round(0, 0, (1,)), [Piece("own", drafted=False)])
        reply.add(Round(4, 1, (2, 3)), [Piece(" drafted\nnext", drafted=True), Piece(" line", drafted=False)])
        assert reply.live is not None
        reply.live.refresh()
    text = screen.getvalue()
    assert "own\x1b[32m drafted\x1b[0m" in text
    assert "\x1b[32mnext\x1b[0m line" in text
    assert "tau 2.00 | " in text
    assert text.rstrip().endswith("line")
