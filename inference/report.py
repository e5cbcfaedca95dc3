"""The report of an evaluation: report.html, one self-contained page, and acceptance.png, one picture that stands alone.

Everything shown is read from report.json's dict and the measurements behind it. The page leads with one sentence about
the last speculative method (the tree) at the lowest temperature; where it is slower than plain decoding, that sentence
says so first. Texts come from prompts and models, so the template escapes all of them.
"""

import base64
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from eyas.inference.acceptance import AcceptanceStats
from eyas.inference.evaluation import PLAIN, Measurement

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ALL = "all"
COLOURS = ("#d98e32", "#1f5f99", "#5b8c5a", "#7a5fa8")
INK, FAINT = "#1d2430", "#6b7482"
NOT_SETTINGS = ("history", "coverage")


def write_report(
    folder: Path,
    report: dict[str, Any],
    measurements: list[Measurement],
    *,
    texts: dict[str, str],
    decode: Callable[[int], str],
) -> None:
    """Write report.html and acceptance.png to `folder`, each whole under its final name or not at all.

    `texts` maps prompt ids to what the reader should see as the prompt; `decode` returns the text of one token id.
    """
    picture = _png(acceptance_figure(report), dpi=200)
    page = render_page(report, measurements, texts=texts, decode=decode)
    folder.mkdir(parents=True, exist_ok=True)
    _write_atomically(folder / "acceptance.png", picture)
    _write_atomically(folder / "report.html", page.encode("utf-8"))


def render_page(
    report: dict[str, Any], measurements: list[Measurement], *, texts: dict[str, str], decode: Callable[[int], str]
) -> str:
    """Return the page as HTML."""
    results, training = report["results"], report["training"]
    temperature, names = lowest_temperature(results), methods(results)
    history = training.get("history", [])
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.j2").render(
        report=report,
        verdict=verdict(results),
        methods=names,
        colours=dict(zip(names, COLOURS, strict=False)),
        temperature=f"T={temperature:g}",
        overall=sorted((e for e in results if e["prompt_set"] == ALL), key=lambda e: e["temperature"]),
        sets=[{m: _entry(results, m, name) for m in (PLAIN, *names)} for name in (*prompt_sets(results), ALL)],
        contexts=_contexts(report["by_context"], temperature),
        differences=_differences(results),
        tau_plot=_data_uri(_panel(_draw_tau, results)),
        survival_plot=_data_uri(_panel(_draw_survival, results)),
        survivors={m: _entry(results, m, ALL) for m in names},
        training_plot=_data_uri(_training_figure(history)) if history else None,
        best=max(history, key=lambda point: point["tau"]) if history else None,
        coverage=training.get("coverage", {}),
        samples=list(_samples(measurements, names[-1], temperature, texts, decode)),
        settings=dict(_flat(report["settings"])),
        training=dict(_flat({name: value for name, value in training.items() if name not in NOT_SETTINGS})),
    )


def verdict(results: list[dict[str, Any]]) -> str:
    """Return one sentence on the last speculative method over all prompts at the lowest temperature."""
    *others, method = methods(results)
    entry = _entry(results, method, ALL)
    at = f"at T={entry['temperature']:g}"
    tokens = f"{entry['tau']:.2f} tokens per target forward"
    speed = f"{entry['speedup']:.2f}"
    if float(speed) > 1:
        text = f"The {method} emits {tokens} {at}, {speed}x the speed of plain decoding"
    elif float(speed) == 1:
        text = f"The {method} is no faster than plain decoding {at} ({speed}x), emitting {tokens}"
    else:
        text = f"The {method} is slower than plain decoding: {speed}x its speed {at}, emitting {tokens}"
    if entry["temperature"] == 0:
        text += (
            f", with output identical to plain decoding on {entry['identical_to_plain']} of {entry['prompts']} prompts"
        )
    best = max((_entry(results, other, ALL) for other in others), key=lambda e: e["speedup"], default=entry)
    if f"{best['speedup']:.2f}" > speed:
        text += f"; the {best['method']} is faster, {best['speedup']:.2f}x plain decoding with {best['tau']:.2f} tokens"
    return text + "."


def methods(results: list[dict[str, Any]]) -> list[str]:
    """Return the speculative methods in the order they were evaluated."""
    return [name for name in dict.fromkeys(e["method"] for e in results) if name != PLAIN]


def prompt_sets(results: list[dict[str, Any]]) -> list[str]:
    """Return the prompt sets in the order they were evaluated."""
    return [name for name in dict.fromkeys(e["prompt_set"] for e in results) if name != ALL]


