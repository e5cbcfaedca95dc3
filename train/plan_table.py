"""A plan as tables in the terminal."""

from rich.console import Console
from rich.table import Table

from eyas.train.break_even import BATCHES, LARGEST, BreakEven
from eyas.train.engine_depth import EngineDepth
from eyas.train.plan import RunPlan, StagePlan, advice, human
from eyas.train.plan_time import ASSUMED_TAU


def print_plan(plan: RunPlan) -> None:
    """Print a plan and its verdict to stdout."""
    console = Console(highlight=False, markup=False)
    facts, counts = plan.facts, plan.facts.counts
    bound = "" if counts.exact else "at most "
    console.print(
        f"{facts.recipe.name}: target of {_count(facts.target.parameters)} parameters, head of "
        f"{_count(facts.head.parameters)}{f', planned for one {plan.card}' if plan.card else ''}\n"
        f"corpus: {bound}{counts.rows} rows, {counts.tokens} tokens ({counts.reply_tokens} of them written by the "
        f"target); features: {bound}{counts.stored_rows} rows, {counts.stored_tokens} tokens",
        soft_wrap=True,
    )
    if not counts.exact:
        assumed = facts.recipe.plan.reply_tokens
        console.print(
            f"  every reply counted as {assumed} tokens (plan.reply_tokens)"
            if assumed
            else "  every reply counted at its limit (plan.reply_tokens: the mean you expect)"
        )
    console.print(_stage_table(plan))
    speed = "the card's data sheet" if plan.card else "the machine's measured speed"
    notes = [
        "memory: highest resident size of a process; of it, mapped files may be dropped and need not fit",
        f"time: {speed}; right within a factor of two; decoding assumes tau {ASSUMED_TAU:g}",
    ]
    for note in notes:
        console.print(f"  {note}", soft_wrap=True)
    if plan.break_even:
        console.print(_break_even_table(plan.break_even))
        console.print("  from compute and bandwidth alone (roofline), in bf16: what an engine adds is not in it")
    if plan.depths:
        console.print(_depth_table(plan.depths))
        console.print(
            "  from this head's measured acceptance and the same roofline; num_speculative_tokens (vLLM), "
            "--speculative-num-steps (SGLang)",
            soft_wrap=True,
        )
    verdict = " ".join([*plan.refusals, advice(plan)]) if plan.refusals else _fits(plan)
    console.print(verdict, style="red" if plan.refusals else "green", soft_wrap=True)


def _fits(plan: RunPlan) -> str:
    memory = max((stage.needed_memory for stage in plan.stages if not stage.finished), default=0)
    return (
        f"fits: {human(plan.disk_needed)} of {human(plan.disk_limit)} disk, {human(memory)} of "
        f"{human(plan.memory_limit)} memory"
    )


def _stage_table(plan: RunPlan) -> Table:
    table = Table(title="stages", title_justify="left")
    for column in ("stage", "disk", "peak memory", "of it mapped", "time", "mostly"):
        table.add_column(column, justify="left" if column in ("stage", "mostly") else "right")
    for stage in plan.stages:
        terms = {name: count for name, count in stage.phase.terms.items() if name != "process"}
        biggest = max(terms, key=lambda name: terms[name], default="process")
        table.add_row(
            stage.name, human(stage.disk), human(stage.phase.peak), human(stage.phase.mapped), _time(stage), biggest
        )
    total = sum(stage.disk for stage in plan.stages)
    seconds = sum(stage.seconds or 0.0 for stage in plan.stages)
    peak = max(stage.phase.peak for stage in plan.stages)
    table.add_section()
    table.add_row("all", human(total), human(peak), "", duration(seconds) if plan.break_even else "", "")
    return table


def _time(stage: StagePlan) -> str:
    estimate = "" if stage.seconds is None else duration(stage.seconds)
    if stage.measured_seconds is None:
        return estimate
    return f"{estimate} (took {duration(stage.measured_seconds)})".strip()


def duration(seconds: float) -> str:
    """Return a time for people."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _count(number: int) -> str:
    return f"{number / 1e9:.2f}B" if number >= 1e9 else f"{number / 1e6:.1f}M"


def _break_even_table(rows: tuple[BreakEven, ...]) -> Table:
    table = Table(title="where speculation stops paying (estimate)", title_justify="left")
    for column in ("method", "tau", *(f"speed-up at {batch}" for batch in BATCHES), "pays up to"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for row in rows:
        limit = f"{LARGEST} and more" if row.pays_to is None else f"batch {row.pays_to}" if row.pays_to else "never"
        table.add_row(row.method, f"{row.tau:g}", *(f"{gain:.2f}x" for gain in row.speedups.values()), limit)
    return table


def _depth_table(rows: tuple[EngineDepth, ...]) -> Table:
    table = Table(title="tokens to draft in an engine (estimate)", title_justify="left")
    for column in ("requests together", "chain of", "tau", "speed-up"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(str(row.batch), str(row.depth or "none"), f"{row.tau:.2f}", f"{row.speedup:.2f}x")
    return table
