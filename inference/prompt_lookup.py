"""Drafting by looking up the text itself: where its last tokens occurred before, what followed then is proposed now.

No model and no cost, and good where the reply repeats the prompt (summaries, code edits): the baseline beside EAGLE.
"""

from dataclasses import dataclass

from eyas.inference.sampling import Sampling
from eyas.inference.tree import DraftTree
from eyas.models.errors import UserError
from eyas.models.target import Target, TargetOutput


@dataclass(frozen=True)
class PromptLookup:
    """Find the last `ngram` tokens (or fewer) earlier in the text and propose the `depth` tokens behind them.

    Where fewer follow before the text ends, it is taken to go round in a circle.
    """

    depth: int = 8
    ngram: int = 3

    def __post_init__(self) -> None:
        if self.depth < 1 or self.ngram < 1:
            raise UserError(f"prompt lookup needs depth and ngram of at least 1, given {self.depth} and {self.ngram}.")

    @property
    def max_nodes(self) -> int:
        return self.depth + 1

    def check(self, target: Target) -> None:
        """Any target will do."""

    def open(self) -> "LookupDrafting":
        return LookupDrafting(self.depth, self.ngram)


@dataclass
class _Row:
    """A text, and for every n-gram that ends before its last token, where its latest occurrence ends."""

    text: list[int]
    ends: dict[tuple[int, ...], int]
    indexed: int = 0


class LookupDrafting:
    """The texts of a session's rows."""

    def __init__(self, depth: int, ngram: int) -> None:
        self.depth = depth
        self.ngram = ngram
        self.rows: list[_Row] = []

    def join(self, prompts: list[tuple[int, ...]], samplings: list[Sampling], *, capacity: int) -> None:
        self.rows += [_Row([prompt[0]], {}) for prompt in prompts]

    def extend(self, first: int, next_tokens: list[list[int]], states: TargetOutput) -> None:
        for row, tokens in zip(self.rows[first : first + len(next_tokens)], next_tokens, strict=True):
            row.text += tokens
            for end in range(row.indexed + 1, len(row.text)):
                for size in range(1, min(self.ngram, end) + 1):
                    row.ends[tuple(row.text[end - size : end])] = end
            row.indexed = len(row.text) - 1

    def draft(self, roots: list[int]) -> list[DraftTree]:
        trees = []
        for row, root in enumerate(roots):
            tokens, _ = self.find(row)
            trees.append(DraftTree.chain(root, tokens, [0.0] * len(tokens)))
        return trees

    def leave(self, row: int) -> None:
        self.rows[row] = self.rows[-1]
        self.rows.pop()

    def find(self, row: int) -> tuple[list[int], int]:
        """Return (the tokens proposed behind a row's text, how many of its last tokens matched), or ([], 0)."""
        known = self.rows[row]
        for size in range(min(self.ngram, len(known.text)), 0, -1):
            end = known.ends.get(tuple(known.text[-size:]))
            if end is not None:
                period = len(known.text) - end  # a copy that reaches the end of the text goes on with what it copied
                return [known.text[end + place % period] for place in range(self.depth)], size
        return [], 0
