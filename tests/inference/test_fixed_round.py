"""Rounds of fixed shapes against ragged ones: texts, rounds and caches; what they ask of the host; graphs on a GPU."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from eyas.inference.draft import ChainTree, DynamicTree, StaticTree, TreeMaker
from eyas.inference.eagle_drafter import EagleDrafting
from eyas.inference.engine import Engine, Generation, GenerationRequest
from eyas.inference.fixed_round import FixedRound
from eyas.inference.penalties import Penalties
from eyas.inference.prompt_lookup import PromptLookup
from eyas.inference.round_graphs import captured, no_waiting
from eyas.inference.sampling import Sampling
from eyas.inference.session import Session
from eyas.kernels import verify_tree_sampling
from eyas.kernels.triton_support import interpreted
from eyas.models.eagle3 import Eagle3Head
from eyas.models.kv_cache import FP8, FP8_CAPABILITY
from eyas.models.target import Target
from eyas.tests.inference.heads import greedy, random_prompt, soften, table_head
from eyas.tests.inference.session_checks import check_session
from eyas.tests.models.families import family_model
from eyas.tests.toys import tiny_eagle1, tiny_head, tiny_target

TARGET = tiny_target(layers=3, aux_layers=(0, 1, 3), initializer_range=0.2)
PROMPTS = [random_prompt(length, seed=20 + length) for length in (1, 7, 33)]
LIMITS = (40, 17, 29)
TEXTS = [[*prompt, *greedy(TARGET, prompt, 50)] for prompt in PROMPTS]
MAKERS: dict[str, TreeMaker] = {
    "chain": ChainTree(4),
    "dynamic": DynamicTree(4, 3, 11),
    "shallow": DynamicTree(5, 2, 3),  # fewer nodes than levels
    "wide": DynamicTree(2, 9, 70),  # two words of ancestor bits
}
HEADS: dict[str, Eagle3Head] = {
    "random": soften(tiny_head(TARGET)),
    "oracle": table_head(TARGET, TEXTS),
    "wrong at every third": table_head(TARGET, TEXTS, flawed=True),
}


def both(engine_of: Any, requests: list[GenerationRequest]) -> tuple[list[Generation], list[Generation]]:
    """Return what ragged and fixed rounds make of some requests."""
    return engine_of(False).generate(requests), engine_of(True).generate(requests)


def assert_same(ragged: list[Generation], fixed: list[Generation]) -> None:
    for one, other in zip(ragged, fixed, strict=True):
        assert one.token_ids == other.token_ids
        assert one.rounds == other.rounds


@pytest.fixture
def fixed_rounds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows of every fixed round that the test ran."""
    ran: list[int] = []
    original = FixedRound.run

    def counted(self: FixedRound, running: Any) -> Any:
        ran.append(len(running))
        return original(self, running)

    monkeypatch.setattr(FixedRound, "run", counted)
    return ran


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("name", HEADS)
def test_a_ragged_batch_has_the_rounds_of_the_ragged_path(
    name: str, maker: TreeMaker, temperature: float, fixed_rounds: list[int]
) -> None:
    requests = [
        GenerationRequest(prompt, limit, sampling=Sampling(temperature, top_p=0.9, seed=limit))
        for prompt, limit in zip(PROMPTS, LIMITS, strict=True)
    ]
    ragged, fixed = both(lambda fixed: Engine(TARGET, HEADS[name], maker, fixed=fixed), requests)
    assert_same(ragged, fixed)
    assert set(fixed_rounds) >= {1, 3}
    if temperature == 0:
        for prompt, text, generation in zip(PROMPTS, TEXTS, fixed, strict=True):
            assert list(generation.token_ids) == text[len(prompt) :][: len(generation.token_ids)]
        if name == "oracle":
            reached = {len(made.tokens) for generation in fixed for made in generation.rounds[:-1]}
            assert reached == {min(maker.depth + 1, maker.max_nodes)}


def test_plain_decoding_and_an_eagle1_head_have_fixed_rounds_too(fixed_rounds: list[int]) -> None:
    requests = [GenerationRequest(prompt, limit) for prompt, limit in zip(PROMPTS, LIMITS, strict=True)]
    assert_same(*both(lambda fixed: Engine(TARGET, fixed=fixed), requests))
    assert len(fixed_rounds) == max(LIMITS) - 1
    target = tiny_target(layers=2, aux_layers=())
    head = tiny_eagle1(target)
    assert_same(*both(lambda fixed: Engine(target, head, MAKERS["dynamic"], fixed=fixed), requests))


@pytest.mark.parametrize("name", ["gemma3_text", "mistral window", "gpt_oss"])
def test_windows_and_sinks_are_those_of_the_ragged_path(name: str) -> None:
    target = Target(family_model(name), aux_layers=(0, 1, 3))
    text = [*PROMPTS[1], *greedy(target, PROMPTS[1], 40)]
    engine = Engine(target, table_head(target, [text]), DynamicTree(4, 3, 12), fixed=True)
    found = engine.generate([GenerationRequest(PROMPTS[1], 30), GenerationRequest(PROMPTS[0], 12)])
    assert [*PROMPTS[1], *found[0].token_ids] == text[:37]
    assert {len(made.tokens) for made in found[0].rounds[:-1]} == {5}
    assert list(found[1].token_ids) == greedy(target, PROMPTS[0], 12)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", HEADS)
