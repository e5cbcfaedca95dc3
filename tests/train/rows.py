"""Feature rows made from a tiny target without the data package: what extraction should store, computed plainly."""

from typing import Any

import torch
from torch import Tensor

from eyas.data.corpus import CorpusRow
from eyas.data.feature_row import FeatureRow
from eyas.inference.draft import DynamicTree
from eyas.inference.engine import Engine, GenerationRequest
from eyas.models.draft_head import DraftHead
from eyas.models.target import Target
from eyas.models.warm_start import vocabulary_of
from eyas.train.loop import LoopPlan
from eyas.train.losses import LossMix
from eyas.train.objective import ObjectivePlan, TrainingTimeTest


def feature_row(target: Target, name: str, ids: list[int], spans: list[tuple[int, int]]) -> FeatureRow:
    """Return the row of a text whose tokens `first..last` of each span the target is said to have generated."""
    mask_T = torch.zeros(len(ids), dtype=torch.bool)
    for first, last in spans:
        mask_T[first : last + 1] = True
    out = target.forward(torch.tensor([ids]))
    argmax_T = target.head.logits(out.final_hidden_BTD[0]).argmax(-1)
    taught_T = mask_T & torch.cat((mask_T[1:], torch.zeros(1, dtype=torch.bool)))
    return FeatureRow(
        id=name,
        input_ids_T=torch.tensor(ids),
        generated_mask_T=mask_T,
        aux_hidden_TF=out.aux_hidden_BTF[0].clone(),
        final_hidden_TD=out.final_hidden_BTD[0].clone(),
        argmax_T=torch.where(taught_T, argmax_T, -1),
    )


def random_row(target: Target, name: str, *, prompt: int, reply: int, seed: int) -> FeatureRow:
    """Return the row of a random prompt followed by a random reply."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, target.vocab_size, (prompt + reply,), generator=generator).tolist()
    return feature_row(target, name, ids, [(prompt, prompt + reply - 1)])


def greedy_row(target: Target, name: str, prompt_ids: list[int], *, new_tokens: int) -> FeatureRow:
    """Return the row of a prompt and the target's own greedy reply to it."""
    reply = Engine(target).generate(GenerationRequest(tuple(prompt_ids), new_tokens)).token_ids
    ids = [*prompt_ids, *reply]
    return feature_row(target, name, ids, [(len(prompt_ids), len(ids) - 1)])


def corpus_row(
    name: str, split: str, prompt_ids: list[int], reply_ids: list[int], *, category: str = "words"
) -> CorpusRow:
    """Return a corpus row of given tokens."""
    ids, span = (*prompt_ids, *reply_ids), (len(prompt_ids), len(prompt_ids) + len(reply_ids))
    return CorpusRow(name, "here", category, split, 0.0, ids, (span,), "stop", "", ("",))


def objective(
    target: Target, head: DraftHead, *, loss: str = "kl", weights: tuple[float, ...] = (1.0, 0.5, 0.25), **settings: Any
) -> TrainingTimeTest:
    """Return the training-time test of a head against its target; settings are ObjectivePlan's."""
    vocabulary = vocabulary_of(head)
    plan = ObjectivePlan(LossMix(((loss, 1.0),)), weights, **settings)
    return TrainingTimeTest(head, target.head.rows(vocabulary.token_ids_U), vocabulary.draft_ids_V, plan)


def gradients(head: DraftHead) -> dict[str, Tensor]:
    """Return copies of a head's gradients by name and clear them."""
    found = {name: p.grad.clone() for name, p in head.named_parameters() if p.grad is not None}
    head.zero_grad(set_to_none=True)
    return found


def loop_plan(**changes: Any) -> LoopPlan:
    """Return a short plan without warm-up, decay, clipping or packing, changed as asked."""
    settings: dict[str, Any] = {
        "steps": 4,
        "epochs": 0,
        "accumulate": 1,
        "line_length": 64,
        "lines_per_batch": 1,
        "packed": False,
        "optimizer": "adamw",
        "learning_rate": 1e-3,
        "lm_head_rate": 1.0,
        "betas": (0.9, 0.95),
        "weight_decay": 0.0,
        "schedule": "cosine",
        "decay_share": 0.2,
        "warmup_steps": 0,
        "floor": 1.0,
        "clip": 1e9,
        "ema": 0.0,
        "precision": "fp32",
        "validate_every": 1000,
        "patience": 0,
        "checkpoint_every": 1000,
        "validation_depth": 3,
        "validation_tree": DynamicTree(3, 2, 4),
        "best_by": "chain",
        "decode_every": 0,
        "seed": 0,
    }
    return LoopPlan(**{**settings, **changes})
