"""`eyas compare`: every cell comes from its own run, missing ones are empty, and unlike measurements are named."""

import json
from pathlib import Path
from typing import Any

import pytest

from eyas.models.errors import UserError
from eyas.tests.scripts.command import Eyas, refused
from eyas.train.comparison import compare

TRAINED = {
    "steps": 1200, "best_step": 800, "head_parameters": 9_812_345, "supervised_tokens": 70123,
    "coverage": {"train": 1.0, "validation": 0.9312}, "best_validation_tau": 1.5512, "best_validation_tree_tau": None,
}  # fmt: skip


def entry(method: str, prompt_set: str, tau: float, temperature: float = 0.0) -> dict[str, Any]:
    return {"method": method, "temperature": temperature, "prompt_set": prompt_set, "tau": tau, "speedup": tau / 2}


def save(folder: Path, *, evaluated: list[dict[str, Any]] | None = None, tokens: int = 48, card: bool = True) -> Path:
    (folder / "evaluation").mkdir(parents=True)
    (folder / "head").mkdir()
    evaluate = {} if evaluated is None else {"results": evaluated}
    results = {"synthesize": {"reply_tokens": 75609}, "train": TRAINED, "evaluate": evaluate}
    (folder / "summary.json").write_text(json.dumps({"results": results}))
    report = {"target_fingerprint": "f", "prompt_hash": "h", "settings": {"max_new_tokens": tokens, "dtype": "float32"}}
    (folder / "evaluation" / "report.json").write_text(json.dumps(report))
    if card:
        provenance = {"commit": "0123456789abcdef", "seed": 7}
        (folder / "head" / "eyas.json").write_text(json.dumps({"provenance": provenance}))
    return folder


EVALUATED = [
    entry("plain", "code", 1.0), entry("chain", "code", 1.514), entry("tree", "code", 2.036),
    entry("chain", "all", 1.4), entry("tree", "all", 1.9), entry("tree", "all", 1.6, 1.0),
]  # fmt: skip


def test_every_cell_comes_from_its_run(tmp_path: Path) -> None:
    one = save(tmp_path / "one", evaluated=EVALUATED)
    other = save(tmp_path / "other", evaluated=[entry("chain", "mathematics", 1.25)], tokens=32, card=False)
    untold = save(tmp_path / "untold")
    found = compare([one, other, untold])
    assert found.runs == ["one", "other", "untold"]
    assert dict(found.rows) == {
        "reply tokens": ["75,609"] * 3,
        "supervised tokens": ["70,123"] * 3,
        "steps (best)": ["1200 (800)"] * 3,
        "head": ["9.8M"] * 3,
        "coverage, held out": ["93.1%"] * 3,
        "validation: chain, tree": ["1.551, -"] * 3,
        "chain tau, code": ["1.51", "", ""],
        "chain tau, all": ["1.40", "", ""],
        "chain tau, mathematics": ["", "1.25", ""],
        "chain against plain": ["0.70x", "", ""],
        "tree tau, code": ["2.04", "", ""],
        "tree tau, all": ["1.90", "", ""],
        "tree tau, all, T=1": ["1.60", "", ""],
        "tree against plain": ["0.95x", "", ""],
        "commit": ["0123456", "", "0123456"],
        "seed": ["7", "", "7"],
    }
    assert found.remarks == ["evaluate.max_new_tokens differs: 32, 48"]
    assert "| chain tau, code | 1.51 |  |  |" in found.markdown()
    assert found.markdown().endswith("\n* evaluate.max_new_tokens differs: 32, 48\n")


def test_the_verb_prints_tables_and_refuses_other_folders(eyas: Eyas, tmp_path: Path) -> None:
    folder = save(tmp_path / "one", evaluated=EVALUATED)
    shown = eyas("compare", folder)
    assert shown.code == 0
    assert "chain tau, code" in shown.out
    assert json.loads(eyas("compare", folder, folder, "--json").out)["runs"] == ["one", "one"]
    assert eyas("compare", folder, "--markdown").out == compare([folder]).markdown()
    assert "holds no run whose training has finished" in refused(eyas("compare", tmp_path))


def test_a_run_that_was_not_trained_is_refused(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text(json.dumps({"results": {"synthesize": {"rows": 3}, "train": {}}}))
    with pytest.raises(UserError, match="holds no run whose training has finished; give run folders"):
        compare([tmp_path])
