"""curves.png: loss, held-out acceptance, and alpha per drafted step over a run, redrawn at every validation."""

from pathlib import Path

from eyas.train.metrics_file import read_metrics
from eyas.train.reference_curve import ReferenceCurve

TAUS = {
    "tree_tau": ("o-", "tab:blue", "tree, replayed"),
    "decoded_tree_tau": ("D", "navy", "tree, really decoded"),
    "sampled_tree_tau": (":", "tab:blue", "tree at T=1"),
    "tau": ("o-", "tab:green", "chain, replayed"),
    "decoded_tau": ("D", "darkgreen", "chain, really decoded"),
    "sampled_tau": (":", "tab:green", "chain at T=1"),
    "slot_tau": ("--", "0.6", "chain, average over slots (over-states)"),
}


def draw_curves(metrics: Path, picture: Path, reference: ReferenceCurve | None = None) -> None:
    """Draw the loss (smoothed, over the raw one), every held-out tau and the chain's alpha from a metrics file.

    The taus of the recipe's reference, where there is one, lie behind them.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    reports = read_metrics(metrics)
    steps = [report for report in reports if report["event"] == "step"]
    validations = [report for report in reports if report["event"] == "validation"]
    figure = Figure(figsize=(14, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, right, steps_axes = figure.subplots(1, 3)
    left.plot([r["step"] for r in steps], [r["loss"] for r in steps], color="0.8", linewidth=0.8, label="each step")
    left.plot([r["step"] for r in steps], smoothed([r["loss"] for r in steps]), color="tab:blue", label="smoothed")
    left.set(title="training loss", xlabel="optimizer step")
    if reference is not None:
        for name, label in (("tree_tau", "reference run of this recipe"), ("tau", None)):
            line = [(point["step"], point[name]) for point in reference.points]
            right.plot(*zip(*line, strict=True), color="0.85", linewidth=5, label=label, zorder=0)
    for name, (style, color, label) in TAUS.items():
        known = [(r["step"], r[name]) for r in validations if name in r]
        if known:
            right.plot(*zip(*known, strict=True), style, color=color, markersize=4, label=label)
    for name, below in (("tree_tau", -14), ("tau", 8)):
        known = [(r["step"], r[name]) for r in validations if name in r]
        if known:
            best = max(known, key=lambda point: (point[1], -point[0]))
            right.annotate(f"best {best[1]:.3f}", best, (0, below), textcoords="offset points", ha="right", fontsize=8)
    right.set(title="held-out acceptance length tau", xlabel="optimizer step")
    depth = max((len(r.get("alpha", ())) for r in validations), default=0)
    for level in range(depth):
        known = [(r["step"], r["alpha"][level]) for r in validations if len(r.get("alpha", ())) > level]
        shade = f"{0.65 * level / max(1, depth - 1):.2f}"
        steps_axes.plot(*zip(*known, strict=True), "o-", color=shade, markersize=3, label=f"draft {level + 1}")
    steps_axes.set(title="chain: P(accepted | those before were)", xlabel="optimizer step")
    for axes in (left, right, steps_axes):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(framealpha=0.85, edgecolor="none", fontsize=8)
    temporary = picture.with_name(f".{picture.name}.tmp.png")
    figure.savefig(temporary, dpi=120)
    temporary.replace(picture)


def smoothed(values: list[float], *, share: float = 0.05) -> list[float]:
    """Return an exponential average whose memory is a share of the run's length, without a bias at the start."""
    weight = 1.0 / max(1.0, share * len(values))
    averaged, total, mass = [], 0.0, 0.0
    for value in values:
        total, mass = total * (1 - weight) + value * weight, mass * (1 - weight) + weight
        averaged.append(total / mass)
    return averaged
