"""The latency table is measured once per machine, target and setting, and read after that."""

from pathlib import Path

import pytest
import torch

from eyas.inference.latency import LatencyTable, RowsLatency
from eyas.models.errors import UserError
from eyas.tests.toys import tiny_head, tiny_target
from eyas.train import latency_cache
from eyas.train.latency_cache import measured_latency
from eyas.train.progress import Reporter

TARGET = tiny_target(layers=3, aux_layers=(0, 1, 3))
HEAD = tiny_head(TARGET)


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the list of tables made, each told by its only time; nothing is timed for real."""
    made: list[float] = []

    def measure(*_arguments: object, **_options: object) -> LatencyTable:
        made.append(float(len(made) + 1))
        return LatencyTable(9, (RowsLatency(1, (1, 9), (made[-1], made[-1]), 0.1, 0.1, 0.1),))

    monkeypatch.setenv("EYAS_HOME", str(tmp_path))
    monkeypatch.setattr(latency_cache, "measure_latency", measure)
    return made


def table(**changes: object) -> float:
    settings: dict[str, object] = {
        "target_fingerprint": "f", "rows": 1, "max_nodes": 9, "top_k": 4, "reporter": Reporter(quiet=True), **changes,
    }  # fmt: skip
    return measured_latency(TARGET, HEAD, **settings).verify_seconds(1)[0]  # type: ignore[arg-type]


def test_it_is_measured_once_and_anew_for_anything_it_depends_on(
    measured: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [table(), table()] == [1.0, 1.0]
    assert table(target_fingerprint="other") == 2.0
    assert [table(rows=2), table(max_nodes=5), table(top_k=3)] == [3.0, 4.0, 5.0]
    assert [table(kv_dtype=torch.float8_e4m3fn), table(kv_dtype=TARGET.dtype)] == [6.0, 1.0]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert table() == 7.0
    monkeypatch.setattr(latency_cache, "device_name", lambda _: "another machine")
    assert table() == 8.0
    monkeypatch.undo()
    assert len(measured) == 8


def test_everything_is_found_again(measured: list[float]) -> None:
    for _ in range(2):
        assert [table(), table(rows=2)] == [1.0, 2.0]
    assert len(measured) == 2


def test_a_damaged_file_is_named(measured: list[float], tmp_path: Path) -> None:
    table()
    (path,) = (tmp_path / "latency").iterdir()
    path.write_text("{")
    with pytest.raises(UserError, match=rf"{path}: a latency table is damaged .*; delete it"):
        table()
