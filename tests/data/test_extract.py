"""Features belong to their own token and row, equal the model's states, and survive being interrupted."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from eyas.data import shard as shard_module
from eyas.data.encode import TokenizedExample, encode_reply
from eyas.data.extract import extract
from eyas.data.extract_plan import ExtractionPlan
from eyas.data.feature_batch import collate
from eyas.data.feature_row import FeatureRow
from eyas.data.feature_store import FeatureStore
from eyas.data.shard import encode_row, write_shard
from eyas.models.errors import UserError
from eyas.models.target import Target, TargetOutput
from eyas.tests.data.toys import corpus_rows, spec_of
from eyas.tests.toys import AUX_LAYERS, tiny_config, tiny_target

TARGET = tiny_target()
Examples = list[tuple[str, TokenizedExample]]


def run(
    folder: Path, given: Examples, *, target: Target = TARGET, tokens: int = 64, per_shard: int = 2,
    dtype: str = "float32", max_length: int = 40, progress: Callable[[int, int, int], None] | None = None,
    **fields: object,
) -> FeatureStore:  # fmt: skip
    plan = ExtractionPlan(max_length, tokens, per_shard)
    spec = spec_of(target, state_dtype=dtype, **fields)
    return extract(target, given, plan, folder, spec=spec, progress=progress or (lambda *_: None))


def same_row(a: FeatureRow, b: FeatureRow) -> bool:
    return a.id == b.id and all(torch.equal(getattr(a, name), getattr(b, name)) for name in a.__dict__ if name != "id")


@torch.inference_mode()
def alone(ids_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Aux states, final state and logits of one row from a plain forward of the model, no hooks of ours."""
    out = TARGET.model(ids_T[None], output_hidden_states=True, use_cache=False)
    return torch.cat([out.hidden_states[k][0] for k in AUX_LAYERS], -1), out.hidden_states[-1][0], out.logits[0]


