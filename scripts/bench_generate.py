"""`eyas bench generate`: our batched decoding against transformers.generate."""

import json
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from eyas.scripts.options import DeviceOption, JsonOption

if TYPE_CHECKING:
    from eyas.train.progress import Bar


def run(
    target: Annotated[
        str, typer.Option(help="A bundled model, a folder or a Hub id.", metavar="MODEL")
    ] = "smollm2-135m-instruct",
    batch: Annotated[int, typer.Option(min=1, max=200, help="Prompts decoded at once.")] = 32,
    tokens: Annotated[int, typer.Option(min=1, help="New tokens per prompt.")] = 64,
    turns: Annotated[int, typer.Option(min=1, help="Timed turns of each.")] = 3,
    dtype: Annotated[Literal["bfloat16", "float32"], typer.Option(help="The target's dtype.")] = "bfloat16",
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Compare our batched decoding with transformers.generate, greedily and at T = 0.8 / top-p 0.95."""
    from statistics import median

    import torch
    from transformers.utils.logging import disable_progress_bar

    from eyas.data.encode import ChatTemplate
    from eyas.data.generate_bench import compare_speed
    from eyas.data.sources import read_prompts
    from eyas.data.styles import GREEDY, AnswerStyle
    from eyas.models.target import Target, load_tokenizer
    from eyas.train.machine import chosen_device
    from eyas.train.progress import Reporter

    disable_progress_bar()
    here = chosen_device(device)
    plain = Target.load(target, dtype=getattr(torch, dtype), device=here)
    packed = Target.load(target, dtype=getattr(torch, dtype), device=here).pack(rows=batch)
    template = ChatTemplate(load_tokenizer(target))
    questions = [list(conversation.messages) for conversation in read_prompts("bundled:train")[:batch]]
    prompts = [tuple(template.ids(messages, add_generation_prompt=True)) for messages in questions]
    results = []
    with Reporter().bar("turns") as bar:
        for style in (GREEDY, AnswerStyle(0.8, top_p=0.95)):
            show = partial(_show_turn, bar, f"T = {style.temperature:g}", turns + 1)
            results.append(compare_speed(packed, plain, prompts, style, new_tokens=tokens, turns=turns, progress=show))
    if as_json:
        shown = [{**asdict(one), "ratio": one.ratio} for one in results]
        settings = {"target": target, "dtype": dtype, "batch": len(prompts), "tokens": tokens, "device": here}
        typer.echo(json.dumps({**settings, "threads": torch.get_num_threads(), "results": shown}, indent=2))
        return
    typer.echo(f"{target}, {dtype}, batch {len(prompts)}, {tokens} new tokens, {torch.get_num_threads()} threads")
    for one in results:
        name = "greedy" if one.temperature == 0 else f"T = {one.temperature:g}, top-p {one.top_p:g}"
        same = f", {one.same} of {one.rows} replies the same" if one.temperature == 0 else ""
        typer.echo(
            f"  {name}: {median(one.eyas):.0f} tokens/s, transformers.generate {median(one.transformers):.0f}: "
            f"{one.ratio:.2f}x{same}"
        )


def _show_turn(bar: "Bar", phase: str, turns: int, done: int) -> None:
    bar.update(phase, done, turns, 0)
