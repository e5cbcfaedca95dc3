"""`eyas bench extract`: extraction beside the bare forward of its target, on the same batches."""

import json
from typing import Annotated, Literal

import typer

from eyas.scripts.options import DeviceOption, JsonOption


def run(
    target: Annotated[
        str, typer.Option(help="A bundled model, a folder or a Hub id.", metavar="MODEL")
    ] = "smollm2-135m-instruct",
    rows: Annotated[int, typer.Option(min=2, help="Random rows of a quarter to the whole of --length tokens.")] = 96,
    length: Annotated[int, typer.Option(min=8, help="The longest row.")] = 256,
    turns: Annotated[int, typer.Option(min=1, help="Timed turns of each way.")] = 3,
    tokens_per_batch: Annotated[int, typer.Option(min=1, help="Padded tokens of a batch.")] = 2048,
    dtype: Annotated[Literal["bfloat16", "float32"], typer.Option(help="The target's dtype.")] = "bfloat16",
    state_dtype: Annotated[
        Literal["float32", "bfloat16", "float8_e4m3fn"], typer.Option(help="How states are kept.")
    ] = "bfloat16",
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Time extraction beside the target's own forward, interleaved in one process; the ratio is what counts."""
    import torch
    from transformers.utils.logging import disable_progress_bar

    from eyas.data.extract_plan import ExtractionPlan
    from eyas.data.manifest import FeatureSpec
    from eyas.models.head_config import default_aux_layers
    from eyas.models.target import Target
    from eyas.train.extract_bench import random_examples, time_extraction
    from eyas.train.machine import chosen_device
    from eyas.train.progress import Reporter

    disable_progress_bar()
    here = chosen_device(device)
    model = Target.load(target, dtype=getattr(torch, dtype), device=here)
    layers = default_aux_layers(model.config.num_hidden_layers)
    tapped = Target(model.model, aux_layers=layers)
    spec = FeatureSpec(
        target=target, quantization="none", tokenizer="", template="", template_arguments="{}", aux_layers=layers,
        hidden_size=model.config.hidden_size, vocab_size=model.vocab_size, compute_dtype=dtype,
        state_dtype=state_dtype, data="random",
    )  # fmt: skip
    examples = random_examples(model.vocab_size, rows=rows, length=length)
    Reporter().say(
        f"{rows} rows of up to {length} tokens, {turns} turns of three ways; this takes a few minutes on CPUs"
    )
    plan = ExtractionPlan(max_length=length, tokens_per_batch=tokens_per_batch, rows_per_shard=rows)
    timing = time_extraction(tapped, examples, plan, spec, turns=turns)
    if as_json:
        typer.echo(json.dumps({"target": target, "dtype": dtype, "state_dtype": state_dtype, **timing.as_dict()}))
        return
    typer.echo(
        f"{timing.tokens} tokens, {timing.taught} of them taught, {timing.padding:.1%} padding, {dtype}, kept as "
        f"{state_dtype}, {timing.threads} threads, torch {torch.__version__}\n"
        f"  bare forward, with logits      {timing.forward:8.0f} tokens/s\n"
        f"  decoder alone, without logits  {timing.decoder:8.0f} tokens/s\n"
        f"  extraction, to disk            {timing.extraction:8.0f} tokens/s\n"
        f"  ratio to the bare forward      {timing.ratio:8.2f}\n"
        f"  ratio to the decoder alone     {timing.ratio_to_decoder:8.2f}"
    )
