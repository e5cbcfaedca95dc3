"""The runtime with every kernel switched on, in triton's interpreter: the same texts, floors, caches and verdicts.

Sizes are small because the interpreter is slow; that each kernel equals its reference at odd sizes is tests/kernels'.
"""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from eyas.inference import draft, verify, verify_kernels
from eyas.inference.draft import ChainTree, DynamicTree, StaticTree, TreeMaker
from eyas.inference.engine import Engine, GenerationRequest
from eyas.inference.model_drafter import ModelDrafter
from eyas.inference.sampling import Sampling
from eyas.inference.tree import DraftTree
from eyas.inference.verify import DRAWN, VERIFIERS, VerifyBatch
from eyas.inference.verify_reference import REFERENCES
from eyas.kernels.triton_support import interpreted
from eyas.models import kv_cache, tree_attention
from eyas.models.draw import draw
from eyas.models.kv_cache import FP8
from eyas.models.target import Target
from eyas.tests.inference.heads import greedy, random_prompt, soften, table_head
from eyas.tests.inference.session_checks import check_session
from eyas.tests.inference.verify_toys import CHAIN, DRAFT_VV, LIKELY, ROOT, TARGET_VV, TREE, V, table
from eyas.tests.models.families import family_model
from eyas.tests.toys import tiny_head, tiny_target

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off on a machine with a GPU")

