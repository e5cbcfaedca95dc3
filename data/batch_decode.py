"""Batched decoding of many short requests: rows at their own lengths, finished rows replaced by waiting ones.

One target forward per step serves all active rows. Sampling draws one uniform per row and step from (seed, request,
step), so a request's text does not depend on its neighbours, on the order, or on a restart, and nothing is sorted.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eyas.data.backends import Reply, Request
from eyas.models.draw import draw
from eyas.models.errors import UserError
from eyas.models.kv_cache import KVCache
from eyas.models.nucleus import nucleus
from eyas.models.target import Target


@dataclass
class _Row:
    request: Request
    generated: list[int] = field(default_factory=list)
    coins: list[float] = field(default_factory=list)  # one uniform in [0, 1) per token

    def __post_init__(self) -> None:
        if self.request.temperature > 0:
            random = torch.Generator().manual_seed(self.request.seed)
            self.coins = torch.rand(self.request.max_new_tokens, generator=random, dtype=torch.float64).tolist()

    @property
    def length(self) -> int:
        """Tokens whose keys are in the cache before the next step."""
        return len(self.request.prompt_ids) + len(self.generated) - 1


class BatchDecoder:
    """Decodes requests `batch` at a time on a preallocated cache of `capacity` tokens per row."""

    def __init__(self, target: Target, *, batch: int, capacity: int) -> None:
        self.target = target
        self.batch = batch
        self.capacity = min(capacity, target.config.max_position_embeddings)

    def run(self, requests: list[Request]) -> Iterator[Reply]:
        """Yield replies as they finish, in no fixed order.

        Raises UserError for a request that is empty or cannot fit the cache, before any work is done.
        """
        for request in requests:
            if not request.prompt_ids or request.max_new_tokens < 1:
                raise UserError(
                    f"request {request.id!r} has {len(request.prompt_ids)} prompt tokens and room for "
                    f"{request.max_new_tokens} new ones; both need at least one."
                )
            need = len(request.prompt_ids) + request.max_new_tokens
            if need > self.capacity:
                raise UserError(
                    f"request {request.id!r} needs {need} tokens (prompt {len(request.prompt_ids)} + new "
                    f"{request.max_new_tokens}), more than the {self.capacity} allowed (the target itself takes "
                    f"{self.target.config.max_position_embeddings}); shorten the prompt or ask for fewer new tokens."
                )
        waiting = sorted(requests, key=lambda r: len(r.prompt_ids), reverse=True)
        rows: list[_Row | None] = [None] * self.batch
        cache = self.target.new_cache(batch=self.batch, capacity=self.capacity)
        while waiting or any(rows):
            free = [i for i, row in enumerate(rows) if row is None]
            if waiting and len(free) >= max(1, self.batch // 8):
                joined = free[: len(waiting)]
                for i in joined:
                    rows[i] = _Row(waiting.pop())
                self._prefill(rows, joined, cache)
            else:
                if not waiting and len(free) >= max(1, len(rows) // 2):
                    kept = [i for i, row in enumerate(rows) if row is not None]
                    cache.select_rows(torch.tensor(kept, device=self.target.device))
                    rows = [rows[i] for i in kept]
                self._decode(rows, cache)
            for i, row in enumerate(rows):
                if row is not None and (reason := _finished(row)):
                    rows[i] = None
                    yield Reply(row.request, tuple(row.generated), reason)

    def _prefill(self, rows: list[_Row | None], joined: list[int], cache: KVCache) -> None:
        """Read the prompts of newly joined rows and append their first token."""
        active = [row for i in joined if (row := rows[i]) is not None]
        lengths = torch.tensor([len(row.request.prompt_ids) for row in active])
        ids_RT = torch.zeros(len(active), int(lengths.max()), dtype=torch.int64)
        for r, row in enumerate(active):
            ids_RT[r, : lengths[r]] = torch.tensor(row.request.prompt_ids)
        # Padding behind a short prompt is written to slots that the row's next tokens overwrite before they are seen.
        positions_RT = torch.arange(ids_RT.shape[1]).expand_as(ids_RT)
        final_RTD = self._forward(ids_RT, positions_RT, joined, cache)
        self._append(final_RTD[torch.arange(len(active)), lengths - 1], active)

    def _decode(self, rows: list[_Row | None], cache: KVCache) -> None:
        """Append one token to every active row; empty rows ride along on slot 0, so the cache is read in place."""
        ids = [row.generated[-1] if row else 0 for row in rows]
        positions = [row.length if row else 0 for row in rows]
        final_R1D = self._forward(torch.tensor(ids)[:, None], torch.tensor(positions)[:, None], None, cache)
        active = [i for i, row in enumerate(rows) if row is not None]
        self._append(final_R1D[active, 0], [row for row in rows if row is not None])

    def _forward(self, ids_RT: Tensor, positions_RT: Tensor, rows: list[int] | None, cache: KVCache) -> Tensor:
        """Return final states of tokens at their rows' positions, each seeing its own row up to itself."""
        device = self.target.device
        slots_L = torch.arange(int(positions_RT.max()) + 1)
        mask_R1TL = slots_L[None, None, None, :] <= positions_RT[:, None, :, None]
        chosen = None if rows is None else torch.tensor(rows, device=device)
        cache.write_rows_at(chosen, positions_RT.to(device))
        return self.target.forward(
            ids_RT.to(device), position_ids_BT=positions_RT.to(device), mask_B1TL=mask_R1TL.to(device), cache=cache
        ).final_hidden_BTD

    def _append(self, last_RD: Tensor, active: list[_Row]) -> None:
        for row, token in zip(active, _choose(self.target.head.logits(last_RD), active), strict=True):
            row.generated.append(token)


