"""Training killed by SIGKILL while a file is half written goes on from the last whole one, bit for bit (faults T15)."""

import multiprocessing
import signal
from pathlib import Path

import pytest
import torch

from eyas.models.checkpoint import load_head
from eyas.tests.train.killed_training import STEPS, train, train_and_die
from eyas.tests.train.nested import equal
from eyas.train.training_state import load_state


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("straight")
    train(folder)
    return folder


@pytest.mark.parametrize(("what", "resumes_at"), [("state", 5), ("best", None)])
def test_a_run_killed_while_writing_goes_on_from_the_last_whole_state(
    straight: Path, tmp_path: Path, what: str, resumes_at: int | None
) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["eyas.tests.train.killed_training"])
    # The state of step 10 is the second; the head of step 0 is the best until a later validation finds a better one.
    step = 10 if what == "state" else 1
    process = context.Process(target=train_and_die, args=(tmp_path, step, what, torch.get_num_threads()))
    process.start()
    process.join(timeout=120)
    assert process.exitcode == -signal.SIGKILL, "it ended before it could be killed"
    if what == "state":
        states = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
        assert len(states) == 2
        assert states[0].startswith(".step-0000010.pt.")
        assert states[1] == "step-0000005.pt"
    else:
        torn = list(tmp_path.glob(".best.*.tmp/model.safetensors"))
        assert len(torn) == 1
    load_head(tmp_path / "best", dtype=torch.float32)  # whole, whatever was being written
    seen: list[int] = []
    head, position = train(tmp_path, at_step=seen.append)
    assert position.step == STEPS
    if resumes_at is not None:
        assert seen[0] == resumes_at + 1
    states = [load_state(folder / "checkpoints", key="killed") for folder in (tmp_path, straight)]
    assert states[0] is not None
    assert equal(*states)
    assert equal(dict(head.state_dict()), states[0]["head"])
    heads = [load_head(folder / "best", dtype=torch.float32).state_dict() for folder in (tmp_path, straight)]
    assert equal(dict(heads[0]), dict(heads[1]))
    assert not list((tmp_path / "checkpoints").glob(".*"))
