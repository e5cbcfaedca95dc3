"""Kernels compile for sm_80, sm_90 and sm_100 without spills and within the card's shared memory.

The suite compiles one build of every kernel, in turn for one of the architectures; `eyas bench kernels --compile-only`
compiles every build for all of them.
"""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from eyas.kernels import aot
from eyas.kernels.aot import BUILDS, CAPABILITIES, SHARED_LIMIT, CompileReport, capabilities

pytest.importorskip("triton")

# Builds that everything else depends on being right, on every architecture that has their types.
ON_ALL = (
    "tree_attention bf16 head_dim=128 rows<=64 window=0",
    "tree_attention bf16 over fp8 head_dim=128 rows<=64 window=0",
)


def chosen() -> list[str]:
    """NAME@CAPABILITY of the last (the largest) build of every kernel, the architectures in turn, and `ON_ALL`."""
    builds = aot.all_builds()
    last = {id(build.kernel): build for build in builds.values()}
    turns = [(build.name, capabilities(build)) for build in last.values()]
    in_turn = [f"{name}@{has[i % len(has)]}" for i, (name, has) in enumerate(turns)]
    on_all = [f"{name}@{capability}" for name in ON_ALL for capability in capabilities(builds[name])]
    return sorted({*in_turn, *on_all})


def test_kernels_compile_without_spills(tmp_path: Path) -> None:
    # A process of its own: this one imported triton with the interpreter on. An own cache: nothing compiled earlier.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-m", "eyas.kernels.aot", *chosen()]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    reports = [CompileReport(**report) for report in json.loads(done.stdout)]
    assert sorted(f"{report.build}@{report.capability}" for report in reports) == chosen()
    assert {report.capability for report in reports} == set(CAPABILITIES)
    for report in reports:
        assert 16 <= report.registers <= 255, report
        assert report.fault is None, report
    attention = [report for report in reports if report.build in ON_ALL]
    assert [report.tensor_core_instructions > 0 for report in attention] == [True] * 5


def test_every_kernel_has_a_build() -> None:
    """A function decorated with @jit whose name ends in _kernel is launched, so it is compiled here too."""
    folder = Path(aot.__file__).parent
    launched = {
        node.name
        for path in folder.glob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")
    }
    assert launched == {build.kernel.__name__ for builds in BUILDS.values() for build in builds()}
    assert len(launched) > 15


def test_every_fp8_build_needs_a_card_that_has_it() -> None:
    fp8 = [build for build in aot.all_builds().values() if "*fp8e4nv" in build.types.values()]
    assert len(fp8) == 50
    for build in fp8:
        assert (build.types["k_ptr"], build.types["v_ptr"]) == ("*fp8e4nv", "*fp8e4nv")
        assert capabilities(build) == (90, 100)
    builds = [build for build in aot.all_builds().values() if build not in fp8]
    assert {capabilities(build) for build in builds} == {CAPABILITIES}
    names = {build.name for build in fp8}
    assert names >= {b.name.replace(" head", " over fp8 head") for b in builds if b.name.startswith("tree_attention")}


def test_faults_are_named() -> None:
    good = CompileReport("a", 90, 32, 0, SHARED_LIMIT[90], 0)
    assert good.fault is None
    assert CompileReport("a", 90, 32, 8, 0, 0).fault == "8 bytes per thread spilled"
    over = CompileReport("a", 80, 32, 0, SHARED_LIMIT[90], 0)
    assert over.fault == "232448 bytes of shared memory, 166912 exist"


def test_the_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(aot.triton_support.triton.knobs.runtime, "interpret", True)
    assert aot.main([]) == 2
    assert "unset it for this command" in capsys.readouterr().err


def test_a_missing_triton_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(aot.triton_support, "triton", None)
    assert aot.main([]) == 2
    assert "pip install triton" in capsys.readouterr().err
