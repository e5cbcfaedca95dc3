"""What extraction measures: the size of aux states, and what keeping them costs, against numbers known by hand."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.data.extract import extract
from eyas.data.extract_plan import ExtractionPlan
from eyas.data.measure import describe, fidelity_sums, state_sums, summarise
from eyas.models.target_head import TargetHead
from eyas.tests.data.toys import corpus_rows, feature_row, spec_of
from eyas.tests.toys import tiny_target


def measured(parts: list[dict[str, Any]]) -> dict[str, Any]:
    none = {"positions": 0, "kl": 0.0, "agreeing": 0, "error": [0.0] * 3, "size": [0.0] * 3}
    return summarise([{"states": part, "fidelity": none} for part in parts])


def test_sizes_of_layers_by_hand_and_over_shards() -> None:
    first = torch.tensor([[3.0, 4.0, 0.0, -10.0]])
    second = torch.tensor([[0.0, 0.0, 1.0, 1.0], [0.0, 0.0, 1.0, -1.0]])
    whole = measured([state_sums([first, second], layers=2)])
    assert whole["rms"] == pytest.approx([math.sqrt(12.5 / 3), math.sqrt((50 + 1 + 1) / 3)])
    assert whole["largest"] == [4.0, 10.0]
    apart = measured([state_sums([first], layers=2), state_sums([second], layers=2)])
    assert apart == whole


def test_kl_agreement_and_errors_by_hand() -> None:
    head = TargetHead(weight_VD=torch.eye(2), bias_V=None, scale=1.0, softcap=None)
    row = feature_row("a", [5, 6, 7], [0, 1, 2])  # teaches at 0 and 1
    states = torch.tensor([[0.0, 0.0], [2.0, 0.0], [float("nan"), 0.0]])
    computed = replace(row, final_hidden_TD=states)
    kept = replace(row, final_hidden_TD=states + torch.tensor([0.0, 3.0]), aux_hidden_TF=1.1 * row.aux_hidden_TF)
    sums = fidelity_sums(head, [computed], [kept], layers=2)
    p = math.exp(2) / (math.exp(2) + 1)
    q = [1 / (1 + math.exp(3)), math.exp(2) / (math.exp(2) + math.exp(3))]
    by_hand = [0.5 * math.log(0.5 / q[0]) + 0.5 * math.log(0.5 / (1 - q[0]))]
    by_hand.append(p * math.log(p / q[1]) + (1 - p) * math.log((1 - p) / (1 - q[1])))
    assert (sums["positions"], sums["agreeing"]) == (2, 0)
    assert sums["kl"] == pytest.approx(sum(by_hand), rel=1e-5)
    result = summarise([{"states": {"tokens": 1, "squares": [1, 1], "largest": [1, 1]}, "fidelity": sums}])
    assert result["kl"] == pytest.approx(sum(by_hand) / 2, rel=1e-5)
    assert result["aux_error"] == pytest.approx([0.1, 0.1], rel=1e-4)
    assert result["final_error"] == pytest.approx(math.sqrt(18 / 4), rel=1e-5)


def test_rows_without_taught_positions_are_no_division_by_zero() -> None:
    head = TargetHead(weight_VD=torch.eye(2), bias_V=None, scale=1.0, softcap=None)
    row = feature_row("a", [5, 6], [])
    sums = fidelity_sums(head, [row], [row], layers=2)
    result = summarise([{"states": state_sums([row.aux_hidden_TF], layers=2), "fidelity": sums}])
    assert (result["kl"], result["agreement"], result["final_error"]) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("state_dtype", "kl", "error"), [("float32", 0.0, 0.0), ("bfloat16", 1e-3, 0.004), ("float8_e4m3fn", 0.1, 0.04)]
)
def test_the_report_of_a_store_says_what_its_format_loses(
    tmp_path: Path, state_dtype: str, kl: float, error: float
) -> None:
    target = tiny_target()
    plan = ExtractionPlan(40, 64, 4, checked_rows=4)
    spec = spec_of(target, state_dtype=state_dtype)
    found = extract(target, corpus_rows(), plan, tmp_path, spec=spec, progress=lambda *_: None).manifest.measured
    assert found["checked_positions"] > 50
    assert found["kl"] <= kl
    assert found["agreement"] >= (1.0 if kl == 0 else 0.9)
    for value in (*found["aux_error"], found["final_error"]):
        assert 0.4 * error <= value <= error
    lines = describe(found, target.aux_layers)
    assert lines[0].startswith("  aux states, root mean square by layer: 1: ")
    assert f"teacher KL {found['kl']:.2g} nats" in lines[-1]
    assert (len(lines), "fc_norm" in lines[1]) == (2, False)


def test_very_uneven_layers_are_told_with_the_remedy() -> None:
    uneven = measured([state_sums([torch.tensor([[1.0, 1.0, 200.0, 200.0]])], layers=2)])
    assert any("head.fc_norm: true" in line for line in describe(uneven, (1, 2)))
