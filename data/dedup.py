"""Duplicates and leaks: prompts that were seen before, and prompts that stand in an evaluation set.

Exact: the same system and user turns, but for white space at their ends (replies are written anew anyway). Near: the
MinHash signatures of the prompts' runs of three words agree in a share of at least `near`, an estimate of their Jaccard
similarity with a standard error of 0.03. Overlap: a run of `overlap_words` words stands in both prompts. An evaluation
prompt with fewer words counts as one run of its own length; below `SHORTEST_RUN` words it has to be the whole prompt,
since a run that short says nothing. A character of a script written without spaces counts as a word.
"""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from eyas.data.conversation import Conversation

PERMUTATIONS = 256
SHINGLE = 3
SHORTEST_RUN = 5
UNSPACED = "\u0e00-\u0eff\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
WORD = re.compile(rf"[{UNSPACED}]|[^\W_{UNSPACED}]+")
WORD_OR_SIGN = re.compile(WORD.pattern + r"|[-+*/=<>^%$#@&|~]")  # 2+2 and 2-2 are two prompts


@dataclass(frozen=True)
class DedupPlan:
    """Which repeats are dropped: `near` is a Jaccard similarity, `overlap_words` a run of words; 0 turns each off."""

    exact: bool = True
    near: float = 0.8
    overlap_words: int = 13


def words(text: str) -> list[str]:
    """Return the words of a text in lower case, without punctuation."""
    return WORD.findall(text.casefold())


class RepeatFinder:
    """Says of each prompt in turn whether it repeats an earlier one; earlier means looked up before."""

    def __init__(self, plan: DedupPlan) -> None:
        self.plan = plan
        self.seen: set[bytes] = set()
        self.signatures: dict[str, Any] = {}
        if plan.near:
            from datasketch import MinHash, MinHashLSH

            self.empty = MinHash(num_perm=PERMUTATIONS, seed=1)
            self.index = MinHashLSH(threshold=plan.near, num_perm=PERMUTATIONS)

    def repeats(self, conversation: Conversation) -> str | None:
        """Return "exact duplicate" or "near duplicate" when the conversation is one, else note it and return None."""
        asked = [(m["role"], m["content"].strip()) for m in conversation.messages if m["role"] in ("system", "user")]
        key = hashlib.sha256(repr(asked).encode()).digest()
        if self.plan.exact and key in self.seen:
            return "exact duplicate"
        self.seen.add(key)
        return "near duplicate" if self.near("\n".join(text for _, text in asked)) else None

    def near(self, text: str) -> bool:
        """Return whether a text nearly repeats an earlier one, else note it; False where the plan has this off."""
        found = WORD_OR_SIGN.findall(text.casefold())
        if not found or not self.plan.near:
            return False
        runs = {" ".join(found[i : i + SHINGLE]).encode() for i in range(max(1, len(found) - SHINGLE + 1))}
        signature = self.empty.copy()
        signature.update_batch(sorted(runs))
        if any(signature.jaccard(self.signatures[name]) >= self.plan.near for name in self.index.query(signature)):
            return True
        name = str(len(self.signatures))
        self.signatures[name] = signature
        self.index.insert(name, signature)
        return False


class TextRepeats:
    """Says of texts one by one whether each repeats an earlier one or stands in an evaluation set, and remembers them.

    Case and white space do not make two texts different.
    """

    def __init__(self, plan: DedupPlan, evaluation: Iterable[str]) -> None:
        self._seen: set[str] = set()
        self._near = RepeatFinder(DedupPlan(exact=False, near=plan.near))
        self._overlaps = OverlapFinder(evaluation if plan.overlap_words else (), run=plan.overlap_words)

    def repeats(self, text: str) -> bool:
        """Return whether a text is to be dropped."""
        normal = " ".join(text.casefold().split())
        known = normal in self._seen
        self._seen.add(normal)
        return known or self._overlaps.overlaps(text) or self._near.near(text)


class OverlapFinder:
    """Says of a prompt whether it shares a run of words with one of the evaluation prompts."""

    def __init__(self, texts: Iterable[str], *, run: int) -> None:
        self.whole: set[tuple[str, ...]] = set()
        self.runs: dict[int, set[tuple[str, ...]]] = {}
        for text in texts:
            found = words(text)
            length = min(run, len(found))
            if found:
                self.whole.add(tuple(found))
            if length >= SHORTEST_RUN:
                self.runs.setdefault(length, set()).update(_runs(found, length))

    def overlaps(self, text: str) -> bool:
        """Return whether the text shares a run with an evaluation prompt or has the same words."""
        found = words(text)
        return tuple(found) in self.whole or any(
            not known.isdisjoint(_runs(found, length)) for length, known in self.runs.items()
        )


def _runs(found: list[str], length: int) -> Iterable[tuple[str, ...]]:
    return (tuple(found[i : i + length]) for i in range(len(found) - length + 1))
