"""The argmax over a whole vocabulary, taken by blocks: the first largest, as torch has it."""

import pytest
import torch

from eyas.data.forward_rows import first_argmax


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
