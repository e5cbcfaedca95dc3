"""Schemas: how the columns of a prompt source spell a conversation.

A schema is stated in the recipe or probed once, over a source's first rows: the one that fits most of them wins, in the
order of `SCHEMAS` where several fit as many. Each turns one row into raw messages, which `row_checks.py` then checks.
A reply column becomes an assistant turn, which synthesis writes anew.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from eyas.data.conversation import Messages
from eyas.data.row_checks import BadRow
from eyas.models.errors import UserError, nearest

Row = dict[str, Any]
SYSTEM_COLUMNS = ("system", "system_prompt")
REPLY_COLUMNS = ("response", "completion", "output", "answer")


@dataclass(frozen=True)
class Schema:
    """Columns that may hold the conversation (the first one present counts), and how to read it from that column."""

    columns: tuple[str, ...]
    fits: Callable[[Any], bool]
    read: Callable[[Row, Any], Messages]

    def column(self, row: Row) -> str | None:
        """Return the first of the columns that holds what the schema expects, None when none does."""
        return next((name for name in self.columns if self.fits(row.get(name))), None)

    def messages(self, row: Row) -> Messages:
        """Return a row's raw messages; raises BadRow when it lacks the column."""
        column = self.column(row)
        if column is None:
            given = next((name for name in self.columns if name in row), None)
            what = f"{given!r} holds {_kind(row[given])}" if given else f"columns: {', '.join(map(str, row)) or 'none'}"
            raise BadRow("column missing", what[:120])
        return self.read(row, row[column])


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_turns(value: Any) -> bool:
    """Return whether a value is a list of objects, or the same by columns, as some readers of Parquet give it."""
    if isinstance(value, dict):
        columns = list(value.values())
        return bool(columns) and all(isinstance(column, list) and len(column) == len(columns[0]) for column in columns)
    return isinstance(value, list)


def _is_text_list(value: Any) -> bool:
    return isinstance(value, list)


def _as_list(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [dict(zip(value, items, strict=True)) for items in zip(*value.values(), strict=True)]
    return list(value)


def _from_messages(row: Row, value: Any) -> Messages:
    return _as_list(value)


def _from_sharegpt(row: Row, value: Any) -> Messages:
    turns = [_renamed(turn) for turn in _as_list(value)]
    system = [{"role": "system", "content": row[name]} for name in SYSTEM_COLUMNS if _said(row.get(name))][:1]
    has_system = turns and isinstance(turns[0], dict) and turns[0].get("role") == "system"
    return [*([] if has_system else system), *turns]


def _renamed(turn: Any) -> Any:
    """Return a turn with role and content, which ShareGPT calls from and value."""
    is_sharegpt = isinstance(turn, dict) and "from" in turn
    return {**turn, "role": turn["from"], "content": turn.get("value")} if is_sharegpt else turn


def _from_turns(row: Row, value: Any) -> Messages:
    """Return user turns with an unwritten assistant turn between each two; turns given as objects are messages."""
    if not all(isinstance(turn, str) for turn in value):
        return _from_sharegpt(row, value)
    users = [{"role": "user", "content": turn} for turn in value]
    gap: dict[str, Any] = {"role": "assistant", "content": None, "unwritten": True}
    return _with_system(row, [message for user in users for message in (user, gap)][:-1])


def _from_question(row: Row, value: str) -> Messages:
    return _with_system(row, [{"role": "user", "content": value}, *_reply(row)])


def _from_prompt(row: Row, value: Any) -> Messages:
    return _from_question(row, value) if isinstance(value, str) else [*_from_sharegpt(row, value), *_reply(row)]


def _from_instruction(row: Row, value: str) -> Messages:
    text = f"{value}\n\n{row['input']}" if _said(row.get("input")) else value
    return _with_system(row, [{"role": "user", "content": text}, *_reply(row)])


def _from_text(row: Row, value: str) -> Messages:
    return [{"role": "user", "content": value}]


def _with_system(row: Row, messages: Messages) -> Messages:
    system = [{"role": "system", "content": row[name]} for name in SYSTEM_COLUMNS if _said(row.get(name))]
    return [*system[:1], *messages]


def _reply(row: Row) -> Messages:
    return [{"role": "assistant", "content": row[name]} for name in REPLY_COLUMNS if _said(row.get(name))][:1]


def _said(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


SCHEMAS = {
    "messages": Schema(("messages",), _is_turns, _from_messages),
    "conversations": Schema(("conversations", "conversation"), _is_turns, _from_sharegpt),
    "turns": Schema(("turns",), _is_text_list, _from_turns),
    "instruction": Schema(("instruction",), _is_text, _from_instruction),
    "prompt": Schema(("prompt",), lambda value: _is_text(value) or _is_turns(value), _from_prompt),
    "question": Schema(("question",), _is_text, _from_question),
    "text": Schema(("text",), _is_text, _from_text),  # preformatted: split by the served template afterwards
    "text-prompt": Schema(("text",), _is_text, _from_text),  # plain text that a user would send
}


def row_tools(row: Row) -> list[Any]:
    """Return the tool schemas of a row's `tools` column, a list or its JSON; empty where there are none."""
    tools = row.get("tools")
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except ValueError:
            raise BadRow("tool turns", "'tools' is text that is not JSON") from None
    return tools if isinstance(tools, list) else []


def probe_schema(rows: list[Row], *, source: str) -> tuple[str, int]:
    """Return the schema that fits most rows, and how many it fits; raises UserError when none fits any."""
    fitting = {name: sum(schema.column(row) is not None for row in rows) for name, schema in SCHEMAS.items()}
    best = max(fitting, key=lambda name: fitting[name])
    if not fitting[best]:
        columns = sorted({str(column) for row in rows for column in row})
        known = [column for schema in SCHEMAS.values() for column in schema.columns]
        near = next((hint for column in columns if (hint := nearest(column, known))), "")
        raise UserError(
            f"none of the first {len(rows)} rows of {source!r} holds a conversation in a column that is known; its "
            f"columns are {', '.join(columns) or 'none'}, known ones {', '.join(dict.fromkeys(known))}.{near}"
        )
    return best, fitting[best]
