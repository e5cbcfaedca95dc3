"""The plan of a tiny run: counts and bytes known by hand, refusals, and smaller settings that really fit."""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eyas.models.errors import CheckFailed
from eyas.models.size import TargetSize
from eyas.tests.toys import save_tiny_model
from eyas.tests.train.tiny_run import tiny_recipe
from eyas.train.break_even import break_even_table, round_cost
from eyas.train.cards import Card
from eyas.train.context import RunContext
from eyas.train.machine import Speed
from eyas.train.pipeline import run_stages
from eyas.train.plan import check_plan, human, make_plan
from eyas.train.plan_corpus import PromptLengths, count_allowed
from eyas.train.plan_disk import DISK, measurements
from eyas.train.plan_facts import CUDA_CONTEXT, HeadSize, gather_facts
from eyas.train.plan_memory import MEMORY, loading
from eyas.train.plan_time import TIME, forward_seconds
from eyas.train.progress import Reporter
from eyas.train.recipe import Recipe
from eyas.train.recipe_io import parse_recipe
from eyas.train.run_folder import STAGES, RunFolder

SPEED = Speed(flops_float32=1e11, flops_bfloat16=4e11, bytes_per_second=2e10, seconds_per_operation=1e-6)
GB = 10**9
MB = GB // 1000
GPU = Speed(flops_float32=1e14, flops_bfloat16=1e15, bytes_per_second=4e12, seconds_per_operation=1e-6)
EIGHT_B = TargetSize(
    parameters=8_030_000_000,
    active=7_500_000_000,
    vocab_size=128_256,
    hidden_size=4096,
    mlp_width=14_336,
    layers=32,
    heads=32,
    kv_heads=8,
    head_dim=128,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def recipe_of(model: Path, folder: Path, **changes: dict[str, Any]) -> Recipe:
    return parse_recipe(tiny_recipe(model, folder, **changes), where="tiny")


def context_of(model: Path, folder: Path, **changes: dict[str, Any]) -> RunContext:
    return RunContext(recipe_of(model, folder, **changes), RunFolder(folder / "run"), Reporter(quiet=True))


def test_rows_and_tokens_are_what_the_limits_allow(model: Path, tmp_path: Path) -> None:
    recipe = recipe_of(
        model, tmp_path,
        synthesize={"self_prompts": 30, "self_heldout": 3, "validation": 4, "self_prompt_tokens": 20},
    )  # fmt: skip
    counts = count_allowed(recipe, PromptLengths(given=(10, 20, 30, 40), frame=8))
    # Two of the four given are for validation, the others answered in two styles; 30 + 2 + 3 are self-written.
    assert (counts.rows, counts.stored_rows, counts.validation_rows) == (6 + 32 + 3, 6 + 32, 4)
    assert counts.stored_prompt_tokens == 6 * 25 + 32 * 28
    assert counts.reply_tokens == 41 * 24
    assert counts.self_prompts_asked == 35 + 11
    assert (counts.longest_row, counts.exact) == (40 + 24, False)


def test_an_expected_reply_length_takes_the_place_of_the_limit(model: Path, tmp_path: Path) -> None:
    lengths = PromptLengths(given=(10,) * 8, frame=8)
    bound = count_allowed(recipe_of(model, tmp_path), lengths)
    expected = count_allowed(recipe_of(model, tmp_path, plan={"reply_tokens": 6}), lengths)
    assert (bound.reply_tokens, expected.reply_tokens) == (14 * 24, 14 * 6)
    assert bound.longest_row == expected.longest_row


def test_features_cost_all_states_of_every_token(model: Path, tmp_path: Path) -> None:
    facts = gather_facts(context_of(model, tmp_path))
    counts = facts.counts
    taught = counts.stored_reply_tokens - counts.stored_rows  # the last token of a reply teaches no slot
    states = counts.stored_tokens * 3 * 40 * 4 + taught * 40 * 4
    assert DISK["extract"](facts) == pytest.approx(states, rel=0.03)
    assert DISK["extract"](facts) > states
    # Four prompts of two sets, plain, chain and tree: all at T=0, one of each set at T=1.
    assert measurements(facts) == 3 * (4 + 2)
    assert measurements(gather_facts(context_of(model, tmp_path, evaluate={"auto": {}}))) == 4 * (4 + 2)


def test_the_public_figure_for_an_8b_model(model: Path, tmp_path: Path) -> None:
    """50k rows of 1024 tokens at hidden size 4096, three aux layers and the final state in bf16: 1.68 TB."""
    facts = gather_facts(context_of(model, tmp_path, extract={"state_dtype": "bfloat16"}))
    counts = replace(facts.counts, stored_rows=50_000, stored_prompt_tokens=0, stored_reply_tokens=50_000 * 1024)
    config = replace(facts.head_config, hidden_size=4096, target_hidden_size=4096)
    planned = DISK["extract"](replace(facts, target=EIGHT_B, head_config=config, counts=counts))
    assert planned == pytest.approx(1.68e12, rel=0.01)


def test_every_stage_has_its_formulas() -> None:
    for table in (DISK, MEMORY, TIME):
        assert tuple(table) == STAGES


def test_weights_used_as_stored_stay_mapped_and_converted_ones_are_read_beside_their_file(
    model: Path, tmp_path: Path
) -> None:
    facts = gather_facts(context_of(model, tmp_path))
    file = (model / "model.safetensors").stat().st_size
    assert (facts.weight_file, facts.weight_dtype) == (file, "float32")
    as_stored, converted = loading(facts, "float32"), loading(facts, "bfloat16")
    assert (as_stored.terms, as_stored.mapped) == ({"process": facts.base}, 0)
    assert (converted.terms["target weights"], converted.mapped) == (2 * facts.target.parameters, file)
    assert [phase.mapped for phase in MEMORY["extract"](facts)] == [0, file, file]


def test_the_target_is_counted_where_it_is(model: Path, tmp_path: Path) -> None:
    """Online it is in the training process; a server that writes and vLLM's devices have it in theirs."""
    half = {"dtype": "bfloat16"}
    stored = gather_facts(context_of(model, tmp_path, extract=half))
    online = gather_facts(context_of(model, tmp_path, extract={**half, "mode": "online"}))
    weights = 2 * stored.target.parameters
    assert all("target weights" not in phase.terms for phase in MEMORY["train"](stored))
    for phase in MEMORY["train"](online)[1:]:
        assert phase.terms["target weights"] == weights
    assert [phase.terms.get("shard") for phase in MEMORY["extract"](online)] == [None] * 3
    assert (DISK["extract"](online), TIME["extract"](online, SPEED) < TIME["extract"](stored, SPEED)) == (0, True)
    assert TIME["train"](online, SPEED) > TIME["train"](stored, SPEED)

    server = {"backend": {"kind": "openai", "url": "http://localhost:8000/v1"}}
    served = gather_facts(context_of(model, tmp_path, synthesize=server))
    assert [phase.terms for phase in MEMORY["synthesize"](served)] == [{"process": served.base}]
    spread = {**half, "backend": "vllm", "vllm_python": "python", "vllm_tensor_parallel": 2}
    spread_facts = gather_facts(context_of(model, tmp_path, extract=spread))
    assert MEMORY["extract"](spread_facts)[1].terms["target weights"] == weights // 2


def test_training_reads_the_parts_that_a_head_borrows(model: Path, tmp_path: Path) -> None:
    context = context_of(model, tmp_path)
    facts = replace(gather_facts(context), weight_dtype="bfloat16")
    first = MEMORY["train"](facts)[0]
    layer = facts.target.parameters // facts.target.layers
    assert first.terms["parts of the target"] == 4 * (2 * 258 * 40 + layer)
    borrowed = {p.data_ptr(): p.numel() for p in context.load_borrowed().model.parameters() if not p.is_meta}
    assert 4 * sum(borrowed.values()) <= first.terms["parts of the target"]


def test_a_plan_for_a_card_has_its_memory_and_its_speed(model: Path, tmp_path: Path) -> None:
    card = Card("a card", 700 * MB, GPU)
    plan = make_plan(context_of(model, tmp_path), card=card)
    assert (plan.memory_limit, plan.facts.base, plan.facts.maps) == (700 * MB, CUDA_CONTEXT, False)
    assert plan.as_dict()["card"] == "a card"
    assert plan.stages[0].seconds == TIME["synthesize"](plan.facts, GPU)
    small = make_plan(context_of(model, tmp_path), card=replace(card, memory=CUDA_CONTEXT))
    assert "but 629 MB may be used" in small.refusals[0]


def test_epochs_averages_and_muon_are_counted(model: Path, tmp_path: Path) -> None:
    plain = gather_facts(context_of(model, tmp_path))
    epochs = gather_facts(context_of(model, tmp_path, train={"epochs": 3, "accumulate": 2}))
    assert (plain.steps, epochs.steps) == (30, round(3 * epochs.counts.stored_tokens / 128 / 2))
    averaged = gather_facts(context_of(model, tmp_path, train={"ema": 0.99}))
    assert DISK["train"](averaged) - DISK["train"](plain) == 2 * 4 * plain.head.parameters
    muon = gather_facts(context_of(model, tmp_path, train={"optimizer": "muon", "lm_head_rate": 0.0}))
    assert muon.moments == muon.trained == plain.head.layer + plain.head.fuse


def test_a_forward_is_bound_by_the_weights_first_and_by_the_products_later(model: Path, tmp_path: Path) -> None:
    facts = gather_facts(context_of(model, tmp_path))
    layers = facts.target.layers * 90 * 1e-6
    one = forward_seconds(facts, SPEED, tokens=1, dtype="float32") - layers
    many = forward_seconds(facts, SPEED, tokens=1000, dtype="float32") - layers
    assert one == pytest.approx(4 * facts.target.active / 2e10)
    assert many == pytest.approx(2 * facts.target.active * 1000 / (1e11 * 0.5))


def test_twice_the_steps_take_twice_the_time(model: Path, tmp_path: Path) -> None:
    times = [
        TIME["train"](gather_facts(context_of(model, tmp_path, train={"steps": steps, "validate_every": 10**6})), SPEED)
        for steps in (1000, 2000)
    ]
    assert times[1] / times[0] == pytest.approx(2, rel=0.05)


def test_a_machine_with_room_plans_without_a_word(model: Path, tmp_path: Path) -> None:
    plan = make_plan(context_of(model, tmp_path), speed=SPEED)
    assert (plan.refusals, plan.smaller) == ((), ())
    assert all(stage.seconds and stage.seconds > 0 for stage in plan.stages)
    assert plan.as_dict()["fits"] is True


def settings(smaller: str) -> list[str]:
    """Return the section.key=value parts of an advice."""
    parts = shlex.split(smaller)
    assert parts[::2] == ["--set"] * (len(parts) // 2)
    return parts[1::2]


def applied(recipe: dict[str, Any], smaller: str) -> dict[str, Any]:
    for setting in settings(smaller):
        key, value = setting.split("=")
        section, name = key.split(".")
        recipe[section][name] = int(value) if value.isdigit() else value
    return recipe


def test_too_little_disk_is_refused_with_settings_that_fit(model: Path, tmp_path: Path) -> None:
    room = make_plan(context_of(model, tmp_path)).disk_needed
    limit = room - 1000
    plan = make_plan(context_of(model, tmp_path, plan={"disk": limit}))
    assert len(plan.refusals) == 1
    assert "more on disk" in plan.refusals[0]
    assert plan.smaller
    for smaller in plan.smaller:
        recipe = applied(tiny_recipe(model, tmp_path, plan={"disk": limit}), smaller)
        context = RunContext(parse_recipe(recipe, where="tiny"), RunFolder(tmp_path / "run"), Reporter(quiet=True))
        assert make_plan(context).refusals == (), smaller


def test_features_in_fewer_bytes_are_offered_for_disk(model: Path, tmp_path: Path) -> None:
    many = {"synthesize": {"self_prompts": 20_000}}
    room = make_plan(context_of(model, tmp_path, **many)).disk_needed
    plan = make_plan(context_of(model, tmp_path, **many, plan={"disk": int(0.8 * room)}))
    assert "--set extract.state_dtype=bfloat16" in plan.smaller


BIG = {
    "head": {"draft_vocab_size": 258},
    "train": {"line_length": 8192, "lines_per_batch": 4, "ttt_steps": 6},
}


def test_too_little_memory_names_the_stage_and_shorter_lines(model: Path, tmp_path: Path) -> None:
    base = gather_facts(context_of(model, tmp_path)).base  # this process's own, which other tests have grown
    plan = make_plan(context_of(model, tmp_path, **BIG, plan={"memory": base + 700 * MB}))
    assert len(plan.refusals) == 1
    assert plan.refusals[0].startswith("stage train needs ")
    assert "activations" in plan.refusals[0]
    assert any(smaller.startswith("--set train.line_length=") for smaller in plan.smaller)


def test_several_changes_are_joined_where_one_is_not_enough(model: Path, tmp_path: Path) -> None:
    base = gather_facts(context_of(model, tmp_path)).base
    both = {**BIG, "synthesize": {"batch": 4096}, "plan": {"memory": base + 150_000_000}}
    plan = make_plan(context_of(model, tmp_path, **both))
    assert [sentence.split()[1] for sentence in plan.refusals] == ["synthesize", "train"]
    (smaller,) = plan.smaller
    assert {setting.split("=")[0] for setting in settings(smaller)} >= {"synthesize.batch", "train.line_length"}


def test_nothing_smaller_is_said_to_fit_where_nothing_does(model: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckFailed, match="No smaller setting of the recipe fits"):
        check_plan(context_of(model, tmp_path, plan={"memory": 1_000_000}), STAGES)


def test_only_the_stages_that_are_left_must_fit(model: Path, tmp_path: Path) -> None:
    base = gather_facts(context_of(model, tmp_path)).base
    context = context_of(model, tmp_path, **BIG, plan={"memory": base + 700 * MB})
    check_plan(context, STAGES[:2])
    with pytest.raises(CheckFailed, match="stage train needs"):
        check_plan(context, STAGES)


def test_a_run_refuses_before_its_first_stage(model: Path, tmp_path: Path) -> None:
    recipe = recipe_of(model, tmp_path, plan={"disk": 1000})
    with pytest.raises(CheckFailed, match=r"It would fit with|No smaller setting"):
        run_stages(recipe, tmp_path / "run", reporter=Reporter(quiet=True))
    assert not (tmp_path / "run").exists()


def test_sizes_may_be_written_as_people_do(model: Path, tmp_path: Path) -> None:
    assert recipe_of(model, tmp_path, plan={"memory": "16GB"}).plan.memory == 16 * GB


def test_speculation_pays_less_the_more_requests_there_are(model: Path, tmp_path: Path) -> None:
    facts = replace(
        gather_facts(context_of(model, tmp_path)),
        target=EIGHT_B,
        head=HeadSize(240_000_000, 50_000_000, 131_000_000, 17_000_000),
    )
    rows = break_even_table(facts, GPU)
    assert {row.method for row in rows} == {"chain of 3", "tree of 8"}
    for row in rows:
        assert row.tau <= 4
        assert row.pays_to is None or row.pays_to > 32
    costs = [round_cost(facts, GPU, batch=batch, depth=3, nodes=3, width=1) for batch in (60, 100, 300, 1000)]
    assert costs == sorted(costs)
    chain, tree = ({row.tau: row.pays_to for row in rows if row.method.startswith(name)} for name in ("chain", "tree"))
    # The ridge of this machine is at 250 tokens (1e15 / 4e12), where 4 tokens of a round go over it: 62 requests.
    assert chain[1.5] is not None
    assert chain[2.0] is not None
    assert tree[2.0] is not None
    assert 62 < chain[1.5] < chain[2.0]
    assert tree[2.0] < chain[2.0]


def test_where_weights_are_free_a_round_costs_its_tokens_and_where_they_bind_nothing(
    model: Path, tmp_path: Path
) -> None:
    facts = gather_facts(context_of(model, tmp_path))
    computing = Speed(flops_float32=1.0, flops_bfloat16=1.0, bytes_per_second=1e30, seconds_per_operation=0.0)
    streaming = Speed(flops_float32=1e30, flops_bfloat16=1e30, bytes_per_second=1.0, seconds_per_operation=0.0)
    drafting = (facts.head.layer + facts.head.lm_head) / facts.target.active
    cost = round_cost(facts, computing, batch=7, depth=3, nodes=3, width=1)
    assert cost == pytest.approx(4 + 3 * drafting, rel=1e-6)
    keys = 120 * facts.target.kv_per_token / facts.target.active
    cost = round_cost(facts, streaming, batch=1, depth=3, nodes=3, width=1)
    assert cost == pytest.approx((1 + keys + 3 * drafting) / (1 + keys), rel=1e-6)


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 KB"), (250e6, "250 MB"), (1.68e12, "1.7 TB")]
)
def test_bytes_are_written_for_people(count: float, text: str) -> None:
    assert human(count) == text
