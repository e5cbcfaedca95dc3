"""The train stage: from features to the best head by replayed acceptance."""

from dataclasses import fields
from typing import Any

import torch

from eyas.data.corpus import load_corpus
from eyas.models.errors import UserError
from eyas.train.accelerator import make_accelerator, track
from eyas.train.context import RunContext
from eyas.train.curves import draw_curves
from eyas.train.features import open_rows
from eyas.train.loop import LoopPlan, train_head
from eyas.train.metrics_file import MetricsFile
from eyas.train.new_head import build_head, build_objective, usable_rows
from eyas.train.vocabulary import choose_vocabulary


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
    corpus = load_corpus(context.folder.of("synthesize") / "corpus.jsonl")
    target = context.load_borrowed()
    vocabulary, coverage = choose_vocabulary(context, corpus, target.vocab_size)
    head = build_head(context, target, vocabulary)
    module = build_objective(context, head, target, vocabulary, accelerator.device)
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
    before = position.history[0]["tau"]
    context.reporter.say(f"  held-out chain tau {before:.3f} before training, {position.best_tau:.3f} after")
    return {
        "steps": position.step,
        "processes": accelerator.num_processes,
        "best_step": position.best_step,
        "initial_validation_tau": before,
        "best_validation_tau": position.best_tau,
        "history": position.history,
        "coverage": coverage,
        "head_parameters": sum(p.numel() for p in head.parameters()),
        "rows": len(usable),
        "rows_without_slots": len(training) - len(usable),
        "supervised_tokens": sum(int(usable.tokens(index).generated_mask_T.sum()) for index in range(len(usable))),
        "trained_length": max(usable.lengths),
    }


def loop_plan(context: RunContext) -> LoopPlan:
    """Return the loop's settings from the recipe."""
    section = context.recipe.train
    return LoopPlan(
        packed=section.batching == "packed",
        **{field.name: getattr(section, field.name) for field in fields(LoopPlan) if field.name != "packed"},
    )
