"""The train stage: from features to the best head by replayed acceptance."""

from dataclasses import fields
from typing import Any

import torch

from eyas.data.encode import ChatTemplate
from eyas.data.feature_row import FeatureRow, RowSource, SelectedRows, as_source
from eyas.models.draft_vocabulary import DraftVocabulary
from eyas.models.eagle3 import Eagle3Head
from eyas.models.errors import UserError
from eyas.models.rope import check_same_rope
from eyas.models.target import Target, load_tokenizer
from eyas.models.target_loading import plain_weight
from eyas.models.warm_start import init_from_target, init_random, set_vocabulary
from eyas.train.accelerator import make_accelerator, track
from eyas.train.context import RunContext
from eyas.train.curves import draw_curves
from eyas.train.features import open_rows
from eyas.train.loop import LoopPlan, train_head
from eyas.train.metrics_file import MetricsFile
from eyas.train.objective import ObjectivePlan, TrainingTimeTest


def run_train(context: RunContext) -> dict[str, Any]:
    """Train the recipe's head into training/best and return losses, acceptance and coverage."""
    recipe = context.recipe
    folder = context.folder.of("train")
    training, validation = open_rows(context)
    if not len(training) or not len(validation):
        raise UserError(
            f"the corpus has {len(training)} training and {len(validation)} validation rows; it needs both."
        )

    accelerator = make_accelerator(context)
    torch.manual_seed(recipe.train.seed)
    target = context.load_target("float32", tapped=True, plain=True)
    vocabulary, coverage = choose_vocabulary(context, target, training, validation)
    head = build_head(context, target, vocabulary)
    module = TrainingTimeTest(
        head,
        target.head.rows(vocabulary.token_ids_U.to(target.device)).to(dtype=torch.float32, device=accelerator.device),
        vocabulary.draft_ids_V.to(accelerator.device),
        ObjectivePlan(
            loss=recipe.train.loss,
            step_weights=tuple(recipe.train.step_decay**step for step in range(recipe.train.ttt_steps)),
            keep_oov=recipe.train.keep_oov,
        ),
    )
    del target
    usable = usable_rows(context, module, training)
    plan = loop_plan(context)
    checkpoints = sorted((folder / "checkpoints").glob("step-*.pt"))
    resume_step = int(checkpoints[-1].stem.split("-")[1]) if checkpoints else -1
    metrics = MetricsFile(folder / "metrics.jsonl", resume_step=resume_step) if accelerator.is_main_process else None
    with context.reporter.bar("tok") as bar:

        def report(values: dict[str, Any]) -> None:
            if metrics is None:
                return
            metrics.write(values)
            track(accelerator, values)
            if values["event"] == "validation":
                bar.progress.console.print(
                    f"  step {values['step']:>5}: held-out chain tau {values['tau']:.3f} by replay of rounds "
                    f"(slot average {values['slot_tau']:.3f}), best {values['best_tau']:.3f}",
                    soft_wrap=True,
                )
                draw_curves(folder / "metrics.jsonl", folder / "curves.png")
            else:
                note = (
                    f"loss {values['loss']:.3f}, {values['tokens_per_second']:.0f} tok/s, epoch {values['epoch']:.1f}"
                )
                bar.update("training", values["step"], values["steps"], 0, note)

        position = train_head(
            module, usable, validation, plan, folder, accelerator=accelerator,
            key=context.fingerprints["train"], report=report,
        )  # fmt: skip
    accelerator.end_training()
    return {
        "steps": position.step,
        "processes": accelerator.num_processes,
        "best_step": position.best_step,
        "best_validation_tau": position.best_tau,
        "history": position.history,
        "coverage": coverage,
        "head_parameters": sum(p.numel() for p in head.parameters()),
        "rows": len(usable),
        "rows_without_slots": len(training) - len(usable),
        "supervised_tokens": int(token_counts(usable, head.config.vocab_size).sum()),
        "trained_length": max(usable.lengths),
    }


def choose_vocabulary(
    context: RunContext,
    target: Target,
    training: RowSource | list[FeatureRow],
    validation: RowSource | list[FeatureRow],
) -> tuple[DraftVocabulary, dict[str, float]]:
    """Return the draft vocabulary from the training rows' counts, and its coverage of generated tokens per split."""
    tokenizer = load_tokenizer(context.recipe.target.model)
    template = ChatTemplate(tokenizer, context.recipe.target.template_arguments)
    counts = {
        name: token_counts(rows, target.vocab_size) for name, rows in (("train", training), ("validation", validation))
    }
    forced = {template.end_of_turn, *tokenizer.all_special_ids}
    vocabulary = DraftVocabulary.from_counts(counts["train"], size=context.recipe.head.draft_vocab_size, forced=forced)
    coverage = {name: vocabulary.coverage(count) for name, count in counts.items()}
    context.reporter.say(
        f"  draft vocabulary: {len(vocabulary)} of {target.vocab_size} tokens, covering "
        + ", ".join(f"{share:.2%} of generated {name} tokens" for name, share in coverage.items())
    )
    return vocabulary, coverage


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


def token_counts(rows: RowSource | list[FeatureRow], vocab_size: int) -> torch.Tensor:
    """Return how often the target generated each token, int64 [V]."""
    source, counts_V = as_source(rows), torch.zeros(vocab_size, dtype=torch.int64)
    for index in range(len(source)):
        row = source.tokens(index)
        generated_N = row.input_ids_T[row.generated_mask_T]
        counts_V.index_add_(0, generated_N, torch.ones_like(generated_N))
    return counts_V


def build_head(context: RunContext, target: Target, vocabulary: DraftVocabulary) -> Eagle3Head:
    """Return the recipe's head, initialised, with map and embedding in place."""
    head = Eagle3Head(context.head_config)
    check_same_rope(head.rope, target.decoder, head.config)
    if context.recipe.head.init == "target":
        check_plain(target)
        init_from_target(head, target, vocabulary)
    else:
        init_random(head)
    set_vocabulary(head, vocabulary)
    head.use_embedding(target.embedding)
    return head.to(target.device)


def check_plain(target: Target) -> None:
    """Raise UserError when the last block of the target, where a head starts, is quantised beyond reading."""
    try:
        for layer in target.layers[-1].modules():
            if isinstance(layer, torch.nn.Linear):
                plain_weight(layer)
    except UserError as error:
        raise UserError(f"cannot warm-start from a quantised target: {error} Set head.init to random.") from None


def loop_plan(context: RunContext) -> LoopPlan:
    """Return the loop's settings from the recipe."""
    section = context.recipe.train
    return LoopPlan(
        packed=section.batching == "packed",
        **{field.name: getattr(section, field.name) for field in fields(LoopPlan) if field.name != "packed"},
    )