def _finished(row: _Row) -> str | None:
    if row.generated and row.generated[-1] in row.request.stop_ids:
        return "stop"
    return "length" if len(row.generated) >= row.request.max_new_tokens else None


@torch.inference_mode()
def _choose(logits_RV: Tensor, rows: list[_Row]) -> list[int]:
    """Return the next token of each row: argmax at temperature 0, else one inverse-CDF draw."""
    best, tokens = logits_RV.max(-1)  # on a CPU faster than argmax
    bad = ~torch.isfinite(best)  # a NaN is the largest
    if bool(bad.any()):
        name = rows[int(bad.nonzero()[0])].request.id
        raise UserError(f"request {name!r}: the target's logits are not finite; load the target in float32.")
    for top_k, cut in {(row.request.top_k, row.request.top_p < 1) for row in rows if row.request.temperature > 0}:
        hot = [
            r
            for r, row in enumerate(rows)
            if row.request.temperature > 0 and (row.request.top_k, row.request.top_p < 1) == (top_k, cut)
        ]
        asked = [rows[r].request for r in hot]
        tokens[hot] = _draw(
            logits_RV[hot].float() / logits_RV.new_tensor([r.temperature for r in asked], dtype=torch.float32)[:, None],
            top_k,
            logits_RV.new_tensor([r.top_p for r in asked], dtype=torch.float64) if cut else None,
            logits_RV.new_tensor([rows[r].coins[len(rows[r].generated)] for r in hot], dtype=torch.float64),
        )
    return tokens.tolist()


def _draw(logits_RV: Tensor, top_k: int, top_p_R: Tensor | None, coins_R: Tensor) -> Tensor:
    """Return one token per row drawn from its logits: the top k (0: all), then the nucleus of top_p (None: all)."""
    ids: Tensor | None = None
    if top_k:
        logits_RV, ids = logits_RV.topk(min(top_k, logits_RV.shape[-1]), dim=-1)
    if top_p_R is None:
        weights = logits_RV.softmax(-1)
    else:
        weights, places = nucleus(logits_RV.float().softmax(-1), top_p_R)
        ids = places if ids is None else ids.gather(1, places)
    drawn = draw(weights, coins_R)
    return drawn if ids is None else ids.gather(1, drawn[:, None]).squeeze(1)
