"""The plan of a run before anything is loaded: rows, tokens, disk, peak memory and time per stage, and whether it fits.

What a run still needs is compared with what the machine has free (or `plan.disk` and `plan.memory` of the recipe).
Where it does not suffice the plan is refused, with smaller settings that would fit.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eyas.data.sources import RowsRefused
from eyas.models.errors import CheckFailed
from eyas.models.size import DTYPE_BYTES
from eyas.train.break_even import BreakEven, break_even_table
from eyas.train.cards import Card
from eyas.train.context import RunContext
from eyas.train.engine_depth import EngineDepth, best_depths, measured_survival
from eyas.train.machine import Speed, free_disk, free_memory
from eyas.train.plan_disk import DISK, in_flight_bytes
from eyas.train.plan_facts import Facts, gather_facts
from eyas.train.plan_fit import settings_that_fit
from eyas.train.plan_memory import MEMORY, Phase
from eyas.train.plan_time import TIME
from eyas.train.run_folder import STAGES, RunFolder


@dataclass(frozen=True)
class StagePlan:
    """One stage. `present` bytes of its disk are there already; `phase` is the one with the highest peak.

    `seconds` is None when time was not asked for, `measured_seconds` the time it took if it is finished.
    """

    name: str
    finished: bool
    disk: int
    present: int
    phase: Phase
    needed_memory: int
    seconds: float | None
    measured_seconds: float | None


@dataclass(frozen=True)
class RunPlan:
    """The stages, the limits, and for each limit that does not suffice a sentence."""

    facts: Facts
    stages: tuple[StagePlan, ...]
    disk_needed: int
    disk_limit: int
    memory_limit: int
    refusals: tuple[str, ...]
    smaller: tuple[str, ...]
    break_even: tuple[BreakEven, ...]
    depths: tuple[EngineDepth, ...] = ()
    card: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as JSON-able values."""
        facts = self.facts
        return {
            "recipe": facts.recipe.name,
            "card": self.card,
            "fits": not self.refusals,
            "target": asdict(facts.target),
            "head_parameters": facts.head.parameters,
            "corpus": asdict(facts.counts),
            "stages": {
                stage.name: {
                    "finished": stage.finished,
                    "disk_bytes": stage.disk,
                    "peak_memory_bytes": stage.phase.peak,
                    "needed_memory_bytes": stage.needed_memory,
                    "mapped_bytes": stage.phase.mapped,
                    "memory_terms": stage.phase.terms,
                    "seconds": stage.seconds,
                    "measured_seconds": stage.measured_seconds,
                }
                for stage in self.stages
            },
            "disk_needed_bytes": self.disk_needed,
            "disk_limit_bytes": self.disk_limit,
            "memory_limit_bytes": self.memory_limit,
            "refusals": list(self.refusals),
            "smaller_settings": list(self.smaller),
            "break_even_estimate": [asdict(row) for row in self.break_even],
            "engine_depths": [asdict(row) for row in self.depths],
        }


def make_plan(
    context: RunContext, *, stages: tuple[str, ...] = STAGES, speed: Speed | None = None, card: Card | None = None
) -> RunPlan:
    """Return the plan of a run that has some stages to do, on this machine or on a `card` of its own.

    Without `speed` or a card times and the break-even table are left out.
    """
    facts = gather_facts(context, on_card=card is not None)
    speed = card.speed if card else speed
    limits = context.recipe.plan
    disk_limit = free_disk(context.folder.path) if limits.disk is None else int(limits.disk)
    memory_limit = int(limits.memory or 0) or (card.memory if card else free_memory(context.device))
    left = unfinished(context, stages)
    present = {name: _present(context.folder, name) if name in left else 0 for name in STAGES}
    planned = tuple(_stage(context, facts, name, present[name], speed) for name in STAGES)

    def excess(other: Facts) -> int:
        disk = max(0, disk_needed(other, left, present) - disk_limit)
        return disk + sum(max(0, memory_needed(other, name) - memory_limit) for name in left)

    survival = measured_survival(context.folder.record("evaluate").get("result", {}))
    needed = disk_needed(facts, left, present)
    refusals = _refusals(facts, left, planned, needed, disk_limit, memory_limit, context.folder.path)
    smaller = settings_that_fit(facts, excess) if refusals else []
    return RunPlan(
        facts=facts,
        stages=planned,
        disk_needed=needed,
        disk_limit=disk_limit,
        memory_limit=memory_limit,
        refusals=tuple(refusals),
        smaller=tuple(" ".join(f"--set {key}={value}" for key, value in changes) for changes in smaller),
        break_even=tuple(break_even_table(facts, speed)) if speed else (),
        depths=best_depths(facts, speed, survival) if speed and survival else (),
        card=card.title if card else None,
    )


