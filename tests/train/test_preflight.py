"""The pre-flight finds every fault it promises to find, and nothing on a sound target."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from eyas.data.encode import TokenizedExample
from eyas.models.target import TargetOutput
from eyas.models.target_head import TargetHead
from eyas.tests.toys import byte_tokenizer, save_tiny_model
from eyas.tests.train.tiny_run import tiny_recipe
from eyas.train.context import RunContext
from eyas.train.pipeline import run_stages
from eyas.train.preflight import Finding, Probe, run_checks
from eyas.train.preflight_checks import CHECKS, VITAL
from eyas.train.preflight_table import marked_text, print_findings
from eyas.train.progress import Reporter
from eyas.train.recipe_io import parse_recipe
from eyas.train.run_folder import RunFolder

Forward = Callable[..., TargetOutput]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def probe_of(model: Path, folder: Path, **changes: dict[str, Any]) -> Probe:
    recipe = parse_recipe(tiny_recipe(model, folder, **changes), where="tiny")
    return Probe(RunContext(recipe, RunFolder(folder / "run"), Reporter(quiet=True)))


def findings_of(probe: Probe) -> dict[str, Finding]:
    return {finding.check: finding for finding in run_checks(probe, CHECKS, vital=VITAL)}


def failed(probe: Probe) -> dict[str, str]:
    """Return the sentences of the checks that failed."""
    return {name: found.detail for name, found in findings_of(probe).items() if found.verdict == "failed"}


def test_a_sound_recipe_passes_everything(model: Path, tmp_path: Path) -> None:
    findings = findings_of(probe_of(model, tmp_path))
    assert list(findings) == list(CHECKS)
    assert {found.verdict for found in findings.values()} == {"ok"}


def test_bf16_extraction_passes_too(model: Path, tmp_path: Path) -> None:
    extract = {"dtype": "bfloat16", "state_dtype": "bfloat16"}
    assert failed(probe_of(model, tmp_path, extract=extract)) == {}


def test_rows_of_a_finished_corpus_are_looked_at(model: Path, tmp_path: Path) -> None:
    probe = probe_of(model, tmp_path)
    run_stages(probe.recipe, tmp_path / "run", last="synthesize", reporter=Reporter(quiet=True))
    assert len(probe.examples) == 2 + 2 * 6
    assert failed(probe) == {}


def test_a_recipe_that_does_not_fit_ends_the_checks(model: Path, tmp_path: Path) -> None:
    findings = findings_of(probe_of(model, tmp_path, head={"aux_layers": [2, 4, 9]}))
    assert findings["recipe"].verdict == "failed"
    assert "aux layer 9 is out of range" in findings["recipe"].detail
    assert {found.verdict for name, found in findings.items() if name != "recipe"} == {"not checked"}


def test_rows_beyond_the_targets_positions(model: Path, tmp_path: Path) -> None:
    long = {"synthesize": {"max_reply_tokens": 500}, "train": {"line_length": 1024}}
    assert "the target takes 512 positions" in failed(probe_of(model, tmp_path, **long))["recipe"]


def test_too_little_room(model: Path, tmp_path: Path) -> None:
    assert "more on disk" in failed(probe_of(model, tmp_path, plan={"disk": 1000}))["disk and memory"]


def template_with(probe: Probe, text: str, **arguments: Any) -> None:
    """Give a probe's target another chat template."""
    from eyas.data.encode import ChatTemplate

    tokenizer: PreTrainedTokenizerBase = byte_tokenizer(text)
    probe.__dict__["template"] = ChatTemplate(tokenizer, arguments)


