"""The summary's tables, by hand."""

from typing import Any

import pytest

from eyas.train.summary import acceptance_rows, markdown_table, print_summary


def entry(prompt_set: str, temperature: float, method: str, **fields: Any) -> dict[str, Any]:
    usual = {"prompts": 4, "tau": 1.0, "tokens_per_second": 10.0, "speedup": 1.0, "identical_to_plain": 4}
    return {"prompt_set": prompt_set, "temperature": temperature, "method": method, **usual, **fields}


ENTRIES = [
    entry("words", 0.0, "plain", prompts=2, identical_to_plain=2),
    entry("words", 0.0, "chain", prompts=2, tau=1.254, tokens_per_second=12.34, speedup=1.234, identical_to_plain=1),
    entry("all", 0.0, "plain", tau=1.0),
    entry("all", 0.0, "chain", tau=1.666, tokens_per_second=15.55, speedup=1.555),
    entry("all", 1.0, "chain", prompts=1, tau=1.5, tokens_per_second=9.0, speedup=0.9, identical_to_plain=1),
    entry("words", 1.0, "chain", prompts=1),
]
ROWS = [
    ("all (4)", "0", "plain", "1.00", "10.0", "1.00x", "4 of 4"),
    ("all (4)", "0", "chain", "1.67", "15.6", "1.55x", "4 of 4"),
    ("words (2)", "0", "plain", "1.00", "10.0", "1.00x", "2 of 2"),
    ("words (2)", "0", "chain", "1.25", "12.3", "1.23x", "1 of 2"),
    ("all (1)", "1", "chain", "1.50", "9.0", "0.90x", "1 of 1"),
]
RESULTS: dict[str, dict[str, Any]] = {
    "synthesize": {"rows": 14, "reply_tokens": 336, "cut_replies": 3},
    "extract": {"tokens": 924, "bytes": 2_345_678},
    "train": {
        "steps": 30,
        "head_parameters": 4_567_890,
        "best_validation_tau": 1.6543,
        "best_validation_tree_tau": 2.0987,
        "best_step": 20,
        "best_by": "chain",
    },
    "evaluate": {"prompts": 4, "results": ENTRIES},
    "export": {"folder": "runs/[tiny]/head"},
}


def summary(*finished: str) -> dict[str, Any]:
    return {
        "recipe": "tiny",
        "folder": "runs/[tiny]",
        "stages": {
            name: {"finished": name in finished, "seconds": 12.6 if name in finished else 0.0} for name in RESULTS
        },
        "results": {name: result if name in finished else {} for name, result in RESULTS.items()},
    }


def test_every_set_is_shown_at_zero_and_all_prompts_at_other_temperatures() -> None:
    assert acceptance_rows(ENTRIES) == ROWS


def test_the_markdown_table_by_hand() -> None:
    assert markdown_table(ENTRIES[2:4]) == (
        "| prompts | T | method | tau | tokens/s | speed-up | same as plain |\n"
        "|---|---|---|---|---|---|---|\n"
        "| all (4) | 0 | plain | 1.00 | 10.0 | 1.00x | 4 of 4 |\n"
        "| all (4) | 0 | chain | 1.67 | 15.6 | 1.55x | 4 of 4 |\n"
    )


def cells(line: str) -> list[str]:
    """Return the cells of a printed table row."""
    return [cell.strip() for cell in line.strip()[1:-1].split("│")]


def test_a_finished_run_is_printed_whole_on_stdout(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    print_summary(summary(*RESULTS))
    captured = capsys.readouterr()
    assert captured.err == ""
    lines = captured.out.splitlines()
    assert lines[0].strip() == "tiny: stages"
    rows = [cells(line) for line in lines if line.startswith("│")]
    assert rows[:6] == [
        ["synthesize", "13", "14 replies, 336 tokens, 3 cut by the limit"],
        ["extract", "13", "924 tokens, 2 MB"],
        [
            "train",
            "13",
            "30 steps, 4.6M parameters, held-out tau: chain 1.654, tree 2.099 (best chain, step 20)",
        ],
        ["evaluate", "13", "4 held-out prompts"],
        ["export", "13", "runs/[tiny]/head"],
        ["total", "63", ""],
    ]
    assert rows[6:] == [list(row) for row in ROWS]
    assert lines[-1] == "everything is in runs/[tiny] (evaluation/report.html to look at, head/ to serve)"


def test_the_last_line_is_not_broken_on_a_narrow_screen(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    print_summary(summary(*RESULTS))
    assert capsys.readouterr().out.endswith(
        "\neverything is in runs/[tiny] (evaluation/report.html to look at, head/ to serve)\n"
    )


def test_an_unfinished_run_says_so_and_shows_no_acceptance(capsys: pytest.CaptureFixture[str]) -> None:
    print_summary(summary("synthesize"))
    printed = capsys.readouterr().out
    rows = [cells(line) for line in printed.splitlines() if line.startswith("│")]
    assert rows[0] == ["synthesize", "13", "14 replies, 336 tokens, 3 cut by the limit"]
    assert rows[1:5] == [[name, "0", "not finished"] for name in list(RESULTS)[1:]]
    assert "speed-up" not in printed
    assert printed.endswith("\neverything is in runs/[tiny]\n")
