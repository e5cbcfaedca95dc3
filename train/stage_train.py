"""The train stage: from features to the best head by replayed acceptance."""

from collections.abc import Callable
from dataclasses import fields
from datetime import datetime, timedelta
from typing import Any

import torch

from eyas.data.corpus import load_corpus
from eyas.data.feature_row import RowSource
from eyas.data.synthesize import stop_token_ids
from eyas.models.draft_head import DraftHead
from eyas.models.errors import UserError
from eyas.train.accelerator import make_accelerator, track
from eyas.train.context import RunContext
from eyas.train.curves import draw_curves
from eyas.train.decode_check import DecodeCheck, first_replies
from eyas.train.features import open_rows
from eyas.train.loop import LoopPlan, train_head
from eyas.train.machine import measured_speed
from eyas.train.metrics_file import MetricsFile
from eyas.train.new_head import build_head, build_objective, usable_rows
from eyas.train.plan_facts import head_size
from eyas.train.reference_curve import ReferenceCurve, behind, reference_of, what_is_normal
from eyas.train.target_odds import measure_odds
from eyas.train.utilisation import TrainingWork
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
    odds = measure_odds(target.head, module.teacher, module.draft_ids_V, validation)
    del target
    decode = decode_check(context, validation) if accelerator.is_main_process and recipe.train.decode_every else None
    usable = usable_rows(context, module, training)
    taught_tokens = sum(int(usable.tokens(index).generated_mask_T.sum()) for index in range(len(usable)))
    reference = reference_of(recipe)
    if reference is None and accelerator.is_main_process:
        context.reporter.say(f"  {what_is_normal(taught_tokens)}")
    plan = loop_plan(context)
    checkpoints = sorted((folder / "checkpoints").glob("step-*.pt"))
    resume_step = int(checkpoints[-1].stem.split("-")[1]) if checkpoints else -1
    metrics = MetricsFile(folder / "metrics.jsonl", resume_step=resume_step) if accelerator.is_main_process else None
    dtype = "bfloat16" if recipe.train.precision == "bf16" else "float32"
    peak = measured_speed(str(accelerator.device)).flops(dtype) if metrics is not None else 0.0
    with context.reporter.bar("tok") as bar:

        def report(values: dict[str, Any]) -> None:
            if metrics is None:
                return
            if values["event"] == "step":
                values["utilisation"] = values["flops_per_second"] / (peak * accelerator.num_processes)
            metrics.write(values)
            track(accelerator, values)
            if values["event"] == "validation":
                bar.progress.console.print(validation_line(values, reference), soft_wrap=True, markup=False)
                draw_curves(folder / "metrics.jsonl", folder / "curves.png", reference)
            else:
                bar.update("training", values["step"], values["steps"], 0, step_note(values))

        position = train_head(
            module, usable, validation, plan, folder, accelerator=accelerator,
            key=context.fingerprints["train"], report=report, odds=odds, decode=decode,
            work=training_work(context).of_batch,
        )  # fmt: skip
    accelerator.end_training()
    before, best = (next(point for point in position.history if point["step"] == s) for s in (0, position.best_step))
    for name, key in (("chain", "tau"), ("tree", "tree_tau")):
        context.reporter.say(f"  held-out {name} tau {before[key]:.3f} before training, {best[key]:.3f} after")
    return {
        "steps": position.step,
        "processes": accelerator.num_processes,
        "best_step": position.best_step,
        "best_by": recipe.train.best_by,
        **{f"initial_validation_{name}": before[name] for name in ("tau", "tree_tau")},
        **{f"best_validation_{name}": best[name] for name in ("tau", "tree_tau", "sampled_tau", "sampled_tree_tau")},
        "history": position.history,
        "coverage": coverage,
        "head_parameters": sum(p.numel() for p in head.parameters()),
        "rows": len(usable),
        "rows_without_slots": len(training) - len(usable),
        "supervised_tokens": taught_tokens,
        "trained_length": max(usable.lengths),
    }


def step_note(values: dict[str, Any]) -> str:
    """Return what the progress bar says of a step: its loss, the speed, and when training will be over."""
    end = datetime.now() + timedelta(seconds=values["seconds_left"])
    return (
        f"loss {values['loss']:.3f}, epoch {values['epoch']:.1f}, {values['tokens_per_second']:.0f} tok/s "
        f"({values['utilisation']:.0%} of the machine's products), done at {end:%H:%M}"
        f"{f' on {end:%d %b}' if end.date() != datetime.now().date() else ''}"
    )


def training_work(context: RunContext) -> TrainingWork:
    """Return what one training step of the recipe's head multiplies."""
    section, config = context.recipe.train, context.head_config
    return TrainingWork(
        config,
        head_size(config),
        ttt_steps=section.ttt_steps,
        trains_output=config.kind == "eagle3" and section.lm_head_rate > 0,
        everywhere=section.supervise == "all",
    )


def validation_line(values: dict[str, Any], reference: ReferenceCurve | None = None) -> str:
    """Return what is said of a validation, beside the reference of its recipe where there is one."""
    line = (
        f"  step {values['step']:>5}: held-out tau by replay of rounds: chain {values['tau']:.3f} (slot average "
        f"{values['slot_tau']:.3f}), tree {values['tree_tau']:.3f}; at T=1 {values['sampled_tau']:.3f} and "
        f"{values['sampled_tree_tau']:.3f}; best {values['best_tau']:.3f}"
    )
    if "decoded_tau" in values:
        line += f"; decoded: chain {values['decoded_tau']:.3f}, tree {values['decoded_tree_tau']:.3f}"
    compared = "" if reference is None else behind(reference, values)
    return f"{line}; {compared}" if compared else line


def decode_check(context: RunContext, validation: RowSource) -> Callable[[DraftHead], dict[str, float]]:
    """Return what decodes a few held-out prompts with a head, the target loaded as it is evaluated."""
    section = context.recipe.train
    target = context.load_target(context.recipe.evaluate.dtype, tapped=True)
    stop_ids = stop_token_ids(context.template, target)
    return DecodeCheck(
        target.pack(rows=context.validation_tree.max_nodes),
        first_replies(validation, count=section.decode_prompts, stop_ids=stop_ids),
        depth=section.validation_depth,
        tree=context.validation_tree,
        dtype=torch.bfloat16 if section.precision == "bf16" else torch.float32,
    )


def loop_plan(context: RunContext) -> LoopPlan:
    """Return the loop's settings from the recipe."""
    section = context.recipe.train
    others = [field.name for field in fields(LoopPlan) if field.name not in ("packed", "validation_tree")]
    return LoopPlan(
        packed=section.batching == "packed",
        validation_tree=context.validation_tree,
        **{name: getattr(section, name) for name in others},
    )