TARGET = tiny_target(layers=3, aux_layers=(0, 1, 3), initializer_range=0.2)
PROMPTS = [random_prompt(length, seed=20 + length) for length in (1, 7, 33)]
LIMITS = (10, 4, 7)
TEXTS = [[*prompt, *greedy(TARGET, prompt, 32)] for prompt in PROMPTS]
MAKERS: dict[str, TreeMaker] = {"chain": ChainTree(3), "static": StaticTree(), "dynamic": DynamicTree(3, 3, 7)}
HEADS = {
    "random": soften(tiny_head(TARGET)),
    "oracle": table_head(TARGET, TEXTS),
    "wrong at every third": table_head(TARGET, TEXTS, flawed=True),
}


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    """Switch every kernel on."""
    pytest.importorskip("triton")
    with interpreted():
        yield


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The ops of the runtime that were asked while the test ran."""
    asked: set[str] = set()

    def counting(owner: Any, name: str) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            asked.add(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    counting(tree_attention, "tree_attention")
    counting(kv_cache, "keep_path")
    for name in ("draft_top_k", "build_tree"):
        counting(draft, name)
    for name in ("verify_tree_greedy", "verify_tree_sampling", "verify_chain"):
        counting(verify_kernels, name)
    return asked


@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("name", HEADS)
def test_a_ragged_batch_writes_the_plain_texts_and_an_oracle_reaches_depth_plus_one(
    name: str, maker: TreeMaker, launches: set[str]
) -> None:
    requests = [GenerationRequest(prompt, limit) for prompt, limit in zip(PROMPTS, LIMITS, strict=True)]
    if name == "random" and isinstance(maker, StaticTree):
        requests = requests[1:]  # many rounds of 26 nodes
    found = Engine(TARGET, HEADS[name], maker).generate(requests)
    for request, generation in zip(requests, found, strict=True):
        text = TEXTS[PROMPTS.index(request.prompt_ids)][len(request.prompt_ids) :]
        assert list(generation.token_ids) == text[: request.max_new_tokens]
    if name == "oracle":
        full = [made for generation in found for made in generation.rounds[:-1]]
        assert {len(made.tokens) for made in full} == {maker.depth + 1}
    elif name != "random":
        assert sum(generation.stats.accepted for generation in found) >= 5
    built = {"build_tree"} if isinstance(maker, DynamicTree) else set()
    assert launches == {"tree_attention", "keep_path", "draft_top_k", "verify_tree_greedy"} | built


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_after_every_round_both_caches_equal_a_fresh_prefill_while_rows_come_and_go(temperature: float) -> None:
    session = Engine(TARGET, HEADS["wrong at every third"], MAKERS["dynamic"]).session()
    limits = (3, 9, 6)
    requests = [
        GenerationRequest(prompt, limit, sampling=Sampling(temperature, seed=seed))
        for seed, (prompt, limit) in enumerate(zip(PROMPTS, limits, strict=True))
    ]
    session.join(requests[:2])
    check_session(session)
    joined = False
    while len(session):
        session.round()
        check_session(session)
        if not joined:
            session.join(requests[2:])
            check_session(session)
            joined = True


@pytest.mark.parametrize("maker", [ChainTree(3), DynamicTree(2, 4, 6)], ids=["chain", "tree"])
def test_the_same_seed_gives_the_text_of_plain_sampling_without_kernels(
    maker: TreeMaker, launches: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # One row is truncated: each of its nodes takes the interpreter half a second.
    truncated = Sampling(0.8, 20, 0.9, seed=2) if isinstance(maker, ChainTree) else Sampling(0.8, seed=2)
    settings = [Sampling(1.0, seed=1), truncated, Sampling(0.6, seed=3)]
    requests = [
        GenerationRequest(prompt, 3 if sampling.top_k else 8, sampling=sampling)
        for prompt, sampling in zip(PROMPTS, settings, strict=True)
    ]
    with monkeypatch.context() as off:
        off.setattr("eyas.kernels.triton_support._interpreting", False)
        plain = [generation.token_ids for generation in Engine(TARGET).generate(requests)]
    texts = [[*prompt, *text, *random_prompt(9, seed=3)] for prompt, text in zip(PROMPTS, plain, strict=True)]
    found = Engine(TARGET, table_head(TARGET, texts, flawed=True), maker).generate(requests)
    assert [generation.token_ids for generation in found] == plain
    assert sum(generation.stats.accepted for generation in found) >= 4
    assert "verify_tree_sampling" in launches
    assert "verify_tree_greedy" not in launches


@pytest.mark.parametrize("fixed", [False, True], ids=["ragged", "fixed"])
def test_with_an_fp8_cache_the_texts_are_those_of_plain_decoding_without_kernels(
    fixed: bool, launches: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [
        GenerationRequest(prompt, 5, sampling=Sampling(temperature, seed=1))
        for prompt, temperature in zip(PROMPTS[:2], (0.0, 0.8), strict=True)
    ]
    with monkeypatch.context() as off:
        off.setattr("eyas.kernels.triton_support._interpreting", False)
        plain = [generation.token_ids for generation in Engine(TARGET, kv_dtype=FP8).generate(requests)]
    texts = [[*prompt, *text, *random_prompt(9, seed=3)] for prompt, text in zip(PROMPTS, plain, strict=False)]
    head = table_head(TARGET, texts, flawed=True)
    found = Engine(TARGET, head, DynamicTree(2, 2, 4), fixed=fixed, kv_dtype=FP8).generate(requests)
    assert [generation.token_ids for generation in found] == plain
    assert sum(generation.stats.accepted for generation in found) >= 4
    assert launches >= {"tree_attention", "keep_path"}


def test_drawn_chains_are_verified_by_their_kernel(launches: set[str]) -> None:
    requests = [
        GenerationRequest(prompt, 8, sampling=Sampling(temperature, seed=3))
        for prompt, temperature in zip(PROMPTS, (1.0, 0.0, 0.7), strict=True)
    ]
    found = Engine(TARGET, drafter=ModelDrafter(TARGET, 3)).generate(requests)
    assert "verify_chain" in launches
    assert list(found[1].token_ids) == TEXTS[1][len(PROMPTS[1]) :][:8]
    assert min(generation.stats.tau for generation in found) > 3  # the target drafts for itself


def random_batch(
    name: str, samplings: list[Sampling], generator: torch.Generator
) -> tuple[VerifyBatch, list[DraftTree]]:
    """Return a ragged batch of trees that a verifier takes."""
    trees = []
    for sampling in samplings:
        if name not in DRAWN:
            trees.append((TREE, CHAIN, LIKELY, DraftTree.root(ROOT))[int(torch.randint(4, ()))])
            continue
        q_VV, tokens = table(sampling, DRAFT_VV), [ROOT]
        for _ in range(int(torch.randint(0, 4, ()))):
            coin = torch.rand(1, generator=generator, dtype=torch.float64)
            tokens.append(int(draw(q_VV[tokens[-1]][None], coin)))
        drawn_KV = q_VV[torch.tensor(tokens[:-1], dtype=torch.int64)]
        trees.append(DraftTree.chain(ROOT, tokens[1:], [0.0] * (len(tokens) - 1), drawn_KV=drawn_KV))
    width = max(map(len, trees))
    logits_RNV = torch.full((len(trees), width, V), torch.nan)
    for r, tree in enumerate(trees):
        logits_RNV[r, : len(tree)] = TARGET_VV[tree.tokens_N]
    coins_RC = torch.rand(len(trees), width, generator=generator, dtype=torch.float64)
    return VerifyBatch.of(trees, logits_RNV, samplings, coins_RC), trees


@pytest.mark.parametrize("name", VERIFIERS)
def test_a_ragged_batch_of_different_settings_equals_the_plain_reference_row_by_row(name: str) -> None:
    mixed = [Sampling(1.0), Sampling(0.9, top_p=0.7), Sampling(1.3, 6, 0.8), Sampling(0.8, top_k=2)]
    generator, lengths = torch.Generator().manual_seed(4), set()
    for settings in (mixed, [Sampling(0.7), Sampling(1.6)]):
        samplings = [Sampling()] * 8 if name == "greedy" else settings * (1 if settings is mixed else 4)
        batch, trees = random_batch(name, samplings, generator)
        assert batch.by_kernel
        found = VERIFIERS[name](batch)
        for r, (tree, verification) in enumerate(zip(trees, found, strict=True)):
            coins = batch.coins_RC[r, : len(tree)].tolist()
            logits_NV = batch.logits_RNV[r, : len(tree)]
            assert verification == REFERENCES[name](tree, logits_NV, samplings[r], coins)
            lengths.add(len(verification.path))
    assert len(lengths) >= 2, "verifications that all accept nothing test nothing"


@pytest.mark.parametrize("name", VERIFIERS)
@pytest.mark.parametrize("poison", ["nan", "nothing"])
def test_nan_logits_and_logits_that_allow_nothing_are_never_accepted(name: str, poison: str) -> None:
    batch, _ = random_batch(name, [Sampling(1.0 if name != "greedy" else 0.0)] * 3, torch.Generator().manual_seed(1))
    if poison == "nan":
        batch.logits_RNV[1, 0, 4] = torch.nan
    else:
        batch.logits_RNV[1, 0] = -torch.inf
    message = verify.NAN if poison == "nan" else verify.NOTHING
    with pytest.raises(FloatingPointError, match=message[:30]):
        VERIFIERS[name](batch)


def test_penalties_and_processors_go_the_plain_way(launches: set[str]) -> None:
    def never(ids: Tensor, scores: Tensor) -> Tensor:
        return scores.index_fill(-1, torch.tensor([5, 6, 7]), float("-inf"))

    request = GenerationRequest(PROMPTS[1], 8, processors=(never,))
    plain = Engine(TARGET).generate(request)
    assert Engine(TARGET, HEADS["random"], MAKERS["chain"]).generate(request).token_ids == plain.token_ids
    assert not {"verify_tree_greedy", "verify_tree_sampling"} & launches


@pytest.mark.parametrize("name", ["qwen3", "mistral window", "gemma3_text", "qwen3_moe"])
def test_a_family_attends_by_the_kernel_as_it_does_by_itself(name: str, launches: set[str]) -> None:
    model = family_model(name)
    prompt, count = random_prompt(9, seed=2), 12
    ids = model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False, pad_token_id=0)
    target = Target(model, aux_layers=(0, 1, 3))
    maker = DynamicTree(4, 3, 9)
    found = Engine(target, table_head(target, [ids[0].tolist()]), maker).generate(GenerationRequest(prompt, count))
    assert [*prompt, *found.token_ids] == ids[0].tolist()
    assert {len(made.tokens) for made in found.rounds[:-1]} == {maker.depth + 1}
    assert "tree_attention" in launches
    # The library goes on as before on the same model, through its own attention.
    again = model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False, pad_token_id=0)
    assert torch.equal(again, ids)


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_a_family_that_the_kernel_does_not_know_attends_by_itself_with_one_notice(
    name: str, launches: set[str], tmp_path: Any
) -> None:
    family_model(name).save_pretrained(tmp_path)
    target = Target.load(str(tmp_path), dtype=torch.float32)
    tree_attention.notice.cache_clear()
    with pytest.warns(UserWarning, match=f"a {name} target attends to draft trees without the kernel: it attends by"):
        text = Engine(target).generate(GenerationRequest((3, 1, 4), 5)).token_ids
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Engine(target).generate(GenerationRequest((3, 1, 4), 5)).token_ids == text
    assert "tree_attention" not in launches
