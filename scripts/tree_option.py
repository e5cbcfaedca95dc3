"""How a draft tree is spelled on the command line, and how it is made once target and head are loaded."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from eyas.models.errors import UserError, nearest

if TYPE_CHECKING:
    from eyas.inference.calibration import Calibration
    from eyas.inference.draft import TreeMaker
    from eyas.inference.latency import LatencyTable

TreeOption = Annotated[
    str,
    typer.Option(
        help="chain:DEPTH, dynamic:DEPTH,TOP_K,NODES[,calibrated], static (EAGLE-1's), or auto[:DEPTH,TOP_K,NODES]: as "
        "much as pays on this machine, of the head's guesses and of what the text repeats (auto:head or ,head: of the "
        "head's alone; needs eyas calibrate); lookup and model read chain."
    ),
]
DEFAULT_TREE = "dynamic:5,8,16"
AUTO = (8, 6, 32)
USUAL_ROWS = 17
CALIBRATED = "calibrated"
HEAD_ALONE = "head"


@dataclass(frozen=True)
class AskedTree:
    """A tree as it was spelled: a name of TREES and its numbers."""

    text: str
    name: str
    numbers: tuple[int, ...]
    calibrated: bool = False
    copies: bool = True

    @property
    def is_auto(self) -> bool:
        return self.name == "auto"

    @property
    def needs_calibration(self) -> bool:
        return self.calibrated or self.is_auto

    @property
    def plain(self) -> "TreeMaker":
        """The tree of these numbers alone, uncalibrated and of fixed size; raises UserError where they make none."""
        from eyas.inference.draft import ChainTree, DynamicTree, StaticTree

        if self.name == "static":
            return StaticTree()
        if self.name == "chain":
            return ChainTree(*self.numbers)
        depth, top_k, nodes = self.numbers
        return DynamicTree(depth, top_k, nodes)

    @property
    def rows(self) -> int:
        """Tokens that a target forward usually carries, for which its weights are laid out."""
        return min(self.plain.max_nodes, USUAL_ROWS) if self.is_auto else self.plain.max_nodes

    def maker(self, calibration: "Calibration | None", latency: "Callable[[int, int], LatencyTable]") -> "TreeMaker":
        """Return the maker; `latency` gives the latency table for a number of nodes and a top_k, where it is needed.

        Raises UserError when the head has no calibration and the tree needs one.
        """
        from eyas.inference.copies import NGRAM
        from eyas.inference.cost_aware_tree import CostAwareTree
        from eyas.inference.draft import DynamicTree

        if not self.needs_calibration:
            return self.plain
        if calibration is None:
            raise UserError(
                f"--tree {self.text} needs a calibrated head, and this one's eyas.json has no calibration; run eyas "
                "calibrate HEAD --target MODEL."
            )
        depth, top_k, nodes = self.numbers
        if self.is_auto:
            table = latency(self.plain.max_nodes, top_k)
            return CostAwareTree(depth, top_k, nodes, calibration, table, NGRAM if self.copies else 0)
        return DynamicTree(depth, top_k, nodes, calibration)


def parse_tree(text: str) -> AskedTree:
    """Return the tree of an option; raises UserError naming what is allowed."""
    from eyas.inference.trees import TREES

    name, _, rest = text.partition(":")
    words = rest.split(",") if rest else []
    calibrated = name == "dynamic" and words[-1:] == [CALIBRATED]
    alone = name == "auto" and words[-1:] == [HEAD_ALONE]
    try:
        numbers = tuple(int(word) for word in (words[:-1] if calibrated or alone else words))
    except ValueError:
        numbers = (-1,) * 9
    if name == "auto" and not numbers:
        numbers = AUTO
    if {"static": 0, "chain": 1, "dynamic": 3, "auto": 3}.get(name) != len(numbers):
        raise UserError(
            f"--tree {text!r} is none of chain:DEPTH, dynamic:DEPTH,TOP_K,NODES (or with ,{CALIBRATED}), static, auto "
            f"and auto:DEPTH,TOP_K,NODES (or with ,{HEAD_ALONE}); for example {DEFAULT_TREE}.{nearest(name, TREES)}"
        )
    asked = AskedTree(text, name, numbers, calibrated, copies=not alone)
    _ = asked.plain  # raises for numbers that make no tree
    return asked
