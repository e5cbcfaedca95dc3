"""Batched decoding against decoding one by one: same tokens, whatever the batch, the order or the neighbours."""

from dataclasses import replace

import pytest
import torch
from scipy.stats import chisquare

from eyas.data.backends import Reply, Request
from eyas.data.batch_decode import BatchDecoder
from eyas.models.draw import draw
from eyas.models.errors import UserError
from eyas.models.target import Target
from eyas.tests.toys import tiny_target

STOPS = frozenset({2, 31, 60})
TARGET = tiny_target(aux_layers=())


def requests(*, temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0) -> list[Request]:
    """Eleven requests with prompts of 1 to 23 tokens and limits of 1 to 24."""
    generator = torch.Generator().manual_seed(1)
    prompts, limits = [7, 1, 23, 3, 12, 2, 19, 5, 5, 9, 16], [24, 18, 1, 24, 2, 9, 24, 13, 24, 5, 24]
    made = []
    for n, (prompt, new) in enumerate(zip(prompts, limits, strict=True)):
        ids = torch.randint(3, 97, (prompt,), generator=generator).tolist()
        made.append(Request(f"r{n}", tuple(ids), new, STOPS, temperature, top_k, top_p, seed=100 + n))
    return made


def decode(asked: list[Request], *, batch: int, target: Target = TARGET, capacity: int = 64) -> dict[str, Reply]:
    replies = list(BatchDecoder(target, batch=batch, capacity=capacity).run(asked))
    assert sorted(reply.request.id for reply in replies) == sorted(request.id for request in asked)
    return {reply.request.id: reply for reply in replies}


def tokens(replies: dict[str, Reply]) -> dict[str, tuple[int, ...]]:
    return {name: reply.token_ids for name, reply in replies.items()}


@torch.inference_mode()
def greedy_alone(request: Request) -> tuple[int, ...]:
    """What transformers' own generate writes for one request."""
    ids = torch.tensor([request.prompt_ids])
    out = TARGET.model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=request.max_new_tokens,
        eos_token_id=sorted(request.stop_ids), pad_token_id=0,
    )  # fmt: skip
    return tuple(out[0, ids.shape[1] :].tolist())


@torch.inference_mode()
def sampled_alone(request: Request) -> tuple[int, ...]:
    """The same draws from a full forward over the text at every token, without a cache."""
    coins = torch.Generator().manual_seed(request.seed)
    text = list(request.prompt_ids)
    for _ in range(request.max_new_tokens):
        logits = TARGET.model(torch.tensor([text]), use_cache=False).logits[:, -1] / request.temperature
        coin = torch.rand(1, generator=coins, dtype=torch.float64)
        text.append(int(draw(logits.softmax(-1), coin)))
        if text[-1] in request.stop_ids:
            break
    return tuple(text[len(request.prompt_ids) :])


@pytest.mark.parametrize("batch", [1, 3, 8, 40])
def test_greedy_replies_equal_generate_one_by_one(batch: int) -> None:
    asked = requests()
    expected = {request.id: greedy_alone(request) for request in asked}
    assert tokens(decode(asked, batch=batch)) == expected
    assert {len(reply) for reply in expected.values()} >= {1, 2, 5, 24}


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_stop_token_is_kept_and_finish_reasons_are_exact(batch: int) -> None:
    replies = decode(requests(), batch=batch)
    reasons = [reply.finish_reason for reply in replies.values()]
    assert min(reasons.count("stop"), reasons.count("length")) >= 2
    for reply in replies.values():
        stops = [token in STOPS for token in reply.token_ids]
        assert not any(stops[:-1])
        assert reply.finish_reason == ("stop" if stops[-1] else "length")
        if reply.finish_reason == "length":
            assert len(reply.token_ids) == reply.request.max_new_tokens


