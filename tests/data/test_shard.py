"""Shards: exact round trips, and a refusal that names the row for everything that was moved, cut or changed."""

import errno
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from eyas.data import shard as shard_module
from eyas.data.feature_row import FeatureRow, teaching_positions
from eyas.data.manifest import SCHEMA, FeatureSpec, row_hash
from eyas.data.shard import Shard, decode_row, encode_row, write_shard
from eyas.models.errors import UserError
from eyas.tests.data.toys import feature_row, spec_of

ROWS = [
    feature_row("a/0", [5, 6, 7, 8], [2, 3]),
    feature_row("b/0", [9, 8, 7, 6], [1, 2, 3]),
    feature_row("c/0", [5], []),
    feature_row("d/0", [5, 6, 7, 8], [3]),
]
SPEC = spec_of()


def shard(tmp_path: Path, *, rows: list[FeatureRow] | None = None, spec: FeatureSpec = SPEC) -> Path:
    path = tmp_path / "one.safetensors"
    write_shard(path, [encode_row(row, spec) for row in rows or ROWS], spec, measured={"x": 1})
    return path


def read(path: Path) -> list[FeatureRow]:
    opened = Shard(path)
    return [opened.row(place) for place in range(len(opened))]


def tamper(path: Path, change: Callable[[dict[str, Tensor]], None] = lambda _: None, **header: object) -> None:
    """Change tensors and header entries of a shard, as damage or another version would."""
    with safe_open(path, framework="pt") as file:
        entry = json.loads(file.metadata()["eyas"])
    tensors = load_file(path)
    change(tensors)
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, path, metadata={"eyas": json.dumps({**entry, **header})})


def known(row: FeatureRow) -> FeatureRow:
    """Return a row as it must come back: final states and argmax where a slot is taught, and nowhere else."""
    taught = teaching_positions(row.generated_mask_T)
    final, argmax = torch.full_like(row.final_hidden_TD, float("nan")), torch.full_like(row.argmax_T, -1)
    final[taught], argmax[taught] = row.final_hidden_TD[taught], row.argmax_T[taught]
    return replace(row, final_hidden_TD=final, argmax_T=argmax)


