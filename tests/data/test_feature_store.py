"""A finished store: read lazily and in corpus order, and refused by name for everything it was not made of."""

import json
import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from eyas.data import feature_store as store_module
from eyas.data.encode import encode_reply
from eyas.data.extract import extract
from eyas.data.extract_plan import ExtractionPlan
from eyas.data.feature_batch import collate
from eyas.data.feature_row import FeatureRow, LoadedRows, SelectedRows, as_source, teaching_positions
from eyas.data.feature_store import FeatureStore, write_index
from eyas.data.manifest import SCHEMA, FeatureSpec, data_fingerprint
from eyas.data.shard import Shard, encode_row, write_shard
from eyas.models.errors import UserError
from eyas.tests.data.toys import corpus_rows, feature_row, spec_of
from eyas.tests.toys import tiny_target

TARGET = tiny_target()


def make(folder: Path, **fields: object) -> FeatureStore:
    """Write the store of the nine toy rows in five shards."""
    plan = ExtractionPlan(max_length=40, tokens_per_batch=64, rows_per_shard=2)
    return extract(TARGET, corpus_rows(), plan, folder, spec=spec_of(TARGET, **fields), progress=lambda *_: None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("store")).folder


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    """Return a copy of the store that a test may damage."""
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def test_rows_come_in_corpus_order_though_they_lie_by_length(folder: Path) -> None:
    store = FeatureStore(folder)
    assert [row.id for row in store.all_rows()] == store.row_ids == [name for name, _ in corpus_rows()]
    assert store.lengths == [len(example) for _, example in corpus_rows()]
    first = Shard(folder / "shard-00000.safetensors")
    assert first.lengths == [40, 33]
    manifest = store.manifest
    assert (manifest.rows, manifest.tokens, manifest.longest, manifest.max_length) == (9, sum(store.lengths), 40, 40)
    assert manifest.taught == sum(len(teaching_positions(ex.generated_mask_T)) for _, ex in corpus_rows())


