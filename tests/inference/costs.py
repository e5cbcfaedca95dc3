"""Calibrations and latency tables whose right decisions can be worked out by hand."""

from eyas.inference.calibration import UNCHANGED, Calibration, TemperatureFit
from eyas.inference.cost_aware_tree import CostAwareTree
from eyas.inference.engine import Engine, GenerationRequest
from eyas.inference.latency import LatencyTable, RowsLatency
from eyas.inference.request import Generation
from eyas.inference.sampling import Sampling
from eyas.models.draft_head import DraftHead
from eyas.models.target import Target

PLAIN = 10.0  # seconds of a plain round


def unchanged(*hits: float) -> Calibration:
    """Return the calibration that believes the head, with these rates of its best child per depth (default: all)."""
    rates = hits or (1.0,)
    fits = [TemperatureFit(t, (UNCHANGED,) * len(rates), rates, rounds=1, loss=(0.0, 0.0)) for t in (0.0, 1.0)]
    return Calibration("target", (), tuple(fits))


def costs(*, node: float = 0.0, feed: float = 0.0, level: float = 0.0, rows: int = 8, nodes: int = 64) -> LatencyTable:
    """Return a table where every node, feed and level costs so much more than PLAIN, whatever the number of rows."""
    sizes = (1, nodes)
    verify = tuple(PLAIN + node * (size - 1) for size in sizes)
    counts = (1, rows) if rows > 1 else (1,)
    return LatencyTable(
        256, tuple(RowsLatency(count, sizes, verify, feed=feed, first=0.0, level=level) for count in counts)
    )


# They copy nothing from the text, so what they do follows from the head alone.
FREE = CostAwareTree(4, 3, 11, unchanged(), costs(feed=1e-6), ngram=0)  # drafts cost nothing: it takes all it may
WHOLE = CostAwareTree(4, 3, 30, unchanged(), costs(feed=1e-6), ngram=0)  # and may take all there is
# Its drafts cost more than they ever bring.
DEAR = CostAwareTree(4, 3, 11, unchanged(), costs(node=10 * PLAIN, feed=PLAIN), ngram=0)


def generate_ragged(
    target: Target,
    prompts: list[tuple[int, ...]],
    head: DraftHead,
    maker: CostAwareTree,
    *,
    temperature: float,
    count: int = 80,
) -> list[Generation]:
    """Return the generations of some prompts, two side by side, each 20 tokens shorter than the one before."""
    requests = [
        GenerationRequest(prompt, count - 20 * number, sampling=Sampling(temperature, seed=number))
        for number, prompt in enumerate(prompts)
    ]
    return Engine(target, head, maker, batch=2).generate(requests)
