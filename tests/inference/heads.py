"""Heads whose right and wrong drafts are known, and rows of text that a tiny target wrote greedily."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from eyas.data.feature_row import FeatureRow
from eyas.inference.engine import Engine, GenerationRequest
from eyas.models.draft_head import DraftHead
from eyas.models.draft_layer import Attend
from eyas.models.draft_vocabulary import DraftVocabulary
from eyas.models.eagle3 import Eagle3Head
from eyas.models.head_config import head_config_for
from eyas.models.target import Target
from eyas.models.warm_start import init_random, set_vocabulary
from eyas.tests.toys import OracleHead, ScriptedHead, known_tokens

# A head that says .6, .3 and .05 wherever it is asked; log-probabilities of paths are sums.
THREE = torch.full((97,), math.log(0.05 / 94)).index_put(
    (torch.tensor([5, 6, 7]),), torch.tensor([0.6, 0.3, 0.05]).log()
)


class FlakyHead(OracleHead):
    """An oracle that is wrong about 4 times in 10: wherever its own feature points too far along a fixed direction.

    So a draft is right or wrong by the features of the whole path that leads to it, not only by its position.
    """

    def draft(self, feature_BTD: Tensor, next_BTD: Tensor, positions_BT: Tensor) -> Tensor:
        logits_BTV = super().draft(feature_BTD, next_BTD, positions_BT)
        direction = torch.linspace(-1, 1, next_BTD.shape[-1]).sin()
        along = nn.functional.normalize(next_BTD, dim=-1) @ nn.functional.normalize(direction, dim=0)
        wrong_BT = along > 0.25 * next_BTD.shape[-1] ** -0.5
        return torch.where(wrong_BT[..., None], logits_BTV.roll(1, -1), logits_BTV)


class TiedHead(OracleHead):
    """An oracle so sure that its draft has probability exactly 1: a child scores as high as its parent."""

    sureness = 100.0

    def draft(self, feature_BTD: Tensor, next_BTD: Tensor, positions_BT: Tensor) -> Tensor:
        return super().draft(feature_BTD, next_BTD, positions_BT) * self.sureness


class ReducedOracle(ScriptedHead):
    """A head with a reduced vocabulary that knows the text wherever the token can be drafted at all."""

    text: list[int]
    draft_ids_V: Tensor

    def draft(self, feature_BTD: Tensor, next_BTD: Tensor, positions_BT: Tensor) -> Tensor:
        draft_ids_BT = self.draft_ids_V[known_tokens(self.text, positions_BT)].clamp(min=0)
        return nn.functional.one_hot(draft_ids_BT, self.config.draft_vocab_size).float()


class FixedHead(ScriptedHead):
    """A head that drafts with the same logits everywhere."""

    fixed_logits_U: Tensor

    def draft(self, feature_BTD: Tensor, next_BTD: Tensor, positions_BT: Tensor) -> Tensor:
        return self.fixed_logits_U.expand(*positions_BT.shape, -1)


class TableHead(ScriptedHead):
    """An oracle of several texts at once; wrong at every third position when `flawed`.

    It tells from the target's states which text a row holds and passes that on in the first number of its feature, so
    rows may stand in any order and have any length.
    """

    texts: list[list[int]]
    states_SF: Tensor  # the target's aux states of all texts
    owner_S: Tensor  # which text each belongs to
    flawed = False

    def fuse(self, aux_hidden_BTF: Tensor) -> Tensor:
        feature_BTD = super().fuse(aux_hidden_BTF)
        nearest_BT = torch.cdist(aux_hidden_BTF, self.states_SF[None]).argmin(-1)
        return torch.cat((self.owner_S[nearest_BT][..., None], feature_BTD[..., 1:]), dim=-1)

    def advance(self, feature_BTD: Tensor, token_ids_BT: Tensor, position_ids_BT: Tensor, context: Attend) -> Tensor:
        next_BTD = super().advance(feature_BTD, token_ids_BT, position_ids_BT, context)
        return torch.cat((feature_BTD[..., :1], next_BTD[..., 1:]), dim=-1)

    def draft(self, feature_BTD: Tensor, next_BTD: Tensor, positions_BT: Tensor) -> Tensor:
        owners_BT = feature_BTD[..., 0].round().long()
        known_BT = torch.zeros_like(owners_BT)
        for owner, text in enumerate(self.texts):
            known_BT = torch.where(owners_BT == owner, known_tokens(text, positions_BT), known_BT)
        wrong_BT = (positions_BT % 3 == 0) & self.flawed
        return 20.0 * nn.functional.one_hot((known_BT + wrong_BT) % self.config.vocab_size, self.config.vocab_size)


def table_head(target: Target, texts: list[list[int]], *, flawed: bool = False, seed: int = 3) -> TableHead:
    """Return the oracle of some texts."""
    torch.manual_seed(seed)
    config = head_config_for(
        target.config, aux_layers=target.aux_layers, draft_vocab_size=target.vocab_size, intermediate_size=56
    )
    head = TableHead(config)
    init_random(head, std=0.3)
    head.use_embedding(target.embedding)
    states = [target.forward(torch.tensor([text])).aux_hidden_BTF[0] for text in texts]
    head.texts, head.flawed, head.states_SF = texts, flawed, torch.cat(states)
    head.owner_S = torch.cat([torch.full((len(rows),), float(owner)) for owner, rows in enumerate(states)])
    return head.eval()


def knowing_head(kind: type[OracleHead], target: Target, text: list[int], *, seed: int = 3) -> OracleHead:
    """Return a head of a kind that knows a text, with random weights."""
    torch.manual_seed(seed)
    head = kind(head_config_for(target.config, aux_layers=target.aux_layers, draft_vocab_size=target.vocab_size), text)
    init_random(head, std=0.3)
    head.use_embedding(target.embedding)
    return head.eval()


def fixed_head(target: Target, logits_V: Tensor) -> FixedHead:
    """Return a full-vocabulary head that always drafts with the given logits."""
    head = FixedHead(head_config_for(target.config, aux_layers=target.aux_layers, draft_vocab_size=target.vocab_size))
    init_random(head)
    head.fixed_logits_U = logits_V
    head.use_embedding(target.embedding)
    return head.eval()


def reduced_oracle(target: Target, text: list[int], vocabulary: DraftVocabulary) -> ReducedOracle:
    """Return the oracle of a text that drafts only from a vocabulary."""
    size = len(vocabulary)
    head = ReducedOracle(head_config_for(target.config, aux_layers=target.aux_layers, draft_vocab_size=size))
    init_random(head)
    set_vocabulary(head, vocabulary)
    head.text, head.draft_ids_V = text, vocabulary.draft_ids_V
    head.use_embedding(target.embedding)
    return head.eval()


@torch.no_grad()
def soften(head: Eagle3Head) -> Eagle3Head:
    """Spread a random head's attention and drafts, so that a key seen wrongly shows and trees branch; returns it."""
    head.midlayer.self_attn.q_proj.weight.mul_(0.05)
    head.lm_head.weight.mul_(0.6)
    return head


