"""The model card holds the measured numbers, the commands and what the Hub indexes; silence is said, not filled in."""

import json
import shlex
from pathlib import Path
from typing import Any

import yaml

from eyas.models.head_files import HeadFiles, read_head_files
from eyas.models.model_card import model_card
from eyas.tests.models.native_heads import eagle1_files, save_native, target_and_head


def entry(method: str, temperature: float, prompt_set: str, tau: float) -> dict[str, Any]:
    return {
        "method": method, "temperature": temperature, "prompt_set": prompt_set, "prompts": 12, "tau": tau,
        "survival": [0.5, 0.25], "tokens_per_second": 20.5, "speedup": 1.25,
    }  # fmt: skip


CARD: dict[str, Any] = {
    "acceptance": [entry("plain", 0.0, "all", 1.0), entry("chain", 0.0, "all", 1.75), entry("tree", 1.0, "all", 1.9)],
    "acceptance_by_set": [entry("tree", 0.0, "code", 2.25)],
    "acceptance_by_context": [
        {"method": method, "temperature": t, "context": at, "below": 2 * at, "tau": tau, "rounds": rounds}
        for method, t, at, tau, rounds in (
            ("chain", 0.0, 128, 1.5, 40), ("tree", 0.0, 128, 2.3, 44), ("tree", 0.0, 256, 1.9, 7),
            ("tree", 1.0, 128, 1.2, 9),
        )
    ],
    "recipe": {"evaluate": {"chain": {"depth": 4}, "tree": {"depth": 4, "top_k": 6, "num_draft_tokens": 20}}},
    "provenance": {
        "command": "eyas run x.yaml", "commit": "abc123", "seed": 7, "versions": {"torch": "2.13.0"},
        "machine": {"cpu": "A CPU", "cores": 2, "gpus": []},
    },
    "trained_length": 266, "coverage": {"train": 1.0, "validation": 0.93}, "data": {"rows": 600, "reply_tokens": 40000},
    "training": {"steps": 1300, "best_step": 910}, "target_revision": "deadbeef", "target_quantisation": None,
}  # fmt: skip


def text(files: HeadFiles, **fields: Any) -> str:
    return model_card(files, **{"repo": "me/a-head", "target": "owner/target", "licence": "apache-2.0", **fields})


def metadata(card: str) -> dict[str, Any]:
    return dict(yaml.safe_load(card.split("---")[1]))


def test_every_number_command_and_limit_is_on_it(tmp_path: Path) -> None:
    files = read_head_files(save_native(target_and_head()[1], tmp_path / "head", **CARD))
    card = text(files)
    for row in (
        "| all (12) | 0 | chain | 1.75 | 0.50 0.25 | 20.5 | 1.25x |", "| all (12) | 1 | tree | 1.90 |",
        "| code (12) | 0 | tree | 2.25 |",
    ):  # fmt: skip
        assert row in card
    of_contexts = [line.strip() for line in card.splitlines() if "before the round" in line]
    assert of_contexts == [
        "* 128 to 255 tokens before the round: tau 2.30 (tree, T=0, 44 rounds)",
        "* 256 to 511 tokens before the round: tau 1.90 (tree, T=0, 7 rounds)",
    ]
    for part in (
        "A CPU, 2 cores, GPUs: none", "`eyas run x.yaml`, commit abc123, seed 7", "rows of up to 266 tokens",
        "600 replies written by the target itself, 40000 tokens", "61 of 97 tokens, covering 93.0 %",
        "aux layers (layers applied; vLLM's numbering): [2, 4, 5], SGLang's: [1, 3, 4]", "revision `deadbeef`",
        "trained against plain weights", "| vLLM | 0.32-0.33 | yes | yes |", "| SGLang | 0.5.23 | no | yes |",
        "| original EAGLE code | cb7e084 | no | yes, after `eyas export HEAD --format eagle` |",
    ):  # fmt: skip
        assert part in card, part
    vllm, sglang = card.split("```")[1], card.split("```")[3]
    assert json.loads(shlex.split(vllm)[-1])["num_speculative_tokens"] == 4
    assert "--speculative-num-draft-tokens 21" in sglang
    assert "None" not in card
    assert "EaModel" not in card  # the uploaded folder is the native one


def test_the_hub_finds_base_model_tags_and_results(tmp_path: Path) -> None:
    found = metadata(text(read_head_files(save_native(target_and_head()[1], tmp_path / "head", **CARD))))
    assert (found["base_model"], found["library_name"], found["license"]) == ("owner/target", "eyas", "apache-2.0")
    assert {"speculative-decoding", "eagle", "eagle3"} <= set(found["tags"])
    results = found["model-index"][0]["results"]
    values = {r["dataset"]["name"]: m["value"] for r in results for m in r["metrics"]}
    assert values == {"all, chain, T=0": 1.75, "all, tree, T=1": 1.9, "code, tree, T=0": 2.25}


def test_a_local_target_is_no_base_model_and_an_unmeasured_head_says_so(tmp_path: Path) -> None:
    card = text(read_head_files(save_native(target_and_head()[1], tmp_path / "head")), target="/a/b", licence=None)
    assert "base_model" not in metadata(card)
    assert "model-index" not in metadata(card)
    for part in ("Nothing was measured", "the trained length is not recorded", "licence: not stated"):
        assert part in card


def test_an_engine_that_cannot_serve_it_has_no_command_but_a_reason(tmp_path: Path) -> None:
    head = target_and_head(norm_before_residual=True)[1]
    card = text(read_head_files(save_native(head, tmp_path / "head")))
    assert "sglang.launch_server" not in card
    assert "no: SGLang does not implement norm_before_residual" in card


def test_an_eagle1_head_is_served_by_its_own_method() -> None:
    card = text(eagle1_files())
    assert "EAGLE-1 draft head" in card
    assert '"method": "eagle"' in card
    assert "--speculative-algorithm EAGLE " in card
    assert "aux layers" not in card.split("## Training")[1].split("## Limits")[0]
