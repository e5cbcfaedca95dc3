"""What a run says, and where: everything on stderr, lines whole, errors always."""

import io

import pytest
from rich.console import Console

from eyas.train import progress
from eyas.train.progress import Bar, Reporter

LONG = (
    "a sentence that is much longer than the eighty columns that rich assumes wherever stderr is a file [and bracketed]"
)


def test_lines_and_errors_go_to_stderr_unbroken_and_unstyled(capsys: pytest.CaptureFixture[str]) -> None:
    reporter = Reporter()
    reporter.say(LONG)
    reporter.error(LONG)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"{LONG}\nerror: {LONG}\n"


def test_a_quiet_reporter_says_nothing_but_errors(capsys: pytest.CaptureFixture[str]) -> None:
    reporter = Reporter(quiet=True)
    reporter.say("hello")
    with reporter.bar("tok") as bar:
        bar.update("working", 1, 2, 10)
    reporter.error("broken")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "error: broken\n")


def test_a_bar_ends_with_its_count_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    with Reporter().bar("tok") as bar:
        for done in range(4):
            bar.update("working", done, 3, 5, "a note")
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert "working" in line
    assert "3/3" in line
    assert "a note" in line


def test_work_of_nothing_shows_no_bar_and_phases_show_one_each(capsys: pytest.CaptureFixture[str]) -> None:
    with Reporter().bar("tok") as bar:
        bar.update("first", 0, 0, 0)
        bar.update("second", 1, 1, 0)
        bar.update("third", 2, 2, 0)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[0] for line in lines] == ["second", "third"]


def test_where_stderr_is_a_file_a_line_is_printed_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: clock[0])
    file = io.StringIO()
    bar = Bar(Console(file=file, highlight=False, width=80), "tok")
    for second in range(0, 100, 10):
        clock[0] = float(second)
        bar.update("writing", second, 200, 50, "")
    assert file.getvalue().splitlines() == [
        "  writing 30/200 7 tok/s",
        "  writing 60/200 6 tok/s",
        "  writing 90/200 6 tok/s",
    ]
