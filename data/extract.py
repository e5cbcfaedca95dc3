"""Extraction: one frozen pass of the target over the corpus, features to shards, proven right on the way.

Which row lies in which shard depends on the corpus and the plan alone (data/extract_plan.py), so any number of
processes may share the work and any other number may resume it: each writes its own shards, whole and under final
names, and nobody waits for anybody until the last shard. The first process then writes index and manifest.

On the way: teacher logits rebuilt from final states equal the model's own, some rows of every shard are computed once
more alone, every row's tokens and states are hashed, and what the kept states lose against the computed ones is
measured. A finished shard is not computed again, but for its first row, which shows whether it is this target's.
"""

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from eyas.data.extract_checks import check_batched, check_examples, check_finished, check_target
from eyas.data.extract_plan import ExtractionPlan, checked_places, plan_batches, plan_shards, shards_of
from eyas.data.feature_row import FeatureRow, teaching_positions
from eyas.data.feature_store import FeatureStore, shard_name, write_index
from eyas.data.forward_rows import Example, forward_rows
from eyas.data.manifest import MANIFEST, SCHEMA, FeatureManifest, FeatureSpec, read_manifest, write_manifest
from eyas.data.measure import fidelity_sums, state_sums, summarise
from eyas.data.shard import decode_row, encode_row, read_header, write_shard
from eyas.data.shard_writer import ShardWriter
from eyas.models.errors import UserError
from eyas.models.target import Target

Progress = Callable[[int, int, int], None]  # this process's rows done, its rows in all, tokens of this call
POLL_SECONDS = 0.1
STALL_SECONDS = 3600.0


def extract(
    target: Target,
    examples: list[Example],
    plan: ExtractionPlan,
    folder: Path,
    *,
    spec: FeatureSpec,
    progress: Progress,
    rank: int = 0,
    ranks: int = 1,
    stall_seconds: float = STALL_SECONDS,
) -> FeatureStore:
    """Write the feature store of `examples` (id, example) to `folder`, resuming at the first unfinished shard.

    With several processes each calls this with its rank and returns when the whole store is there. Raises UserError
    for rows that are too long, for a corpus without supervised tokens, when a self-check fails, when the disk is full,
    and when the other processes finish no shard for `stall_seconds`.
    """
    assert spec.aux_layers == target.aux_layers
    check_examples(examples, plan)
    folder.mkdir(parents=True, exist_ok=True)
    check_target(target, examples[0])
    lengths = [len(example) for _, example in examples]
    shards = plan_shards(lengths, rows_per_shard=plan.rows_per_shard)
    paths = [folder / shard_name(number) for number in range(len(shards))]
    if rank == 0 and not all(path.is_file() for path in paths):
        (folder / MANIFEST).unlink(missing_ok=True)
    mine = shards_of(len(shards), rank=rank, ranks=ranks)
    total, done = sum(len(shards[number]) for number in mine), 0
    with ShardWriter() as writer:
        for number in mine:
            group = [examples[row] for row in shards[number]]
            if paths[number].is_file():
                check_finished(target, paths[number], group, spec)
            else:
                rows = _compute(target, group, plan, spec, partial(_report, progress, done, total))
                measured = _check_rows(target, group, rows, plan, spec)
                writer.submit(partial(_write, paths[number], rows, spec, measured))
            done += len(group)
            progress(done, total, 0)
    _wait_for(paths, stall_seconds)
    if rank == 0:
        _finish(folder, examples, plan, spec, shards, paths)
    _wait_for([folder / MANIFEST], stall_seconds)
    return FeatureStore(folder)


def _report(progress: Progress, before: int, total: int, rows: int, tokens: int) -> None:
    progress(before + rows, total, tokens)


def _compute(
    target: Target, group: list[Example], plan: ExtractionPlan, spec: FeatureSpec, progress: Callable[[int, int], None]
) -> list[FeatureRow]:
    """Return the feature rows of one shard, in its order."""
    lengths = [len(example) for _, example in group]
    rows: list[FeatureRow] = []
    for batch in plan_batches(list(range(len(group))), lengths, tokens_per_batch=plan.tokens_per_batch):
        everywhere = spec.final_at == "everywhere"
        rows.extend(forward_rows(target, [group[row] for row in batch], final_everywhere=everywhere))
        progress(len(rows), sum(lengths[row] for row in batch))
    return rows


def _check_rows(
    target: Target, group: list[Example], rows: list[FeatureRow], plan: ExtractionPlan, spec: FeatureSpec
) -> dict[str, Any]:
    """Compute some rows of a shard once more alone and return what keeping them loses."""
    places = checked_places(len(group), plan.checked_rows)
    for place in places:
        check_batched(target, group[place], rows[place])
    computed = [rows[place] for place in places]
    kept = [decode_row(encode_row(row, spec), spec) for row in computed]
    return fidelity_sums(target.head, computed, kept, layers=len(spec.aux_layers))


def _write(path: Path, rows: list[FeatureRow], spec: FeatureSpec, fidelity: dict[str, Any]) -> None:
    """Encode, measure and write one shard."""
    states = state_sums((row.aux_hidden_TF for row in rows), layers=len(spec.aux_layers))
    write_shard(path, [encode_row(row, spec) for row in rows], spec, measured={"states": states, "fidelity": fidelity})


def _wait_for(paths: list[Path], stall_seconds: float) -> None:
    """Wait until all files are there; raises UserError when none of them has come for `stall_seconds`."""
    missing, since = [path for path in paths if not path.is_file()], time.monotonic()
    while missing:
        time.sleep(POLL_SECONDS)
        still = [path for path in missing if not path.is_file()]
        if len(still) < len(missing):
            since = time.monotonic()
        missing = still
        if missing and time.monotonic() - since > stall_seconds:
            raise UserError(
                f"the other processes have finished nothing for {stall_seconds:.0f} s and {len(missing)} files are "
                f"missing, {missing[0].name} first; if they have ended, run extract again: it resumes there."
            )


def _finish(
    folder: Path,
    examples: list[Example],
    plan: ExtractionPlan,
    spec: FeatureSpec,
    shards: list[list[int]],
    paths: list[Path],
) -> None:
    """Write index and manifest of a store whose shards are all there."""
    where = {row: (number, place) for number, group in enumerate(shards) for place, row in enumerate(group)}
    lengths = [len(example) for _, example in examples]
    write_index(
        folder,
        json.dumps({"schema": SCHEMA, "row_ids": [row_id for row_id, _ in examples]}),
        lengths=lengths,
        shards=[where[row][0] for row in range(len(examples))],
        places=[where[row][1] for row in range(len(examples))],
    )
    manifest = FeatureManifest(
        spec=spec,
        max_length=plan.max_length,
        longest=max(lengths),
        rows=len(examples),
        tokens=sum(lengths),
        taught=sum(len(teaching_positions(example.generated_mask_T)) for _, example in examples),
        shards=tuple(path.name for path in paths),
        measured=summarise([read_header(path)["measured"] for path in paths]),
    )
    if not (folder / MANIFEST).is_file() or read_manifest(folder) != manifest:
        write_manifest(folder, manifest)