def test_after_every_round_both_caches_equal_a_fresh_prefill_while_rows_come_and_go(
    name: str, temperature: float, fixed_rounds: list[int]
) -> None:
    session = Engine(TARGET, HEADS[name], MAKERS["dynamic"], fixed=True).session()
    limits, waiting = iter((9, 26, 17, 300, 2, 1, 12)), list(range(2, 7))
    prompts = [*PROMPTS, *(random_prompt(length, seed=length) for length in (2, 5, 3, 11))]

    def request(number: int) -> GenerationRequest:
        limit = next(limits)  # the longest makes the caches grow, and the fixed rounds with them
        stops = frozenset() if limit < 300 else frozenset(range(40))
        return GenerationRequest(prompts[number], limit, stops, Sampling(temperature, seed=number))

    session.join([request(0), request(1)])
    while len(session):
        session.round()
        check_session(session)
        if waiting and len(session) < 3:
            session.join([request(waiting.pop(0)) for _ in range(min(2, len(waiting)))])
            check_session(session)
    assert set(fixed_rounds) >= {1, 2, 3}


def test_what_has_no_fixed_round_takes_the_ragged_one_and_comes_back(fixed_rounds: list[int]) -> None:
    makers = {"static": StaticTree(), "chain": ChainTree(3)}
    request = GenerationRequest(PROMPTS[1], 12)
    for engine in (
        Engine(TARGET, HEADS["oracle"], makers["static"], fixed=True),
        Engine(TARGET, drafter=PromptLookup(3, 2), fixed=True),
    ):
        assert list(engine.generate(request).token_ids) == TEXTS[1][7:19]
    assert fixed_rounds == []
    mixed = [
        GenerationRequest(PROMPTS[0], 6, logprobs=True),
        GenerationRequest(PROMPTS[1], 16),
        GenerationRequest(PROMPTS[2], 4, penalties=Penalties(repetition=1.3)),
    ]
    ragged, fixed = both(lambda fixed: Engine(TARGET, HEADS["random"], makers["chain"], fixed=fixed), mixed)
    assert [one.token_ids for one in ragged] == [other.token_ids for other in fixed]
    assert fixed_rounds
    assert set(fixed_rounds) == {1}  # only once the two others had left


def test_nan_logits_end_a_fixed_round_too() -> None:
    session = Engine(TARGET, HEADS["random"], ChainTree(3), fixed=True).session()
    session.join([GenerationRequest(PROMPTS[1], 12)])
    assert session.cache is not None
    with torch.inference_mode():
        session.cache.buffers[0].values.fill_(torch.nan)
    with pytest.raises(FloatingPointError, match="NaN logits; nothing of this round is accepted"):
        session.round()


