"""What a machine has: limits that are really its own, and speeds that are measured once."""

import json
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from eyas.train import machine
from eyas.train.machine import Speed, free_disk, free_memory, measure, measured_speed

SPEED = Speed(flops_float32=1e9, flops_bfloat16=2e9, bytes_per_second=3e9, seconds_per_operation=4e-6)


def test_speeds_are_positive_and_of_a_real_machine() -> None:
    speed = measure("cpu", seconds=0.02)
    assert 1e8 < speed.flops_float32 < 1e15
    assert 1e8 < speed.bytes_per_second < 1e14
    assert 1e-8 < speed.seconds_per_operation < 1e-2
    assert (speed.flops("bfloat16"), speed.flops("float32")) == (speed.flops_bfloat16, speed.flops_float32)


def test_speeds_are_measured_once_and_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    measured: list[str] = []

    def slow(device: str) -> Speed:
        measured.append(device)
        return SPEED

    monkeypatch.setenv("EYAS_HOME", str(tmp_path))
    monkeypatch.setattr(machine, "measure", slow)
    assert [measured_speed("cpu"), measured_speed("cpu")] == [SPEED, SPEED]
    assert measured == ["cpu"]
    (path,) = (tmp_path / "machine").iterdir()
    assert json.loads(path.read_text()) == asdict(SPEED)


def test_free_disk_is_asked_of_the_nearest_folder_there_is(tmp_path: Path) -> None:
    here, there = free_disk(tmp_path), free_disk(tmp_path / "not" / "yet" / "made")
    assert here > 0
    assert there == pytest.approx(here, rel=0.05)


def test_free_memory_respects_a_cgroup(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "CGROUP", tmp_path / "none")
    own = psutil.Process().memory_info().rss
    assert free_memory("cpu") == pytest.approx(own + psutil.virtual_memory().available, rel=0.2)
    for name, text in (("max", "9000000"), ("current", "4000000"), ("stat", "anon 1\ninactive_file 1000000\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    assert free_memory("cpu") - psutil.Process().memory_info().rss == pytest.approx(6_000_000, abs=3_000_000)
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory("cpu") > own + 6_000_000
