"""Extraction by one and by several processes, killed at any moment: always the same bytes, and never a hang."""

import multiprocessing
import random
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from eyas.data.extract import _wait_for
from eyas.data.extract_plan import checked_places, plan_batches, plan_shards, shards_of
from eyas.data.feature_store import FeatureStore
from eyas.models.errors import UserError
from eyas.tests.data.extract_job import ROWS, SHARDS, job_examples, run_job


def start(folder: Path, *, ranks: int, seconds: float = 0.0) -> list[BaseProcess]:
    """Start the job's processes, forked from one that has the libraries loaded."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["eyas.tests.data.extract_job"])
    processes: list[BaseProcess] = []
    for rank in range(ranks):
        options = {"rank": rank, "ranks": ranks, "seconds_per_batch": seconds}
        processes.append(context.Process(target=run_job, args=(folder,), kwargs=options))
    for process in processes:
        process.start()
    return processes


def finish(processes: list[BaseProcess]) -> list[int | None]:
    for process in processes:
        process.join(timeout=120)
    return [process.exitcode for process in processes]


def kill_all(processes: list[BaseProcess]) -> None:
    for process in processes:
        process.kill()
        process.join()


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a run by one process that nobody touched."""
    folder = tmp_path_factory.mktemp("undisturbed") / "store"
    assert finish(start(folder, ranks=1)) == [0]
    files = contents(folder)
    assert len([name for name in files if name.startswith("shard-")]) == SHARDS
    assert files.keys() >= {"manifest.json", "index.safetensors"}
    assert [row.id for row in FeatureStore(folder).all_rows()] == [name for name, _ in job_examples()]
    return files


@pytest.mark.parametrize("ranks", [2, 3, 11])
def test_any_number_of_processes_writes_the_same_bytes(
    undisturbed: dict[str, bytes], tmp_path: Path, ranks: int
) -> None:
    assert finish(start(tmp_path / "store", ranks=ranks)) == [0] * ranks
    assert contents(tmp_path / "store") == undisturbed


@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_at_three_random_moments_the_store_is_that_of_an_undisturbed_run(
    undisturbed: dict[str, bytes], tmp_path: Path, ranks: int
) -> None:
    folder, dice = tmp_path / "store", random.Random(ranks)
    for kill in range(3):
        processes = start(folder, ranks=ranks, seconds=0.15)
        shards = 1 + 2 * kill  # not before it got further than the time before
        while len(list(folder.glob("shard-*"))) < shards:
            assert all(process.exitcode in (None, 0) for process in processes)
            time.sleep(0.002)
        time.sleep(dice.uniform(0, 0.25))
        kill_all(processes)
        assert -signal.SIGKILL in [process.exitcode for process in processes]
        assert not (folder / "manifest.json").exists()
        whole = {name: data for name, data in contents(folder).items() if not name.startswith(".")}
        assert whole.items() <= undisturbed.items()
    assert finish(start(folder, ranks=ranks)) == [0] * ranks
    assert contents(folder) == undisturbed


def test_work_begun_by_two_processes_is_finished_by_three_and_by_one(
    undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    folder = tmp_path / "store"
    for ranks in (2, 3):
        already = len(list(folder.glob("shard-*")))
        processes = start(folder, ranks=ranks, seconds=0.15)
        while len(list(folder.glob("shard-*"))) < already + 2:
            time.sleep(0.002)
        kill_all(processes)
    assert not (folder / "manifest.json").exists()
    assert finish(start(folder, ranks=1)) == [0]
    assert contents(folder) == undisturbed


def test_a_process_whose_fellow_has_died_says_what_is_missing(tmp_path: Path) -> None:
    started, there = time.monotonic(), tmp_path / "shard-00000.safetensors"
    there.touch()
    with pytest.raises(UserError, match=r"finished nothing for 0 s and 1 files are missing, shard-00001"):
        _wait_for([there, tmp_path / "shard-00001.safetensors"], stall_seconds=0.3)
    assert time.monotonic() - started < 5


def test_every_shard_has_one_owner_whatever_their_number() -> None:
    for ranks in (1, 2, 3, 7, 40):
        owned = [shards_of(23, rank=rank, ranks=ranks) for rank in range(ranks)]
        assert sorted(number for mine in owned for number in mine) == list(range(23))
        assert max(map(len, owned)) - min(map(len, owned)) <= 1


def test_rows_are_sorted_over_the_whole_corpus_not_within_a_shard() -> None:
    lengths = [len(example) for _, example in job_examples()]
    shards = plan_shards(lengths, rows_per_shard=3)
    order = [row for shard in shards for row in shard]
    assert sorted(order) == list(range(ROWS))
    assert [lengths[row] for row in order] == sorted(lengths, reverse=True)
    batches = [batch for shard in shards for batch in plan_batches(shard, lengths, tokens_per_batch=100)]
    padded = sum(len(batch) * lengths[batch[0]] for batch in batches)
    assert all(len(batch) * lengths[batch[0]] <= 100 or len(batch) == 1 for batch in batches)
    assert padded < 1.05 * sum(lengths)  # in corpus order it is 1.3 times the tokens and more
    unsorted = [list(range(start, min(start + 3, ROWS))) for start in range(0, ROWS, 3)]
    assert sum(len(group) * max(lengths[row] for row in group) for group in unsorted) > 1.3 * sum(lengths)


def test_the_checked_rows_hold_the_last_one_and_are_spread() -> None:
    assert checked_places(128, 1) == [127]
    assert checked_places(128, 2) == [63, 127]
    assert checked_places(1, 4) == [0]
    assert checked_places(3, 99) == [0, 1, 2]
