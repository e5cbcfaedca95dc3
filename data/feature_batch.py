"""The slot algebra, in the one place that defines it.

The target reads x_0 .. x_{T-1}. Its feature at position t knows x_0..x_t; p_t is its distribution of x_{t+1}.

    position        t-1        t         t+1        t+2        t+3
    tokens      ... x_{t-1}   x_t       x_{t+1}    x_{t+2}    x_{t+3}
    slot t, s=0           feature_t + emb(x_{t+1})  -> p_{t+1}, the distribution of x_{t+2}       RoPE position t
    slot t, s=1           own output + emb(x_{t+2}) -> p_{t+2}, the distribution of x_{t+3}       RoPE position t+1
    slot t, step s        own output + emb(x_{t+1+s})-> p_{t+1+s}                                 RoPE position t+s

m[i] is true iff the target itself generated token i. Slot t is supervised at step s iff m[t+1] .. m[t+2+s] are all true
and in one document. For a reply at positions a..e that is slots a-1 .. e-2 at s=0: from the first slot drafted after
the prompt to the one that predicts the end of turn, and none past it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.data.feature_row import FeatureRow


@dataclass(frozen=True)
class FeatureBatch:
    """B lines of T tokens; a line holds one or more documents one after the other, then padding (document -1).

    Final states are NaN where they were not kept: outside the positions that teach a slot (`extract.final_states`).
    """

    input_ids_BT: Tensor
    aux_hidden_BTF: Tensor
    final_hidden_BTD: Tensor
    argmax_BT: Tensor
    generated_mask_BT: Tensor
    document_BT: Tensor
    position_BT: Tensor

    def __post_init__(self) -> None:
        shape = self.input_ids_BT.shape
        assert all(value.shape[:2] == shape for value in self.__dict__.values())
        assert not bool((self.generated_mask_BT & (self.document_BT < 0)).any()), "padding is marked as generated"

    def token_ids(self, step: int) -> Tensor:
        """Return the token each slot embeds at a step, x_{t+1+s} as [B, T]; 0 beyond the line's end."""
        return _ahead(self.input_ids_BT, 1 + step, fill=0)

    def position_ids(self, step: int) -> Tensor:
        """Return the RoPE position of each slot at a step, t + s within its document, [B, T]."""
        return self.position_BT + step

    def supervised(self, step: int, *, everywhere: bool = False) -> Tensor:
        """Return which slots are supervised at a step, bool [B, T]; `everywhere` counts every token as generated."""
        generated_BT = self.document_BT >= 0 if everywhere else self.generated_mask_BT
        mask = torch.ones_like(generated_BT)
        for ahead in range(1, 3 + step):
            same_document = _ahead(self.document_BT, ahead, fill=-1) == self.document_BT
            mask = mask & _ahead(generated_BT, ahead, fill=0) & same_document
        return mask

    def teacher_index(self, slots_N: Tensor, step: int | Tensor) -> Tensor:
        """Return flat indices into B*T of the teacher's position t+1+s of flat slots, at one step or each its own."""
        return slots_N + 1 + step

    def to(self, device: torch.device | str) -> "FeatureBatch":
        """Return the batch on another device."""
        return FeatureBatch(**{name: value.to(device) for name, value in self.__dict__.items()})


def _ahead(x_BT: Tensor, count: int, *, fill: int) -> Tensor:
    """Return x shifted so that entry t holds x[t + count]; entries past the end hold `fill`."""
    shifted = torch.full_like(x_BT, fill)
    if count < x_BT.shape[1]:
        shifted[:, : x_BT.shape[1] - count] = x_BT[:, count:]
    return shifted


def collate(lines: list[list[FeatureRow]], *, length: int, dtype: torch.dtype) -> FeatureBatch:
    """Return a batch of the given rows: each inner list is packed into one line of `length` tokens.

    States are returned in `dtype`. Raises AssertionError when a line does not fit.
    """
    B = len(lines)
    first = lines[0][0]
    aux = torch.zeros(B, length, first.aux_hidden_TF.shape[1], dtype=dtype)
    final = torch.zeros(B, length, first.final_hidden_TD.shape[1], dtype=dtype)
    ids = torch.zeros(B, length, dtype=torch.int64)
    argmax = torch.full((B, length), -1, dtype=torch.int64)
    mask = torch.zeros(B, length, dtype=torch.bool)
    document = torch.full((B, length), -1, dtype=torch.int64)
    position = torch.zeros(B, length, dtype=torch.int64)
    for b, rows in enumerate(lines):
        start = 0
        for number, row in enumerate(rows):
            span = slice(start, start + len(row))
            assert span.stop <= length, f"rows {[r.id for r in rows]} do not fit a line of {length} tokens"
            ids[b, span] = row.input_ids_T
            aux[b, span] = row.aux_hidden_TF.to(dtype)
            final[b, span] = row.final_hidden_TD.to(dtype)
            argmax[b, span] = row.argmax_T
            mask[b, span] = row.generated_mask_T.bool()
            document[b, span] = number
            position[b, span] = torch.arange(len(row))
            start = span.stop
    return FeatureBatch(ids, aux, final, argmax, mask, document, position)
