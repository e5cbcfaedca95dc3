"""curves.png: loss and held-out acceptance over the steps of a run, redrawn at every validation."""

from pathlib import Path

from eyas.train.metrics_file import read_metrics


def draw_curves(metrics: Path, picture: Path) -> None:
    """Draw the loss (smoothed, over the raw one) and both held-out taus from a metrics file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    reports = read_metrics(metrics)
    steps = [report for report in reports if report["event"] == "step"]
    validations = [report for report in reports if report["event"] == "validation"]
    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    left.plot([r["step"] for r in steps], [r["loss"] for r in steps], color="0.8", linewidth=0.8, label="each step")
    left.plot([r["step"] for r in steps], smoothed([r["loss"] for r in steps]), color="tab:blue", label="smoothed")
    left.set(title="training loss", xlabel="optimizer step")
    at = [r["step"] for r in validations]
    right.plot(
        at, [r["tau"] for r in validations], "o-", color="tab:green", label="replay of rounds (what decoding sees)"
    )
    right.plot(at, [r["slot_tau"] for r in validations], "--", color="0.6", label="average over slots (over-states)")
    if validations:
        best = max(validations, key=lambda r: (r["tau"], -r["step"]))
        right.annotate(f"best {best['tau']:.3f}", (best["step"], best["tau"]), (0, -14), textcoords="offset points")
    right.set(title="held-out chain acceptance length tau", xlabel="optimizer step")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
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
