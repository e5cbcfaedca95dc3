"""The summary of a run as tables in the terminal and as Markdown."""

from typing import Any

from rich.console import Console
from rich.table import Table


def print_summary(summary: dict[str, Any]) -> None:
    """Print stage times, acceptance and speed, and where things are, to stdout."""
    console = Console(highlight=False, markup=False)
    times = Table(title=f"{summary['recipe']}: stages", title_justify="left")
    for column in ("stage", "seconds", "result"):
        times.add_column(column, justify="right" if column == "seconds" else "left")
    for name, stage in summary["stages"].items():
        result = summary["results"][name]
        state = _describe(name, result) if stage["finished"] else "not finished"
        times.add_row(name, f"{stage['seconds']:.0f}", state)
    total = sum(stage["seconds"] for stage in summary["stages"].values())
    times.add_row("total", f"{total:.0f}", "")
    console.print(times)
    entries = summary["results"]["evaluate"].get("results", [])
    if entries:
        console.print(_acceptance_table(entries))
    whole = summary["stages"]["export"]["finished"]
    what = " (evaluation/report.html to look at, head/ to serve)" if whole else ""
    console.print(f"everything is in {summary['folder']}{what}", soft_wrap=True)


def _describe(name: str, result: dict[str, Any]) -> str:
    if name == "synthesize":
        return f"{result['rows']} replies, {result['reply_tokens']} tokens, {result['cut_replies']} cut by the limit"
    if name == "extract":
        return f"{result['tokens']} tokens, {result['bytes'] / 1e6:.0f} MB"
    if name == "train":
        return (
            f"{result['steps']} steps, {result['head_parameters'] / 1e6:.1f}M parameters, held-out tau: chain "
            f"{result['best_validation_tau']:.3f}, tree {result['best_validation_tree_tau']:.3f} "
            f"(best {result['best_by']}, step {result['best_step']})"
        )
    if name == "evaluate":
        return f"{result['prompts']} held-out prompts"
    return str(result["folder"])


COLUMNS = ("prompts", "T", "method", "tau", "tokens/s", "speed-up", "same as plain")


def acceptance_rows(entries: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return the table's rows: every set at T=0, then all prompts at other temperatures."""
    shown = [e for e in entries if e["temperature"] == 0 or e["prompt_set"] == "all"]
    ordered = sorted(shown, key=lambda e: (e["temperature"], e["prompt_set"] != "all", e["prompt_set"]))
    return [
        (
            f"{e['prompt_set']} ({e['prompts']})", f"{e['temperature']:g}", e["method"],
            "1.00" if e["method"] == "plain" else f"{e['tau']:.2f}", f"{e['tokens_per_second']:.1f}",
            f"{e['speedup']:.2f}x", f"{e['identical_to_plain']} of {e['prompts']}",
        )
        for e in ordered
    ]  # fmt: skip


def _acceptance_table(entries: list[dict[str, Any]]) -> Table:
    table = Table(title="held-out acceptance (tau: tokens per target forward, bonus included)", title_justify="left")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in ("prompts", "method") else "right")
    previous = None
    for row in acceptance_rows(entries):
        if previous is not None and row[:2] != previous:
            table.add_section()
        previous = row[:2]
        table.add_row(*row)
    return table


def markdown_table(entries: list[dict[str, Any]]) -> str:
    """Return the acceptance table as Markdown, for README files and notes."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(row) + " |" for row in acceptance_rows(entries)]
    return "\n".join(lines) + "\n"