def test_a_template_that_writes_into_the_reply(model: Path, tmp_path: Path) -> None:
    probe = probe_of(model, tmp_path)
    template_with(
        probe,
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
        "{% if m['role'] == 'assistant' %}{{ 'Sure! ' }}{% endif %}{{ m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    )
    assert "the tokens 'Sure! It is 4.' are marked" in failed(probe)["chat template"]


def test_a_generation_prompt_that_leads_nowhere(model: Path, tmp_path: Path) -> None:
    probe = probe_of(model, tmp_path)
    template_with(
        probe,
        "{% for m in messages %}"
        "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n\n</think>\n\n' }}{% endif %}",
    )
    assert "chat template" in failed(probe)


def test_history_that_is_rewritten_is_a_warning(model: Path, tmp_path: Path) -> None:
    probe = probe_of(model, tmp_path)
    template_with(
        probe,
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
        "{% if m['role'] == 'assistant' and not loop.last %}{{ '...' }}{% else %}{{ m['content'] }}{% endif %}"
        "{{ '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    )
    found = findings_of(probe)["chat template"]
    assert (found.verdict, "rewrites earlier turns" in found.detail) == ("warning", True)


def test_a_tokenizer_of_another_model(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model")
    extra = [f"<|x{i}|>" for i in range(9)]
    byte_tokenizer(specials=(*extra, "<|im_start|>", "<|im_end|>")).save_pretrained(model)
    assert "they do not belong together" in failed(probe_of(model, tmp_path))["target"]


def test_layers_tapped_at_the_wrong_place(model: Path, tmp_path: Path) -> None:
    probe = probe_of(model, tmp_path)
    layers = probe.target.layers
    probe.target.layers = torch.nn.ModuleList([*layers[1:], layers[0]])  # every tap one layer late
    assert list(failed(probe)) == ["feature layers"]


def test_the_last_layer_is_compared_before_the_final_norm(model: Path, tmp_path: Path) -> None:
    probe = probe_of(model, tmp_path, head={"aux_layers": [0, 4, 8]})
    assert failed(probe) == {}


def test_logits_that_cannot_be_rebuilt(model: Path, tmp_path: Path) -> None:
    probe = probe_of(model, tmp_path)
    head = probe.target.head
    probe.target.head = TargetHead(head.weight_VD, head.bias_V, 1.3, head.softcap)
    assert "scales its logits" in failed(probe)["teacher logits"]


def test_a_forward_that_mixes_rows(model: Path, tmp_path: Path) -> None:
    probe = probe_of(model, tmp_path)
    forward: Forward = probe.target.forward

    def mixing(ids_BT: Tensor, **arguments: Any) -> TargetOutput:
        out = forward(ids_BT, **arguments)
        return TargetOutput(out.aux_hidden_BTF.roll(1, dims=0), out.final_hidden_BTD)

    _ = probe.examples
    object.__setattr__(probe.target, "forward", mixing)
    assert "mixes rows" in failed(probe)["batching"]


@pytest.mark.parametrize(("prompt", "reply"), [(99, 1), (1, 99)])
def test_rows_that_are_nearly_all_prompt_or_all_reply(model: Path, tmp_path: Path, prompt: int, reply: int) -> None:
    probe = probe_of(model, tmp_path)
    mask_T = torch.tensor([False] * prompt + [True] * reply)
    probe.__dict__["examples"] = [("row", TokenizedExample(torch.arange(100), mask_T))]
    assert f"{reply:.1f}% of 100 tokens" in failed(probe)["supervised tokens"]


def test_a_rope_that_the_config_does_not_tell(model: Path, tmp_path: Path) -> None:
    probe = probe_of(model, tmp_path)
    probe.target.decoder.rotary_emb.inv_freq *= 1.01
    assert "rotary cos differs" in failed(probe)["RoPE"]


def test_a_narrow_mlp_is_a_warning(model: Path, tmp_path: Path) -> None:
    probe = probe_of(model, tmp_path, head={"intermediate_size": 16, "init": "random"})
    found = findings_of(probe)["head shape"]
    assert (found.verdict, "narrower than the hidden size 40" in found.detail) == ("warning", True)


def test_a_head_that_cannot_start_from_its_target(model: Path, tmp_path: Path) -> None:
    sentence = failed(probe_of(model, tmp_path, head={"intermediate_size": 64}))["head shape"]
    assert "set head.init to 'random'" in sentence


def test_a_draft_cache_at_other_positions(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from eyas.data.feature_batch import FeatureBatch

    monkeypatch.setattr(FeatureBatch, "position_ids", lambda self, step: self.position_BT)  # the "+ s" forgotten
    assert list(failed(probe_of(model, tmp_path))) == ["training equals drafting"]


def test_the_preview_marks_what_is_trained(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    probe = probe_of(model, tmp_path)
    ids = probe.template.tokenizer("ask:tell!", add_special_tokens=False).input_ids
    example = TokenizedExample(torch.tensor(ids), torch.tensor([False] * 4 + [True] * 5))
    assert marked_text(probe.template, example) == "ask:\u27e6tell!\u27e7"
    findings = [Finding("recipe", "ok", "fine"), Finding("RoPE", "failed", "turns the other way")]
    print_findings("tiny", findings, "ask:\u27e6tell!\u27e7")
    said = capsys.readouterr().out
    assert "turns the other way" in said
    assert said.endswith("1 of 2 checks failed\n")
