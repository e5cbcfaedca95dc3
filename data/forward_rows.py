"""Feature rows straight from the target: one padded batch in, one row of features per example out."""

from collections.abc import Iterator

import torch
from torch import Tensor

from eyas.data.encode import TokenizedExample
from eyas.data.feature_row import FeatureRow, scatter_rows, teaching_positions
from eyas.models.errors import UserError
from eyas.models.target import Target

Example = tuple[str, TokenizedExample]
ARGMAX_CHUNK = 256
BLOCK = 256


@torch.inference_mode()
def forward_rows(target: Target, batch: list[Example], *, final_everywhere: bool = False) -> Iterator[FeatureRow]:
    """Yield the feature rows of one batch, in its order; right padding changes nothing under causal attention.

    Final states are NaN where no slot is taught, unless asked for everywhere. Raises UserError when the target gives
    back another number of states than it was given tokens.
    """
    longest = max(len(example) for _, example in batch)
    ids_BT = torch.zeros(len(batch), longest, dtype=torch.int64)
    for b, (_, example) in enumerate(batch):
        ids_BT[b, : len(example)] = example.input_ids_T
    out = target.forward(ids_BT.to(target.device))
    if out.aux_hidden_BTF.shape[:2] != ids_BT.shape or out.final_hidden_BTD.shape[:2] != ids_BT.shape:
        raise UserError(
            f"row {batch[0][0]}: the target gave {out.aux_hidden_BTF.shape[1]} aux and {out.final_hidden_BTD.shape[1]} "
            f"final states for {longest} tokens; features would belong to other tokens."
        )
    taught = [teaching_positions(example.generated_mask_T) for _, example in batch]
    final_ND = torch.cat([out.final_hidden_BTD[b, positions.to(ids_BT.device)] for b, positions in enumerate(taught)])
    argmax_N = argmax_of_logits(target, final_ND)
    aux_BTF, counts = out.aux_hidden_BTF.cpu(), [len(positions) for positions in taught]
    finals = list(final_ND.cpu().split(counts)) if not final_everywhere else list(out.final_hidden_BTD.cpu())
    for b, ((row_id, example), argmax) in enumerate(zip(batch, argmax_N.split(counts), strict=True)):
        T = len(example)
        yield FeatureRow(
            id=row_id,
            input_ids_T=example.input_ids_T,
            generated_mask_T=example.generated_mask_T,
            aux_hidden_TF=aux_BTF[b, :T],
            final_hidden_TD=finals[b][:T] if final_everywhere else scatter_rows(finals[b], taught[b], T, float("nan")),
            argmax_T=scatter_rows(argmax, taught[b], T, -1),
        )


def argmax_of_logits(target: Target, final_ND: Tensor) -> Tensor:
    """Return the argmax of the target's full logits, int64 [N] on the CPU; in chunks, so no N x V tensor is made."""
    return torch.cat([first_argmax(target.head.logits(chunk)).cpu() for chunk in final_ND.split(ARGMAX_CHUNK)])


def first_argmax(logits_NV: Tensor) -> Tensor:
    """Return the first index of the largest logit of each row, by blocks: PyTorch's argmax of half precision is slow.

    On a CPU it takes half as long as the product that makes the logits; the largest of each block a twentieth of that.
    """
    N, V = logits_NV.shape
    count = V // BLOCK
    if count < 2:
        return logits_NV.argmax(-1)
    rows_N = torch.arange(N, device=logits_NV.device)
    blocks = logits_NV[:, : count * BLOCK].unflatten(-1, (count, BLOCK))
    largest_NC = blocks.amax(-1)
    block_N = largest_NC.argmax(-1)
    found_N = block_N * BLOCK + blocks[rows_N, block_N].argmax(-1)
    if count * BLOCK < V:
        rest_N, at_N = logits_NV[:, count * BLOCK :].max(-1)
        found_N = torch.where(rest_N > largest_NC[rows_N, block_N], count * BLOCK + at_N, found_N)
    return found_N
