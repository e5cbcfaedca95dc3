"""Whether a session's caches are those of a fresh prefill of the text that each row has so far."""

from typing import Any

import torch
from torch import Tensor

from eyas.inference.eagle_drafter import EagleDrafting
from eyas.inference.model_drafter import ModelDrafting
from eyas.inference.paced_drafting import PacedDrafting
from eyas.inference.sampling import Sampling
from eyas.inference.session import Session
from eyas.models.kv_cache import FP8, KVCache
from eyas.models.target import Target


def close(ours: Tensor, true: Tensor) -> None:
    """Assert equality within 1e-5 of the largest entry; in fp8, where rounding may tip over, of all but 1 %."""
    if ours.dtype == FP8:
        off = (ours.float() - true.float()).abs()
        assert int((off > 0).sum()) <= max(2, off.numel() // 100)
        assert bool((off <= true.float().abs().clamp(min=2.0**-6) / 8).all())  # one step of its 3 bits
        return
    scale = max(1.0, float(true.abs().max()))
    assert float((ours - true).abs().max()) <= 1e-5 * scale


def check_target_cache(target: Target, cache: KVCache, row: int, text: list[int]) -> Any:
    """Compare a row of the target's cache with a fresh prefill of the text; returns the prefill's states."""
    cached = len(text) - 1
    fresh = target.new_cache(batch=1, capacity=cached, dtype=cache.dtype)
    fresh.write_at(0, cached)
    out = target.forward(torch.tensor([text[:-1]]), cache=fresh)
    for ours, true in zip(cache.buffers, fresh.buffers, strict=True):
        close(ours.keys[row, :, :cached], true.keys[0])
        close(ours.values[row, :, :cached], true.values[0])
    return out


def check_draft_cache(drafting: EagleDrafting, row: int, text: list[int], out: Any) -> None:
    """Compare a row of the head's cache with a fresh pass over the text, and the state of its last slot."""
    cached, cache = len(text) - 1, drafting.cache
    assert (cache.lengths[row], cache.tree_length) == (cached, 0)
    fresh = EagleDrafting(drafting.head, drafting.tree)
    fresh.join([tuple(text)], [Sampling()], capacity=cached)
    fresh.extend(0, [text[1:]], out)
    for name in ("keys", "values"):
        close(getattr(cache, name)[:, row, :, :cached], getattr(fresh.cache, name)[:, 0, :, :cached])
    close(drafting.features_RD[row], fresh.features_RD[0])
    close(drafting.logits_RU[row], fresh.logits_RU[0])


def check_session(session: Session) -> None:
    assert session.cache is not None
    for r, running in enumerate(session.rows):
        text = [*running.request.prompt_ids, *running.tokens]
        assert running.cached == len(text) - 1
        out = check_target_cache(session.target, session.cache, r, text)
        if isinstance(session.drafting, EagleDrafting):
            check_draft_cache(session.drafting, r, text, out)
        if isinstance(session.drafting, PacedDrafting):
            fed = text[: len(text) - len(session.drafting.rows[r].tokens)]
            assert isinstance(session.drafting.drafting, EagleDrafting)
            check_draft_cache(session.drafting.drafting, r, fed, out)
        if isinstance(session.drafting, ModelDrafting):
            mine = session.drafting.rows[r]
            assert session.drafting.cache is not None
            assert mine.text == text
            assert mine.cached >= len(text) - 2
            check_target_cache(session.drafting.model, session.drafting.cache, r, text[: mine.cached + 1])
