"""Features from a real vLLM equal those of the library's own forward: right rows, right order, right lengths.

Rows share prefixes, two are identical, lengths run from 1 to 40, batches hold one row or many, and are asked for twice.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml

from eyas.data.feature_store import FeatureStore
from eyas.models.errors import UserError
from eyas.models.target import Target
from eyas.models.vllm_target import VllmTarget
from eyas.tests.toys import save_tiny_model
from eyas.tests.train.tiny_run import tiny_recipe
from eyas.tests.vllm_job import vllm_python
from eyas.train.pipeline import run_stages
from eyas.train.progress import Reporter
from eyas.train.recipe_io import load_recipe

pytestmark = pytest.mark.vllm
SHAPE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
AUX = (2, 5, 8)  # the last is the state before the final norm, which vLLM hands out anyway


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny_model(tmp_path_factory.mktemp("model"), **SHAPE, initializer_range=0.08)
    return folder


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[VllmTarget]:
    target = VllmTarget(str(model), dtype=torch.float32, aux_layers=AUX, python=str(vllm_python()), max_length=64)
    yield target
    target.close()
    assert not target.folder.exists()


def row(length: int, *, seed: int) -> torch.Tensor:
    """Return random ids; all rows begin with the same 16."""
    random = torch.Generator().manual_seed(seed)
    shared = torch.arange(40, 56)
    return torch.cat([shared, torch.randint(3, 250, (64,), generator=random)])[:length]


@pytest.mark.parametrize("lengths", [[40], [17, 17, 17, 17], [33] * 9, [1], [64, 64]])
def test_states_are_those_of_the_library_whatever_the_batch(
    model: Path, served: VllmTarget, lengths: list[int]
) -> None:
    ours = Target.load(str(model), dtype=torch.float32, aux_layers=AUX)
    ids_BT = torch.stack([row(length, seed=min(seed, 2)) for seed, length in enumerate(lengths)])  # 2 and on: identical
    for _again in range(2):
        found = served.forward(ids_BT)
        for b in range(len(ids_BT)):
            expected = ours.forward(ids_BT[b : b + 1])
            for name in ("aux_hidden_BTF", "final_hidden_BTD"):
                torch.testing.assert_close(
                    getattr(found, name)[b], getattr(expected, name)[0], rtol=1e-3, atol=1e-3, msg=f"{name} of row {b}"
                )


def test_the_engines_own_log_probabilities_are_rebuilt(served: VllmTarget) -> None:
    assert served.self_check(row(40, seed=1)) < 1e-3


def test_a_tail_that_is_not_the_engines_is_found(served: VllmTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.tail, "final_state", lambda state: state)  # the final norm forgotten
    with pytest.raises(UserError, match="final norm or head"):
        served.self_check(row(40, seed=1))


def test_a_row_the_engine_refuses_is_an_error_of_its_own(served: VllmTarget) -> None:
    with pytest.raises(UserError, match=r"vLLM .* failed"):
        served.forward(torch.full((1, 500), 5))
    assert served.self_check(row(20, seed=1)) < 1e-3  # and it goes on


def test_an_engine_that_does_not_start_says_why(model: Path) -> None:
    with pytest.raises(UserError, match="vLLM ended with exit code"):
        VllmTarget(
            str(model), dtype=torch.float32, aux_layers=AUX, python=sys.executable, max_length=64
        )  # no vLLM there


def test_the_extract_stage_writes_the_same_store_from_either(model: Path, tmp_path: Path) -> None:
    stores = []
    for backend in ("hf", "vllm"):
        extract = {"backend": backend, "vllm_python": str(vllm_python()), "rows_per_shard": 5}
        fields = tiny_recipe(model, tmp_path, extract=extract)
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(fields))
        folder = tmp_path / backend
        run_stages(load_recipe(str(tmp_path / "recipe.yaml")), folder, last="extract", reporter=Reporter(quiet=True))
        stores.append(FeatureStore(folder / "features").all_rows())
    for ours, theirs in zip(*stores, strict=True):
        assert (ours.id, ours.input_ids_T.tolist()) == (theirs.id, theirs.input_ids_T.tolist())
        torch.testing.assert_close(ours.aux_hidden_TF, theirs.aux_hidden_TF, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(ours.final_hidden_TD, theirs.final_hidden_TD, rtol=1e-3, atol=1e-3, equal_nan=True)
