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
from eyas.inference.draft import ChainTree, DynamicTree
from eyas.inference.evaluation import EvaluationPlan, EvaluationPrompt, evaluate, summarise
from eyas.inference.report import write_report
from eyas.models.checkpoint import load_head
from eyas.models.errors import UserError
from eyas.models.packed_linear import pack_linears
from eyas.models.target import load_tokenizer
from eyas.train.context import RunContext
from eyas.train.prompt_sources import check_apart
from eyas.train.run_folder import fingerprint


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
    tree = DynamicTree(section.tree.depth, section.tree.top_k, section.tree.num_draft_tokens)
    plan = EvaluationPlan(
        trees={"chain": ChainTree(section.chain.depth), "tree": tree},
        temperatures=section.temperatures,
        sampled_prompts=section.sampled_prompts,
        max_new_tokens=section.max_new_tokens,
        stop_ids=stop_token_ids(template, target),
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
        "results": summarise(measurements),
    }
    write_atomically(folder / "report.json", json.dumps(report, indent=2))
    texts = {prompt.id: prompt.text for prompt in prompts}
    write_report(folder, report, measurements, texts=texts, decode=lambda token: str(tokenizer.decode([token])))
    return {"results": report["results"], "prompts": len(prompts)}


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
