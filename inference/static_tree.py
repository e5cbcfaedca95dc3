"""The shape of a static tree, from its paths of child ranks, and EAGLE-1's own.

A path (2, 0) is the head's third guess below the root, and the best guess below that. Nodes are numbered level by
level; a level is drafted from the nodes above it that have children, which the head runs in one step.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.models.errors import UserError

# 25 paths, with the root 26 nodes, depth 5 (EAGLE, Li et al. 2024, arXiv 2401.15077).
EAGLE1_PATHS: tuple[tuple[int, ...], ...] = (
    (0,), (1,), (2,), (3,),
    (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0),
    (0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (1, 0, 0),
    (0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2),
    (0, 0, 0, 0, 0), (0, 0, 0, 0, 1),
)  # fmt: skip


@dataclass(frozen=True)
class Level:
    """How one level is drafted from the level above it.

    The head runs the `run` nodes of the level above (by their place in it); `origin` is each one's parent's place among
    the nodes run before, `sight_KN` which of all nodes run so far each sees. Node i of this level is the child of rank
    rank[i] of the parent[i]-th node run; `width` children of each are looked at.
    """

    run: tuple[int, ...]
    origin: tuple[int, ...]
    sight_KN: Tensor
    parent: tuple[int, ...]
    rank: tuple[int, ...]
    width: int


@dataclass(frozen=True)
class StaticShape:
    """A static tree: parents and depths as in `DraftTree`, and its levels from depth 1 on."""

    parents_N: Tensor
    depths_N: Tensor
    levels: tuple[Level, ...]

    @property
    def depth(self) -> int:
        return len(self.levels)

    @classmethod
    def of(cls, paths: tuple[tuple[int, ...], ...]) -> "StaticShape":
        """Return the shape of some paths; raises UserError for a repeated path, a missing parent or a wrong rank."""
        known = set(paths)
        if not paths or len(known) != len(paths):
            twice = next((path for path in paths if paths.count(path) > 1), None)
            raise UserError(f"a static tree needs paths, each of them once; given {len(paths)}, twice: {twice}.")
        for path in paths:
            if not path or any(not isinstance(rank, int) or rank < 0 for rank in path):
                raise UserError(f"path {path} of the static tree must be child ranks of 0 or more.")
            if len(path) > 1 and path[:-1] not in known:
                raise UserError(f"path {path} of the static tree has no parent {path[:-1]}; name every node's path.")
        nodes = [(), *sorted(paths, key=lambda path: (len(path), path))]
        number = {path: i for i, path in enumerate(nodes)}
        parents = [-1, *(number[path[:-1]] for path in nodes[1:])]
        return cls(torch.tensor(parents), torch.tensor([len(path) for path in nodes]), tuple(_levels(nodes)))


def _levels(nodes: list[tuple[int, ...]]) -> list[Level]:
    levels: list[Level] = []
    run_before: list[tuple[int, ...]] = []  # paths of the nodes run for the level above
    run_so_far: list[tuple[int, ...]] = []
    for depth in range(1, len(nodes[-1]) + 1):
        above = [path for path in nodes if len(path) == depth - 1]
        here = [path for path in nodes if len(path) == depth]
        run = [path for path in above if any(child[:-1] == path for child in here)]
        if depth > 1:
            run_so_far += run
        sight = [[path[: len(seen)] == seen for seen in run_so_far] for path in run]
        levels.append(
            Level(
                run=tuple(above.index(path) for path in run),
                origin=tuple(run_before.index(path[:-1]) for path in run) if depth > 1 else (0,),
                sight_KN=torch.tensor(sight, dtype=torch.bool).view(len(run), len(run_so_far)),
                parent=tuple(run.index(path[:-1]) for path in here),
                rank=tuple(path[-1] for path in here),
                width=1 + max(path[-1] for path in here),
            )
        )
        run_before = run
    return levels
