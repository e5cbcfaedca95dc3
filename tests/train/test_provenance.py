"""Where a head came from, in words that JSON holds."""

import json
import sys

import pytest

from eyas.train.provenance import provenance


def test_command_commit_machine_and_seed_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["eyas", "run", "a recipe.yaml"])
    found = json.loads(json.dumps(provenance(seed=5)))
    assert found["command"] == "eyas run 'a recipe.yaml'"
    assert found["seed"] == 5
    assert found["commit"] is None or len(found["commit"]) == 40
    assert found["machine"]["cores"] >= 1
    assert found["machine"]["cpu"]
    assert {"eyas", "torch", "python"} <= found["versions"].keys()
