"""Grouped attention is attention over keys that are repeated for every head of their group."""

import pytest
import torch
import torch.nn.functional as F

from eyas.models.grouped_attention import MOST_ROWS, grouped_attention


@pytest.mark.parametrize("rows", [1, 3, 7, MOST_ROWS, MOST_ROWS + 1])
@pytest.mark.parametrize(("heads", "groups"), [(6, 2), (6, 6), (5, 1)])
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_every_head_reads_the_keys_of_its_group(
    rows: int, heads: int, groups: int, added: bool, scale: float | None
) -> None:
    torch.manual_seed(rows)
    batch, keys, width = 2, 37, 8
    q = torch.randn(batch, rows, heads, width).transpose(1, 2)
    k, v = torch.randn(2, batch, groups, keys + 5, width)[:, :, :, :keys]
    mask = torch.rand(batch, 1, rows, keys) < 0.6
    mask[..., 0] = True
    expected = F.scaled_dot_product_attention(
        q,
        k.repeat_interleave(heads // groups, dim=1),
        v.repeat_interleave(heads // groups, dim=1),
        attn_mask=mask,
        scale=scale,
    )
    given = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min) if added else mask
    torch.testing.assert_close(grouped_attention(q, k, v, given, scale=scale), expected, rtol=1e-5, atol=1e-6)