def test_stop_token_at_the_limit_counts_as_a_stop() -> None:
    request = next(r for r in requests() if r.max_new_tokens == 24)
    text = greedy_alone(replace(request, stop_ids=frozenset({96_000})))
    stopped = replace(request, stop_ids=frozenset({text[0]}), max_new_tokens=1)
    (reply,) = decode([stopped], batch=2).values()
    assert (reply.token_ids, reply.finish_reason) == ((text[0],), "stop")


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_sampled_replies_equal_draws_from_uncached_forwards(batch: int) -> None:
    asked = requests(temperature=0.8)
    assert tokens(decode(asked, batch=batch)) == {request.id: sampled_alone(request) for request in asked}


def test_sampled_replies_do_not_depend_on_order_or_neighbours() -> None:
    asked = requests(temperature=1.1)
    alone = {request.id: decode([request], batch=1)[request.id].token_ids for request in asked}
    assert tokens(decode(asked[::-1], batch=4)) == alone
    neighbours = [replace(request, id=f"greedy-{request.id}") for request in requests()]
    mixed = tokens(decode([*neighbours, *asked], batch=5))
    assert {name: mixed[name] for name in alone} == alone
    assert all(mixed[request.id] == greedy_alone(request) for request in neighbours)


def test_equal_seeds_write_equal_text_and_different_seeds_do_not() -> None:
    base = Request("a", (5, 6, 7), 12, frozenset({96_000}), temperature=1.0, seed=4)
    replies = tokens(decode([base, replace(base, id="same"), replace(base, id="other", seed=5)], batch=2))
    assert replies["a"] == replies["same"] != replies["other"]


@pytest.mark.parametrize("batch", [1, 4])
def test_top_k_draws_only_from_the_k_likeliest(batch: int) -> None:
    asked = requests(temperature=3.0, top_k=3)
    seen: set[int] = set()
    for reply in decode(asked, batch=batch).values():
        text = torch.tensor([reply.request.prompt_ids + reply.token_ids])
        logits = TARGET.model(text, use_cache=False).logits[0, len(reply.request.prompt_ids) - 1 : -1]
        for row, token in zip(logits, reply.token_ids, strict=True):
            rank = int((row > row[token]).sum())
            assert rank < 3
            seen.add(rank)
    assert seen == {0, 1, 2}


@torch.inference_mode()
def cut_alone(request: Request) -> tuple[int, ...]:
    """Draws from a sorted vocabulary, cut to the top k and then to the top p, likeliest first, without a cache."""
    coins = torch.Generator().manual_seed(request.seed)
    text = list(request.prompt_ids)
    for _ in range(request.max_new_tokens):
        logits = TARGET.model(torch.tensor([text]), use_cache=False).logits[0, -1] / request.temperature
        ranked = logits.sort(descending=True, stable=True)
        ranked_logits = ranked.values[: request.top_k or None]
        masses = ranked_logits.softmax(-1).double()
        before = torch.cat([masses.new_zeros(1), masses.cumsum(0)[:-1]])
        masses[before >= request.top_p] = 0.0
        coin = torch.rand(1, generator=coins, dtype=torch.float64)
        text.append(int(ranked.indices[draw(masses[None], coin)]))
        if text[-1] in request.stop_ids:
            break
    return tuple(text[len(request.prompt_ids) :])


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 0.9), (0, 0.3), (7, 0.8), (40, 0.95)])
@pytest.mark.parametrize("batch", [1, 5])
def test_top_p_replies_equal_draws_from_a_sorted_vocabulary(top_k: int, top_p: float, batch: int) -> None:
    asked = requests(temperature=1.3, top_k=top_k, top_p=top_p)
    assert tokens(decode(asked, batch=batch)) == {request.id: cut_alone(request) for request in asked}


def test_a_tiny_top_p_is_greedy_and_a_full_one_changes_nothing() -> None:
    greedy = tokens(decode(requests(), batch=3))
    assert tokens(decode(requests(temperature=5.0, top_p=1e-6), batch=3)) == greedy
    plain = tokens(decode(requests(temperature=1.1), batch=3))
    assert tokens(decode(requests(temperature=1.1, top_p=1.0), batch=4)) == plain
    assert tokens(decode(requests(temperature=1.1, top_p=0.5), batch=3)) != plain