@pytest.mark.parametrize(("tokens", "per_shard"), [(1, 2), (64, 2), (4096, 9), (100, 4)])
def test_every_row_equals_a_forward_of_its_own(tmp_path: Path, tokens: int, per_shard: int) -> None:
    given = corpus_rows()
    store = run(tmp_path, given, tokens=tokens, per_shard=per_shard)
    rows = store.all_rows()
    assert [row.id for row in rows] == [name for name, _ in given]
    for row, (_, example) in zip(rows, given, strict=True):
        aux, final, logits = alone(example.input_ids_T)
        assert torch.equal(row.input_ids_T, example.input_ids_T)
        assert torch.equal(row.generated_mask_T, example.generated_mask_T)
        torch.testing.assert_close(row.aux_hidden_TF, aux, rtol=1e-4, atol=1e-4)
        m = example.generated_mask_T.tolist()
        taught = [p for p in range(len(m) - 1) if m[p] and m[p + 1]]
        assert [p for p in range(len(m)) if row.argmax_T[p] >= 0] == taught
        torch.testing.assert_close(row.final_hidden_TD[taught], final[taught], rtol=1e-4, atol=1e-4)
        assert bool(row.final_hidden_TD[[p for p in range(len(m)) if p not in taught]].isnan().all())
        assert row.argmax_T[taught].tolist() == logits[taught].argmax(-1).tolist()
    assert len(list(tmp_path.glob("shard-*"))) == -(-9 // per_shard)
    assert sum(len(row) for row in rows) == store.manifest.tokens == 40 + 19 + 24 + 24 + 16 + 1 + 7 + 33 + 2


def test_argmax_is_kept_exactly_where_a_slot_is_taught(tmp_path: Path) -> None:
    ids = torch.arange(10, 20)
    mask = torch.tensor([False, False, True, True, False, True, False, True, True, True])
    (row,) = run(tmp_path, [("turns", TokenizedExample(ids, mask))]).all_rows()
    predicted = alone(ids)[2].argmax(-1).tolist()
    expected = [-1] * 10
    for position in (2, 7, 8):  # this token and the next one were both generated
        expected[position] = predicted[position]
    assert row.argmax_T.tolist() == expected
    batch = collate([[row]], length=12, dtype=torch.float32)
    chosen = batch.supervised(0).flatten().nonzero().squeeze(-1)
    assert batch.teacher_index(chosen, 0).tolist() == [2, 7, 8]


def test_order_and_repetition_change_nothing(tmp_path: Path) -> None:
    given = corpus_rows()
    first = {row.id: row for row in run(tmp_path / "a", given).all_rows()}
    again = {row.id: row for row in run(tmp_path / "b", given).all_rows()}
    by_length = {
        row.id: row for row in run(tmp_path / "c", sorted(given, key=lambda r: len(r[1])), tokens=400).all_rows()
    }
    assert all(torch.equal(first[name].aux_hidden_TF, again[name].aux_hidden_TF) for name in first)
    for name, row in first.items():
        torch.testing.assert_close(by_length[name].aux_hidden_TF, row.aux_hidden_TF, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(
            by_length[name].final_hidden_TD, row.final_hidden_TD, rtol=1e-4, atol=1e-4, equal_nan=True
        )


def test_identical_texts_have_identical_features(tmp_path: Path) -> None:
    rows = {row.id: row for row in run(tmp_path, corpus_rows()).all_rows()}
    torch.testing.assert_close(rows["row-2"].aux_hidden_TF, rows["row-3"].aux_hidden_TF, rtol=1e-4, atol=1e-4)
    assert torch.equal(rows["row-2"].input_ids_T, rows["row-3"].input_ids_T)


def test_batches_respect_their_token_limit(tmp_path: Path) -> None:
    shapes: list[tuple[int, int]] = []
    target = tiny_target()
    inner = target.forward

    def forward(ids: Tensor, **kwargs: Tensor) -> object:
        shapes.append((ids.shape[0], ids.shape[1]))
        return inner(ids, **kwargs)  # type: ignore[arg-type]

    target.forward = forward  # type: ignore[method-assign, assignment]
    run(tmp_path, corpus_rows(), target=target, tokens=80, per_shard=9)
    assert all(rows * length <= 80 for rows, length in shapes)
    assert max(rows for rows, _ in shapes) > 1


# A norm of one weight everywhere changes nothing when applied twice; the ramp shows that too.
@pytest.mark.parametrize("weight", [torch.full((40,), 3.0), torch.linspace(0.5, 5.0, 40)], ids=["3.0", "ramp"])
def test_rebuilt_logits_equal_the_models_whatever_the_final_norm(tmp_path: Path, weight: Tensor) -> None:
    target = tiny_target(aux_layers=(1, 2, 4), layers=4)
    target.model.model.norm.weight.data.copy_(weight)
    example = corpus_rows()[2][1]
    (row,) = run(tmp_path, [("r", example)], target=target, final_at="everywhere").all_rows()
    ids = example.input_ids_T[None]
    with torch.inference_mode():
        out = target.model(ids, output_hidden_states=True)
        by_hooks = target.head.logits(target.forward(ids).final_hidden_BTD)
        by_output = target.model.lm_head(out.hidden_states[-1])
        from_disk = target.head.logits(row.final_hidden_TD)
        from_last_layer = target.model.lm_head(target.model.model.norm(row.aux_hidden_TF[:, -40:]))
        missing = target.model.lm_head(row.aux_hidden_TF[:, -40:])
        twice = target.model.lm_head(target.model.model.norm(row.final_hidden_TD))
    for logits in (by_hooks[0], by_output[0], from_disk, from_last_layer):
        torch.testing.assert_close(logits, out.logits[0], rtol=1e-4, atol=1e-4)
    # Aux layer L is the residual stream before that norm: not the final state, and norming the final state is wrong.
    assert (row.aux_hidden_TF[:, -40:] - row.final_hidden_TD).abs().max() > 1.0
    assert (missing - out.logits[0]).abs().max() > 1.0
    assert bool((twice - out.logits[0]).abs().max() > 0.1) == bool(weight.std() > 0)


def constant_layers(*, constants: list[float], aux_layers: tuple[int, ...]) -> Target:
    """A target whose layer k adds constants[k] to every dimension and nothing else."""
    model = LlamaForCausalLM(tiny_config(layers=len(constants), mlp_bias=True))
    for layer, constant in zip(model.model.layers, constants, strict=True):
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
        layer.mlp.down_proj.bias.data.fill_(constant)
    return Target(model, aux_layers=aux_layers)


def test_residual_stream_known_by_hand(tmp_path: Path) -> None:
    target = constant_layers(constants=[1.0, 10.0, 100.0, 1000.0], aux_layers=(0, 1, 3, 4))
    example = encode_reply([5, 6], [7, 8, 2])
    (row,) = run(tmp_path, [("r", example)], target=target, final_at="everywhere").all_rows()
    embedded = target.model.model.embed_tokens.weight[example.input_ids_T]
    for tap, added in enumerate((0.0, 1.0, 111.0, 1111.0)):
        torch.testing.assert_close(row.aux_hidden_TF[:, 40 * tap : 40 * tap + 40], embedded + added)
    last = embedded + 1111.0
    torch.testing.assert_close(row.final_hidden_TD, last / last.pow(2).mean(-1, keepdim=True).sqrt(), rtol=1e-4, atol=0)
    logits = row.final_hidden_TD @ target.model.lm_head.weight.T
    assert row.argmax_T.tolist() == [-1, -1, int(logits[2].argmax()), int(logits[3].argmax()), -1]
    store = FeatureStore(tmp_path)
    assert (store.manifest.spec.aux_layers, store.manifest.spec.final_state) == ((0, 1, 3, 4), "post-norm")


def test_states_that_overflow_half_precision_leave_no_shard_and_no_manifest(tmp_path: Path) -> None:
    target = constant_layers(constants=[1.0, 7e4, 1.0], aux_layers=(1, 2))
    given = [("small", encode_reply([5, 6], [7, 8]))]
    with pytest.raises(UserError, match=r"aux_hidden of row small is not finite in float16: .* 7e\+04"):
        run(tmp_path, given, target=target, dtype="float16")
    assert not list(tmp_path.iterdir())
    (row,) = run(tmp_path, given, target=target, dtype="bfloat16").all_rows()
    assert float(row.aux_hidden_TF[:, 40:].float().mean()) == pytest.approx(7e4, rel=0.01)


def test_target_that_computes_no_number_is_refused(tmp_path: Path) -> None:
    target = tiny_target()
    target.model.model.layers[3].mlp.down_proj.weight.data[0, 0] = float("nan")
    with pytest.raises(UserError, match="nan"):
        run(tmp_path, corpus_rows(), target=target)
    assert not list(tmp_path.glob("shard-*"))


def test_batched_forward_that_mixes_rows_is_found(tmp_path: Path) -> None:
    target = tiny_target()
    inner = target.forward

    def leaky(ids: Tensor, **kwargs: Tensor) -> TargetOutput:
        out = inner(ids, **kwargs)  # type: ignore[arg-type]
        mixed = out.aux_hidden_BTF + 0.05 * out.aux_hidden_BTF.roll(1, 0) * (len(ids) > 1)
        return TargetOutput(mixed, out.final_hidden_BTD)

    target.forward = leaky  # type: ignore[method-assign, assignment]
    short = [(f"r{n}", encode_reply([5 + n, 6], [7, 8])) for n in range(3)]
    given = [("alone", encode_reply([5] * 6, [6] * 6)), *short]
    with pytest.raises(UserError, match=r"row r\d: aux_hidden_TF differs .* batched forward mixes rows"):
        run(tmp_path, given, target=target, tokens=12, per_shard=4)
    assert not list(tmp_path.iterdir())
    assert len(run(tmp_path, given, target=target, tokens=1, per_shard=4).all_rows()) == 4


class Kill(Exception):
    pass


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_resume_keeps_finished_shards_and_ends_with_the_same_bytes(tmp_path: Path) -> None:
    given = corpus_rows()
    run(tmp_path / "whole", given, per_shard=2)

    def kill(done: int, total: int, tokens: int) -> None:
        assert total == 9
        if done > 5 and tokens:
            raise Kill

    folder = tmp_path / "killed"
    with pytest.raises(Kill):
        run(folder, given, per_shard=2, progress=kill)
    assert sorted(path.name for path in folder.iterdir()) == [f"shard-0000{n}.safetensors" for n in (0, 1)]
    with pytest.raises(UserError, match="no finished feature store"):
        FeatureStore(folder)
    (folder / ".shard-00002.safetensors.tmp").write_bytes(b"torn")
    for path in folder.glob("shard-*"):
        os.utime(path, ns=(10**18, 10**18))
    seen: list[tuple[int, int]] = []
    run(folder, given, per_shard=2, progress=lambda done, _, tokens: seen.append((done, tokens)))
    assert [path.stat().st_mtime_ns == 10**18 for path in sorted(folder.glob("shard-*"))] == [True] * 2 + [False] * 3
    assert seen[:2] == [(2, 0), (4, 0)]
    lengths = sorted((len(example) for _, example in given), reverse=True)
    assert sum(tokens for _, tokens in seen) == sum(lengths[4:])
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert contents(folder) == contents(tmp_path / "whole")


def test_a_full_disk_leaves_whole_shards_and_resumes_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = corpus_rows()
    run(tmp_path / "whole", given, per_shard=2)
    save, folder = shard_module.save_file, tmp_path / "full"

    def full(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
        save(tensors, path, metadata=metadata)
        if "00003" in path.name:
            path.write_bytes(path.read_bytes()[:500])
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(shard_module, "save_file", full)
        with pytest.raises(UserError, match=r"cannot write .*shard-00003.safetensors .* No space left .* run again"):
            run(folder, given, per_shard=2)
    assert sorted(path.name for path in folder.iterdir()) == [f"shard-0000{n}.safetensors" for n in (0, 1, 2)]
    run(folder, given, per_shard=2)
    assert contents(folder) == contents(tmp_path / "whole")


def test_a_manifest_does_not_outlive_a_shard(tmp_path: Path) -> None:
    store = run(tmp_path, corpus_rows())
    (tmp_path / "shard-00003.safetensors").unlink()
    with pytest.raises(UserError, match="rank 1 alone"):
        extract(
            TARGET, corpus_rows(), ExtractionPlan(40, 64, 2), tmp_path, spec=store.manifest.spec,
            progress=lambda *_: raise_user_error(), rank=0, ranks=2,
        )  # fmt: skip
    assert not (tmp_path / "manifest.json").exists()


def raise_user_error() -> None:
    raise UserError("rank 1 alone has not written its shard")


def test_finished_store_is_read_not_computed_again(tmp_path: Path) -> None:
    given = corpus_rows()
    run(tmp_path, given)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("shard-*")}
    tokens = 0

    def count(_done: int, _total: int, new: int) -> None:
        nonlocal tokens
        tokens += new

    assert len(run(tmp_path, given, progress=count).all_rows()) == 9
    assert tokens == 0
    assert {path: path.stat().st_mtime_ns for path in before} == before


def other_id(given: Examples) -> Examples:
    return [("new", given[0][1]), *given[1:]]


def other_token(given: Examples) -> Examples:
    example = given[1][1]
    ids = example.input_ids_T.clone()
    ids[3] += 1
    return [given[0], (given[1][0], TokenizedExample(ids, example.generated_mask_T)), *given[2:]]


def other_mask(given: Examples) -> Examples:
    example = given[1][1]
    return [given[0], (given[1][0], TokenizedExample(example.input_ids_T, ~example.generated_mask_T)), *given[2:]]


@pytest.mark.parametrize("change", [other_id, other_token, other_mask])
def test_other_rows_in_a_finished_shard_are_refused(tmp_path: Path, change: Callable[[Examples], Examples]) -> None:
    run(tmp_path, corpus_rows())
    with pytest.raises(UserError, match=r"shard-0000\d.safetensors holds other rows than the corpus; delete"):
        run(tmp_path, change(corpus_rows()))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_finished_shards_of_other_weights_are_refused_though_everything_is_said_to_be_the_same(
    tmp_path: Path, dtype: str
) -> None:
    given = corpus_rows()[1:]
    run(tmp_path, given, dtype=dtype)
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"row row-0: aux_hidden_TF .*shard-00000.safetensors.* run extract again"):
        run(tmp_path, given, target=tiny_target(seed=1), dtype=dtype)
    assert not (tmp_path / "manifest.json").exists()
    assert len(run(tmp_path, given, dtype=dtype).all_rows()) == 8


def test_finished_shards_of_other_layers_or_another_dtype_are_refused_by_name(tmp_path: Path) -> None:
    run(tmp_path, corpus_rows(), dtype="bfloat16")
    with pytest.raises(UserError, match=r"state_dtype is 'bfloat16' there, 'float32' here"):
        run(tmp_path, corpus_rows())
    with pytest.raises(UserError, match=r"aux_layers is \(1, 2, 4\) there, \(1, 2, 3\) here"):
        run(tmp_path, corpus_rows(), target=tiny_target(aux_layers=(1, 2, 3)), dtype="bfloat16")


def test_features_of_other_positions_in_a_finished_shard_are_refused_on_resume(tmp_path: Path) -> None:
    given = [("a", encode_reply([5, 6], [7, 8])), ("b", encode_reply([9, 10], [11, 12]))]
    store = run(tmp_path, given)
    a, b = store.all_rows()
    a.__dict__["aux_hidden_TF"], b.__dict__["aux_hidden_TF"] = b.aux_hidden_TF, a.aux_hidden_TF
    spec = store.manifest.spec
    write_shard(tmp_path / "shard-00000.safetensors", [encode_row(row, spec) for row in (a, b)], spec, measured={})
    with pytest.raises(UserError, match="row a: aux_hidden_TF"):
        run(tmp_path, given)


def test_row_over_the_length_limit_is_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"row row-0 has 40 tokens, more than train.line_length = 39"):
        run(tmp_path / "new", corpus_rows(), max_length=39)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "nothing to extract"),
        ([("a", encode_reply([5, 6], [])), ("b", encode_reply([5], []))], "no token of the corpus is marked"),
        ([("a", encode_reply([], [5, 6])), ("b", encode_reply([], [7]))], "every token of the corpus is marked"),
        ([(name, encode_reply([5], [6])) for name in ("a", "b", "a")], "row a occurs twice in the corpus"),
    ],
)
def test_corpus_that_teaches_nothing_or_repeats_an_id_is_refused(tmp_path: Path, given: Examples, message: str) -> None:
    with pytest.raises(UserError, match=message):
        run(tmp_path / "new", given)
    assert not (tmp_path / "new").exists()
