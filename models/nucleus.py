"""Top-p without sorting the vocabulary: find the few tokens that can be in the nucleus, and sort only those.

A token is in the nucleus while the tokens likelier than it weigh less than top_p: equals are in or out together, the
rule of `kernels/truncate.py`. All tokens of at least some probability are the likeliest; once their mass reaches top_p
the nucleus is among them. Those below (1 - top_p) / V can never be in it: together they weigh less than 1 - top_p.
"""

import torch
from torch import Tensor

FEW = 2048  # the first guess: tokens below (1 - top_p) / FEW are left out; wrong only for very flat rows


def nucleus(probabilities_RV: Tensor, top_p_R: Tensor) -> tuple[Tensor, Tensor]:
    """Return (weights_RK fp64, ids_RK int64): the nucleus of each row, likeliest first (equals by id), 0 behind it.

    Masses are summed in fp64; at least one token is always in. With a softmax, in fp32 or better, of logits already
    divided by the temperature, and cut to the top k, this is the Hugging Face order.
    """
    top_p_R = top_p_R.to(torch.float64)
    threshold_R = (1.0 - top_p_R) / FEW
    while True:
        rows_N, ids_N = (probabilities_RV >= threshold_R[:, None]).nonzero(as_tuple=True)
        found_N = probabilities_RV[rows_N, ids_N].to(torch.float64)
        mass_R = torch.zeros_like(top_p_R).index_add_(0, rows_N, found_N)
        short_R = (mass_R < top_p_R) & (threshold_R > 0)
        if not bool(short_R.any()):
            break
        # Below this bound the mass suffices but for rounding; a row that is still short then takes everything.
        bound_R = (1.0 - top_p_R) / (2 * probabilities_RV.shape[-1])
        lower_R = torch.where(threshold_R > bound_R, bound_R, 0.0)
        threshold_R = torch.where(short_R, lower_R, threshold_R)
    count_R = rows_N.bincount(minlength=len(top_p_R))
    # Every row's candidates side by side, in ascending id: a stable sort then breaks ties by id.
    place_N = torch.arange(len(rows_N), device=rows_N.device) - (count_R.cumsum(0) - count_R)[rows_N]
    weights_RK = probabilities_RV.new_zeros(len(top_p_R), int(count_R.max()), dtype=torch.float64)
    ids_RK = torch.zeros_like(weights_RK, dtype=torch.int64)
    weights_RK[rows_N, place_N] = found_N
    ids_RK[rows_N, place_N] = ids_N
    weights_RK, order_RK = weights_RK.sort(dim=-1, descending=True, stable=True)
    before_RK = torch.nn.functional.pad(weights_RK.cumsum(-1)[:, :-1], (1, 0))
    # All equals of a token that counts are candidates too: the threshold is one of probability.
    least_R1 = weights_RK.masked_fill(before_RK >= top_p_R[:, None], torch.inf).amin(-1, keepdim=True)
    return weights_RK.masked_fill(weights_RK < least_R1, 0.0), ids_RK.gather(1, order_RK)