def test_asking_for_tokens_reads_no_states(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    part = Shard._part

    def noted(self: Shard, name: str, start: int, stop: int) -> torch.Tensor:
        read.append(name)
        return part(self, name, start, stop)

    monkeypatch.setattr(Shard, "_part", noted)
    store = FeatureStore(folder)
    assert read == []
    tokens = [store.tokens(index) for index in range(len(store))]
    assert set(read) == {"input_ids", "generated_mask", "argmax"}
    for row, (name, example) in zip(tokens, corpus_rows(), strict=True):
        assert (row.id, row.input_ids_T.tolist()) == (name, example.input_ids_T.tolist())


def test_few_shards_are_open_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    init = Shard.__init__

    def noted(self: Shard, path: Path) -> None:
        opened.append(path.name)
        init(self, path)

    monkeypatch.setattr(Shard, "__init__", noted)
    monkeypatch.setattr(store_module, "OPEN_SHARDS", 2)
    store = FeatureStore(folder)
    by_length = sorted(range(9), key=lambda i: -store.lengths[i])
    for index in by_length:
        store.rows([index])
        assert len(store._open) <= 2
    assert opened == [f"shard-0000{n}.safetensors" for n in range(5)]
    store.rows([by_length[-1], by_length[-3]])  # the last two are still open
    assert len(opened) == 5
    store.rows([by_length[0]])
    assert opened[5:] == ["shard-00000.safetensors"]


def test_states_are_checked_when_they_are_first_read_and_not_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks: list[bool] = []
    row = Shard.row

    def noted(self: Shard, place: int, *, check_states: bool = True) -> FeatureRow:
        checks.append(check_states)
        return row(self, place, check_states=check_states)

    monkeypatch.setattr(Shard, "row", noted)
    store = FeatureStore(folder)
    store.rows([3, 4, 3])
    store.rows([4, 5])
    assert checks == [True, True, False, False, True]


def test_memory_does_not_grow_with_the_store_or_over_epochs(tmp_path: Path) -> None:
    """A store of 96 MB is read three times over, in batches; what the process owns stays where it was."""
    rows, width, length = 48, 1000, 250
    spec = spec_of(hidden_size=width, state_dtype="float32")
    template = feature_row("r", list(range(length)), list(range(5, length)))
    for shard in range(6):
        encoded = []
        for place in range(8):
            aux = torch.randn(length, 2 * width)
            final = torch.randn(length, width)
            row = replace(template, id=f"r{8 * shard + place}", aux_hidden_TF=aux, final_hidden_TD=final)
            encoded.append(encode_row(row, spec))
        write_shard(tmp_path / f"shard-{shard:05d}.safetensors", encoded, spec, measured={})
    names = [f"r{n}" for n in range(rows)]
    write_index(
        tmp_path, json.dumps({"schema": SCHEMA, "row_ids": names}), lengths=[length] * rows,
        shards=[n // 8 for n in range(rows)], places=[n % 8 for n in range(rows)],
    )  # fmt: skip
    fields = {"spec": spec.__dict__, "schema": SCHEMA, "max_length": length, "longest": length, "rows": rows}
    shards = [f"shard-{n:05d}.safetensors" for n in range(6)]
    fields |= {"tokens": rows * length, "taught": 0, "shards": shards, "measured": {}}
    (tmp_path / "manifest.json").write_text(json.dumps(fields))
    del encoded, aux, final, row
    store = FeatureStore(tmp_path)
    own = []
    for _epoch in range(3):
        for start in range(0, rows, 2):
            batch = collate([store.rows([start, start + 1])], length=2 * length, dtype=torch.float32)
            assert bool(torch.isfinite(batch.aux_hidden_BTF).all())
        own.append(anonymous_bytes())
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert size > 90e6
    assert max(own) - min(own) < 0.1 * size, own
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > 0


def anonymous_bytes() -> int:
    """Return the memory this process owns; mapped files are the system's to drop."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    pytest.skip("this system does not tell owned from mapped memory")


OTHERS: dict[str, object] = {
    "target": "other",
    "quantization": "int8",
    "tokenizer": "other",
    "template": "other",
    "template_arguments": '{"enable_thinking": false}',
    "aux_layers": (1, 2, 3),
    "hidden_size": 41,
    "vocab_size": 98,
    "compute_dtype": "bfloat16",
    "state_dtype": "bfloat16",
    "data": "other",
    "final_at": "everywhere",
    "aux_state": "post-norm",
    "final_state": "pre-norm",
}


def test_the_list_of_what_may_differ_is_whole() -> None:
    assert OTHERS.keys() == FeatureSpec.__dataclass_fields__.keys()


@pytest.mark.parametrize("field", OTHERS)
def test_anything_that_differs_is_named_with_both_values(folder: Path, field: str) -> None:
    store = FeatureStore(folder)
    here = spec_of(TARGET)
    store.check(here, max_length=40)
    with pytest.raises(UserError) as error:
        store.check(replace(here, **{field: OTHERS[field]}), max_length=40)
    said = str(error.value)
    assert f"{field} is {getattr(here, field)!r} there, {OTHERS[field]!r} here" in said
    assert "extract again" in said.lower()


def test_all_differences_are_named_at_once(folder: Path) -> None:
    with pytest.raises(UserError, match=r"target is 't' there, 'u' here; data is 'd' there, 'e' here"):
        FeatureStore(folder).check(spec_of(TARGET, target="u", data="e"), max_length=40)


def test_rows_longer_than_the_run_asks_for_are_refused_when_the_store_is_opened(folder: Path) -> None:
    FeatureStore(folder).check(spec_of(TARGET), max_length=400)
    with pytest.raises(UserError, match=r"max length of 40 and holds a row of 40 tokens, more than .*line_length = 39"):
        FeatureStore(folder).check(spec_of(TARGET), max_length=39)


def test_a_shard_of_another_run_under_the_right_name_is_refused(copy: Path, tmp_path: Path) -> None:
    make(tmp_path / "other", target="u")
    (copy / "shard-00001.safetensors").write_bytes((tmp_path / "other" / "shard-00001.safetensors").read_bytes())
    with pytest.raises(UserError, match=r"shard-00001.safetensors in .* target is 'u' there, 't' here"):
        FeatureStore(copy).all_rows()


def test_a_row_that_is_not_where_the_index_says_is_refused(copy: Path) -> None:
    store = FeatureStore(copy)
    store._places[0], store._places[1] = 1 - store._places[0], store._places[1]
    with pytest.raises(UserError, match="row row-5 is not where the index"):
        store.rows([0])


def test_foreign_files_are_named_and_ignored(copy: Path) -> None:
    for name in ("d2t.npy", "shard-00099.safetensors", "notes.txt"):
        (copy / name).write_bytes(b"not ours")
    said: list[str] = []
    store = FeatureStore(copy)
    store.check_files(said.append)
    (line,) = said
    assert line.endswith("not part of this store: d2t.npy, notes.txt, shard-00099.safetensors")
    assert len(store.all_rows()) == 9


def test_a_clean_store_says_nothing(folder: Path) -> None:
    said: list[str] = []
    FeatureStore(folder).check_files(said.append)
    assert said == []


@pytest.mark.parametrize("name", ["shard-00002.safetensors", "index.safetensors"])
def test_store_with_a_lost_file_is_refused(copy: Path, name: str) -> None:
    (copy / name).unlink()
    if name.startswith("shard"):
        with pytest.raises(UserError, match=f"has lost {name}"):
            FeatureStore(copy).check_files(lambda _: None)
    with pytest.raises(UserError, match=f"cannot read feature shard {name}"):
        FeatureStore(copy).all_rows()


def change(path: Path, edit: Callable[[dict[str, object]], None]) -> None:
    fields = json.loads(path.read_text())
    edit(fields)
    path.write_text(json.dumps(fields))


def test_manifest_of_an_older_schema_is_refused_naming_both(copy: Path) -> None:
    change(copy / "manifest.json", lambda fields: fields.update(schema=1))
    with pytest.raises(UserError, match=f"has feature schema 1, this version reads {SCHEMA}; extract again"):
        FeatureStore(copy)


def test_a_manifest_of_the_first_schema_as_it_was_written_is_refused_naming_both(tmp_path: Path) -> None:
    old = {"target_fingerprint": "t", "corpus_fingerprint": "c", "aux_layers": [1], "shards": ["a"], "schema": 1}
    (tmp_path / "manifest.json").write_text(json.dumps(old))
    with pytest.raises(UserError, match=f"has feature schema 1, this version reads {SCHEMA}"):
        FeatureStore(tmp_path)


def test_store_without_a_manifest_or_with_a_torn_one_is_not_finished(copy: Path) -> None:
    whole = (copy / "manifest.json").read_text()
    (copy / "manifest.json").write_text(whole[:-20])
    with pytest.raises(UserError, match=r"manifest.json is damaged .*extract again"):
        FeatureStore(copy)
    (copy / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"no finished feature store .*run the extract stage first"):
        FeatureStore(copy)


def test_the_data_fingerprint_covers_ids_tokens_mask_and_order() -> None:
    rows = [("a", encode_reply([5, 6], [7])), ("b", encode_reply([5], [6, 7]))]
    others = [rows[::-1], rows[:1], [("c", rows[0][1]), rows[1]], [("a", encode_reply([5], [6, 7])), rows[1]]]
    prints = [data_fingerprint(given) for given in (rows, *others)]
    assert len(set(prints)) == len(prints)
    assert data_fingerprint(list(rows)) == prints[0]


def test_a_source_of_rows_in_memory_and_a_selection_of_it() -> None:
    rows = [feature_row(name, [1] * n, []) for name, n in (("a", 3), ("b", 1), ("c", 2))]
    source = as_source(rows)
    assert isinstance(source, LoadedRows)
    assert as_source(source) is source
    picked = SelectedRows(source, [2, 0])
    assert (picked.lengths, len(picked), picked.tokens(0).id) == ([2, 3], 2, "c")
    assert [row.id for row in picked.rows([1, 0, 1])] == ["a", "c", "a"]