class Asked(TorchDispatchMode):
    """Collects what reads a value back, or makes a shape of one, and the shapes of everything that is computed."""

    READS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "unique", "item")

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []
        self.shapes: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.__name__.split(".")[0]
        if name in self.READS:
            self.reads.append(name)
        self.shapes.append((name, tuple(result.shape) if isinstance(result, Tensor) else None))
        return result


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Switch every kernel on, in the interpreter, without the checks of values that only a CPU gets."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("the interpreter is off on a machine with a GPU")
    monkeypatch.setattr(verify_tree_sampling, "check_draw", lambda *_arguments: None)
    with interpreted():
        yield


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("maker", "kv_dtype"),
    [(None, None), (ChainTree(2), None), (DynamicTree(2, 3, 5), None), (ChainTree(2), FP8)],
    ids=["plain", "chain", "tree", "chain, fp8 cache"],
)
def test_with_kernels_a_round_reads_nothing_back_and_does_the_same_whatever_its_rows_hold(
    maker: TreeMaker | None, kv_dtype: torch.dtype | None
) -> None:
    head = None if maker is None else HEADS["wrong at every third"]
    session = Engine(TARGET, head, maker, fixed=True, kv_dtype=kv_dtype).session()
    session.join([GenerationRequest(prompt, 12) for prompt in PROMPTS])
    session.round()  # makes the fixed round of four rows
    (made,) = session.fixed_rounds.values()
    computed = []
    for rows in (session.rows, session.rows[:1], session.rows[::-1]):
        with torch.inference_mode():
            made.inputs.load(rows, made.num_nodes)
        with torch.inference_mode(), Asked() as asked:
            made.draft_stage()
            made.verify_stage()
            made.refeed_stage()
        assert asked.reads == []
        computed.append(asked.shapes)
    assert computed[0] == computed[1] == computed[2]
    assert len(computed[0]) > 50


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_with_kernels_a_fixed_round_has_the_texts_of_the_plain_path(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [
        GenerationRequest(prompt, limit, sampling=Sampling(temperature, seed=limit))
        for prompt, limit in zip(PROMPTS, (9, 3, 6), strict=True)
    ]
    with monkeypatch.context() as off:
        off.setattr("eyas.kernels.triton_support._interpreting", False)
        plain = [one.token_ids for one in Engine(TARGET).generate(requests)]
    texts = [[*prompt, *text, 0, 0, 0] for prompt, text in zip(PROMPTS, plain, strict=True)]
    head = table_head(TARGET, texts, flawed=True)
    found = Engine(TARGET, head, DynamicTree(2, 2, 3), fixed=True).generate(requests)
    assert [one.token_ids for one in found] == plain
    assert sum(one.stats.accepted for one in found) >= 4


def test_stages_stay_as_they_are_where_there_are_no_graphs() -> None:
    stages = (lambda: None, lambda: None)
    assert captured(stages, (), device=torch.device("cpu")) == stages


def on_gpu(name: str = "llama") -> tuple[Target, Eagle3Head]:
    """Return a small target of 8 tokens, of which a random head guesses many, and that head."""
    model = family_model(name, vocab_size=8, head_dim=16)
    target = Target(model.cuda(), aux_layers=(0, 1, 3))
    head = tiny_head(target, draft_vocab_size=6).cuda()
    head.use_embedding(target.embedding)
    return target, head


def session_on_gpu(maker: TreeMaker | None, *, graphs: bool, temperature: float) -> tuple[Session, list[Any]]:
    target, head = on_gpu()
    engine = Engine(target, None if maker is None else head, maker, fixed=True, graphs=graphs)
    session = engine.session()
    events = session.join(
        [
            GenerationRequest(tuple(token % 8 for token in prompt), 40, sampling=Sampling(temperature, seed=seed))
            for seed, prompt in enumerate(PROMPTS)
        ]
    )
    return session, events


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", [None, FP8], ids=["", "fp8 cache"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("maker", [None, ChainTree(3), DynamicTree(3, 4, 12)], ids=["plain", "chain", "tree"])
def test_graphs_plain_launches_and_ragged_rounds_write_the_same_texts(
    maker: TreeMaker | None, temperature: float, kv_dtype: torch.dtype | None
) -> None:
    if kv_dtype is not None and torch.cuda.get_device_capability() < FP8_CAPABILITY:
        pytest.skip("this card has no fp8")
    texts = []
    target, head = on_gpu()
    for fixed, graphs in ((False, False), (True, False), (True, True)):
        drafts = None if maker is None else head
        engine = Engine(target, drafts, maker, fixed=fixed, graphs=graphs, kv_dtype=kv_dtype)
        requests = [
            GenerationRequest(tuple(token % 8 for token in prompt), limit, sampling=Sampling(temperature, seed=limit))
            for prompt, limit in zip(PROMPTS, LIMITS, strict=True)
        ]
        found = engine.generate(requests)
        texts.append([generation.token_ids for generation in found])
        if maker is not None:
            assert sum(generation.stats.accepted for generation in found) > 10
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.gpu
@pytest.mark.parametrize("maker", [None, ChainTree(3), DynamicTree(3, 4, 12)], ids=["plain", "chain", "tree"])
def test_a_round_on_a_gpu_never_waits_for_it(maker: TreeMaker | None) -> None:
    session, _ = session_on_gpu(maker, graphs=False, temperature=1.0)
    session.round()  # compiles the kernels
    (made,) = session.fixed_rounds.values()
    with torch.inference_mode(), no_waiting():
        made.start(session.rows)
        made.draft_stage()
        made.verify_stage()
        made.refeed_stage()


@pytest.mark.gpu
@pytest.mark.parametrize("maker", [None, ChainTree(3), DynamicTree(3, 4, 12)], ids=["plain", "chain", "tree"])
def test_a_round_on_a_gpu_is_replayed_from_graphs(maker: TreeMaker | None) -> None:
    session, _ = session_on_gpu(maker, graphs=True, temperature=1.0)
    for _ in range(3):
        session.round()
        if isinstance(session.drafting, EagleDrafting):
            assert bool(session.drafting.features_RD.isfinite().all())
    (made,) = session.fixed_rounds.values()
    assert made.stages is not None
    assert all(stage.__self__.__class__ is torch.cuda.CUDAGraph for stage in made.stages)  # type: ignore[attr-defined]


@pytest.mark.gpu
def test_a_stage_that_waits_is_launched_plainly_with_a_notice() -> None:
    held = torch.zeros(3, device="cuda")

    def waits() -> None:
        held.add_(1)
        held.sum().item()

    with pytest.warns(UserWarning, match="rounds are launched without CUDA graphs"):
        assert captured((waits,), (held,), device=held.device) == (waits,)
    assert held.tolist() == [0.0, 0.0, 0.0]
