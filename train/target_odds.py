"""How likely the target holds a token, from stored final states: its probability over the whole vocabulary, at T=1.

Drafted tokens lie in the draft vocabulary, whose rows of the target's head the teacher has, so a logit is one dot
product. What is missing is the log-sum-exp over the whole vocabulary. It is computed here, once per run, for held-out
rows alone and in chunks: exact for any store and for features that are computed online, in seconds. Stored with the
features it would have to be written for every training row, by every backend, and never be read there.
"""

import torch
from torch import Tensor

from eyas.data.feature_row import FeatureRow, RowSource, as_source, scatter_rows, teaching_positions
from eyas.inference.replay import Odds
from eyas.models.target_head import TargetHead

CHUNK_ELEMENTS = 1 << 24
"""Logits or weights at once: 64 MiB in fp32."""
ROWS_AT_ONCE = 16


class TargetOdds:
    """The target's probability of draft-vocabulary tokens at the taught positions of some rows."""

    def __init__(self, teacher: TargetHead, draft_ids_V: Tensor, log_mass: dict[str, Tensor]) -> None:
        """`log_mass`: by row id, the log-sum-exp of the target's logits at every taught position, NaN elsewhere."""
        self.teacher = teacher
        self.draft_ids_V = draft_ids_V
        self.log_mass = log_mass

    def of(self, rows: list[FeatureRow]) -> Odds:
        """Return p(token behind position) over these rows, counted as they are given."""
        starts_R = torch.tensor([0, *(len(row) for row in rows)]).cumsum(0)
        final_ND = torch.cat([row.final_hidden_TD for row in rows])
        mass_N = torch.cat([self.log_mass[row.id] for row in rows])

        def odds(rows_N: Tensor, positions_N: Tensor, tokens_N: Tensor) -> Tensor:
            at_N = starts_R[rows_N] + positions_N
            drafts_N = self.draft_ids_V[tokens_N.to(self.draft_ids_V.device)]
            assert bool((drafts_N >= 0).all()), "a token outside the draft vocabulary was drafted"
            size = max(1, CHUNK_ELEMENTS // final_ND.shape[1])
            logits = [
                self.teacher.logits_at(final_ND[at], drafts).cpu()
                for at, drafts in zip(at_N.split(size), drafts_N.split(size), strict=True)
            ]
            p_N = (torch.cat(logits) - mass_N[at_N]).exp() if logits else mass_N.new_zeros(0)
            assert bool(torch.isfinite(p_N).all()), "a position without a final state was asked for"
            return p_N

        return odds


@torch.no_grad()
def measure_odds(
    output: TargetHead, teacher: TargetHead, draft_ids_V: Tensor, rows: RowSource | list[FeatureRow]
) -> TargetOdds:
    """Return the odds over some rows; `output` is the target's whole head, `teacher` its draft-vocabulary rows."""
    source, log_mass = as_source(rows), {}
    size = max(1, CHUNK_ELEMENTS // len(output.weight_VD))
    for start in range(0, len(source), ROWS_AT_ONCE):
        for row in source.rows(range(start, min(len(source), start + ROWS_AT_ONCE))):
            taught_N = teaching_positions(row.generated_mask_T.bool())
            chunks = row.final_hidden_TD[taught_N].split(size)
            mass_N = torch.cat([output.logits(chunk).logsumexp(-1).float().cpu() for chunk in chunks])
            log_mass[row.id] = scatter_rows(mass_N, taught_N, len(row), float("nan"))
    return TargetOdds(teacher, draft_ids_V, log_mass)
