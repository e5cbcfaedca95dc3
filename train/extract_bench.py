"""Extraction timed beside the bare forward of its target, interleaved in one process: only the ratio means anything.

forward     the model as it is called by anyone, logits of every token included
decoder     the decoder alone, without the output head: nothing that could be stored
extraction  everything the extract stage does: taps, argmax at taught positions, checks, hashes, fsync to disk
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eyas.data.encode import encode_reply
from eyas.data.extract import extract
from eyas.data.extract_plan import ExtractionPlan, plan_batches, plan_shards
from eyas.data.forward_rows import Example
from eyas.data.manifest import FeatureSpec
from eyas.models.target import Target


@dataclass(frozen=True)
class ExtractTiming:
    """Tokens per second of each way, the median of the ratios of every turn, and what was measured."""

    forward: float
    decoder: float
    extraction: float
    ratio: float
    ratio_to_decoder: float
    tokens: int
    taught: int
    padding: float
    turns: int
    threads: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def random_examples(vocab_size: int, *, rows: int, length: int, seed: int = 0) -> list[Example]:
    """Return rows of random tokens, a quarter to the whole of `length` long, the later half of each a reply."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for number in range(rows):
        count = int(torch.randint(max(2, length // 4), length + 1, (1,), generator=generator))
        ids = torch.randint(vocab_size, (count,), generator=generator).tolist()
        found.append((f"row-{number}", encode_reply(ids[: count // 2], ids[count // 2 :])))
    return found


def time_extraction(
    target: Target, examples: list[Example], plan: ExtractionPlan, spec: FeatureSpec, *, turns: int
) -> ExtractTiming:
    """Return the timings of some turns, each of all three ways over the same rows in the same batches."""
    lengths = [len(example) for _, example in examples]
    batches = [
        _padded(examples, batch)
        for shard in plan_shards(lengths, rows_per_shard=plan.rows_per_shard)
        for batch in plan_batches(shard, lengths, tokens_per_batch=plan.tokens_per_batch)
    ]
    ways: dict[str, Callable[[], object]] = {
        "forward": lambda: [_forward(target, batch) for batch in batches],
        "decoder": lambda: [target.forward(batch.to(target.device)) for batch in batches],
        "extraction": lambda: _extract(target, examples, plan, spec),
    }
    for way in ways.values():
        way()
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(turns):
        for name in list(ways)[turn % 3 :] + list(ways)[: turn % 3]:
            started = time.perf_counter()
            ways[name]()
            _settle(target)
            seconds[name].append(time.perf_counter() - started)
    tokens = sum(lengths)
    rate = {name: tokens / statistics.median(times) for name, times in seconds.items()}

    def ratio(name: str) -> float:
        return statistics.median(a / b for a, b in zip(seconds[name], seconds["extraction"], strict=True))

    return ExtractTiming(
        forward=rate["forward"],
        decoder=rate["decoder"],
        extraction=rate["extraction"],
        ratio=ratio("forward"),
        ratio_to_decoder=ratio("decoder"),
        tokens=tokens,
        taught=sum(int(example.generated_mask_T.sum()) - 1 for _, example in examples),
        padding=sum(batch.numel() for batch in batches) / tokens - 1,
        turns=turns,
        threads=torch.get_num_threads(),
    )


def _padded(examples: list[Example], rows: list[int]) -> Tensor:
    longest = max(len(examples[row][1]) for row in rows)
    ids_BT = torch.zeros(len(rows), longest, dtype=torch.int64)
    for b, row in enumerate(rows):
        ids_BT[b, : len(examples[row][1])] = examples[row][1].input_ids_T
    return ids_BT


@torch.inference_mode()
def _forward(target: Target, ids_BT: Tensor) -> None:
    target.model(input_ids=ids_BT.to(target.device), use_cache=False)


def _extract(target: Target, examples: list[Example], plan: ExtractionPlan, spec: FeatureSpec) -> None:
    with tempfile.TemporaryDirectory(prefix="eyas-bench-") as folder:
        extract(target, examples, plan, Path(folder), spec=spec, progress=lambda *_: None)


def _settle(target: Target) -> None:
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
