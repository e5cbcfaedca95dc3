"""The chain an engine should draft: worked out by hand where one cost alone counts, shorter in larger batches."""

from dataclasses import replace

import pytest

from eyas.models.size import TargetSize
from eyas.tests.toys import save_tiny_model
from eyas.tests.train.tiny_run import tiny_recipe
from eyas.train.break_even import BATCHES
from eyas.train.context import RunContext
from eyas.train.engine_depth import best_depths, measured_survival
from eyas.train.machine import Speed
from eyas.train.plan_facts import Facts, HeadSize, gather_facts
from eyas.train.progress import Reporter
from eyas.train.recipe_io import parse_recipe
from eyas.train.run_folder import RunFolder

GPU = Speed(flops_float32=1e14, flops_bfloat16=1e15, bytes_per_second=4e12, seconds_per_operation=1e-6)
STREAMING = Speed(flops_float32=1e30, flops_bfloat16=1e30, bytes_per_second=1.0, seconds_per_operation=0.0)
COMPUTING = Speed(flops_float32=1.0, flops_bfloat16=1.0, bytes_per_second=1e30, seconds_per_operation=0.0)


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Facts:
    """Return a target of a billion parameters without keys to speak of, and a head of a tenth of it."""
    folder = tmp_path_factory.mktemp("run")
    recipe = parse_recipe(tiny_recipe(save_tiny_model(folder / "model"), folder), where="tiny")
    found = gather_facts(RunContext(recipe, RunFolder(folder / "run"), Reporter(quiet=True)))
    target = TargetSize(
        parameters=10**9, active=10**9, vocab_size=1000, hidden_size=64, mlp_width=64, layers=1, heads=1, kv_heads=1,
        head_dim=1,
    )  # fmt: skip
    return replace(found, target=target, head=HeadSize(layer=60_000_000, fuse=0, lm_head=40_000_000, keys=0))


def test_where_only_weights_are_streamed_a_level_costs_its_share_of_them(facts: Facts) -> None:
    # 1.8 / 1.1 = 1.64, 2.3 / 1.2 = 1.92, 2.35 / 1.3 = 1.81, whatever the batch
    for best in best_depths(facts, STREAMING, [0.8, 0.5, 0.05]):
        assert (best.depth, best.tau) == (2, pytest.approx(2.3))
        assert best.speedup == pytest.approx(2.3 / 1.2, rel=1e-4)


def test_where_only_products_count_nothing_pays(facts: Facts) -> None:
    # 1.9 / 2.1 and 2.8 / 3.2 are less than 1
    assert [best.depth for best in best_depths(facts, COMPUTING, [0.9, 0.9])] == [0] * len(BATCHES)


def test_larger_batches_draft_less(facts: Facts) -> None:
    found = best_depths(facts, replace(GPU, flops_bfloat16=1e14), [0.8, 0.65, 0.5, 0.4, 0.3, 0.2])
    assert [best.batch for best in found] == list(BATCHES)
    depths = [best.depth for best in found]
    assert depths == sorted(depths, reverse=True)
    assert depths[0] > depths[-1]


def test_survival_is_the_chains_at_the_lowest_temperature() -> None:
    def entry(method: str, name: str, temperature: float, survival: list[float]) -> dict[str, object]:
        return {"method": method, "prompt_set": name, "temperature": temperature, "survival": survival}

    results = [
        entry("tree", "all", 0.0, [0.9]), entry("chain", "all", 1.0, [0.5]), entry("chain", "code", 0.0, [0.8]),
        entry("chain", "all", 0.0, [0.7, 0.4]),
    ]  # fmt: skip
    assert measured_survival({"results": results}) == [0.7, 0.4]
    assert measured_survival({}) == []
