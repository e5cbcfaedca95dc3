"""The head a run begins with: of the recipe's kind, initialised, with its vocabulary and what it borrows in place."""

import torch

from eyas.data.feature_row import FeatureRow, RowSource, SelectedRows, as_source
from eyas.models.checkpoint import head_from_files
from eyas.models.draft_head import DraftHead
from eyas.models.draft_vocabulary import DraftVocabulary
from eyas.models.embedding_scale import with_embedding_scale
from eyas.models.errors import UserError
from eyas.models.head_config import head_remarks
from eyas.models.heads import new_head
from eyas.models.import_head import Answers, read_any_head
from eyas.models.rope import check_same_rope
from eyas.models.target import Target
from eyas.models.target_facts import TargetFacts
from eyas.models.target_loading import plain_weight, takes_pictures
from eyas.models.warm_start import init_from_head, init_from_target, init_random, set_vocabulary
from eyas.train.context import RunContext
from eyas.train.losses import LossMix
from eyas.train.objective import ObjectivePlan, TrainingTimeTest
from eyas.train.slot_weights import SlotWeighting


def build_head(context: RunContext, target: Target, vocabulary: DraftVocabulary) -> DraftHead:
    """Return the recipe's head, initialised, with map, embedding and (EAGLE-1) output head in place."""
    section = context.recipe.head
    head = new_head(with_embedding_scale(context.head_config, target.embedding))
    check_same_rope(head.rope, target.decoder, head.config)
    for remark in head_remarks(head.config, context.target_config):
        context.reporter.say(f"  note: {remark}")
    if takes_pictures(context.recipe.target.model):
        context.reporter.say("  note: this target reads pictures too; the corpus and every number are of text alone")
    if section.init == "random":
        init_random(head)
    elif section.init == "target":
        check_plain(target)
        for remark in init_from_target(head, target, vocabulary):
            context.reporter.say(f"  note: warm start: {remark}")
    else:
        shared = init_from_head(head, trained_head(context), target, vocabulary)
        context.reporter.say(f"  begins as {section.init}, which can draft {shared:.1%} of this draft vocabulary")
    set_vocabulary(head, vocabulary)
    head.lend(target)
    if context.recipe.train.compile:
        compile_parts(head)
    return head.to(target.device)


def trained_head(context: RunContext) -> DraftHead:
    """Return the head that head.init names, of any layout that can be imported; what was decided on the way is said.

    Where its files do not say which layers it reads, head.aux_layers answers.
    """
    section, folder = context.recipe.head, context.init_folder
    assert folder is not None
    try:
        answers = Answers(aux_layers=section.aux_layers or None)
        imported = read_any_head(folder, target=TargetFacts.of(context.recipe.target.model), answers=answers)
    except UserError as error:
        raise UserError(
            f"head.init {section.init!r} cannot be used as it is: {error} Name the layers in head.aux_layers, or bring "
            "it in with eyas import, which takes all the answers, and name the folder it writes."
        ) from None
    for note in imported.notes:
        context.reporter.say(f"  note: {note}")
    return head_from_files(imported.files, dtype=torch.float32)


def compile_parts(head: DraftHead) -> None:
    """Compile, in place, the parts of a head that do nothing but arithmetic: its MLPs. Names stay as they are."""
    for name, module in head.named_modules():
        if name.endswith("mlp"):
            module.compile()


def build_objective(
    context: RunContext, head: DraftHead, target: Target, vocabulary: DraftVocabulary, device: torch.device
) -> TrainingTimeTest:
    """Return the head with the recipe's objective; the teacher works in fp32."""
    teacher = target.head.rows(vocabulary.token_ids_U.to(target.device)).to(dtype=torch.float32, device=device)
    return TrainingTimeTest(head, teacher, vocabulary.draft_ids_V.to(device), objective_plan(context))


def objective_plan(context: RunContext) -> ObjectivePlan:
    """Return the objective's settings from the recipe."""
    section, eagle1 = context.recipe.train, context.recipe.head.kind == "eagle1"
    loss = section.loss or ({"kl": 0.1} if eagle1 else "kl")
    feature_weight = section.feature_weight if section.feature_weight is not None else float(eagle1)
    return ObjectivePlan(
        loss=LossMix(tuple(loss.items()) if isinstance(loss, dict) else ((loss, 1.0),)),
        step_weights=section.step_weights or tuple(section.step_decay**step for step in range(section.ttt_steps)),
        keep_oov=section.keep_oov,
        everywhere=section.supervise == "all",
        normalisation=section.normalisation,
        weighting=SlotWeighting(section.pace, section.align_top_k, section.start_floor),
        feature_weight=feature_weight,
        feature_noise=section.feature_noise,
        attention=section.attention,
        recompute=section.recompute,
    )


def usable_rows(context: RunContext, module: TrainingTimeTest, rows: RowSource | list[FeatureRow]) -> SelectedRows:
    """Return the rows that train at least one slot, and say how many do not; raises UserError when none does."""
    source = as_source(rows)
    usable = [index for index in range(len(source)) if module.trains(source.tokens(index))]
    reasons = "replies of a single token, or none of the target's tokens in the draft vocabulary"
    if not usable:
        raise UserError(f"none of the {len(rows)} training rows has a slot to train ({reasons}); give other prompts.")
    if len(usable) < len(rows):
        context.reporter.say(f"  left out {len(rows) - len(usable)} of {len(rows)} rows without slots ({reasons})")
    return SelectedRows(source, usable)


def check_plain(target: Target) -> None:
    """Raise UserError when the last block of the target, where a head starts, is quantised beyond reading."""
    try:
        for layer in target.layers[-1].modules():
            if isinstance(layer, torch.nn.Linear):
                plain_weight(layer)
    except UserError as error:
        raise UserError(f"cannot warm-start from a quantised target: {error} Set head.init to random.") from None
