"""Where triton is missing, and where kernels may run."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from eyas.kernels import triton_support


def test_imports_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    spec = importlib.util.spec_from_file_location("support_without_triton", Path(triton_support.__file__))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    assert module.tl is None
    assert module.jit(len) is len
    assert not module.available(torch.device("cpu"))
    assert not module.available(torch.device("cuda"))


def test_the_cpu_never_takes_a_kernel() -> None:
    assert not triton_support.available(torch.device("cpu"))


@pytest.mark.parametrize(("capability", "expected"), [((7, 5), False), ((8, 0), True), ((9, 0), True), ((12, 0), True)])
def test_triton_needs_ampere(capability: tuple[int, int], expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert triton_support.available(torch.device("cuda", 0)) is expected


def test_next_power_of_two() -> None:
    assert [triton_support.next_power_of_two(value) for value in (0, 1, 2, 3, 60, 64, 65)] == [1, 1, 2, 4, 64, 64, 128]


def test_a_gpu_without_kernels_gives_one_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    triton_support._warn_once.cache_clear()
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    with pytest.warns(UserWarning, match=r"plain PyTorch references.*compute capability 7\.0") as caught:
        assert [triton_support.available(torch.device("cuda", 0)) for _ in range(3)] == [False] * 3
    assert len(caught) == 1
    monkeypatch.setattr(triton_support, "triton", None)
    with pytest.warns(UserWarning, match=r"pip install triton"):
        assert not triton_support.available(torch.device("cuda", 0))


def test_interpreted_ends_with_its_block() -> None:
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("the interpreter is off on a machine with a GPU")
    cpu = torch.device("cpu")
    with triton_support.interpreted():
        assert triton_support.available(cpu)
    assert not triton_support.available(cpu)
