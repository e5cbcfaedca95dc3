"""`eyas doctor HEAD`: every contract a head must keep with engines and target, as findings and verdicts."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from eyas.data.encode import ChatTemplate
from eyas.data.sources import read_prompts
from eyas.data.synthesize import stop_token_ids
from eyas.inference.acceptance import AcceptanceStats
from eyas.inference.draft import ChainTree
from eyas.inference.engine import Engine, GenerationRequest
from eyas.models.checkpoint import head_from_files
from eyas.models.engines import ENGINES, Verdict, judge
from eyas.models.errors import UserError
from eyas.models.head_checks import Check, check_files
from eyas.models.head_files import HeadFiles, read_head_files
from eyas.models.head_layout import EMBEDDINGS
from eyas.models.heads import HEADS
from eyas.models.hub import resolve_head
from eyas.models.import_head import RELAID, Answers, import_head
from eyas.models.packed_linear import pack_linears
from eyas.models.target import Target, load_tokenizer
from eyas.models.target_checks import check_loaded_target, check_target_config
from eyas.models.target_facts import TargetFacts
from eyas.models.tensor_origins import TensorOrigin, tensor_origins
from eyas.train.progress import Reporter

PROMPTS, TOKENS, DEPTH = 20, 32, 5
KEPT = 0.5  # the share of the recorded gain, tau - 1, under which a head is said not to fit


@dataclass(frozen=True)
class HeadReport:
    """What was found about a head, and whose its tensors are; `failed` decides the exit code."""

    head: str
    target: str
    checks: tuple[Check, ...]
    verdicts: tuple[Verdict, ...] = ()
    tensors: tuple[TensorOrigin, ...] = ()
    acceptance: dict[str, Any] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        return any(check.status == "failed" for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "failed": self.failed}


def check_head_folder(
    head: str, target: str, *, decode: bool = True, answers: Answers | None = None, reporter: Reporter
) -> HeadReport:
    """Return the report on a head (folder or Hub id) for a target; a foreign layout is imported in memory first.

    Without `decode` nothing is decoded, so nothing is said about acceptance.
    """
    folder = resolve_head(head)
    facts = TargetFacts.of(target)
    checks: list[Check] = []
    try:
        files = _native(folder, facts, answers or Answers(), checks)
    except UserError as error:
        return HeadReport(head, target, (Check("files", "failed", str(error)),))
    checks += check_files(files)
    if any(check.status == "failed" for check in checks):
        return HeadReport(head, target, tuple(checks))
    verdicts = tuple(judge(name, files.fields) for name in ENGINES)
    tokenizer = load_tokenizer(target)
    arguments = files.card.get("template_arguments", {})
    checks += check_target_config(files, facts, tokenizer, arguments)
    sizes_differ = any(check.name == "target sizes" and check.status == "failed" for check in checks)
    if sizes_differ or files.method not in HEADS:
        return HeadReport(head, target, tuple(checks), verdicts)
    layers = tuple(files.fields.get("eagle_aux_hidden_state_layer_ids", ()))
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    loaded = Target.load(target, dtype=dtype, aux_layers=layers, device=device)
    checks += check_loaded_target(files, loaded)
    acceptance: dict[str, Any] = {}
    if decode and not any(check.status == "failed" for check in checks):
        stats = _decode(files, loaded, ChatTemplate(tokenizer, arguments), reporter)
        acceptance = {"prompts": PROMPTS, "max_new_tokens": TOKENS, **stats.as_dict()}
        checks.append(_judge_acceptance(files, stats.tau))
    return HeadReport(head, target, tuple(checks), verdicts, tensor_origins(files, loaded), acceptance)


def _native(folder: Path, facts: TargetFacts, answers: Answers, checks: list[Check]) -> HeadFiles:
    """Return the head as native files, importing it when it is in another layout."""
    try:
        files = read_head_files(folder)
        if files.method and files.card.get("format") not in RELAID and EMBEDDINGS not in files.tensors:
            return files
    except UserError:
        if not (folder / "config.json").is_file():
            raise
    imported = import_head(folder, target=facts, answers=answers)
    checks += [Check("layout", "warning", note) for note in imported.notes]
    return imported.files


def _decode(files: HeadFiles, target: Target, template: ChatTemplate, reporter: Reporter) -> AcceptanceStats:
    head = head_from_files(files, dtype=target.dtype, device=str(target.device))
    target.pack(rows=DEPTH + 1)
    pack_linears(head, rows=1)
    engine = Engine(target, head, ChainTree(DEPTH))
    stop = stop_token_ids(template, target)
    stats = AcceptanceStats(DEPTH)
    longest = target.config.max_position_embeddings - TOKENS
    prompts = [template.ids(list(p.messages), add_generation_prompt=True) for p in read_prompts("bundled:eval")]
    prompts = [ids for ids in prompts if len(ids) <= longest]
    if not prompts:
        raise UserError(f"none of the bundled prompts fits into the target's positions with {TOKENS} new tokens.")
    chosen = prompts[:: max(1, len(prompts) // PROMPTS)][:PROMPTS]
    with reporter.bar("tok") as bar:
        for number, ids in enumerate(chosen, start=1):
            generation = engine.generate(GenerationRequest(tuple(ids), TOKENS, stop))
            stats += generation.stats
            bar.update("decoding", number, len(chosen), len(generation.token_ids))
    return stats


def _judge_acceptance(files: HeadFiles, tau: float) -> Check:
    chains = [e for e in files.card.get("acceptance", []) if e["method"] == "chain" and e["temperature"] == 0]
    said = f"a chain of {DEPTH} wins {tau:.2f} tokens per forward on {PROMPTS} prompts"
    if not chains:
        return Check("acceptance", "failed" if tau < 1.02 else "ok", f"{said}; nothing recorded to compare with")
    recorded = float(chains[0]["tau"])
    kept = tau - 1 >= KEPT * (recorded - 1)
    advice = "" if kept else "; the head does not fit this target: fine-tune or retrain it"
    return Check("acceptance", "ok" if kept else "failed", f"{said}, {recorded:.2f} when it was trained{advice}")
