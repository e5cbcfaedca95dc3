"""Whether a server renders conversations to the token ids that we do: two renderers of one template can drift apart.

The corpus is asked for by ids, so a drift does not show in it; it shows once the head serves clients that send
messages, as acceptance that nobody can explain. vLLM answers at `/tokenize`, beside the OpenAI interface; other servers
may not.
"""

from typing import TYPE_CHECKING

from eyas.data.conversation import Messages
from eyas.data.encode import ChatTemplate
from eyas.models.errors import UserError

if TYPE_CHECKING:
    from eyas.data.openai_backend import Server

SHOWN = 12  # tokens around the first difference


def compare_rendering(template: ChatTemplate, server: "Server", prompts: list[Messages], *, api_key: str | None) -> str:
    """Return what came of comparing the ids of prompts, in one line; raises UserError where the server has others."""
    from openai import OpenAI, OpenAIError

    root = server.url.rstrip("/").removesuffix("/v1")
    client = OpenAI(base_url=root, api_key=api_key or "none", max_retries=1, timeout=server.timeout)
    for number, messages in enumerate(prompts):
        body = {
            "model": server.model,
            "messages": [{key: value for key, value in message.items() if key != "tools"} for message in messages],
            "tools": messages[0].get("tools"),
            "add_generation_prompt": True,
            "add_special_tokens": False,
            "chat_template_kwargs": template.arguments,
        }
        try:
            answer = client.post("/tokenize", body=body, cast_to=object)
        except (OpenAIError, ValueError):  # no such path, no answer, or none in JSON
            answer = None
        theirs = answer.get("tokens") if isinstance(answer, dict) else None
        if not isinstance(theirs, list):
            return "the server does not say how it renders messages (no /tokenize as vLLM's): its template is unchecked"
        ours = template.ids(messages, add_generation_prompt=True)
        if theirs != ours:
            raise UserError(_difference(template, number, ours, theirs))
    return f"the server renders {len(prompts)} prompts to the ids that training uses"


def _difference(template: ChatTemplate, number: int, ours: list[int], theirs: list[int]) -> str:
    place = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    shown = [str(template.tokenizer.decode(ids[max(0, place - SHOWN) : place + SHOWN])) for ids in (ours, theirs)]
    return (
        f"the server renders prompt {number + 1} otherwise than the target's own template, from token {place} on: "
        f"{shown[0]!r} here, {shown[1]!r} there. A head trained here would be served in a context it never saw: serve "
        "with the target's own chat template, set target.template_arguments as it is served, or (if clients will send "
        "token ids) set synthesize.backend.checked_prompts to 0."
    )
