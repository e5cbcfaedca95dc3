"""Stops and limits inside an accepted block, token by token: ids, text, counts and log-probabilities."""

from collections.abc import Callable

import pytest
import torch

from eyas.inference.draft import ChainTree, DynamicTree, StaticTree, TreeMaker
from eyas.inference.engine import Engine, Generation, GenerationRequest
from eyas.inference.prompt_lookup import PromptLookup
from eyas.inference.sampling import Sampling
from eyas.models.errors import UserError
from eyas.models.target import Target
from eyas.tests.inference.heads import TableHead, greedy, random_prompt, table_head
from eyas.tests.toys import byte_tokenizer, tiny_target

TOKENIZER = byte_tokenizer()
TARGET = tiny_target(vocab_size=len(TOKENIZER), layers=3, aux_layers=(0, 1, 3))
MAKERS: dict[str, TreeMaker] = {"chain": ChainTree(4), "tree": DynamicTree(4, 3, 10), "static": StaticTree()}


def decode(tokens: list[int]) -> str:
    return "".join(chr(0x100 + token) for token in tokens)


def first_distinct(count: int) -> tuple[tuple[int, ...], list[int]]:
    """Return a prompt whose greedy continuation starts with `count` different tokens, and that continuation."""
    for seed in range(100):
        prompt = random_prompt(5, seed=seed)
        text = greedy(TARGET, prompt, 20)
        if len(set(text[:count])) == count:
            return prompt, text
    raise AssertionError("no such prompt")


PROMPT, TEXT = first_distinct(9)
OTHER = random_prompt(3, seed=77)
OTHER_TEXT = greedy(TARGET, OTHER, 20)


def oracle() -> TableHead:
    return table_head(TARGET, [[*PROMPT, *TEXT], [*OTHER, *OTHER_TEXT]])


def both(maker: TreeMaker, *requests: GenerationRequest) -> list[tuple[Generation, Generation]]:
    """Return (plain, speculative) of each request, all of them in one batch, with everything comparable equal."""
    plain = Engine(TARGET, decode=decode).generate(requests)
    found = Engine(TARGET, oracle(), maker, decode=decode).generate(requests)
    for a, b in zip(plain, found, strict=True):
        assert (a.token_ids, a.text, a.finish_reason) == (b.token_ids, b.text, b.finish_reason)
        emitted = 1 + sum(len(made.tokens) for made in b.rounds)
        assert (
            emitted
            == len(b.token_ids)
            == 1 + b.stats.accepted + sum(len(made.tokens) > made.accepted for made in b.rounds)
        )
        if a.logprobs is not None:
            assert b.logprobs is not None
            assert len(a.logprobs) == len(a.token_ids)
            assert b.logprobs == pytest.approx(a.logprobs, abs=1e-4)
    return list(zip(plain, found, strict=True))


@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("place", [1, 3, 4, 5])
def test_a_stop_token_inside_a_block_ends_one_request_and_the_other_goes_on(maker: TreeMaker, place: int) -> None:
    stops = frozenset({TEXT[place - 1]})
    ending = GenerationRequest(PROMPT, 20, stops, logprobs=True)
    going = GenerationRequest(OTHER, 15, logprobs=True)
    (plain, found), (_, other) = both(maker, ending, going)
    assert list(found.token_ids) == TEXT[:place]
    assert (found.finish_reason, other.finish_reason) == ("stop", "length")
    assert list(other.token_ids) == OTHER_TEXT[:15]
    assert plain.text == decode(TEXT[:place])
    assert found.stats.rounds == (place > 1)


@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("limit", [1, 2, 3, 5])
def test_limits_inside_a_block(maker: TreeMaker, limit: int) -> None:
    ((_, found),) = both(maker, GenerationRequest(PROMPT, limit, logprobs=True))
    assert list(found.token_ids) == TEXT[:limit]
    assert found.finish_reason == "length"
    stop = frozenset({TEXT[limit - 1]})
    ((_, found),) = both(maker, GenerationRequest(PROMPT, limit, stop))
    assert found.finish_reason == "stop", "a stop inside the budget wins over the limit"


