"""`eyas calibrate HEAD --target MODEL`: fit acceptance probabilities to a head's scores, into its eyas.json."""

import json
from pathlib import Path
from typing import Annotated

import typer

from eyas.models.errors import UserError
from eyas.scripts.decoding import DTYPES, DtypeOption, SeedOption
from eyas.scripts.options import DeviceOption, JsonOption


def calibrate(
    head: Annotated[Path, typer.Argument(help="The head's folder.", metavar="HEAD")],
    target: Annotated[str | None, typer.Option("--target", help="The target (default: the head's own).")] = None,
    prompts: Annotated[
        str, typer.Option(help="A JSONL file of messages, not those you measure on; or bundled:train.")
    ] = "bundled:train",
    count: Annotated[int, typer.Option(help="How many of them, evenly spaced.", min=1)] = 48,
    max_new_tokens: Annotated[int, typer.Option(help="The longest reply.", min=2)] = 48,
    temperatures: Annotated[
        list[float] | None, typer.Option("--temperature", help="0 and at least one above it; repeatable (0 and 1).")
    ] = None,
    dtype: DtypeOption = "float32",
    seed: SeedOption = 0,
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Learn from real rounds how often a head's drafts are accepted; trees choose their nodes by it."""
    import torch
    from transformers.utils.logging import disable_progress_bar

    from eyas.data.encode import ChatTemplate
    from eyas.data.sources import read_prompts
    from eyas.data.synthesize import stop_token_ids
    from eyas.inference.fit_calibration import OBSERVED_TREE, CalibrationPlan
    from eyas.inference.fit_calibration import calibrate as fit
    from eyas.models.checkpoint import head_from_files
    from eyas.models.head_files import read_head_files, update_card
    from eyas.models.packed_linear import pack_linears
    from eyas.models.target import Target, load_tokenizer, model_fingerprint
    from eyas.train.machine import chosen_device
    from eyas.train.progress import Reporter

    chosen_at = tuple(temperatures or (0.0, 1.0))
    if dtype not in DTYPES:
        raise UserError(f"--dtype {dtype!r} must be {' or '.join(DTYPES)}.")
    if 0 not in chosen_at or len(set(chosen_at)) < max(2, len(chosen_at)) or min(chosen_at) < 0:
        raise UserError(f"--temperature must be given 0 and at least one above it, each once; given {chosen_at}.")
    disable_progress_bar()
    files = read_head_files(head)
    name = target or files.card.get("target")
    if name is None:
        raise UserError("name the target: --target MODEL (a model folder, a Hub id or a bundled name).")
    here = chosen_device(device)
    drafting = head_from_files(files, dtype=torch.bfloat16, device=here)
    pack_linears(drafting, rows=OBSERVED_TREE.top_k)
    loaded = Target.load(name, dtype=getattr(torch, dtype), aux_layers=drafting.config.aux_layers, device=here).pack(
        rows=OBSERVED_TREE.max_nodes
    )
    template = ChatTemplate(load_tokenizer(name), files.card.get("template_arguments") or {})
    ids = [tuple(template.ids(list(prompt.messages), add_generation_prompt=True)) for prompt in read_prompts(prompts)]
    chosen = ids[:: max(1, len(ids) // count)][:count]
    plan = CalibrationPlan(chosen_at, max_new_tokens, stop_token_ids(template, loaded), seed)
    with Reporter(quiet=as_json).bar("tok") as bar:
        calibration = fit(
            loaded, drafting, chosen, plan, fingerprint=model_fingerprint(name),
            progress=lambda phase, done, total, tokens: bar.update(phase, done, total, tokens),
        )  # fmt: skip
    update_card(head, {"calibration": calibration.as_dict()})
    if as_json:
        typer.echo(json.dumps(calibration.as_dict(), indent=2))
        return
    typer.echo(f"{head}/eyas.json: calibrated on {len(chosen)} prompts")
    for fit_at in calibration.fits:
        raw, fitted = fit_at.loss
        hits = " ".join(f"{hit:.2f}" for hit in fit_at.hits)
        kept = "" if fitted < raw else " (so the head's own probabilities are kept)"
        typer.echo(
            f"  T={fit_at.temperature:g}: {fit_at.rounds} rounds; log loss per candidate {raw:.4f} -> {fitted:.4f} on "
            f"rounds not fitted on{kept}; best child accepted, by depth: {hits}"
        )
