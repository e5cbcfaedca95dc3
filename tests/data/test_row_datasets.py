"""Datasets: local folders are loaded for real; of the Hub only what we ask it for is tested, by a stub in its place."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from datasets import Dataset, DatasetDict
from datasets.exceptions import DatasetNotFoundError

from eyas.data.prompt_source import PromptSource
from eyas.data.row_datasets import DatasetName, read_dataset
from eyas.data.sources import ReadPlan, read_sources
from eyas.models.errors import UserError

ROWS = [
    {"messages": [{"role": "user", "content": f"question {n}", "name": None if n % 2 else "ann"}], "n": n}
    for n in range(5)
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def numbers(name: DatasetName) -> list[int]:
    rows = list(read_dataset(name))
    assert [row.number for row in rows] == list(range(1, len(rows) + 1))
    return [row.value["n"] for row in rows]


def saved(folder: Path) -> str:
    rows = Dataset.from_list(ROWS)
    DatasetDict({"train": rows.select(range(3)), "held": rows.select(range(3, 5))}).save_to_disk(folder)
    return str(folder)


def files(folder: Path) -> str:
    folder.mkdir()
    for split, rows in (("train", ROWS[:3]), ("test", ROWS[3:])):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


@pytest.mark.parametrize("streaming", [False, True])
def test_splits_of_a_saved_dataset(tmp_path: Path, streaming: bool) -> None:
    name = saved(tmp_path / "saved")
    assert numbers(DatasetName(name, streaming=streaming)) == [0, 1, 2]
    assert numbers(DatasetName(name, split="held", streaming=streaming)) == [3, 4]
    with pytest.raises(UserError, match=r"has no split 'helt', only held, train\. Did you mean 'held'\?"):
        numbers(DatasetName(name, split="helt"))
    with pytest.raises(UserError, match="was saved to disk: config and revision say nothing about it"):
        numbers(DatasetName(name, revision="main"))


def test_a_saved_dataset_of_one_split(tmp_path: Path) -> None:
    Dataset.from_list(ROWS).save_to_disk(tmp_path / "one")
    assert numbers(DatasetName(str(tmp_path / "one"))) == [0, 1, 2, 3, 4]
    assert numbers(DatasetName(str(tmp_path / "one"), split="train")) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("streaming", [False, True])
def test_splits_of_a_folder_of_files(tmp_path: Path, streaming: bool) -> None:
    name = files(tmp_path / "files")
    assert numbers(DatasetName(name, streaming=streaming)) == [0, 1, 2]
    assert numbers(DatasetName(name, split="test", streaming=streaming)) == [3, 4]


@pytest.mark.parametrize("streaming", [False, True])
def test_what_does_not_load_is_one_sentence(tmp_path: Path, streaming: bool) -> None:
    name = files(tmp_path / "files")
    with pytest.raises(UserError, match=r"dataset '.*files' does not load: .*held") as caught:
        numbers(DatasetName(name, split="held", streaming=streaming))
    assert "\n" not in str(caught.value)
    (tmp_path / "files" / "train.jsonl").write_text('{"n": 1}\n{"n": \n')
    with pytest.raises(UserError, match=r"dataset '.*files' does not load") as caught:
        numbers(DatasetName(name, streaming=streaming))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("make", [saved, files])
def test_rows_of_a_dataset_become_conversations(tmp_path: Path, make: Any) -> None:
    name = make(tmp_path / "chats")
    source = PromptSource(dataset=DatasetName(name, split="train"), limit=2)
    report = read_sources([source], ReadPlan(strict=True))
    assert [conversation.id for conversation in report.conversations] == ["chats-00001", "chats-00002"]
    assert [dict(conversation.messages[0]) for conversation in report.conversations] == [
        {"role": "user", "content": "question 0", "name": "ann"}, {"role": "user", "content": "question 1"}
    ]  # fmt: skip
    (rows,) = report.table.sources
    assert (rows.source, rows.schema, rows.read) == (f"{name}/train", "messages", 2)


def test_a_hub_id_is_asked_for_as_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    def load_dataset(path: str, name: str | None, *, split: str, revision: str | None, streaming: bool) -> Any:
        calls.append((path, name, split, revision, streaming))
        return iter(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert numbers(DatasetName("some/chats")) == [0, 1, 2, 3, 4]
    assert numbers(DatasetName("some/chats", "english", "v2", "test[:9]", True)) == [0, 1, 2, 3, 4]
    assert calls == [
        ("some/chats", None, "train", None, False), ("some/chats", "english", "test[:9]", "v2", True)
    ]  # fmt: skip


@pytest.mark.parametrize(
    "error",
    [DatasetNotFoundError("'some/chats' doesn't exist on the Hub"), ConnectionError("offline"), OSError()],
)
def test_a_dataset_that_cannot_be_had_is_one_sentence(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def load_dataset(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    reason = str(error) or "OSError"
    with pytest.raises(UserError) as caught:
        numbers(DatasetName("some/chats"))
    assert str(caught.value) == f"dataset 'some/chats' does not load: {reason}"