@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
def test_ignored_stop_tokens_end_nothing(maker: TreeMaker) -> None:
    ((_, found),) = both(maker, GenerationRequest(PROMPT, 20, frozenset(TEXT), ignore_eos=True))
    assert list(found.token_ids) == TEXT


@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize(("start", "stop"), [(3, 5), (2, 3), (0, 1), (4, 8), (0, 6)])
def test_a_stop_string_split_over_tokens_ends_the_text_before_it(maker: TreeMaker, start: int, stop: int) -> None:
    """The token that completes the string is the last one returned, the text ends before the string."""
    strings = ("not in the text", decode(TEXT[start:stop]))
    ending = GenerationRequest(PROMPT, 20, stop_strings=strings, logprobs=True)
    (_, found), (_, other) = both(maker, ending, GenerationRequest(OTHER, 12))
    assert list(found.token_ids) == TEXT[:stop]
    assert found.text == decode(TEXT[:start])
    assert found.finish_reason == "stop"
    assert len(other.token_ids) == 12


@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
def test_a_stop_string_that_ends_in_the_middle_of_a_token_is_found(maker: TreeMaker) -> None:
    words = {token: f"<{token}>" for token in range(TARGET.vocab_size)}

    def spell(tokens: list[int]) -> str:
        return "".join(words[token] for token in tokens)

    string = f"{TEXT[2]}><{str(TEXT[3])[0]}"  # from inside token 3 into token 4
    request = GenerationRequest(PROMPT, 20, stop_strings=(string,))
    for engine in (Engine(TARGET, decode=spell), Engine(TARGET, oracle(), maker, decode=spell)):
        found = engine.generate(request)
        assert list(found.token_ids) == TEXT[:4]
        assert found.text == spell(TEXT[:2]) + "<"


def test_stop_strings_of_real_bytes_are_found_through_the_tokenizer() -> None:
    def say(tokens: list[int]) -> str:
        return str(TOKENIZER.decode(tokens))

    whole = say(TEXT)
    string = whole[2:5]
    found = Engine(TARGET, oracle(), ChainTree(4), decode=say).generate(
        GenerationRequest(PROMPT, 20, stop_strings=(string,))
    )
    assert found.text == whole[: whole.index(string)]
    assert string in say(list(found.token_ids))
    assert string not in say(list(found.token_ids[:-1]))


def test_stop_strings_without_a_decoder_and_empty_ones_are_refused() -> None:
    with pytest.raises(UserError, match="stop strings need an engine that can decode"):
        Engine(TARGET).generate(GenerationRequest(PROMPT, 5, stop_strings=("x",)))
    with pytest.raises(UserError, match="a stop string must not be empty"):
        GenerationRequest(PROMPT, 5, stop_strings=("x", ""))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_are_the_targets_own(temperature: float) -> None:
    sampling = Sampling(temperature, top_k=5 if temperature else 0)
    request = GenerationRequest(PROMPT, 12, sampling=sampling, logprobs=True)
    drafters: list[Callable[[], Engine]] = [
        lambda: Engine(TARGET),
        lambda: Engine(TARGET, oracle(), MAKERS["tree"]),
        lambda: Engine(TARGET, drafter=PromptLookup(4, 1)),
    ]
    for make in drafters:
        found = make().generate(request)
        ids = torch.tensor([[*PROMPT, *found.token_ids]])
        logits = TARGET.model(input_ids=ids).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
        expected = logits.gather(1, torch.tensor(found.token_ids)[:, None]).squeeze(1).tolist()
        assert found.logprobs == pytest.approx(expected, abs=1e-4)
    assert Engine(TARGET).generate(GenerationRequest(PROMPT, 3)).logprobs is None


def test_text_needs_a_decoder() -> None:
    assert Engine(TARGET).generate(GenerationRequest(PROMPT, 3)).text is None
    assert Engine(TARGET, decode=decode).generate(GenerationRequest(PROMPT, 3)).text == decode(TEXT[:3])


def test_the_toys_stand_on_a_target_of_the_tokenizers_size() -> None:
    assert isinstance(TARGET, Target)
    assert TARGET.vocab_size == len(TOKENIZER) == 258
