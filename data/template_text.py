"""Preformatted text back into turns, by the served template itself.

The text between two contents is learnt by rendering probes whose contents are marks that no text holds: what stands
before a system message, before a first user message, between user and assistant, and so on. A text is split at those
pieces and rendered again; only a text that comes out as it went in (but for a leading begin-of-text and white space at
the ends) was written by this template. Anything else is a row's fault, never a guess.
"""

from jinja2 import TemplateError

from eyas.data.conversation import Messages
from eyas.data.encode import ChatTemplate
from eyas.data.row_checks import BadRow

FAULT = "not this template's text"
MARKS = tuple(f"\u241f{number}\u241f" for number in range(5))


class TemplateText:
    """Splits preformatted texts by the headers of one served template."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        roles = ("user", "assistant", "user", "assistant")
        plain = self._pieces(roles)
        # A template without system messages has no piece before one: texts then begin with a user turn.
        system = self._pieces(("system", "user"))
        self.start, self.to_assistant, self.to_user = plain[0], plain[1], plain[2]
        self.system_start: str | None = system[0] if system else None
        self.after_system = system[1] if system else ""
        waiting = _render(template, [{"role": "user", "content": MARKS[0]}], answer=True) or ""
        self.header = waiting.partition(MARKS[0])[2]

    def messages(self, text: str) -> Messages:
        """Return the turns of a text; raises BadRow when the template would not render them as that text."""
        turns = self._split(self._without_header(self._from_start(text)))
        marks = {token.content for token in self.template.tokenizer.added_tokens_decoder.values() if token.special}
        held = next((mark for turn in turns for mark in marks if mark in turn["content"]), None)
        if held is not None:  # a tool's turn, for example, would otherwise pass for something the user said
            raise BadRow(FAULT, f"a turn of it holds {held!r}")
        waiting = turns[-1]["role"] == "user"
        if not self._renders(self.template, turns, text, waiting=waiting):
            served = self.template.arguments
            plain = ChatTemplate(self.template.tokenizer) if served else self.template
            if served and self._renders(plain, turns, text, waiting=waiting):
                names = ", ".join(f"{name}={value!r}" for name, value in served.items())
                raise BadRow(FAULT, f"it was rendered without the template arguments of serving ({names})")
            raise BadRow(FAULT, "split at the template's headers it renders otherwise")
        return turns

    def _renders(self, template: ChatTemplate, turns: Messages, text: str, *, waiting: bool) -> bool:
        """Return whether the turns render as the text, with the header of a reply behind them if they are `waiting`."""
        again = [_render(template, turns), _render(template, turns, answer=True) if waiting else None]
        return self._bare(text) in [self._bare(rendered) for rendered in again if rendered is not None]

    def _without_header(self, text: str) -> str:
        """Return a text less the header of the reply it waits for, where that header opens more than a reply's turn.

        With thinking off, for example, it holds an empty block of thoughts, which nobody said.
        """
        header, bare = self.header.rstrip(), text.rstrip()
        more = header.strip() and header.strip() != self.to_assistant.strip()
        return bare.removesuffix(header) if more and bare.endswith(header) else text

    def _split(self, text: str) -> Messages:
        start, system = self._from_start(self.start), self.system_start
        turns: Messages = []
        if system is not None and text.startswith(self._from_start(system)) and self.after_system in text:
            content, text = text.removeprefix(self._from_start(system)).split(self.after_system, 1)
            turns.append({"role": "system", "content": content})
        elif text.startswith(start):
            text = text.removeprefix(start)
        else:
            raise BadRow(FAULT, f"it begins with {text[:30]!r}, the template with {start[:30]!r}")
        role, separators = "user", {"user": self.to_assistant, "assistant": self.to_user}
        while separators[role] and separators[role] in text:
            content, text = text.split(separators[role], 1)
            turns.append({"role": role, "content": content})
            role = "assistant" if role == "user" else "user"
        if text.strip():
            turns.append({"role": role, "content": text.rstrip().removesuffix(self._ending(role))})
        if not turns:
            raise BadRow(FAULT, "it holds no turn")
        return turns

    def _from_start(self, text: str) -> str:
        """Return a text from its first character on, less a begin-of-text token."""
        return text.lstrip().removeprefix(str(self.template.tokenizer.bos_token or "")).lstrip()

    def _bare(self, text: str) -> str:
        return self._from_start(text).rstrip()

    def _ending(self, role: str) -> str:
        """Return what the template writes behind a last turn of a role, without white space at its end."""
        return self._pieces(("user", "assistant") if role == "assistant" else ("user",))[-1].rstrip()

    def _pieces(self, roles: tuple[str, ...]) -> list[str]:
        """Return the texts before, between and behind the contents of a probe; empty when it cannot be rendered."""
        turns = [{"role": role, "content": mark} for role, mark in zip(roles, MARKS, strict=False)]
        rendered = _render(self.template, turns)
        if rendered is None:
            return []
        pieces = []
        for mark in MARKS[: len(roles)]:
            before, found, rendered = rendered.partition(mark)
            if not found:
                return []
            pieces.append(before)
        return [*pieces, rendered]


def _render(template: ChatTemplate, turns: Messages, *, answer: bool = False) -> str | None:
    try:
        return template.text(turns, add_generation_prompt=answer)
    except TemplateError:
        return None
