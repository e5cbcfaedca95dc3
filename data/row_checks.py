"""Row validation: every row of a prompt source ends as kept, repaired, dropped or unused, with a reason.

The checks know nothing of files or column names: they take one row's messages, as `schema.py` made them, and return
them normalised with the repairs that were needed, or raise `BadRow`. `REASONS` is the whole list of what can happen.
"""

from dataclasses import dataclass
from typing import Any, Literal

from eyas.data.conversation import MESSAGE_KEYS, Messages, is_unwritten

Outcome = Literal["kept", "repaired", "dropped", "unused"]


@dataclass(frozen=True)
class Reason:
    """What a reason does to a row. `bad`: something given is lost, so strict mode stops; bad drops count as share."""

    outcome: Outcome
    bad: bool
    meaning: str


REASONS = {
    "byte order mark": Reason("repaired", False, "the file begins with a byte order mark"),
    "Windows line end": Reason("repaired", False, "the line ends with a carriage return"),
    "text parts": Reason("repaired", False, "content given as a list of text parts is joined by line ends"),
    "same role twice": Reason("repaired", False, "turns of one role in a row are joined by a blank line"),
    "repeated id": Reason("repaired", False, "an id that another row has is made unique by source and row number"),
    "lone surrogate": Reason("repaired", True, "half a UTF-16 pair is no character; it becomes U+FFFD"),
    "assistant first": Reason("repaired", True, "assistant turns before the first user turn are left out"),
    "ends with a tool turn": Reason("repaired", True, "system and tool turns behind the last user or assistant turn"),
    "broken JSON": Reason("dropped", True, "the line is not JSON"),
    "not UTF-8": Reason("dropped", True, "the line is not UTF-8 text"),
    "not an object": Reason("dropped", True, "the row is no JSON object with columns"),
    "column missing": Reason("dropped", True, "the row lacks the column of the schema, or it holds no such thing"),
    "empty conversation": Reason("dropped", True, "there is no message"),
    "broken turn": Reason("dropped", True, "a turn is no object with a role and a content"),
    "unknown role": Reason("dropped", True, "a role that is none of system, user, assistant, tool and their synonyms"),
    "null content": Reason("dropped", True, "a turn whose content is null or missing"),
    "empty content": Reason("dropped", True, "a turn whose content is blank"),
    "content is not text": Reason("dropped", True, "a turn whose content is neither text nor a list of text parts"),
    "image or audio": Reason("dropped", True, "a turn with parts that are not text"),
    "no user turn": Reason("dropped", True, "nobody asks anything"),
    "tool turns": Reason("dropped", True, "the served template does not show the row's tool turns"),
    "refused by the template": Reason("dropped", True, "the served chat template raises an error for the row"),
    "not this template's text": Reason("dropped", True, "preformatted text that the served template does not render"),
    "too long": Reason("dropped", True, "the first prompt has more tokens than the recipe and the target allow"),
    "blank line": Reason("dropped", False, "the line holds nothing"),
    "exact duplicate": Reason("dropped", False, "an earlier row has the same system and user turns"),
    "near duplicate": Reason("dropped", False, "an earlier row has nearly the same words"),
    "in an evaluation set": Reason("dropped", False, "the prompt shares a run of words with an evaluation prompt"),
    "beyond its weight": Reason("unused", False, "the source has more rows than its weight takes"),
}

ROLES = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user", "prompter": "user",
    "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
    "bot": "assistant", "model": "assistant", "ai": "assistant",
    "tool": "tool", "function": "tool", "observation": "tool", "ipython": "tool",
}  # fmt: skip


class BadRow(Exception):
    """A row that must be dropped: `reason` is a key of REASONS, the text says where in the row."""

    def __init__(self, reason: str, detail: str = "") -> None:
        assert REASONS[reason].outcome == "dropped"
        super().__init__(f"{reason}{f' ({detail})' if detail else ''}")
        self.reason = reason


def check_messages(given: Messages) -> tuple[Messages, list[str]]:
    """Return normalised messages (see Conversation) and the repairs that were needed; raises BadRow."""
    repairs: list[str] = []
    messages = [_normalised(message, number, repairs) for number, message in enumerate(given, start=1)]
    if not messages:
        raise BadRow("empty conversation")
    messages = _without_leading_assistant(messages, repairs)
    messages = _joined(messages, repairs)
    while messages and messages[-1]["role"] in ("system", "tool"):
        messages.pop()
        repairs.append("ends with a tool turn")
    if not any(message["role"] == "user" for message in messages):
        raise BadRow("no user turn")
    return messages, sorted(set(repairs))


def mended(value: Any) -> tuple[Any, bool]:
    """Return a JSON value whose strings are all real text, and whether lone surrogates had to be replaced."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace"), True
        return value, False
    if isinstance(value, list):
        pairs = [mended(item) for item in value]
        return [item for item, _ in pairs], any(changed for _, changed in pairs)
    if isinstance(value, dict):
        keys, values = mended(list(value)), mended(list(value.values()))
        return dict(zip(keys[0], values[0], strict=True)), keys[1] or values[1]
    return value, False


def _normalised(given: Any, number: int, repairs: list[str]) -> dict[str, Any]:
    where = f"turn {number}"
    if not isinstance(given, dict) or not isinstance(given.get("role"), str):
        raise BadRow("broken turn", f"{where}: {str(given)[:60]!r}")
    role = ROLES.get(given["role"].strip().lower())
    if role is None:
        raise BadRow("unknown role", f"{where}: {given['role'][:40]!r}")
    extra = {key: given[key] for key in MESSAGE_KEYS if given.get(key)}
    unwritten = role == "assistant" and ("tool_calls" in extra or given.get("unwritten", False))
    content = "" if unwritten and given.get("content") is None else _text(given.get("content"), where, repairs)
    if not content.strip() and not unwritten and role != "tool":
        raise BadRow("empty content", f"{where}, {role}")
    return {"role": role, "content": content, **extra}


def _text(content: Any, where: str, repairs: list[str]) -> str:
    """Return a turn's content as text: itself, or its text parts joined."""
    if isinstance(content, str):
        return content
    if content is None:
        raise BadRow("null content", where)
    if not isinstance(content, list):
        raise BadRow("content is not text", f"{where}: {type(content).__name__}")
    parts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) else part
        kind = part.get("type", "text") if isinstance(part, dict) else "text"
        if kind != "text":
            raise BadRow("image or audio", f"{where}: a part of type {str(kind)[:20]!r}")
        if not isinstance(text, str):
            raise BadRow("null content" if text is None else "content is not text", f"{where}: a part without text")
        parts.append(text)
    repairs.append("text parts")
    return "\n".join(parts)


def _without_leading_assistant(messages: Messages, repairs: list[str]) -> Messages:
    """Return the messages less the assistant and tool turns that stand before the first user turn."""
    first = next((number for number, message in enumerate(messages) if message["role"] == "user"), len(messages))
    kept = [message for message in messages[:first] if message["role"] == "system"] + messages[first:]
    if len(kept) < len(messages):
        repairs.append("assistant first")
    return kept


def _joined(messages: Messages, repairs: list[str]) -> Messages:
    """Return the messages with plain turns of the same role in a row made one; tool results stay apart."""
    joined: Messages = []
    for message in messages:
        last = joined[-1] if joined else None
        plain = last is not None and set(last) == set(message) == {"role", "content"}
        if last and plain and last["role"] == message["role"] != "tool" and not is_unwritten(last):
            joined[-1] = {**last, "content": f"{last['content']}\n\n{message['content']}"}
            repairs.append("same role twice")
        else:
            joined.append(message)
    return joined
