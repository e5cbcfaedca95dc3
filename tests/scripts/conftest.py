"""The command, a tiny model and a recipe for it; and accelerate, which keeps state in singletons, without any."""

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState, GradientState, PartialState

from eyas.scripts import cli
from eyas.tests.scripts.command import Eyas, Outcome
from eyas.tests.toys import save_tiny_model
from eyas.tests.train.tiny_run import write_recipe


@pytest.fixture(autouse=True)
def fresh_accelerate() -> Iterator[None]:
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def recipe(model: Path, tmp_path: Path) -> Path:
    return write_recipe(model, tmp_path)


@pytest.fixture
def eyas(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Eyas:
    """Return the `eyas` command, run in this process in an empty folder; `said` is its standard input."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: object, said: str = "") -> Outcome:
        capsys.readouterr()
        monkeypatch.setattr("sys.argv", ["eyas", *map(str, arguments)])
        monkeypatch.setattr("sys.stdin", io.StringIO(said))
        code: object = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code or 0
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return call
