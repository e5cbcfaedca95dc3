"""Shards and manifests: exact round trips, and a refusal that names the row for everything that was moved or cut."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from eyas.data.feature_store import (
    SCHEMA,
    FeatureManifest,
    FeatureRow,
    FeatureStore,
    ids_hash,
    read_shard,
    write_manifest,
    write_shard,
)
from eyas.models.errors import UserError
from eyas.tests.data.toys import feature_row

ROWS = [
    feature_row("a/0", [5, 6, 7, 8], [2, 3]),
    feature_row("b/0", [9, 8, 7, 6], [1, 2, 3]),
    feature_row("c/0", [5], []),
    feature_row("d/0", [5, 6, 7, 8], [3]),
]
MANIFEST = FeatureManifest("target", "corpus", (1, 2), 2, 97, "float32", "post-norm", 16, ("one.safetensors",), 4, 13)
TOKEN_TENSORS = ("input_ids", "generated_mask", "aux_hidden", "final_hidden", "argmax")


def shard(tmp_path: Path, *, dtype: torch.dtype = torch.float32) -> Path:
    path = tmp_path / "one.safetensors"
    write_shard(path, ROWS, state_dtype=dtype)
    return path


def tamper(
    path: Path, change: Callable[[dict[str, Tensor]], None], header: Callable[[dict[str, str]], dict[str, str] | None]
) -> None:
    with safe_open(path, framework="pt") as file:
        metadata = dict(file.metadata())
    tensors = load_file(path)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata=header(metadata))


def keep(value: dict[str, str]) -> dict[str, str]:
    return value


def nothing(_tensors: dict[str, Tensor]) -> None:
    return None


def same(a: FeatureRow, b: FeatureRow) -> bool:
    return all(
        x == y if isinstance(x, str) else bool(torch.equal(x, y))
        for x, y in zip(a.__dict__.values(), b.__dict__.values(), strict=True)
    )


def test_rows_come_back_exactly_and_in_order(tmp_path: Path) -> None:
    read = list(read_shard(shard(tmp_path)))
    assert [row.id for row in read] == ["a/0", "b/0", "c/0", "d/0"]
    assert all(same(a, b) for a, b in zip(read, ROWS, strict=True))
    assert {row.input_ids_T.dtype for row in read} == {row.argmax_T.dtype for row in read} == {torch.int64}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_states_are_stored_in_the_asked_dtype_and_nothing_else_is(tmp_path: Path, dtype: torch.dtype) -> None:
    for row, given in zip(read_shard(shard(tmp_path, dtype=dtype)), ROWS, strict=True):
        assert row.aux_hidden_TF.dtype == row.final_hidden_TD.dtype == dtype
        assert torch.equal(row.final_hidden_TD, given.final_hidden_TD.to(dtype))
        assert torch.equal(row.argmax_T, given.argmax_T)  # 1005 is not a bfloat16


def test_shard_says_which_states_it_holds(tmp_path: Path) -> None:
    with safe_open(shard(tmp_path), framework="pt") as file:
        header = file.metadata()
    assert header["schema"] == str(SCHEMA)
    assert (header["aux_hidden"], header["final_hidden"]) == ("pre-norm", "post-norm")


def test_no_temporary_file_is_left(tmp_path: Path) -> None:
    assert [path.name for path in shard(tmp_path).parent.iterdir()] == ["one.safetensors"]


@pytest.mark.parametrize("name", TOKEN_TENSORS)
@pytest.mark.parametrize("by", [-1, 1])
def test_shortened_or_lengthened_features_are_refused_with_the_rows(tmp_path: Path, name: str, by: int) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        whole = tensors[name]
        tensors[name] = whole[:-1] if by < 0 else torch.cat([whole, whole[:1]])

    path = shard(tmp_path)
    tamper(path, change, keep)
    with pytest.raises(UserError, match=rf"{name} holds {13 + by} tokens, the rows a/0 .. d/0 have 13.*extract again"):
        list(read_shard(path))


def swap_first_two(tensors: dict[str, Tensor]) -> None:
    tensors["input_ids"] = torch.cat([tensors["input_ids"][4:8], tensors["input_ids"][:4], tensors["input_ids"][8:]])


def move_a_boundary(tensors: dict[str, Tensor]) -> None:
    tensors["lengths"] = torch.tensor([3, 5, 1, 4])


def change_a_token(tensors: dict[str, Tensor]) -> None:
    tensors["input_ids"][0] += 1


@pytest.mark.parametrize("change", [swap_first_two, move_a_boundary, change_a_token])
def test_row_whose_tokens_moved_is_refused_by_name(tmp_path: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    path = shard(tmp_path)
    tamper(path, change, keep)
    with pytest.raises(UserError, match="the tokens of row a/0 are not those its features were made from"):
        list(read_shard(path))


@pytest.mark.parametrize(
    ("header", "named"),
    [(lambda m: {**m, "schema": "0"}, "0"), (lambda m: {**m, "schema": "99"}, "99"), (lambda _: None, "None")],
)
def test_shard_of_another_schema_is_refused_naming_both(
    tmp_path: Path, header: Callable[[dict[str, str]], dict[str, str] | None], named: str
) -> None:
    path = shard(tmp_path)
    tamper(path, nothing, header)
    with pytest.raises(UserError, match=f"one.safetensors has feature schema {named}, this version reads {SCHEMA}"):
        list(read_shard(path))


@pytest.mark.parametrize("size", [0, 6, 200, -1])
def test_torn_shard_is_refused(tmp_path: Path, size: int) -> None:
    path = shard(tmp_path)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(UserError, match=r"cannot read feature shard one.safetensors: .*extract again"):
        list(read_shard(path))


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(7e4, torch.float16), (float("nan"), torch.float32), (float("inf"), torch.bfloat16), (-7e4, torch.float16)],
)
@pytest.mark.parametrize("name", ["aux_hidden", "final_hidden"])
def test_states_that_are_not_finite_in_the_stored_dtype_are_refused(
    tmp_path: Path, name: str, value: float, dtype: torch.dtype
) -> None:
    field = {"aux_hidden": "aux_hidden_TF", "final_hidden": "final_hidden_TD"}[name]
    states = getattr(ROWS[1], field).clone()
    states[2, 1] = value
    bad = replace(ROWS[1], **{field: states})
    with pytest.raises(UserError, match=rf"{name} of row b/0 is not finite in {dtype}"):
        write_shard(tmp_path / "one.safetensors", [ROWS[0], bad, ROWS[2]], state_dtype=dtype)
    assert not list(tmp_path.iterdir())


def test_seventy_thousand_fits_bfloat16(tmp_path: Path) -> None:
    big = replace(ROWS[0], aux_hidden_TF=torch.full((4, 4), 7e4))
    write_shard(tmp_path / "big.safetensors", [big], state_dtype=torch.bfloat16)
    (row,) = read_shard(tmp_path / "big.safetensors")
    assert float(row.aux_hidden_TF.max()) == pytest.approx(7e4, rel=2**-8)


@pytest.mark.parametrize("field", ["generated_mask_T", "aux_hidden_TF", "final_hidden_TD", "argmax_T"])
def test_row_with_a_missing_state_cannot_be_made(field: str) -> None:
    with pytest.raises(AssertionError, match=f"a/0: {field} has 3 entries for 4 tokens"):
        replace(ROWS[0], **{field: getattr(ROWS[0], field)[:-1]})


def test_ids_hash_tells_rows_apart_and_ignores_the_integer_type() -> None:
    hashes = [ids_hash(torch.tensor(ids)) for ids in ([1, 2], [2, 1], [1], [1, 2, 0], [258], [])]
    assert len(set(hashes)) == len(hashes)
    assert all(0 <= value < 2**63 for value in hashes)
    assert ids_hash(torch.tensor([1, 2], dtype=torch.int32)) == hashes[0]


def test_store_without_a_manifest_is_not_finished(tmp_path: Path) -> None:
    shard(tmp_path)
    with pytest.raises(UserError, match=r"no finished feature store .*run the extract stage first"):
        FeatureStore(tmp_path)


def test_store_reads_its_shards_in_manifest_order(tmp_path: Path) -> None:
    write_shard(tmp_path / "x.safetensors", ROWS[2:], state_dtype=torch.float32)
    write_shard(tmp_path / "y.safetensors", ROWS[:2], state_dtype=torch.float32)
    write_manifest(tmp_path, replace(MANIFEST, shards=("y.safetensors", "x.safetensors")))
    store = FeatureStore(tmp_path)
    assert [row.id for row in store.rows()] == ["a/0", "b/0", "c/0", "d/0"]
    assert store.manifest == replace(MANIFEST, shards=("y.safetensors", "x.safetensors"))


def test_store_with_a_lost_shard_is_refused(tmp_path: Path) -> None:
    write_manifest(tmp_path, MANIFEST)
    with pytest.raises(UserError, match=r"cannot read feature shard one.safetensors"):
        FeatureStore(tmp_path).rows()


def test_manifest_of_an_older_schema_is_refused_naming_both(tmp_path: Path) -> None:
    write_manifest(tmp_path, MANIFEST)
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema": 0}))
    with pytest.raises(UserError, match=f"has feature schema 0, this version reads {SCHEMA}; extract again"):
        FeatureStore(tmp_path)


def test_store_of_another_target_or_other_layers_is_refused(tmp_path: Path) -> None:
    write_manifest(tmp_path, MANIFEST)
    store = FeatureStore(tmp_path)
    store.check_target(target_fingerprint="target", aux_layers=(1, 2))
    with pytest.raises(UserError, match=r"made for another target \(fingerprint target, this target has other\)"):
        store.check_target(target_fingerprint="other", aux_layers=(1, 2))
    with pytest.raises(UserError, match=r"holds aux layers \[1, 2\], the recipe asks for \[1, 3\]"):
        store.check_target(target_fingerprint="target", aux_layers=(1, 3))
