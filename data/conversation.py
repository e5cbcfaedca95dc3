"""Conversations as they are given, and the prompts that start them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Prompt:
    """Messages that end with a user turn, waiting for the target's answer."""

    id: str
    category: str
    messages: tuple[dict[str, Any], ...]

    def user_texts(self) -> list[str]:
        """Return what the user says, turn by turn."""
        return [message["content"] for message in self.messages if message["role"] == "user"]


@dataclass(frozen=True)
class Conversation:
    """One given conversation, normalised: every message has a role (system, user, assistant or tool) and text content.

    There is at least one user turn, and the last turn is a user's or an assistant's. An assistant turn whose content
    and tool calls are empty is still to be written (a row that gave user turns alone). The keys of `MESSAGE_KEYS` stay
    on the messages that had them; tool schemas stand under "tools" on the first message.
    """

    id: str
    category: str
    source: str
    messages: tuple[dict[str, Any], ...]

    def prompt(self) -> Prompt:
        """Return the messages up to the last user turn that follows no unwritten assistant turn."""
        end = 0
        for number, message in enumerate(self.messages):
            if message["role"] == "user":
                end = number + 1
            elif is_unwritten(message):
                break
        return Prompt(self.id, self.category, self.messages[:end])

    def user_texts(self) -> list[str]:
        """Return what the user says, turn by turn."""
        return [message["content"] for message in self.messages if message["role"] == "user"]


MESSAGE_KEYS = ("reasoning_content", "thinking", "tool_calls", "tool_call_id", "name")


def is_unwritten(message: dict[str, Any]) -> bool:
    """Return whether a message is an assistant turn that nobody has written yet."""
    return message["role"] == "assistant" and not message["content"] and not message.get("tool_calls")


def bundled_prompts(name: str) -> Path:
    """Return the path of a bundled prompt file, "train" or "eval"."""
    return Path(__file__).resolve().parent.parent / "recipes" / "prompts" / f"{name}.jsonl"
