"""Recipes: strict keys with the nearest name, ranges, overrides, and what is written out can be read again."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from eyas.models.errors import UserError
from eyas.train.losses import OBJECTIVES
from eyas.train.recipe import Recipe, TrainSection
from eyas.train.recipe_io import bundled_recipes, dump_recipe, load_recipe, parse_recipe

SMALL: dict[str, Any] = {"name": "small", "target": {"model": "some/model"}}


def recipe(**sections: dict[str, Any]) -> Recipe:
    return parse_recipe({**SMALL, **sections}, where="here")


@pytest.fixture
def small(tmp_path: Path) -> str:
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(SMALL))
    return str(path)


@pytest.mark.parametrize("name", bundled_recipes())
def test_every_bundled_recipe_loads_and_bears_its_own_name(name: str) -> None:
    assert load_recipe(name).name == name


def test_there_is_a_bundled_recipe() -> None:
    assert "smollm2-quickstart" in bundled_recipes()


@pytest.mark.parametrize(
    ("fields", "key", "near"),
    [
        ({"trian": {"steps": 5}}, "trian", "train"),
        ({"train": {"stepz": 5}}, "train.stepz", "steps"),
        ({"evaluate": {"tree": {"topk": 4}}}, "evaluate.tree.topk", "top_k"),
        ({"synthesize": {"answers": [{"temperature": 1.0}, {"temprature": 1.0}]}}, "synthesize.answers.1.temprature",
         "temperature"),
    ],
)  # fmt: skip
def test_an_unknown_key_names_its_place_and_the_nearest_valid_one(fields: dict[str, Any], key: str, near: str) -> None:
    with pytest.raises(UserError) as caught:
        recipe(**fields)
    message = str(caught.value)
    assert message.startswith(f"recipe here: unknown key '{key}'; allowed here: ")
    assert message.endswith(f"Did you mean '{near}'?")
    assert "\n" not in message


def test_the_keys_allowed_at_a_place_are_listed() -> None:
    with pytest.raises(
        UserError, match=r"unknown key 'synthesize\.answers\.0\.x'; allowed here: temperature, top_k, top_p, share\."
    ):
        recipe(synthesize={"answers": [{"x": 1}]})
    with pytest.raises(
        UserError, match="allowed here: name, target, synthesize, extract, head, train, evaluate, export"
    ):
        recipe(unheard_of={})


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"train": {"steps": 0}}, r"train\.steps: Input should be greater than 0 \(given 0\)"),
        ({"train": {"steps": "many"}}, r"train\.steps: .*valid integer.* \(given 'many'\)"),
        ({"train": {"loss": "kll"}}, r"train\.loss: Input should be 'kl', 'ce', 'tv' or 'lk' \(given 'kll'\)"),
        ({"train": {"learning_rate": float("inf")}}, r"train\.learning_rate: .*finite number \(given inf\)"),
        ({"train": {"learning_rate": -0.1}}, r"train\.learning_rate: .*greater than 0 \(given -0\.1\)"),
        ({"train": {"betas": [0.9, 1.0]}}, r"train\.betas\.1: Input should be less than 1 \(given 1\.0\)"),
        ({"train": {"betas": [0.9]}}, r"train\.betas\.1' is missing"),
        ({"train": {"step_decay": 1.5}}, r"train\.step_decay: .*less than or equal to 1 \(given 1\.5\)"),
        ({"train": None}, r"train: .* \(given None\)"),
        ({"synthesize": {"answers": []}}, r"synthesize\.answers: .*at least 1 item"),
        ({"synthesize": {"dtype": "float16"}}, r"synthesize\.dtype: Input should be 'float32' or 'bfloat16'"),
        ({"evaluate": {"temperatures": [0.0, -1.0]}}, r"evaluate\.temperatures\.1: .*greater than or equal to 0"),
        ({"synthesize": {"answers": [{"top_p": 0.0}]}}, r"synthesize\.answers\.0\.top_p: .*greater than 0"),
        ({"synthesize": {"steering": [{"category": "a b"}]}}, r"synthesize\.steering\.0\.category: .*pattern"),
        (
            {"synthesize": {"backend": {"kind": "vllm"}}},
            r"backend\.kind: Input should be .local. or .openai.",
        ),
        ({"name": "../up"}, r"name: .*pattern"),
        ({"name": ".."}, r"name: .*pattern"),
    ],
)
def test_a_value_out_of_range_says_what_is_allowed_and_what_was_given(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        recipe(**sections)
    assert "\n" not in str(caught.value)


def test_a_prompt_source_is_a_text_or_an_object() -> None:
    given = ["a.jsonl", {"dataset": "some/chats", "split": "test", "schema": "turns", "weight": 2, "streaming": True}]
    first, second = recipe(synthesize={"prompts": given}).synthesize.prompts
    assert (first.path, first.dataset, first.schema_name, first.weight) == ("a.jsonl", None, None, None)
    assert (second.path, second.dataset, second.split, second.schema_name) == (None, "some/chats", "test", "turns")
    assert second.model_dump()["schema"] == "turns"


@pytest.mark.parametrize(
    ("synthesize", "message"),
    [
        ({"prompts": [{"path": "a", "weigth": 1}]},
         r"unknown key 'synthesize\.prompts\.0\.weigth'; allowed here: path, .*schema.*Did you mean 'weight'\?"),
        ({"prompts": [{"path": "a", "schema_name": "turns"}]}, r"unknown key .*schema_name'.*Did you mean 'schema'"),
        ({"prompts": [{}]}, r"synthesize\.prompts\.0: a prompt source needs either path or dataset"),
        ({"prompts": [{"path": "a", "dataset": "b"}]}, "a prompt source needs either path or dataset"),
        ({"prompts": [{"path": "a", "split": "x"}]}, "split and streaming go with a dataset, not with path 'a'"),
        ({"prompts": [{"path": "a", "schema": "chat"}]}, r"prompts\.0\.schema: Input should be 'messages', "),
        ({"prompts": [{"path": "a", "weight": 0}]}, r"prompts\.0\.weight: .*greater than 0"),
        ({"prompts": [7]}, r"synthesize\.prompts\.0: .* \(given 7\)"),
        ({"max_drop_share": 1.5}, r"synthesize\.max_drop_share: .*less than or equal to 1"),
        ({"dedup": {"nearr": 1}}, r"unknown key 'synthesize\.dedup\.nearr'; allowed here: exact, near, .*Did you mean"),
    ],
)  # fmt: skip
def test_a_wrong_prompt_source_is_one_sentence(synthesize: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        recipe(synthesize=synthesize)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"synthesize": {"max_prompt_tokens": 300, "max_reply_tokens": 213}, "train": {"line_length": 512}},
         r"line_length 512 is shorter than the longest row, synthesize\.max_prompt_tokens \+ max_reply_tokens = 513"),
        ({"synthesize": {"prompts": []}}, "nothing to train on"),
        ({"synthesize": {"answers": [{"share": 0.5}, {"share": 0.4}]}}, r"shares of answers .* up to 1, given \[0\.5"),
        ({"synthesize": {"self_answers": [{"share": 1.0}, {}]}}, "shares of self_answers must be given for all styles"),
        ({"synthesize": {"steering": [{"category": "a"}, {"category": "a"}]}}, "categories of steering must differ"),
        ({"synthesize": {"backend": {"kind": "openai"}}}, r"backend\.kind openai needs backend\.url"),
        ({"synthesize": {"backend": {"url": "http://x/v1"}}}, r"backend\.url is for backend\.kind openai"),
        ({"evaluate": {"prompts": []}}, "nothing to evaluate on"),
        ({"evaluate": {"prompts": [], "self_heldout": False}, "synthesize": {"self_heldout": 4}}, "nothing to eval"),
        ({"evaluate": {"auto": {}, "calibration": {"prompts": 0}}}, r"need evaluate\.calibration\.prompts above 0"),
        ({"evaluate": {"tree": {"calibrated": True}, "calibration": {"prompts": 0}}}, "calibration.prompts above 0"),
        ({"evaluate": {"calibration": {"temperatures": [0.0]}}}, "must be 0 and at least one above it"),
        ({"evaluate": {"calibration": {"temperatures": [0.0, 1.0, 1.0]}}}, "each once, given"),
        ({"evaluate": {"calibration": {"temperatures": [0.5, 1.0]}}}, "must be 0 and at least one above it"),
    ],
)  # fmt: skip
def test_sections_that_do_not_fit_each_other_are_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        recipe(**sections)


def test_a_line_exactly_as_long_as_the_longest_row_is_allowed() -> None:
    sections = {"synthesize": {"max_prompt_tokens": 300, "max_reply_tokens": 212}, "train": {"line_length": 512}}
    assert recipe(**sections).train.line_length == 512
    assert recipe(evaluate={"prompts": []}, synthesize={"self_heldout": 4}).evaluate.prompts == ()


def test_further_faults_are_counted() -> None:
    with pytest.raises(UserError, match=r"\(2 more\)"):
        recipe(train={"steps": 0, "clip": 0, "warmup_steps": -1})


def test_a_recipe_needs_a_target() -> None:
    with pytest.raises(UserError, match=r"recipe here: 'target' is missing\."):
        parse_recipe({"name": "x"}, where="here")


def test_every_objective_can_be_asked_for() -> None:
    for name in OBJECTIVES:
        assert TrainSection(loss=name).loss == name  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("train.steps=7", "train", "steps", 7),
        ("train.learning_rate=1e-4", "train", "learning_rate", 1e-4),
        ("train.keep_oov=true", "train", "keep_oov", True),
        ("head.aux_layers=[1, 2, 5]", "head", "aux_layers", (1, 2, 5)),
        ("evaluate.prompts=[a=b.jsonl]", "evaluate", "prompts", ("a=b.jsonl",)),
        ("head.intermediate_size=null", "head", "intermediate_size", None),
        ("target.template_arguments.enable_thinking=false", "target", "template_arguments", {"enable_thinking": False}),
        (" target.model = ./else ", "target", "model", "./else"),
    ],
)
def test_an_override_sets_a_typed_value(small: str, override: str, section: str, key: str, value: object) -> None:
    assert getattr(getattr(load_recipe(small, [override]), section), key) == value


def test_overrides_apply_in_order_and_leave_the_rest_alone(small: str) -> None:
    changed = load_recipe(small, ["evaluate.tree.depth=2", "train.steps=3", "train.steps=4"])
    assert (changed.evaluate.tree.depth, changed.train.steps) == (2, 4)
    plain = load_recipe(small)
    assert changed.evaluate.chain == plain.evaluate.chain
    assert changed.train.model_copy(update={"steps": plain.train.steps}) == plain.train


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.steps", r"--set takes section\.key=value, given 'train\.steps'"),
        ("train.stepz=4", r"unknown key 'train\.stepz'.*Did you mean 'steps'\?"),
        ("name.first=x", r"--set 'name\.first=x': 'name' is a value, not a section"),
        ("train.steps=[1", r"--set 'train\.steps=\[1': the value is not YAML"),
        ("=4", "unknown key ''"),
        ("train=4", r"train: .* \(given 4\)"),
    ],
)
def test_a_bad_override_is_one_sentence(small: str, override: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        load_recipe(small, [override])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty; start from a bundled one: .*smollm2-quickstart"),
        ("# nothing yet\n", "is empty"),
        ("- a\n- b\n", "holds a list instead of sections"),
        ("just words", "holds a str instead of sections"),
        ("name: [", "is not YAML"),
        ("1: 2\nname: x\ntarget: {model: m}\n", "recipe .*1"),
        ("name: caf\xe9", "is not YAML"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused_in_one_sentence(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(UserError, match=message) as caught:
        load_recipe(str(path))
    assert "\n" not in str(caught.value)


def test_a_missing_recipe_names_the_bundled_ones() -> None:
    with pytest.raises(
        UserError, match=r"there is no recipe 'smollm2-quickstrat'.*Did you mean 'smollm2-quickstart'\?"
    ):
        load_recipe("smollm2-quickstrat")


@pytest.mark.parametrize("source", [*bundled_recipes(), "small"])
def test_a_dumped_recipe_is_complete_and_loads_as_the_same(source: str, small: str, tmp_path: Path) -> None:
    changes = ["head.aux_layers=[1,3,5]", "synthesize.prompts=[a.jsonl, {dataset: b, schema: text}]"]
    original = load_recipe(small if source == "small" else source, changes)
    path = tmp_path / "dumped.yaml"
    path.write_text(dump_recipe(original))
    assert load_recipe(str(path)) == original
    written = yaml.safe_load(path.read_text())
    assert written["train"].keys() == TrainSection.model_fields.keys()
    assert written.keys() == Recipe.model_fields.keys()


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"train": {"ttt_steps": 3, "step_weights": [1.0, 0.5]}}, r"has 2 entries for train\.ttt_steps = 3"),
        ({"train": {"loss": {}}}, r"train\.loss names no loss"),
        ({"train": {"loss": {"kl": 0}}}, r"train\.loss"),
        ({"train": {"loss": {"kll": 1.0}}}, r"train\.loss"),
        ({"train": {"supervise": "all"}}, r"set train\.keep_oov to true"),
        ({"train": {"feature_weight": 1.0}}, r"only head\.kind eagle1 continues"),
        ({"train": {"pace": 1.5}}, r"train\.pace"),
        ({"head": {"init": ""}}, r"head\.init"),
    ],
)
def test_an_objective_that_cannot_be_is_refused(sections: dict[str, dict[str, Any]], said: str) -> None:
    with pytest.raises(UserError, match=said):
        recipe(**sections)


def test_losses_are_a_name_or_a_mix() -> None:
    assert recipe(train={"loss": "tv"}).train.loss == "tv"
    assert recipe(train={"loss": {"kl": 0.5, "lk": 0.5}}).train.loss == {"kl": 0.5, "lk": 0.5}
    assert recipe().train.loss is None
    assert recipe(head={"kind": "eagle1"}, train={"feature_weight": 0.5}).train.feature_weight == 0.5
