"""`eyas bench copies RUN`: how often what the text repeats is right, in the held-out replies of a run."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from eyas.scripts.options import DeviceOption, JsonOption


def run(
    run_folder: Annotated[Path, typer.Argument(help="A run folder with a corpus and a head.", metavar="RUN")],
    target: Annotated[str | None, typer.Option(help="The target, if not the run's.", metavar="MODEL")] = None,
    count: Annotated[int, typer.Option(help="Rows of the corpus that were held out from training.", min=1)] = 160,
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Count how often copies from the text are right, by how much matched and by what the head says."""
    import torch
    from transformers.utils.logging import disable_progress_bar

    from eyas.data.corpus import load_corpus
    from eyas.models.checkpoint import load_head
    from eyas.models.errors import UserError
    from eyas.models.target import Target
    from eyas.scripts.decoding import head_card
    from eyas.train.copy_rates import measure_copies
    from eyas.train.machine import chosen_device
    from eyas.train.progress import Reporter

    disable_progress_bar()
    rows = [row for row in load_corpus(run_folder / "corpus" / "corpus.jsonl") if row.split != "train"][:count]
    if not rows:
        raise UserError(f"the corpus of {str(run_folder)!r} holds no rows out from training.")
    here, folder = chosen_device(device), run_folder / "head"
    head = load_head(folder, dtype=torch.float32, device=here)
    name = target or head_card(folder).get("target")
    if name is None:
        raise UserError("name the target: --target MODEL (a model folder, a Hub id or a bundled name).")
    loaded = Target.load(name, dtype=torch.float32, aux_layers=head.config.aux_layers, device=here)
    head.lend(loaded)
    with Reporter(quiet=as_json).bar("tok") as bar:
        rates = measure_copies(
            loaded, head, rows, progress=lambda done, total, tokens: bar.update("copies", done, total, tokens)
        )
    if as_json:
        typer.echo(json.dumps(asdict(rates), indent=2))
        return
    typer.echo(f"{rates.tokens} tokens of {len(rows)} rows; share of right tokens (cases)")
    typer.echo("matched  alone          following      opposed        agreed         doubt taken off the head's")
    for known, kinds in enumerate(zip(rates.alone, rates.following, rates.opposed, rates.agreed, strict=True)):
        shares = "".join(f"{_share(kind.rate):>5} ({kind.cases:6d}) " for kind in kinds)
        typer.echo(f"{known + 1:7d}  {shares}{_share(kinds[-1].doubt_taken):>5}")


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
