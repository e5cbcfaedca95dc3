"""The picture of a run: drawn from metrics, smoothing by hand."""

import json
from pathlib import Path

import pytest
from matplotlib.image import imread

from eyas.train.curves import draw_curves, smoothed


def test_smoothing_has_no_bias_at_the_start() -> None:
    assert smoothed([3.0] * 40) == pytest.approx([3.0] * 40)
    weight = 1 / 2
    values = smoothed([4.0, 0.0, 0.0, 0.0], share=0.5)
    assert values[0] == pytest.approx(4.0)
    assert values[1] == pytest.approx((4.0 * weight * (1 - weight)) / (weight * (1 - weight) + weight))


@pytest.mark.parametrize("steps", [0, 1, 30])
def test_the_picture_is_drawn_at_any_length_of_run(tmp_path: Path, steps: int) -> None:
    lines = [{"event": "validation", "step": 0, "tau": 1.0, "slot_tau": 1.0}]
    lines += [{"event": "step", "step": n + 1, "loss": 9.0 / (n + 1)} for n in range(steps)]
    more = {"tree_tau": 1.9, "sampled_tau": 1.3, "sampled_tree_tau": 1.6, "decoded_tau": 1.45, "alpha": [0.4, 0.3, 0.2]}
    lines += [{"event": "validation", "step": steps, "tau": 1.5, "slot_tau": 1.7, **more}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    draw_curves(tmp_path / "metrics.jsonl", tmp_path / "curves.png")
    picture = imread(tmp_path / "curves.png")
    assert picture.shape[:2] == (504, 1680)
    assert float(picture[..., :3].std()) > 0.05
    assert [path.name for path in tmp_path.glob(".*")] == []
