"""The exported head in a real vLLM: it loads, drafts what we draft, and accepts as often as our own chain says."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from eyas.data.corpus import load_corpus
from eyas.inference.acceptance import AcceptanceStats
from eyas.inference.decode_bench import BenchPlan
from eyas.inference.sampling import Sampling
from eyas.models.checkpoint import save_head
from eyas.models.export import export_head
from eyas.models.launch import Serving
from eyas.models.target import Target
from eyas.tests.toys import save_tiny_model, tiny_eagle1, tiny_head
from eyas.tests.vllm_job import run_ours, run_vllm, vllm_python
from eyas.train.pipeline import run_stages
from eyas.train.progress import Reporter
from eyas.train.recipe_io import load_recipe
from eyas.train.verify_engine import verify_vllm
from eyas.train.vllm_decoding import VllmMethod

pytestmark = pytest.mark.vllm
DEPTH = 3


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole tiny run on a target whose text is regular enough for a head to learn it."""
    folder = tmp_path_factory.mktemp("vllm")
    model = save_tiny_model(
        folder / "model",
        hidden_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        initializer_range=0.08,
    )
    for name in ("train", "eval"):
        prompts = [
            {"id": f"{name}-{i}", "messages": [{"role": "user", "content": f"{name} {i * i}"}]} for i in range(48)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    recipe = {
        "name": "vllm",
        "target": {"model": str(model), "device": "cpu"},
        "synthesize": {
            "prompts": [str(folder / "train.jsonl")], "validation": 8, "max_prompt_tokens": 64, "max_reply_tokens": 64,
            "dtype": "float32",
        },
        "extract": {"dtype": "float32", "state_dtype": "float32"},
        "head": {"draft_vocab_size": 200},
        "train": {"steps": 150, "line_length": 128, "precision": "fp32", "learning_rate": 3e-3, "validate_every": 75},
        "evaluate": {"prompts": [str(folder / "eval.jsonl")], "sampled_prompts": 0, "max_new_tokens": 8},
        "export": {"dtype": "float32"},
    }  # fmt: skip
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    run_stages(load_recipe(str(folder / "recipe.yaml")), folder / "run", reporter=Reporter(quiet=True))
    return folder


def corpus_prompts(run: Path, count: int) -> list[list[int]]:
    """Return the prompts of the corpus's first rows."""
    return [list(row.prompt_ids) for row in load_corpus(run / "run" / "corpus" / "corpus.jsonl")[:count]]


def test_vllm_accepts_as_often_as_our_chain(run: Path) -> None:
    prompts = corpus_prompts(run, 24)
    model, head = str(run / "model"), run / "run" / "head"
    stop = frozenset({int(json.loads((run / "model" / "config.json").read_text())["eos_token_id"])})

    texts, ours = run_ours(target=model, head=head, depth=DEPTH, prompts=prompts, tokens=64, stop_ids=stop)
    theirs = run_vllm(run / "job", target=model, head=head, depth=DEPTH, prompts=prompts, tokens=64)

    assert ours.tau > 1.2, "the head learned nothing, so the comparison would say nothing"
    assert theirs["token_ids"] == texts
    assert theirs["mean_acceptance_length"] == pytest.approx(ours.tau, rel=0.03)
    for position, accepted in enumerate(theirs["accepted_per_pos"]):
        assert accepted / theirs["num_drafts"] == pytest.approx(ours.survival[position], abs=0.02)


def test_a_head_whose_layer_ids_are_off_by_one_accepts_less(run: Path, tmp_path: Path) -> None:
    """The comparison above can fail: the same head read at the wrong layers is seen in vLLM's own counters."""
    model, head = str(run / "model"), run / "run" / "head"
    wrong = tmp_path / "head"
    wrong.mkdir()
    (wrong / "model.safetensors").write_bytes((head / "model.safetensors").read_bytes())
    config = json.loads((head / "config.json").read_text())
    config["eagle_aux_hidden_state_layer_ids"] = [k - 1 for k in config["eagle_aux_hidden_state_layer_ids"]]
    (wrong / "config.json").write_text(json.dumps(config))
    prompts = corpus_prompts(run, 24)

    right = run_vllm(tmp_path / "right", target=model, head=head, depth=DEPTH, prompts=prompts, tokens=64)
    off = run_vllm(tmp_path / "off", target=model, head=wrong, depth=DEPTH, prompts=prompts, tokens=64)

    assert off["token_ids"] == right["token_ids"]
    assert off["mean_acceptance_length"] < right["mean_acceptance_length"] - 0.02


def test_vllm_drafts_what_we_draft_token_by_token(run: Path) -> None:
    prompts = corpus_prompts(run, 12)
    parity = verify_vllm(
        run / "run" / "head", str(run / "model"), vllm_python(), prompts=prompts, depth=DEPTH, max_new_tokens=64
    )
    assert parity.passed, parity
    assert parity.rounds_compared == 20
    assert parity.our_tau > 1.2


def test_vllm_takes_turns_as_a_method_of_a_comparison(run: Path) -> None:
    prompts = [tuple(prompt) for prompt in corpus_prompts(run, 6)]
    model, head = str(run / "model"), run / "run" / "head"
    stop = frozenset({int(json.loads((run / "model" / "config.json").read_text())["eos_token_id"])})
    plan = BenchPlan((6,), 24, stop, Sampling())
    texts, ours = run_ours(
        target=model, head=head, depth=DEPTH, prompts=[list(p) for p in prompts], tokens=24, stop_ids=stop
    )
    longest = max(map(len, prompts)) + 24
    plain = VllmMethod(vllm_python(), target=model, dtype="float32", batch=6, longest=longest)
    drafting = VllmMethod.with_head(
        vllm_python(), target=model, head=str(head), method="eagle3", depth=DEPTH, dtype="float32", longest=longest
    )
    try:
        for half in (slice(0, 3), slice(3, 6)):
            assert plain.run(prompts[half], plan).token_ids == texts[half]
        stats = AcceptanceStats(DEPTH)
        for prompt, text in zip(prompts, texts, strict=True):
            replies = drafting.run([prompt], plan)
            assert replies.token_ids == [text]
            assert replies.stats is not None
            stats += replies.stats
        assert stats.tau == pytest.approx(ours.tau, rel=0.1)  # it counts a reply's last round before it cuts it
        sampled = [replace(plan, sampling=Sampling(1.0, seed=seed)) for seed in range(4)]
        assert len({tuple(plain.run(prompts[:1], asked).token_ids[0]) for asked in sampled}) > 1
    finally:
        plain.close()
        drafting.close()


@pytest.fixture(scope="module")
def odd_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose head_dim is not hidden / heads."""
    return save_tiny_model(
        tmp_path_factory.mktemp("odd") / "model",
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        initializer_range=0.08,
    )


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("vllm", {"aux_layers": (1, 3, 6)}),
        ("vllm", {"aux_layers": (0, 5, 7, 8)}),
        ("vllm", {"draft_vocab_size": 258}),
        ("vllm", {"fc_norm": True, "norm_output": True}),
        ("vllm", {"norm_before_fc": True}),
        ("vllm", {"norm_before_residual": True}),
        ("speculators", {"aux_layers": (1, 3, 6)}),
        ("vllm", {"num_layers": 3, "norm_output": True}),
        ("speculators", {"num_layers": 2}),
    ],
    ids=[
        "layers",
        "first and last layer",
        "whole vocabulary",
        "EAGLE-3.1",
        "before fc",
        "before residual",
        "speculators",
        "three layers",
        "two layers, speculators",
    ],
)
def test_every_kind_of_head_is_drafted_alike(
    name: str, fields: dict[str, Any], odd_model: Path, tmp_path: Path
) -> None:
    fields = dict(fields)
    layers = fields.pop("aux_layers", (2, 4, 5))
    target = Target.load(str(odd_model), dtype=torch.float32, aux_layers=layers)
    head = tiny_head(target, **{"draft_vocab_size": 200, **fields})
    save_head(head, tmp_path / "native", metadata={}, dtype=torch.float32)
    serving = Serving("owner/target", "owner/head", depth=DEPTH, top_k=4, num_draft_tokens=8)
    export_head(tmp_path / "native", name, tmp_path / "head", serving=serving)
    prompts = [[ord(letter) % 256 for letter in f"say {number} again"] for number in range(2)]
    parity = verify_vllm(
        tmp_path / "native", str(odd_model), vllm_python(), prompts=prompts, depth=DEPTH, max_new_tokens=40,
        served=tmp_path / "head",
    )  # fmt: skip
    assert parity.rounds_equal == parity.rounds_compared == 20, parity
    assert parity.texts_equal == 2


@pytest.mark.parametrize("name", ["native", "eagle1-vllm"])
def test_an_eagle1_head_is_drafted_alike(name: str, odd_model: Path, tmp_path: Path) -> None:
    target = Target.load(str(odd_model), dtype=torch.float32)
    save_head(tiny_eagle1(target), tmp_path / "native", metadata={}, dtype=torch.float32)
    serving = Serving("owner/target", "owner/head", depth=DEPTH, top_k=4, num_draft_tokens=8)
    if name != "native":
        export_head(tmp_path / "native", name, tmp_path / name, serving=serving, embeddings_of=str(odd_model))
    prompts = [[ord(letter) % 256 for letter in f"say {number} again"] for number in range(2)]
    parity = verify_vllm(
        tmp_path / "native", str(odd_model), vllm_python(), prompts=prompts, depth=DEPTH, max_new_tokens=40,
        served=tmp_path / name,
    )  # fmt: skip
    assert parity.rounds_equal == parity.rounds_compared == 20, parity
    assert parity.texts_equal == 2
