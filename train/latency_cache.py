"""The latency table of a target and a head on this machine: measured once in seconds, kept under EYAS_HOME.

Its name is a fingerprint of everything it depends on, so another machine, target, dtype or number of threads measures
its own.
"""

from dataclasses import asdict

import torch

from eyas.data.corpus import write_atomically
from eyas.inference.latency import LatencyTable
from eyas.inference.measure_latency import measure_latency
from eyas.models.bundled import cache_home
from eyas.models.draft_head import DraftHead
from eyas.models.errors import UserError
from eyas.models.target import Target
from eyas.train.machine import device_name
from eyas.train.progress import Reporter
from eyas.train.run_folder import fingerprint


def measured_latency(
    target: Target,
    head: DraftHead,
    *,
    target_fingerprint: str,
    rows: int,
    max_nodes: int,
    top_k: int,
    kv_dtype: torch.dtype | None = None,
    reporter: Reporter,
) -> LatencyTable:
    """Return the table for up to `rows` rows and trees of `max_nodes` nodes, root included; measured if it is new."""
    key = fingerprint(
        {
            "target": target_fingerprint,
            "head": asdict(head.config),
            "dtypes": [str(x) for x in (target.dtype, next(head.parameters()).dtype, kv_dtype or target.dtype)],
            "device": device_name(str(target.device)),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "sizes": [rows, max_nodes, top_k],
        }
    )
    path = cache_home() / "latency" / f"{key}.json"
    if path.is_file():
        try:
            return LatencyTable.from_json(path.read_text(encoding="utf-8"))
        except UserError as error:
            raise UserError(f"{path}: {error}") from None
    with reporter.bar("rows") as bar:
        table = measure_latency(
            target, head, rows=rows, max_nodes=max_nodes, top_k=top_k, kv_dtype=kv_dtype,
            progress=lambda done, total, _: bar.update("timing this machine", done, total, 1),
        )  # fmt: skip
    write_atomically(path, table.as_json())
    return table
