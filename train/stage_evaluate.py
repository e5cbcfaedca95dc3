"""The evaluate stage: held-out prompts decoded by the bundled runtime, and the report."""

import json
import shlex
import sys
from importlib import metadata
from typing import Any

import torch

from eyas.data.corpus import load_corpus, load_split, write_atomically
from eyas.data.encode import ChatTemplate
from eyas.data.sources import read_prompts
from eyas.data.synthesize import stop_token_ids
from eyas.inference.calibration import Calibration
from eyas.inference.context_acceptance import acceptance_by_context
from eyas.inference.cost_aware_tree import CostAwareTree
from eyas.inference.draft import ChainTree, DynamicTree, TreeMaker
from eyas.inference.evaluation import EvaluationPlan, EvaluationPrompt, evaluate, summarise
from eyas.inference.fit_calibration import CalibrationPlan, calibrate
from eyas.inference.report import write_report
from eyas.models.checkpoint import load_head
from eyas.models.draft_head import DraftHead
from eyas.models.errors import UserError
from eyas.models.packed_linear import pack_linears
from eyas.models.target import Target, load_tokenizer
from eyas.train.context import RunContext
from eyas.train.latency_cache import measured_latency
from eyas.train.prompt_sources import check_apart
from eyas.train.run_folder import fingerprint

COST_AWARE = "cost-aware tree"
CALIBRATION_FILE = "calibration.json"


def run_evaluate(context: RunContext) -> dict[str, Any]:
    """Write report.json, report.html and acceptance.png to evaluation/ and return the report's summary."""
    recipe, section = context.recipe, context.recipe.evaluate
    folder = context.folder.of("evaluate")
    tokenizer = load_tokenizer(recipe.target.model)
    template = ChatTemplate(tokenizer, recipe.target.template_arguments)
    check_apart(recipe, load_corpus(context.folder.of("synthesize") / "corpus.jsonl"))
    prompts = evaluation_prompts(context, template)
    target = context.load_target(section.dtype, tapped=True).pack(rows=section.tree.num_draft_tokens + 1)
    target.self_check(torch.tensor(prompts[0].prompt_ids))
    head = load_head(
        context.folder.of("train") / "best", dtype=getattr(torch, section.draft_dtype), device=context.device
    )
    pack_linears(head, rows=section.tree.top_k)
    stop_ids = stop_token_ids(template, target)
    calibration = run_calibration(context, target, head, prompts, stop_ids)
    plan = EvaluationPlan(
        trees=evaluation_trees(context, target, head, calibration),
        temperatures=section.temperatures,
        sampled_prompts=section.sampled_prompts,
        max_new_tokens=section.max_new_tokens,
        stop_ids=stop_ids,
        seed=section.seed,
    )
    with context.reporter.bar("tok") as bar:
        measurements = evaluate(
            target, head, prompts, plan, folder / "measurements.jsonl",
            lambda done, total, tokens: bar.update("decoding", done, total, tokens),
        )  # fmt: skip
    report = {
        "recipe": recipe.name,
        "target": recipe.target.model,
        "target_fingerprint": context.target_fingerprint,
        "template_fingerprint": fingerprint({"template": str(tokenizer.chat_template), **template.arguments}),
        "prompt_hash": fingerprint({prompt.id: prompt.prompt_ids for prompt in prompts}),
        "settings": section.model_dump(mode="json"),
        "versions": versions(),
        "command": shlex.join(["eyas", *sys.argv[1:]]),
        "training": context.folder.record("train").get("result", {}),
        "calibration": calibration_summary(calibration),
        "results": summarise(measurements),
        "by_context": acceptance_by_context(measurements),
    }
    write_atomically(folder / "report.json", json.dumps(report, indent=2))
    texts = {prompt.id: prompt.text for prompt in prompts}
    write_report(folder, report, measurements, texts=texts, decode=lambda token: str(tokenizer.decode([token])))
    return {"results": report["results"], "by_context": report["by_context"], "prompts": len(prompts)}