def test_top_k_of_one_is_greedy_and_a_large_one_keeps_the_whole_vocabulary() -> None:
    greedy = tokens(decode(requests(), batch=3))
    assert tokens(decode(requests(temperature=5.0, top_k=1), batch=3)) == greedy
    hot = [replace(request, max_new_tokens=24) for request in requests(temperature=9.0, top_k=10_000)]
    assert len({token for reply in decode(hot, batch=3).values() for token in reply.token_ids}) > 50


def test_requests_of_different_styles_share_a_batch() -> None:
    styles = [(0.0, 0, 1.0), (0.9, 0, 1.0), (0.9, 4, 1.0), (0.5, 20, 0.7), (1.5, 2, 1.0), (1.2, 0, 0.9), (0.8, 0, 0.6)]
    asked = []
    for n, request in enumerate(requests()):
        temperature, top_k, top_p = styles[n % 7]
        asked.append(replace(request, temperature=temperature, top_k=top_k, top_p=top_p))
    alone = {request.id: decode([request], batch=1)[request.id].token_ids for request in asked}
    assert tokens(decode(asked, batch=6)) == alone


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, 0), (0.6, 0), (1.0, 5)])
def test_first_sampled_token_passes_chi_square(temperature: float, top_k: int) -> None:
    target = tiny_target(vocab_size=11, aux_layers=(), initializer_range=0.2)
    prompt, count = (3, 4, 9), 4000
    asked = [
        Request(str(n), prompt, 1, frozenset({11}), temperature=temperature, top_k=top_k, seed=n) for n in range(count)
    ]
    replies = decode(asked, batch=500, target=target, capacity=8)
    seen = torch.tensor([reply.token_ids[0] for reply in replies.values()]).bincount(minlength=11).double()
    logits = target.model(torch.tensor([prompt])).logits[0, -1].double()
    kept = logits.topk(top_k or 11).indices

    def pvalue(hot: float) -> float:
        expected = (logits[kept] / hot).softmax(-1) * count
        return float(chisquare(seen[kept].numpy(), expected.detach().numpy(), sum_check=False).pvalue)

    assert seen[kept].sum() == count
    assert pvalue(temperature) > 1e-3
    assert pvalue(temperature * 1.25) < 1e-6


def test_too_long_request_is_refused_by_id_before_any_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target(aux_layers=())
    monkeypatch.setattr(target, "forward", lambda *_, **__: pytest.fail("worked before checking"))
    asked = [*requests(), Request("long", (5,) * 50, 15, STOPS)]
    with pytest.raises(UserError, match=r"request 'long' needs 65 tokens \(prompt 50 \+ new 15\), more than the 64"):
        list(BatchDecoder(target, batch=2, capacity=64).run(asked))


def test_request_of_exactly_the_capacity_is_decoded() -> None:
    request = Request("full", (5,) * 50, 14, frozenset({96_000}))
    assert decode([request], batch=2)["full"].token_ids == greedy_alone(request)


def test_capacity_ends_at_the_targets_positions() -> None:
    decoder = BatchDecoder(tiny_target(aux_layers=(), max_position_embeddings=32), batch=1, capacity=64)
    with pytest.raises(UserError, match="more than the 32 allowed"):
        list(decoder.run([Request("r", (5,) * 20, 13, STOPS)]))


@pytest.mark.parametrize(("prompt", "new"), [((), 4), ((5, 6), 0), ((5, 6), -3)])
def test_request_without_a_prompt_or_room_for_a_reply_is_refused(prompt: tuple[int, ...], new: int) -> None:
    with pytest.raises(UserError, match=r"request 'none' has .* at least one"):
        decode([Request("none", prompt, new, STOPS)], batch=1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_target_whose_logits_are_not_numbers_is_refused_by_request(temperature: float) -> None:
    target = tiny_target(aux_layers=())
    target.model.model.norm.weight.data[3] = float("nan")
    with pytest.raises(UserError, match=r"request 'nan': the target's logits are not finite"):
        decode([Request("nan", (5, 6), 4, STOPS, temperature=temperature)], batch=1, target=target)


def test_no_request_is_no_work() -> None:
    assert decode([], batch=3) == {}