def random_prompt(length: int, *, seed: int, vocab_size: int = 97) -> tuple[int, ...]:
    """Return a prompt of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(vocab_size, (length,), generator=generator).tolist())


def greedy(target: Target, prompt: tuple[int, ...], count: int) -> list[int]:
    """Return the target's plain greedy continuation of exactly `count` tokens."""
    return list(Engine(target).generate(GenerationRequest(prompt, count)).token_ids)


def feature_row(target: Target, prompt: tuple[int, ...], reply: list[int], *, name: str = "row") -> FeatureRow:
    """Return the features of a prompt and a reply that the target wrote."""
    ids = torch.tensor([*prompt, *reply])
    out = target.forward(ids[None])
    final = out.final_hidden_BTD[0].clone()
    generated = torch.arange(len(ids)) >= len(prompt)
    return FeatureRow(name, ids, generated, out.aux_hidden_BTF[0].clone(), final, target.head.logits(final).argmax(-1))


@contextmanager
def counted_steps(head: DraftHead) -> Iterator[list[int]]:
    """Count the steps of a head, each with its number of tokens."""
    steps: list[int] = []
    step = head.step

    def counting(feature, tokens, *arguments, **options):
        steps.append(tokens.shape[1])
        return step(feature, tokens, *arguments, **options)

    head.step = counting
    try:
        yield steps
    finally:
        del head.step
