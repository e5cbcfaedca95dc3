"""Conversations and the prompts that start them, read once from JSONL and validated."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.models.errors import UserError

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Conversation:
    """Messages as they were given. The target writes every assistant turn itself; the given ones only say where."""

    id: str
    category: str
    source: str
    messages: tuple[dict[str, Any], ...]


def bundled_prompts(name: str) -> Path:
    """Return the path of a bundled prompt file, "train" or "eval"."""
    return Path(__file__).resolve().parent.parent / "recipes" / "prompts" / f"{name}.jsonl"


def read_prompts(source: str) -> list[Conversation]:
    """Return the conversations of a JSONL file, or of a bundled set named "bundled:train" or "bundled:eval".

    Each line is {"id", "category", "messages"}; id and category are optional. Raises UserError naming the line.
    """
    path = bundled_prompts(source.removeprefix("bundled:")) if source.startswith("bundled:") else Path(source)
    if not path.is_file():
        raise UserError(f"there is no prompt file {source!r}; give a JSONL file, or bundled:train or bundled:eval.")
    prompts = list(_parse(path))
    if not prompts:
        raise UserError(f'prompt file {source!r} is empty; it needs at least one line with "messages".')
    repeated = len(prompts) - len({prompt.id for prompt in prompts})
    if repeated:
        raise UserError(f"prompt file {source!r} repeats {repeated} ids; ids must be unique (or left out).")
    return prompts


def _parse(path: Path) -> Iterator[Conversation]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path.name} is not UTF-8 text ({error}); save it as UTF-8.") from None
    # Not splitlines(): that also breaks at characters that JSON allows inside a string.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path.name} line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{where} is not JSON: {error}.") from None
        messages = row.get("messages") if isinstance(row, dict) else None
        if not isinstance(messages, list) or not messages:
            raise UserError(f'{where} has no "messages"; write {{"messages": [{{"role": "user", "content": "..."}}]}}.')
        for message in messages:
            if not isinstance(message, dict) or not isinstance(message.get("content"), str) or "role" not in message:
                raise UserError(f"{where}: every message needs a role and a text content, given {message!r}.")
        if messages[-1]["role"] != "user" or not messages[-1]["content"].strip():
            raise UserError(f"{where}: a prompt must end with a non-empty user message for the target to answer.")
        yield Conversation(
            id=str(row.get("id", f"{path.stem}-{number:05d}")),
            category=str(row.get("category", path.stem)),
            source="given",
            messages=tuple(messages),
        )
