"""Every kernel compiles for sm_80, sm_90 and sm_100 without spills and within the card's shared memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from eyas.kernels import aot, tree_attention, verify_tree_greedy

pytest.importorskip("triton")

# Opt-in maximum per block (CUDA C++ programming guide, "Compute Capabilities").
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}


def test_kernels_compile_without_spills(tmp_path: Path) -> None:
    # A process of its own: this one imported triton with the interpreter on. An own cache: nothing compiled earlier.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-m", "eyas.kernels.aot"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    reports = {(report["build"], report["capability"]): report for report in json.loads(done.stdout)}
    builds = [build.name for build in (*verify_tree_greedy.aot_builds(), *tree_attention.aot_builds())]
    assert set(reports) == {(build, capability) for build in builds for capability in SHARED_LIMIT}
    for (build, capability), report in reports.items():
        where = f"{build} on sm_{capability}: {report}"
        assert 16 <= report["registers"] <= 255, where
        assert report["spilled_bytes"] == 0, where
        assert report["shared_bytes"] <= SHARED_LIMIT[capability], where
        assert ("attention" in build) == (report["shared_bytes"] > 0), where


def test_the_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(aot.triton_support.triton.knobs.runtime, "interpret", True)
    assert aot.main() == 2
    assert "unset it for this command" in capsys.readouterr().err


def test_a_missing_triton_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(aot.triton_support, "triton", None)
    assert aot.main() == 2
    assert "pip install triton" in capsys.readouterr().err