def run_calibration(
    context: RunContext, target: Target, head: DraftHead, prompts: list[EvaluationPrompt], stop_ids: frozenset[int]
) -> Calibration | None:
    """Return the head's calibration from prompts of the validation split; kept in calibration.json of the stage."""
    section, path = context.recipe.evaluate, context.folder.of("evaluate") / CALIBRATION_FILE
    if section.calibration.prompts == 0:
        return None
    if path.is_file():  # made before the stage was interrupted
        card = {"calibration": json.loads(path.read_text(encoding="utf-8"))}
        return Calibration.from_card(card, where=str(path))
    measured = {prompt.prompt_ids for prompt in prompts}
    rows = load_split(context.folder.of("synthesize"), "validation")
    others = list(dict.fromkeys(row.prompt_ids for row in rows if row.prompt_ids not in measured))
    chosen = others[:: max(1, len(others) // section.calibration.prompts)][: section.calibration.prompts]
    if not chosen:
        raise UserError(
            "there is no validation prompt that is not evaluated, too, so the head cannot be calibrated; raise "
            "synthesize.validation or set evaluate.calibration.prompts to 0."
        )
    plan = CalibrationPlan(
        section.calibration.temperatures, section.calibration.max_new_tokens, stop_ids, seed=section.seed
    )
    with context.reporter.bar("tok") as bar:
        calibration = calibrate(
            target, head, chosen, plan, fingerprint=context.target_fingerprint,
            progress=lambda name, done, total, tokens: bar.update(f"calibrating, {name}", done, total, tokens),
        )  # fmt: skip
    write_atomically(path, json.dumps(calibration.as_dict(), indent=1))
    return calibration


def evaluation_trees(
    context: RunContext, target: Target, head: DraftHead, calibration: Calibration | None
) -> dict[str, TreeMaker]:
    """Return the speculative methods of the recipe; the report leads with the last, which is the one to use."""
    section = context.recipe.evaluate
    tree, auto = section.tree, section.auto
    chosen_by = calibration if tree.calibrated else None
    trees: dict[str, TreeMaker] = {
        "chain": ChainTree(section.chain.depth),
        "tree": DynamicTree(tree.depth, tree.top_k, tree.num_draft_tokens, chosen_by),
    }
    if auto is not None:
        assert calibration is not None
        latency = measured_latency(
            target, head, target_fingerprint=context.target_fingerprint, rows=1,
            max_nodes=auto.num_draft_tokens + 1, top_k=auto.top_k, reporter=context.reporter,
        )  # fmt: skip
        trees[COST_AWARE] = CostAwareTree(auto.depth, auto.top_k, auto.num_draft_tokens, calibration, latency)
    return trees


def calibration_summary(calibration: Calibration | None) -> dict[str, Any]:
    """Return what a report says of a calibration: rounds, and log loss per candidate on rounds not fitted on."""
    if calibration is None:
        return {}
    return {
        "prompts": len(calibration.prompts),
        **{f"rounds at T={fit.temperature:g}": fit.rounds for fit in calibration.fits},
        **{f"log loss at T={fit.temperature:g}, before and after": fit.loss for fit in calibration.fits},
    }


def evaluation_prompts(context: RunContext, template: ChatTemplate) -> list[EvaluationPrompt]:
    """Return the held-out prompts: a set per category of the files, and the target's own as "self-written"."""
    section, limit = context.recipe.evaluate, context.recipe.synthesize.max_prompt_tokens
    prompts = []
    for source in section.prompts:
        for prompt in read_prompts(source):
            ids = template.ids(list(prompt.messages), add_generation_prompt=True)
            prompts.append(EvaluationPrompt(prompt.id, prompt.category, tuple(ids), prompt.messages[-1]["content"]))
    if section.self_heldout:
        for row in load_split(context.folder.of("synthesize"), "heldout"):
            prompts.append(EvaluationPrompt(row.id, "self-written", row.prompt_ids, row.prompt_text))
    if not prompts:
        raise UserError("there are no held-out prompts; give evaluate.prompts or raise synthesize.self_heldout.")
    long = [prompt.id for prompt in prompts if len(prompt.prompt_ids) > limit]
    if long:
        raise UserError(
            f"evaluation prompt {long[0]!r} is longer than synthesize.max_prompt_tokens = {limit}; raise it."
        )
    return prompts


def versions() -> dict[str, str]:
    """Return the versions a number depends on."""
    names = ("eyas", "transformers", "accelerate")
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "unknown"
    return {**found, "torch": torch.__version__, "python": sys.version.split()[0]}