def lowest_temperature(results: list[dict[str, Any]]) -> float:
    """Return the temperature that the verdict, the per-set table, the plots and the samples are about."""
    return min(float(e["temperature"]) for e in results)


def _entry(results: list[dict[str, Any]], method: str, prompt_set: str) -> dict[str, Any]:
    key = (method, lowest_temperature(results), prompt_set)
    return next(e for e in results if (e["method"], e["temperature"], e["prompt_set"]) == key)


def _contexts(by_context: list[dict[str, Any]], temperature: float) -> list[dict[str, Any]]:
    """Return one row per class of contexts, with the entry of every method that had rounds there."""
    rows: dict[int, dict[str, Any]] = {}
    for entry in by_context:
        if entry["temperature"] == temperature:
            row = {"context": entry["context"], "below": entry["below"], "methods": {}}
            rows.setdefault(entry["context"], row)["methods"][entry["method"]] = entry
    return [rows[context] for context in sorted(rows)]


def _differences(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return where greedy output left plain decoding's, the widest logit gap first."""
    greedy = [e for e in results if e["temperature"] == 0 and e["prompt_set"] == ALL]
    found = [{"method": e["method"], **difference} for e in greedy for difference in e["differences"]]
    return sorted(found, key=lambda difference: -difference["gap"])


def _samples(
    measurements: list[Measurement],
    method: str,
    temperature: float,
    texts: dict[str, str],
    decode: Callable[[int], str],
) -> Iterator[dict[str, Any]]:
    """Yield the first prompt of every set, with its continuation as (text, whether drafted) tokens."""
    shown: set[str] = set()
    for m in measurements:
        if (m.method, m.temperature) != (method, temperature) or m.prompt_set in shown:
            continue
        shown.add(m.prompt_set)
        tokens = [(decode(token), drafted) for token, drafted in zip(m.token_ids, m.accepted, strict=True)]
        yield {
            "id": m.prompt_id,
            "prompt_set": m.prompt_set,
            "prompt": texts[m.prompt_id],
            # A line break has no width: without the arrow its background colour would not be seen.
            "tokens": [(text.replace("\n", "↵\n") if drafted else text, drafted) for text, drafted in tokens],
            "split": any("\ufffd" in text for text, _ in tokens),
            "drafted": sum(m.accepted),
            "tau": AcceptanceStats.from_dict(m.stats).tau,
            "finish_reason": m.finish_reason,
        }


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield nested settings under dotted names, as `--set` takes them."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        elif isinstance(value, list | tuple):
            yield prefix + name, ", ".join(map(str, value)) or "none"
        else:
            yield prefix + name, f"{value:.6g}" if isinstance(value, float) else str(value)


def acceptance_figure(report: dict[str, Any]) -> "Figure":
    """Return two panels: tau per prompt set, and survival with alpha per depth."""
    results = report["results"]
    names = methods(results)
    figure = _new_figure(12, max(5.2, 2.2 + 0.42 * len(prompt_sets(results))))
    left, right = figure.subplots(1, 2, width_ratios=(1.1, 1))
    _draw_tau(left, results)
    _draw_survival(right, results)
    entries = [_entry(results, name, ALL) for name in (PLAIN, *names)]
    facts = [
        f"{e['method']} {e['tau']:.2f} tokens per target forward, {e['speedup']:.2f}x plain speed" for e in entries[1:]
    ]
    figure.suptitle("    ".join(facts), x=0.01, ha="left", fontsize=12.5, fontweight="bold", color=INK)
    figure.supxlabel(
        _literal(
            f"Recipe {report['recipe']}, target {Path(report['target']).name}, T={entries[0]['temperature']:g}, "
            f"{entries[0]['prompts']} held-out prompts, batch 1.\n"
            "survival: share of rounds with at least d draft tokens accepted; alpha: survival at d / survival at d - 1."
        ),
        x=0.01, ha="left", fontsize=10, color=FAINT,
    )  # fmt: skip
    return figure


def _panel(draw: Callable[["Axes", list[dict[str, Any]]], None], results: list[dict[str, Any]]) -> "Figure":
    """Return one panel of the acceptance figure alone; all panels of a report have one height."""
    figure = _new_figure(6.4, max(4.2, 1.4 + 0.42 * len(prompt_sets(results))))
    draw(figure.subplots(), results)
    return figure


def _training_figure(history: list[dict[str, Any]]) -> "Figure":
    figure = _new_figure(6.4, 3.6)
    axes = figure.subplots()
    steps, taus = [point["step"] for point in history], [point["tau"] for point in history]
    best = taus.index(max(taus))
    axes.plot(steps, taus, color=COLOURS[1], linewidth=2, marker="o", markersize=3.5)
    axes.plot(steps[best], taus[best], marker="o", markersize=9, markerfacecolor="none", color=COLOURS[1])
    axes.set_ylim(1, 1 + max(0.1, (taus[best] - 1) * 1.15))
    _style(axes, title="Held-out tau during training (chain, replayed)", grid="y")
    axes.set_xlabel("training step")
    axes.set_ylabel("tau")
    return figure


def _draw_tau(axes: "Axes", results: list[dict[str, Any]]) -> None:
    """Draw one group of bars per prompt set, all prompts on top, and a line where plain decoding is."""
    names, groups = methods(results), [ALL, *prompt_sets(results)]
    height = 0.8 / len(names)
    longest = 1.0
    for i, method in enumerate(names):
        taus = [_entry(results, method, group)["tau"] for group in groups]
        places = [row - 0.4 + (i + 0.5) * height for row in range(len(groups))]
        bars = axes.barh(places, taus, height * 0.9, color=COLOURS[i % len(COLOURS)], label=method)
        axes.bar_label(bars, [f"{tau:.2f}" for tau in taus], padding=3, fontsize=9.5, color=INK)
        longest = max(longest, *taus)
    axes.axvline(1, color=INK, linewidth=1, linestyle=(0, (4, 3)))
    axes.text(1, -0.5, " plain decoding", fontsize=9, color=FAINT, va="bottom")
    axes.axhline(0.5, color="#d5d9e0", linewidth=1)
    axes.set_yticks(range(len(groups)), ["all prompts", *map(_literal, groups[1:])])
    axes.set_ylim(len(groups) - 0.5, -0.8)
    axes.set_xlim(0, longest * 1.12)
    _style(axes, title="tau per prompt set", grid="x")
    axes.set_xlabel("tau: tokens per target forward, bonus included")
    axes.legend(
        frameon=False, fontsize=10, ncols=len(names), loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0.2
    )


def _draw_survival(axes: "Axes", results: list[dict[str, Any]]) -> None:
    """Draw survival (solid) and alpha (dashed) per depth over all prompts; alpha stops where nothing survived."""
    deepest = 1
    for i, method in enumerate(methods(results)):
        entry, colour = _entry(results, method, ALL), COLOURS[i % len(COLOURS)]
        depths = list(range(1, entry["depth"] + 1))
        tested = sum(base > 0 for base in [entry["rounds"], *entry["survived"][:-1]])
        axes.plot(depths, entry["survival"], color=colour, linewidth=2.2, marker="o", label=f"{method}: survival")
        axes.plot(
            depths[:tested], entry["alpha"][:tested], color=colour, linewidth=1.4, linestyle=(0, (4, 2)), marker="o",
            markersize=4.5, markerfacecolor="white", label=f"{method}: alpha",
        )  # fmt: skip
        deepest = max(deepest, entry["depth"])
    axes.set_xticks(range(1, deepest + 1))
    axes.set_xlim(0.8, deepest + 0.2)
    axes.set_ylim(0, 1)
    _style(axes, title="Survival and alpha per depth, all prompts", grid="y")
    axes.set_xlabel("depth of the draft token")
    axes.set_ylabel("survival, alpha")
    axes.legend(loc="best", fontsize=10, framealpha=0.9, edgecolor="none")


def _literal(text: str) -> str:
    """Return `text` for matplotlib to print as it is: a dollar sign would begin a formula."""
    return text.replace("$", r"\$")


def _style(axes: "Axes", *, title: str, grid: Literal["x", "y"]) -> None:
    axes.set_title(title, loc="left", fontsize=11.5, color=INK, pad=9)
    axes.grid(axis=grid, color="#e6e9ee", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#b9c0ca")
    axes.tick_params(colors=INK, labelsize=10, length=0)
    axes.xaxis.label.set(color=FAINT, fontsize=10)
    axes.yaxis.label.set(color=FAINT, fontsize=10)


def _new_figure(width: float, height: float) -> "Figure":
    """Return an empty figure in inches; it belongs to no global state and is drawn by Agg when saved as PNG."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1)
    return Figure(figsize=(width, height), layout=layout, facecolor="white")


def _png(figure: "Figure", *, dpi: int) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    return buffer.getvalue()


def _data_uri(figure: "Figure") -> str:
    return "data:image/png;base64," + base64.b64encode(_png(figure, dpi=170)).decode("ascii")


def _write_atomically(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