def assert_same(a: FeatureRow, b: FeatureRow) -> None:
    assert a.id == b.id
    for name in ("input_ids_T", "generated_mask_T", "argmax_T"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name
    for name in ("aux_hidden_TF", "final_hidden_TD"):
        torch.testing.assert_close(getattr(a, name), getattr(b, name), rtol=0, atol=0, equal_nan=True)


def test_rows_come_back_exactly_and_in_order_with_final_states_only_where_a_slot_is_taught(tmp_path: Path) -> None:
    for row, given in zip(read(shard(tmp_path)), ROWS, strict=True):
        assert_same(row, known(given))
        assert row.input_ids_T.dtype == row.argmax_T.dtype == torch.int64
    with safe_open(tmp_path / "one.safetensors", framework="pt") as file:
        # a/0 teaches at 2, b/0 at 1 and 2, c/0 and d/0 nowhere
        assert file.get_tensor("final_hidden").tolist() == [[7.5, 2.5], [8.5, 1.5], [7.5, 2.5]]
        assert file.get_tensor("argmax").tolist() == [1007, 1008, 1007]
        assert not any(97 in file.get_slice(name).get_shape() for name in file.keys())  # noqa: SIM118 - no logits kept


def test_final_states_everywhere_where_that_is_asked_for(tmp_path: Path) -> None:
    spec = spec_of(final_at="everywhere")
    for row, given in zip(read(shard(tmp_path, spec=spec)), ROWS, strict=True):
        assert torch.equal(row.final_hidden_TD, given.final_hidden_TD)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_states_are_stored_in_the_asked_dtype_and_nothing_else_is(tmp_path: Path, dtype: str) -> None:
    for row, given in zip(read(shard(tmp_path, spec=spec_of(state_dtype=dtype))), ROWS, strict=True):
        assert row.aux_hidden_TF.dtype == row.final_hidden_TD.dtype == getattr(torch, dtype)
        assert torch.equal(row.aux_hidden_TF, given.aux_hidden_TF.to(row.aux_hidden_TF.dtype))
        assert torch.equal(row.argmax_T, known(given).argmax_T)  # 1005 is not a bfloat16


def test_eight_bit_states_come_back_as_they_were_rounded(tmp_path: Path) -> None:
    spec = spec_of(state_dtype="float8_e4m3fn")
    for row, given in zip(read(shard(tmp_path, spec=spec)), ROWS, strict=True):
        assert_same(row, decode_row(encode_row(given, spec), spec))
        torch.testing.assert_close(row.aux_hidden_TF, given.aux_hidden_TF, rtol=0.07, atol=0.01)


def test_the_header_says_what_the_tensors_are(tmp_path: Path) -> None:
    path = shard(tmp_path)
    opened = Shard(path)
    assert (opened.spec, opened.row_ids) == (SPEC, ["a/0", "b/0", "c/0", "d/0"])
    assert opened.measured == {"x": 1}
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    assert list(metadata) == ["eyas"]  # several entries would be written in an order of their own every time
    header = json.loads(metadata["eyas"])
    assert header["schema"] == SCHEMA
    assert header["axes"] == {"aux_hidden": "tokens, layers * hidden", "final_hidden": "taught tokens, hidden"}
    assert (header["spec"]["aux_state"], header["spec"]["final_state"]) == ("pre-norm", "post-norm")


def test_equal_shards_are_equal_files_and_no_temporary_is_left(tmp_path: Path) -> None:
    first = shard(tmp_path).read_bytes()
    (tmp_path / ".one.safetensors.tmp").write_bytes(b"torn by a kill")
    assert shard(tmp_path).read_bytes() == first
    assert [path.name for path in tmp_path.iterdir()] == ["one.safetensors"]


def test_tokens_are_read_without_the_states(tmp_path: Path) -> None:
    path = shard(tmp_path)
    tamper(path, lambda t: t["aux_hidden"].zero_())
    opened = Shard(path)
    for place, given in enumerate(ROWS):
        row = opened.tokens(place)
        assert (row.id, row.input_ids_T.tolist()) == (given.id, given.input_ids_T.tolist())
        assert torch.equal(row.argmax_T, known(given).argmax_T)
    with pytest.raises(UserError, match="the features of row a/0 are not those that were written"):
        opened.row(0)
    assert float(opened.row(0, check_states=False).aux_hidden_TF.abs().max()) == 0


@pytest.mark.parametrize("name", ["input_ids", "generated_mask", "aux_hidden", "final_hidden", "argmax"])
@pytest.mark.parametrize("by", [-1, 1])
def test_shortened_or_lengthened_tensors_are_refused_with_the_rows(tmp_path: Path, name: str, by: int) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        whole = tensors[name]
        tensors[name] = whole[:-1] if by < 0 else torch.cat([whole, whole[:1]])

    path = shard(tmp_path)
    tamper(path, change)
    right = 3 if name in ("final_hidden", "argmax") else 13
    with pytest.raises(UserError, match=rf"{name} has the shape \[{right + by}.*a/0 .. d/0 have \[{right}.*extract"):
        Shard(path)


def test_a_missing_tensor_or_one_of_other_layers_is_refused(tmp_path: Path) -> None:
    path = shard(tmp_path)
    tamper(path, lambda t: t.pop("final_hidden"))
    with pytest.raises(UserError, match="final_hidden has the shape None"):
        Shard(path)
    wide = [replace(row, aux_hidden_TF=torch.cat([row.aux_hidden_TF, row.aux_hidden_TF[:, :2]], 1)) for row in ROWS]
    path = shard(tmp_path, rows=wide)  # three layers' states under a header of two
    with pytest.raises(UserError, match=r"aux_hidden has the shape \[13, 6\], .* have \[13, 4\]"):
        Shard(path)


def swap_first_two(tensors: dict[str, Tensor]) -> None:
    tensors["input_ids"] = torch.cat([tensors["input_ids"][4:8], tensors["input_ids"][:4], tensors["input_ids"][8:]])


def move_a_boundary(tensors: dict[str, Tensor]) -> None:
    tensors["lengths"] = torch.tensor([3, 5, 1, 4])


def change_a_token(tensors: dict[str, Tensor]) -> None:
    tensors["input_ids"][0] += 1


def change_the_mask(tensors: dict[str, Tensor]) -> None:
    tensors["generated_mask"][0] = True


@pytest.mark.parametrize("change", [swap_first_two, move_a_boundary, change_a_token, change_the_mask])
def test_row_whose_tokens_moved_is_refused_by_name(tmp_path: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    path = shard(tmp_path)
    tamper(path, change)
    with pytest.raises(UserError, match="the tokens of row a/0 are not those its features were made from"):
        read(path)


def test_two_rows_swapped_whole_are_refused_by_name(tmp_path: Path) -> None:
    path = shard(tmp_path)
    tamper(path, row_ids=["b/0", "a/0", "c/0", "d/0"])
    with pytest.raises(UserError, match="the tokens of row b/0 are not those"):
        read(path)


@pytest.mark.parametrize("name", ["aux_hidden", "final_hidden", "argmax"])
def test_features_of_another_row_are_refused_by_name(tmp_path: Path, name: str) -> None:
    path = shard(tmp_path)

    def roll(tensors: dict[str, Tensor]) -> None:
        tensors[name] = tensors[name].roll(1, 0)

    tamper(path, roll)
    with pytest.raises(UserError, match=r"the features of row ./0 are not those that were written"):
        read(path)


@pytest.mark.parametrize("schema", [0, 1, 99, None])
def test_shard_of_another_schema_is_refused_naming_both(tmp_path: Path, schema: int | None) -> None:
    path = shard(tmp_path)
    tamper(path, schema=schema)
    with pytest.raises(UserError, match=rf"one.safetensors has feature schema {schema}, this version reads {SCHEMA}"):
        Shard(path)


def test_shard_of_the_first_schema_as_it_was_written_is_refused_naming_both(tmp_path: Path) -> None:
    path = tmp_path / "old.safetensors"
    save_file({"lengths": torch.tensor([1])}, path, metadata={"schema": "1", "row_ids": '["a"]'})
    with pytest.raises(UserError, match=rf"old.safetensors has feature schema 1, this version reads {SCHEMA}"):
        Shard(path)


@pytest.mark.parametrize("size", [0, 6, 200, -1])
def test_torn_shard_is_refused(tmp_path: Path, size: int) -> None:
    path = shard(tmp_path)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(UserError, match=r"cannot read feature shard one.safetensors: .*extract again"):
        Shard(path)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(7e4, "float16"), (float("nan"), "float32"), (float("inf"), "bfloat16"), (float("nan"), "float8_e4m3fn")],
)
@pytest.mark.parametrize("name", ["aux_hidden", "final_hidden"])
def test_states_that_are_not_finite_in_the_stored_dtype_are_refused(name: str, value: float, dtype: str) -> None:
    field = {"aux_hidden": "aux_hidden_TF", "final_hidden": "final_hidden_TD"}[name]
    states = getattr(ROWS[1], field).clone()
    states[2, 1] = value
    with pytest.raises(UserError, match=rf"{name} of row b/0 is not finite in {dtype}"):
        encode_row(replace(ROWS[1], **{field: states}), spec_of(state_dtype=dtype))


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_seventy_thousand_fits(tmp_path: Path, dtype: str) -> None:
    big = replace(ROWS[0], aux_hidden_TF=torch.full((4, 4), 7e4))
    (row,) = read(shard(tmp_path, rows=[big], spec=spec_of(state_dtype=dtype)))
    assert float(row.aux_hidden_TF.max()) == pytest.approx(7e4, rel=2**-8)


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left on device"), SafetensorError("I/O error: No space left on device")],
)
def test_a_full_disk_leaves_nothing_behind_and_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def full(_tensors: object, path: Path, metadata: object) -> None:
        path.write_bytes(b"half a shard")
        raise error

    monkeypatch.setattr(shard_module, "save_file", full)
    with pytest.raises(UserError, match=r"No space left on device.*make room and run again, or set extract"):
        shard(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("field", ["generated_mask_T", "aux_hidden_TF", "final_hidden_TD", "argmax_T"])
def test_row_with_a_missing_state_cannot_be_made(field: str) -> None:
    with pytest.raises(AssertionError, match=f"a/0: {field} has 3 entries for 4 tokens"):
        replace(ROWS[0], **{field: getattr(ROWS[0], field)[:-1]})


def test_row_hash_tells_id_tokens_and_mask_apart_and_ignores_the_integer_type() -> None:
    def of(name: str, ids: list[int], mask: list[bool]) -> int:
        return row_hash(name, torch.tensor(ids), torch.tensor(mask))

    rows = [("a", [1, 2], [True, False]), ("b", [1, 2], [True, False]), ("a", [2, 1], [True, False])]
    rows += [("a", [1, 2], [True, True]), ("a", [1], [True]), ("a", [258, 2], [True, False]), ("a", [], [])]
    hashes = [of(*row) for row in rows]
    assert len(set(hashes)) == len(hashes)
    assert all(0 <= value < 2**63 for value in hashes)
    assert row_hash("a", torch.tensor([1, 2], dtype=torch.int32), torch.tensor([True, False])) == hashes[0]