def unfinished(context: RunContext, stages: tuple[str, ...]) -> list[str]:
    """Return those of some stages that have still to run."""
    return [name for name in stages if not context.folder.is_finished(name, context.fingerprints[name])]


def check_plan(context: RunContext, stages: tuple[str, ...]) -> None:
    """Raise CheckFailed when some stages cannot finish on this machine's disk and memory, naming a smaller setting."""
    try:
        plan = make_plan(context, stages=stages)
    except RowsRefused:
        return  # the stage that reads them says so, with its table
    if plan.refusals:
        raise CheckFailed(f"{' '.join(plan.refusals)} {advice(plan)}")


def advice(plan: RunPlan) -> str:
    """Return what to do about a plan that does not fit."""
    if plan.smaller:
        return f"It would fit with {', or with '.join(plan.smaller)}."
    weights = DTYPE_BYTES[plan.facts.recipe.synthesize.dtype] * plan.facts.target.parameters
    return (
        f"No smaller setting of the recipe fits (the target's weights alone take {human(weights)}): it needs another "
        "machine or target."
    )


def disk_needed(facts: Facts, left: list[str], present: dict[str, int]) -> int:
    """Return the bytes that the unfinished stages have still to write."""
    stages = sum(max(0, DISK[name](facts) - present[name]) for name in left)
    return stages + (in_flight_bytes(facts) if "train" in left else 0)


def memory_needed(facts: Facts, stage: str) -> int:
    """Return the bytes that must fit, mapped files not among them."""
    return max(phase.needed for phase in MEMORY[stage](facts))


def human(count: float) -> str:
    """Return a number of bytes for people."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def _stage(context: RunContext, facts: Facts, name: str, present: int, speed: Speed | None) -> StagePlan:
    record = context.folder.record(name)
    finished = context.folder.is_finished(name, context.fingerprints[name])
    return StagePlan(
        name=name,
        finished=finished,
        disk=DISK[name](facts),
        present=present,
        phase=max(MEMORY[name](facts), key=lambda phase: phase.peak),
        needed_memory=memory_needed(facts, name),
        seconds=TIME[name](facts, speed) if speed else None,
        measured_seconds=record["seconds"] if finished else None,
    )


def _present(folder: RunFolder, name: str) -> int:
    """Return the bytes that an unfinished stage has already written."""
    return sum(path.stat().st_size for path in folder.of(name).rglob("*") if path.is_file())


def _refusals(
    facts: Facts, left: list[str], stages: tuple[StagePlan, ...], needed: int, disk: int, memory: int, folder: Path
) -> list[str]:
    found = []
    if needed > disk:
        most = max((stage for stage in stages if stage.name in left), key=lambda stage: stage.disk)
        found.append(
            f"the run needs {human(needed)} more on disk (most of it for {most.name}: {human(most.disk)}), but "
            f"{human(disk)} may be used in {str(folder)!r}."
        )
    for stage in stages:
        if stage.name in left and stage.needed_memory > memory:
            worst = max(MEMORY[stage.name](facts), key=lambda phase: phase.needed)
            terms = sorted(worst.terms.items(), key=lambda term: -term[1])[:3]
            found.append(
                f"stage {stage.name} needs {human(stage.needed_memory)} of memory "
                f"({', '.join(f'{name} {human(count)}' for name, count in terms)}), but {human(memory)} may be used."
            )
    return found
