"""What the loop does with a validation: which head it keeps, what it decodes, what it reports."""

import json
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator

from eyas.inference.acceptance import AcceptanceStats
from eyas.inference.draft import DynamicTree
from eyas.models.eagle3 import Eagle3Head
from eyas.tests.toys import tiny_head, tiny_target
from eyas.tests.train.rows import loop_plan, objective, random_row
from eyas.train import loop
from eyas.train.loop import train_head
from eyas.train.validation import HeldOutAcceptance


def test_the_trees_tau_chooses_where_the_plan_says_so_and_every_nth_validation_decodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_target()
    rows = [random_row(target, f"row-{i}", prompt=3, reply=5 + i, seed=i) for i in range(3)]
    counts = iter([(5, 5), (9, 6), (7, 9), (8, 8), (5, 5)])

    def scripted(*args: Any, **settings: Any) -> HeldOutAcceptance:
        assert settings["tree"] == DynamicTree(3, 2, 4)
        stats = [AcceptanceStats(3, 10, 30, [count, 0, 0]) for count in next(counts)]
        return HeldOutAcceptance(stats[0], AcceptanceStats(3), tree=stats[1])

    monkeypatch.setattr(loop, "held_out_acceptance", scripted)
    decoded: list[Eagle3Head] = []

    def decode(head: Any) -> dict[str, float]:
        decoded.append(head)
        return {"decoded_tau": 1.25}

    reports: list[dict[str, Any]] = []
    head = tiny_head(target).train()
    plan = loop_plan(steps=8, validate_every=2, best_by="tree", decode_every=2)
    position = train_head(
        objective(target, head), rows, rows[:1], plan, tmp_path, accelerator=Accelerator(cpu=True), key="chosen",
        report=reports.append, decode=decode, work=lambda batch: 1e9,
    )  # fmt: skip
    assert (position.best_step, position.best_tau) == (4, pytest.approx(1.9))
    saved = json.loads((tmp_path / "best" / "eyas.json").read_text())["validation"]
    assert (saved["replay"]["tau"], saved["tree"]["tau"]) == (pytest.approx(1.7), pytest.approx(1.9))
    assert decoded == [head] * 3
    validations = [fields for fields in reports if fields["event"] == "validation"]
    assert [fields.get("decoded_tau") for fields in validations] == [1.25, None, 1.25, None, 1.25]
    assert [fields["tree_tau"] for fields in validations] == pytest.approx([1.5, 1.6, 1.9, 1.8, 1.5])
    assert validations[2]["tree_survival"] == [0.9, 0.0, 0.0]
    assert validations[2]["alpha"] == [0.7, 0.0, 0.0]
    steps = [fields for fields in reports if fields["event"] == "step"]
    assert steps[-1]["seconds_left"] == 0.0
    assert all(fields["flops_per_second"] > 0 for fields in steps)
    assert steps[3]["seconds_left"] > 0
