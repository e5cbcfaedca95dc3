"""The three kernels of chain verification: prefix probabilities, residual masses by chunk, decision and bonus token."""

from __future__ import annotations

import torch
from torch import Tensor

from eyas.kernels.block_statistics import AOT_ELEMENTS
from eyas.kernels.draw_tokens import pick
from eyas.kernels.triton_support import KernelBuild, jit, next_power_of_two, on_device, tl
from eyas.kernels.truncate import Truncated, probability

CHUNK = 1024


def launch_verify_chain(
    target: Truncated,
    draft: Truncated,
    tokens_BK: Tensor,
    draft_ids_V: Tensor | None,
    coins_BK: Tensor,
    bonus_coins_B: Tensor,
    *,
    block: bool,
) -> tuple[Tensor, Tensor]:
    """(accepted_B, bonus_B); `target` covers one node more per row than `draft`."""
    B, N, V = target.logits_BNV.shape
    U = draft.logits_BNV.shape[2]
    device = tokens_BK.device
    chunks = -(-V // CHUNK)
    prefix_BN = torch.empty((B, N), dtype=torch.float64, device=device)
    chance_BN = torch.empty_like(prefix_BN)
    mass_BNM = torch.empty((B, N, chunks), dtype=torch.float32, device=device)
    accepted_B = torch.empty(B, dtype=torch.int64, device=device)
    bonus_B = torch.empty_like(accepted_B)
    if B == 0:
        return accepted_B, bonus_B
    has_map = draft_ids_V is not None
    ids = draft_ids_V.contiguous() if draft_ids_V is not None else tokens_BK
    distributions = (*_arguments(target), *_arguments(draft))
    shape = {"num_slots": N, "width": V, "draft_width": U}
    constants = {"HAS_MAP": has_map, "BLOCK_RULE": block}
    with on_device(device):
        _chain_prefix_kernel[(B,)](
            *distributions, ids, tokens_BK.contiguous(), prefix_BN, chance_BN, **shape, HAS_MAP=has_map, num_warps=1
        )
        _chain_residual_kernel[(B * N, chunks)](
            *distributions, ids, prefix_BN, mass_BNM, **shape, chunks=chunks, **constants, CHUNK=CHUNK, num_warps=4
        )
        _chain_decision_kernel[(B,)](
            *distributions,
            ids,
            prefix_BN,
            chance_BN,
            mass_BNM,
            coins_BK.contiguous(),
            bonus_coins_B.contiguous(),
            accepted_B,
            bonus_B,
            **shape,
            chunks=chunks,
            **constants,
            BLOCK_M=next_power_of_two(chunks),
            CHUNK=CHUNK,
            num_warps=4,
        )
    return accepted_B, bonus_B


def _arguments(x: Truncated) -> tuple[Tensor, ...]:
    return x.logits_BNV, x.num_nodes_B.contiguous(), x.temperature_B, x.top_BN, x.cut_BN, x.only_BN, x.total_BN


@jit
def _target_probability(slot, row, token, inside, logits, temperature, top, cut, only, total, width):
    logit = tl.load(logits + slot * width + token, mask=inside, other=-float("inf")).to(tl.float32)
    p = probability(
        logit, token, tl.load(temperature + row), tl.load(top + slot), tl.load(cut + slot), tl.load(only + slot),
        tl.load(total + slot),
    )  # fmt: skip
    return tl.where(inside, p, 0.0)


@jit
def _draft_probability(
    slot, row, token, inside, ids, logits, temperature, top, cut, only, total, width, HAS_MAP: tl.constexpr
):
    draft_id = token
    if HAS_MAP:
        draft_id = tl.load(ids + token, mask=inside, other=-1)
    known = inside & (draft_id >= 0) & (draft_id < width)
    logit = tl.load(logits + slot * width + draft_id, mask=known, other=-float("inf")).to(tl.float32)
    q = probability(
        logit, draft_id, tl.load(temperature + row), tl.load(top + slot), tl.load(cut + slot), tl.load(only + slot),
        tl.load(total + slot),
    )  # fmt: skip
    return tl.where(known, q, 0.0)


@jit
def _chain_prefix_kernel(
    p_logits, p_nodes, p_temperature, p_top, p_cut, p_only, p_total,
    q_logits, q_nodes, q_temperature, q_top, q_cut, q_only, q_total,
    ids, tokens_ptr, prefix_ptr, chance_ptr,
    num_slots, width, draft_width,
    HAS_MAP: tl.constexpr,
):  # fmt: skip
    # One program per row walks its drafts. Entry i+1 of `prefix` and `chance` belongs to draft i: P_{i+1}, and p / q.
    row = tl.program_id(0).to(tl.int64)
    drafted = tl.minimum(tl.load(q_nodes + row), num_slots - 1)
    prefix = tl.full([], 1.0, tl.float64)
    tl.store(prefix_ptr + row * num_slots, prefix)
    tl.store(chance_ptr + row * num_slots, prefix)
    for i in range(0, num_slots - 1):
        drafts = row * (num_slots - 1) + i
        token = tl.load(tokens_ptr + drafts)
        inside = (i < drafted) & (token >= 0) & (token < width)
        p = tl.full([], 0.0, tl.float64)
        q = tl.full([], 0.0, tl.float64)
        if inside:
            p = _target_probability(
                row * num_slots + i, row, token, inside, p_logits, p_temperature, p_top, p_cut, p_only, p_total, width
            ).to(tl.float64)
            q = _draft_probability(
                drafts, row, token, inside, ids, q_logits, q_temperature, q_top, q_cut, q_only, q_total, draft_width,
                HAS_MAP,
            ).to(tl.float64)  # fmt: skip
        # A draft that its head could not have drawn counts as certain: accepted iff the target allows it.
        ratio = tl.where(q > 0.0, p / tl.where(q > 0.0, q, 1.0), tl.where(p > 0.0, 1.0, 0.0))
        ratio = tl.where(p == p, ratio, float("nan"))
        product = prefix * ratio
        prefix = tl.where(product > 1.0, 1.0, product)
        tl.store(prefix_ptr + row * num_slots + i + 1, prefix)
        tl.store(chance_ptr + row * num_slots + i + 1, ratio)


@jit
def _residual(
    row, slot, i, drafted, token_L, prefix_ptr,
    p_logits, p_temperature, p_top, p_cut, p_only, p_total,
    q_logits, q_temperature, q_top, q_cut, q_only, q_total,
    ids, num_slots, width, draft_width, HAS_MAP: tl.constexpr, BLOCK_RULE: tl.constexpr,
):  # fmt: skip
    # relu(P_i p - q) after i drafts, at some tokens; p behind the whole chain.
    inside_L = token_L < width
    p_L = _target_probability(
        slot, row, token_L, inside_L, p_logits, p_temperature, p_top, p_cut, p_only, p_total, width
    )
    if i < drafted:
        q_L = _draft_probability(
            row * (num_slots - 1) + i, row, token_L, inside_L, ids, q_logits, q_temperature, q_top, q_cut, q_only,
            q_total, draft_width, HAS_MAP,
        )  # fmt: skip
        scaled_L = p_L
        if BLOCK_RULE:
            scaled_L = p_L * tl.load(prefix_ptr + slot).to(tl.float32)
        rest_L = scaled_L - q_L
        p_L = tl.where(rest_L > 0.0, rest_L, tl.where(rest_L == rest_L, 0.0, float("nan")))
    return p_L


@jit
def _chain_residual_kernel(
    p_logits, p_nodes, p_temperature, p_top, p_cut, p_only, p_total,
    q_logits, q_nodes, q_temperature, q_top, q_cut, q_only, q_total,
    ids, prefix_ptr, mass_ptr,
    num_slots, width, draft_width, chunks,
    HAS_MAP: tl.constexpr, BLOCK_RULE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    # Program (place in a row, chunk of the vocabulary): the mass of the residual there.
    slot = tl.program_id(0).to(tl.int64)
    row = slot // num_slots
    i = slot % num_slots
    drafted = tl.minimum(tl.load(q_nodes + row), num_slots - 1)
    if i <= drafted:
        token_L = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
        rest_L = _residual(
            row, slot, i, drafted, token_L, prefix_ptr, p_logits, p_temperature, p_top, p_cut, p_only, p_total,
            q_logits, q_temperature, q_top, q_cut, q_only, q_total, ids, num_slots, width, draft_width,
            HAS_MAP, BLOCK_RULE,
        )  # fmt: skip
        tl.store(mass_ptr + slot * chunks + tl.program_id(1), tl.sum(rest_L))


@jit
def _chain_decision_kernel(
    p_logits, p_nodes, p_temperature, p_top, p_cut, p_only, p_total,
    q_logits, q_nodes, q_temperature, q_top, q_cut, q_only, q_total,
    ids, prefix_ptr, chance_ptr, mass_ptr, coins_ptr, bonus_coins_ptr, accepted_ptr, bonus_ptr,
    num_slots, width, draft_width, chunks,
    HAS_MAP: tl.constexpr, BLOCK_RULE: tl.constexpr, BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    # One program per row: how many drafts stand, then the bonus, first its chunk, then the token in it.
    row = tl.program_id(0).to(tl.int64)
    drafted = tl.minimum(tl.load(q_nodes + row), num_slots - 1)
    accepted = tl.full([], 0, tl.int64)
    bonus = tl.full([], -1, tl.int64)
    if drafted >= 0:
        chunk_M = tl.arange(0, BLOCK_M)
        in_row_M = chunk_M < chunks
        going = drafted > 0
        for i in range(1, num_slots):
            slot = row * num_slots + i
            coin = tl.load(coins_ptr + row * (num_slots - 1) + i - 1)
            chance = tl.load(chance_ptr + slot)
            if BLOCK_RULE:
                prefix = tl.load(prefix_ptr + slot)
                if i < drafted:
                    mass_M = tl.load(mass_ptr + slot * chunks + chunk_M, mask=in_row_M, other=0.0)
                    mass = tl.sum(mass_M.to(tl.float64))
                    whole = mass + 1.0 - prefix
                    chance = tl.where(whole > 0.0, mass / tl.where(whole > 0.0, whole, 1.0), 1.0)
                    chance = tl.where(whole == whole, chance, 0.0)
                else:
                    chance = prefix
                accepted = tl.where((i <= drafted) & (coin < chance), i, accepted)
            else:
                going = going & (i <= drafted) & (coin < chance)
                accepted = tl.where(going, i, accepted)

        slot = row * num_slots + accepted
        mass_M = tl.load(mass_ptr + slot * chunks + chunk_M, mask=in_row_M, other=0.0).to(tl.float64)
        coin = tl.load(bonus_coins_ptr + row)
        mass = tl.sum(mass_M)
        if mass == 0.0:
            # p = q up to rounding: nothing is left over, so the bonus is drawn from p itself.
            for chunk in range(0, chunks):
                token_L = chunk * CHUNK + tl.arange(0, CHUNK)
                p_L = _target_probability(
                    slot, row, token_L, token_L < width, p_logits, p_temperature, p_top, p_cut, p_only, p_total, width
                )
                mass_M = tl.where(chunk_M == chunk, tl.sum(p_L).to(tl.float64), mass_M)
            mass = tl.sum(mass_M)
            drafted = accepted
        target = coin * mass + tl.zeros([1], tl.float64)
        picked, before = pick(mass_M[None, :], target, chunk_M[None, :], BLOCK_M)
        lane_L = tl.arange(0, CHUNK)
        token_L = tl.sum(picked) * CHUNK + lane_L
        rest_L = _residual(
            row, slot, accepted, drafted, token_L, prefix_ptr, p_logits, p_temperature, p_top, p_cut, p_only, p_total,
            q_logits, q_temperature, q_top, q_cut, q_only, q_total, ids, num_slots, width, draft_width,
            HAS_MAP, BLOCK_RULE,
        )  # fmt: skip
        lane, _ = pick(rest_L.to(tl.float64)[None, :], target - before, lane_L[None, :], CHUNK)
        token = tl.sum(picked).to(tl.int64) * CHUNK + tl.sum(lane)
        bonus = tl.where((tl.sum(picked) < BLOCK_M) & (tl.sum(lane) < CHUNK) & (mass == mass), token, -1)
    tl.store(accepted_ptr + row, accepted)
    tl.store(bonus_ptr + row, bonus)


def aot_builds() -> list[KernelBuild]:
    """The compilations that `eyas.kernels.aot` checks: both rules, with and without a draft vocabulary, two types."""
    distributions: dict[str, str] = {}
    for side in ("p", "q"):
        distributions |= {f"{side}_{name}": "*fp32" for name in ("temperature", "top", "cut")}
        distributions |= {f"{side}_nodes": "*i64", f"{side}_only": "*i64", f"{side}_total": "*fp64"}
    more = {
        "prefix": {"tokens_ptr": "*i64", "prefix_ptr": "*fp64", "chance_ptr": "*fp64"},
        "residual": {"prefix_ptr": "*fp64", "mass_ptr": "*fp32"},
        "decision": {
            **dict.fromkeys(("prefix_ptr", "chance_ptr", "coins_ptr", "bonus_coins_ptr"), "*fp64"),
            **dict.fromkeys(("accepted_ptr", "bonus_ptr"), "*i64"),
            "mass_ptr": "*fp32",
        },
    }
    kernels: dict[str, tuple[object, dict[str, int], int]] = {
        "prefix": (_chain_prefix_kernel, {}, 1),
        "residual": (_chain_residual_kernel, {"CHUNK": CHUNK}, 4),
        "decision": (_chain_decision_kernel, {"CHUNK": CHUNK, "BLOCK_M": 128}, 4),
    }
    builds = []
    for element in AOT_ELEMENTS:
        for has_map, rule in ((True, "block"), (True, "token"), (False, "block")):
            for name, (kernel, constants, warps) in kernels.items():
                pointers = {
                    "p_logits": f"*{element}",
                    "q_logits": f"*{element}",
                    **distributions,
                    "ids": "*i64",
                    **more[name],
                }
                if name == "prefix" and rule == "token":
                    continue  # the same for both rules
                builds.append(
                    KernelBuild(
                        name=f"verify_chain {name} {element} {rule} {'draft' if has_map else 'whole'} vocabulary",
                        kernel=kernel,
                        types={
                            **pointers,
                            **dict.fromkeys(("num_slots", "width", "draft_width"), "i32"),
                            **({} if name == "prefix" else {"chunks": "i32"}),
                        },
                        aligned=frozenset((*pointers, "width", "draft_width")),
                        constants={
                            "HAS_MAP": has_map,
                            **({} if name == "prefix" else {"BLOCK_RULE": rule == "block"}),
                            **constants,
                        },
                        options={"num_warps": warps},
                    )
                )
    return builds
