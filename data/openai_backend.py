"""The `openai` backend: an OpenAI-compatible server that serves the target continues our token ids.

Prompts go to the completions endpoint as ids, so the server's own template cannot come between. Servers that offer
their token ids (vLLM, SGLang: `return_token_ids`) are taken at their ids; a reply that comes as text alone is encoded
again and used only where that is certain: the text behind its prompt encodes to the prompt's ids and its own, and to as
many tokens as the server counted.
"""

from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from eyas.data.backends import Reply, Request
from eyas.data.encode import ChatTemplate
from eyas.models.errors import UserError

if TYPE_CHECKING:
    from openai import OpenAI
    from openai.types import Completion


@dataclass(frozen=True)
class Server:
    """Where the target is served. `token_ids` asks for ids and exact sampling with the fields vLLM and SGLang know;
    without it only fields of the OpenAI interface are sent. A request is tried `retries` times more, with back-off."""

    url: str
    model: str
    token_ids: bool
    concurrency: int
    retries: int
    timeout: float


class OpenAIBackend:
    """Asks a server, `concurrency` requests at a time. The key is sent to it and goes nowhere else."""

    def __init__(self, template: ChatTemplate, server: Server, *, api_key: str | None) -> None:
        self.template = template
        self.server = server
        self._api_key = api_key

    def run(self, requests: list[Request]) -> Iterator[Reply]:
        """Yield replies as they finish; raises UserError when the server cannot be reached or refuses a request."""
        try:
            from openai import OpenAI
        except ImportError:
            raise UserError("the openai backend needs the openai package: pip install 'eyas[openai]'.") from None
        server = self.server
        cut = next((request for request in requests if request.top_k and request.temperature > 0), None)
        if cut and not server.token_ids:
            raise UserError(
                f"request {cut.id!r} asks for top_k {cut.top_k}, which the plain OpenAI interface does not know: set "
                "top_k (and prompt_top_k) to 0, or synthesize.backend.token_ids to true for vLLM or SGLang."
            )
        client = OpenAI(
            base_url=server.url,
            api_key=self._api_key or "none",  # servers without keys take any
            max_retries=server.retries,
            timeout=server.timeout,
        )
        waiting = iter(requests)
        pool = ThreadPoolExecutor(server.concurrency, thread_name_prefix="ask")
        try:
            asked = {pool.submit(self._ask, client, request) for request in islice(waiting, server.concurrency)}
            while asked:
                done, asked = wait(asked, return_when=FIRST_COMPLETED)
                asked |= {pool.submit(self._ask, client, request) for request in islice(waiting, len(done))}
                for future in done:
                    yield future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            client.close()

    def _ask(self, client: "OpenAI", request: Request) -> Reply:
        import openai

        try:
            completion = client.completions.create(
                model=self.server.model,
                prompt=list(request.prompt_ids),
                max_tokens=request.max_new_tokens,
                temperature=request.temperature,
                top_p=request.top_p if request.temperature > 0 else 1.0,
                seed=request.seed,
                extra_body=_engine_fields(request) if self.server.token_ids else None,
            )
        except openai.APIStatusError as error:
            raise UserError(self._scrubbed(_refusal(self.server, request, error))) from None
        except openai.APIError as error:  # no connection, or no answer in time
            raise UserError(
                self._scrubbed(
                    f"the server at {self.server.url} gave no answer to request {request.id!r} in "
                    f"{self.server.retries + 1} tries ({error}). What is written is kept: run again to go on."
                )
            ) from None
        return self._reply(request, completion)

    def _scrubbed(self, text: str) -> str:
        """Return the text without the key, which some servers quote."""
        return text.replace(self._api_key, "***") if self._api_key else text

    def _reply(self, request: Request, completion: "Completion") -> Reply:
        """Return the server's answer as a reply, dropped with its fault where its ids are not certain."""
        if not completion.choices:
            return _dropped(request, "the server sent no choice")
        choice = completion.choices[0]
        reason = str(choice.finish_reason)
        if reason not in ("stop", "length"):
            return _dropped(request, f"finish reason {reason!r}")
        read: Any = getattr(choice, "prompt_token_ids", None)
        if read is not None and tuple(read) != request.prompt_ids:
            return _dropped(request, "the server read other prompt ids than were sent")
        ids: Any = getattr(choice, "token_ids", None) or getattr(choice, "response_token_ids", None)
        if ids:
            return _exact_reply(request, list(ids), reason, getattr(choice, "stop_reason", None))
        counted = completion.usage.completion_tokens if completion.usage else None
        return self._encoded_reply(request, choice.text, reason, counted)

    def _encoded_reply(self, request: Request, text: str, reason: str, counted: int | None) -> Reply:
        """Return a reply encoded from its text, dropped where its ids cannot be known."""
        tokenizer = self.template.tokenizer
        end = [self.template.end_of_turn] if reason == "stop" else []
        before = str(tokenizer.decode(list(request.prompt_ids), clean_up_tokenization_spaces=False))
        whole = tokenizer(before + text + str(tokenizer.decode(end)), add_special_tokens=False).input_ids
        ids = whole[len(request.prompt_ids) :]
        alone = tokenizer(text, add_special_tokens=False).input_ids
        # A server counts the token that ended the reply, or does not.
        count_fits = counted is None or counted in (len(ids), len(ids) - len(end))
        fits = tuple(whole[: len(request.prompt_ids)]) == request.prompt_ids and ids == [*alone, *end]
        if not fits or not count_fits or "\ufffd" in text or len(ids) > request.max_new_tokens or not ids:
            return _dropped(request, "text does not encode to certain ids")
        return Reply(request, tuple(ids), reason, exact=False)


def _engine_fields(request: Request) -> dict[str, Any]:
    """Return what vLLM and SGLang take besides: ids to stop at and to send back, and no sampling of their own."""
    return {
        "return_token_ids": True,
        "stop_token_ids": sorted(request.stop_ids),
        "top_k": request.top_k or -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "skip_special_tokens": False,
    }


def _exact_reply(request: Request, ids: list[int], reason: str, stop_reason: object) -> Reply:
    """Return a reply of the server's ids, up to and with the first stop token."""
    if reason == "stop" and isinstance(stop_reason, int) and ids[-1] != stop_reason:
        ids.append(stop_reason)
    for place, token in enumerate(ids):
        if token in request.stop_ids:
            return Reply(request, tuple(ids[: place + 1]), "stop")
    if reason == "stop":
        return _dropped(request, "stopped at a token that is no end of turn")
    if len(ids) > request.max_new_tokens:
        return _dropped(request, "longer than asked for")
    return Reply(request, tuple(ids), "length")


def _dropped(request: Request, fault: str) -> Reply:
    return Reply(request, (), "dropped", fault=fault)


def _refusal(server: Server, request: Request, error: Any) -> str:
    status = int(error.status_code)
    advice = {
        401: "set the key in the environment variable that synthesize.backend.api_key_env names",
        403: "set the key in the environment variable that synthesize.backend.api_key_env names",
        404: f"is synthesize.backend.url right (it ends in /v1), and is the model served as {server.model!r}",
    }.get(status, "if it knows no ids or extra fields, set synthesize.backend.token_ids to false")
    if status >= 500 or status in (408, 409, 429):
        advice = f"tried {server.retries + 1} times; what is written is kept: run again to go on"
    return f"the server at {server.url} answered request {request.id!r} with {status}: {error.message} ({advice})."
