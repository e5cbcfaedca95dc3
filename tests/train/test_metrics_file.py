"""metrics.jsonl across a kill and a resume."""

import json
from pathlib import Path

from eyas.train.metrics_file import MetricsFile, read_metrics


def test_metrics_of_steps_that_will_be_repeated_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "metrics.jsonl"
    metrics = MetricsFile(path, resume_step=-1)
    for step in range(5):
        metrics.write({"event": "step", "step": step})
    metrics.file.write('{"event": "step", "st')
    metrics.file.close()
    resumed = MetricsFile(path, resume_step=2)
    resumed.write({"event": "step", "step": 3, "again": True})
    resumed.file.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["step"], "again" in line) for line in lines] == [(0, False), (1, False), (2, False), (3, True)]


def test_a_line_cut_by_a_kill_is_left_out_when_metrics_are_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"event": "step", "step": 1}\n{"event": "st', encoding="utf-8")
    assert read_metrics(path) == [{"event": "step", "step": 1}]
    assert read_metrics(tmp_path / "none.jsonl") == []
