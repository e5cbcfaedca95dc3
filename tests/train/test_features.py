"""Where a run's rows come from: the store it extracted, or its target while it trains; and what makes a store stale."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.data.corpus import load_corpus
from eyas.models.errors import UserError
from eyas.tests.toys import save_tiny_model
from eyas.tests.train.tiny_run import tiny_recipe
from eyas.train.context import RunContext
from eyas.train.features import feature_examples, feature_spec, open_rows
from eyas.train.pipeline import run_stages
from eyas.train.progress import Reporter
from eyas.train.recipe_io import parse_recipe
from eyas.train.run_folder import RunFolder


@pytest.fixture(scope="module")
def fields(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("features")
    model = save_tiny_model(folder / "model")
    return tiny_recipe(model, folder, extract={"tokens_per_batch": 1}, train={"steps": 4, "validate_every": 4})


@pytest.fixture(scope="module")
def run(fields: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "run"
    run_stages(parse_recipe(fields, where="here"), folder, last="train", reporter=Reporter(quiet=True))
    return folder


def with_(fields: dict[str, Any], section: str, **values: object) -> dict[str, Any]:
    return {**fields, section: {**fields[section], **values}}


def context(fields: dict[str, Any], folder: Path) -> RunContext:
    return RunContext(parse_recipe(fields, where="here"), RunFolder(folder), Reporter(quiet=True))


def test_the_rows_of_a_run_are_those_of_its_corpus_split_by_split(fields: dict[str, Any], run: Path) -> None:
    rows = open_rows(context(fields, run))
    corpus = load_corpus(run / "corpus" / "corpus.jsonl")
    for source, split in ((rows.training, "train"), (rows.validation, "validation")):
        expected = [row for row in corpus if row.split == split]
        assert [source.tokens(index).id for index in range(len(source))] == [row.id for row in expected]
        assert source.lengths == [len(row.prompt_ids) + len(row.reply_ids) for row in expected]


def trained(folder: Path) -> dict[str, Any]:
    result = json.loads((folder / "stages" / "train.json").read_text())["result"]
    lines = [json.loads(line) for line in (folder / "training" / "metrics.jsonl").read_text().splitlines()]
    return {
        "history": result["history"],
        "losses": [line["loss"] for line in lines if line["event"] == "step"],
        "rows": (result["rows"], result["supervised_tokens"], result["trained_length"]),
    }


@pytest.mark.parametrize("cache_bytes", [0, 10**8])
def test_training_without_a_store_is_training_with_one(
    fields: dict[str, Any], run: Path, tmp_path: Path, cache_bytes: int
) -> None:
    online = with_(fields, "extract", mode="online", cache_bytes=cache_bytes)
    summary = run_stages(
        parse_recipe(online, where="here"), tmp_path / "run", last="train", reporter=Reporter(quiet=True)
    )
    assert list((tmp_path / "run" / "features").iterdir()) == []
    assert summary["results"]["extract"]["bytes"] == 0
    assert trained(tmp_path / "run") == trained(run)


STALE: list[tuple[str, dict[str, Any], str]] = [
    ("target", {"template_arguments": {"enable_thinking": False}}, "template_arguments is '{}' there, '{\"enable"),
    ("target", {"quantization": "int8"}, "quantization is 'none' there, 'int8' here"),
    ("extract", {"dtype": "bfloat16"}, "compute_dtype is 'float32' there, 'bfloat16' here"),
    ("extract", {"state_dtype": "float8_e4m3fn"}, "state_dtype is 'float32' there, 'float8_e4m3fn' here"),
    ("extract", {"final_states": "everywhere"}, "final_at is 'taught' there, 'everywhere' here"),
    ("head", {"aux_layers": [1, 4, 6]}, r"aux_layers is (2, 4, 5) there, (1, 4, 6) here"),
]


@pytest.mark.parametrize(("section", "values", "said"), STALE)
def test_a_store_of_other_settings_is_refused_by_field(
    fields: dict[str, Any], run: Path, section: str, values: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError) as error:
        open_rows(context(with_(fields, section, **values), run))
    assert said in str(error.value)


def test_another_template_tokenizer_or_corpus_is_another_spec(
    fields: dict[str, Any], run: Path, tmp_path: Path
) -> None:
    here = context(fields, run)
    examples, _ = feature_examples(here)
    spec = feature_spec(here, examples)
    other = save_tiny_model(tmp_path / "model")
    (other / "chat_template.jinja").write_text((other / "chat_template.jinja").read_text() + " ")
    changed = feature_spec(context(with_(fields, "target", model=str(other)), run), examples)
    assert changed.template != spec.template
    assert changed.tokenizer == spec.tokenizer
    assert feature_spec(here, examples[1:]).data != spec.data
    shorter = with_(fields, "train", line_length=max(len(example) for _, example in examples) - 1)
    shorter = with_(shorter, "synthesize", max_prompt_tokens=8, max_reply_tokens=8)
    with pytest.raises(UserError, match=r"holds a row of \d+ tokens, more than train.line_length = \d+"):
        open_rows(context(shorter, run))


def test_a_head_that_reads_a_final_state_that_was_not_kept_computes_no_number(
    fields: dict[str, Any], run: Path
) -> None:
    (row,) = open_rows(context(fields, run)).training.rows([0])
    assert not bool(torch.isfinite(row.final_hidden_TD).all())
    assert bool(torch.isfinite(row.final_hidden_TD[row.argmax_T >= 0]).all())
