"""Rows straight from the target: lengths that agree, argmax by blocks, and no tensor of tokens by vocabulary."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from eyas.data.encode import encode_reply
from eyas.data.extract import extract
from eyas.data.extract_plan import ExtractionPlan
from eyas.data.feature_store import FeatureStore
from eyas.data.forward_rows import Example, first_argmax
from eyas.models.errors import UserError
from eyas.models.target import Target, TargetOutput
from eyas.tests.data.toys import corpus_rows, spec_of
from eyas.tests.toys import tiny_target


def run(folder: Path, given: list[Example], *, target: Target, max_length: int = 40) -> FeatureStore:
    plan = ExtractionPlan(max_length, tokens_per_batch=64, rows_per_shard=2)
    return extract(target, given, plan, folder, spec=spec_of(target), progress=lambda *_: None)


def test_a_target_that_gives_back_fewer_states_is_refused(tmp_path: Path) -> None:
    target = tiny_target()
    inner = target.forward

    def shortened(ids: Tensor, **kwargs: Tensor) -> TargetOutput:
        out = inner(ids, **kwargs)  # type: ignore[arg-type]
        return TargetOutput(out.aux_hidden_BTF[:, :-1], out.final_hidden_BTD)

    target.forward = shortened  # type: ignore[method-assign, assignment]
    with pytest.raises(UserError, match=r"row row-0: the target gave 39 aux and 40 final states for 40 tokens"):
        run(tmp_path, corpus_rows(), target=target)
    assert not list(tmp_path.iterdir())


class Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple | list) else (out,):
            if isinstance(value, Tensor):
                self.elements = max(self.elements, value.numel())
        return out


def test_no_tensor_of_a_rows_tokens_by_the_vocabulary_is_ever_made(tmp_path: Path) -> None:
    vocab, length = 128256, 2048
    target = tiny_target(vocab_size=vocab, max_position_embeddings=length, initializer_range=0.05)
    ids = torch.randint(vocab, (length,)).tolist()
    with Largest() as largest:
        store = run(tmp_path, [("long", encode_reply(ids[:1000], ids[1000:]))], target=target, max_length=length)
    assert store.manifest.taught == length - 1001
    assert largest.elements <= 256 * vocab
    assert sum(path.stat().st_size for path in tmp_path.glob("shard-*")) < length * vocab // 100


@pytest.mark.parametrize("vocab", [97, 511, 512, 513, 2048, 49152])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_argmax_by_blocks_is_the_first_largest(vocab: int, dtype: torch.dtype) -> None:
    logits = torch.randn(7, vocab).to(dtype)
    logits[0] = 0
    logits[1, [vocab // 3, vocab - 1]] = 50
    logits[2, vocab - 1] = 50
    logits[3] = -torch.inf
    expected = [int((row == row.max()).nonzero()[0]) for row in logits]
    assert first_argmax(logits).tolist() == expected
    assert expected[:4] == [0, vocab // 3, vocab - 1, 0]
    assert first_argmax(logits[:0]).tolist() == []
