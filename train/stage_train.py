"""The train stage: from features to the best head by replayed acceptance."""

from dataclasses import fields
from typing import Any

import torch

from eyas.data.corpus import load_corpus
from eyas.data.encode import ChatTemplate
from eyas.data.feature_store import FeatureRow, FeatureStore
from eyas.models.draft_vocabulary import DraftVocabulary
from eyas.models.eagle3 import Eagle3Head
from eyas.models.errors import UserError
from eyas.models.rope import check_same_rope
from eyas.models.target import Target, load_tokenizer
from eyas.models.warm_start import init_from_target, init_random, set_vocabulary
from eyas.train.accelerator import make_accelerator, track
from eyas.train.context import RunContext
from eyas.train.curves import draw_curves
from eyas.train.loop import LoopPlan, train_head
from eyas.train.metrics_file import MetricsFile
from eyas.train.objective import ObjectivePlan, TrainingTimeTest


def run_train(context: RunContext) -> dict[str, Any]:
    """Train the recipe's head into training/best and return losses, acceptance and coverage."""
    recipe = context.recipe
    folder = context.folder.of("train")
    store = FeatureStore(context.folder.of("extract"))
    store.check_target(target_fingerprint=context.target_fingerprint, aux_layers=context.aux_layers)
    splits = {row.id: row.split for row in load_corpus(context.folder.of("synthesize") / "corpus.jsonl")}
    rows = store.rows()
    training = [row for row in rows if splits[row.id] == "train"]
    validation = [row for row in rows if splits[row.id] == "validation"]
    if not training or not validation:
        raise UserError(
            f"the corpus has {len(training)} training and {len(validation)} validation rows; it needs both."
        )

    accelerator = make_accelerator(context)
    torch.manual_seed(recipe.train.seed)
    target = context.load_target("float32", tapped=True)
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
        "supervised_tokens": sum(int(row.generated_mask_T.sum()) for row in usable),
        "trained_length": max(len(row) for row in usable),
    }


def choose_vocabulary(
    context: RunContext, target: Target, training: list[FeatureRow], validation: list[FeatureRow]
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


def usable_rows(context: RunContext, module: TrainingTimeTest, rows: list[FeatureRow]) -> list[FeatureRow]:
    """Return the rows that train at least one slot, and say how many do not; raises UserError when none does."""
    usable = [row for row in rows if module.trains(row)]
    reasons = "replies of a single token, or none of the target's tokens in the draft vocabulary"
    if not usable:
        raise UserError(f"none of the {len(rows)} training rows has a slot to train ({reasons}); give other prompts.")
    if len(usable) < len(rows):
        context.reporter.say(f"  left out {len(rows) - len(usable)} of {len(rows)} rows without slots ({reasons})")
    return usable


def token_counts(rows: list[FeatureRow], vocab_size: int) -> torch.Tensor:
    """Return how often the target generated each token, int64 [V]."""
    generated = torch.cat([row.input_ids_T[row.generated_mask_T.bool()] for row in rows])
    return torch.bincount(generated, minlength=vocab_size)


def build_head(context: RunContext, target: Target, vocabulary: DraftVocabulary) -> Eagle3Head:
    """Return the recipe's head, initialised, with map and embedding in place."""
    head = Eagle3Head(context.head_config)
    check_same_rope(head.rope, target.decoder, head.config)
    if context.recipe.head.init == "target":
        init_from_target(head, target, vocabulary)
    else:
        init_random(head)
    set_vocabulary(head, vocabulary)
    head.use_embedding(target.embedding)
    return head.to(target.device)


def loop_plan(context: RunContext) -> LoopPlan:
    """Return the loop's settings from the recipe."""
    section = context.recipe.train
    return LoopPlan(
        packed=section.batching == "packed",
        **{field.name: getattr(section, field.name) for field in fields(LoopPlan) if field.name != "packed"},
    )
