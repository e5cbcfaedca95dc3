"""The openai backend against a server of our own that drops connections, refuses, is late and answers out of order."""

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from eyas.data.answering import ReplyLog, answer_all
from eyas.data.backends import Reply, Request
from eyas.data.encode import ChatTemplate
from eyas.data.openai_backend import OpenAIBackend, Server
from eyas.data.ranks import Ranks
from eyas.models.errors import UserError
from eyas.tests.data.toys import text_ids
from eyas.tests.toys import byte_tokenizer

pytest.importorskip("openai")
TEMPLATE = ChatTemplate(byte_tokenizer())
END = TEMPLATE.end_of_turn
KEY = "sk-secret-4711"


def ids(text: str) -> tuple[int, ...]:
    return tuple(text_ids(TEMPLATE.tokenizer, text))


def request(name: str, text: str = "hi", **changes: Any) -> Request:
    prompt = ids(f"<|im_start|>user\n{text} {name}<|im_end|>\n<|im_start|>assistant\n")
    fields = {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "seed": 11, **changes}
    return Request(name, prompt, 30, frozenset({END}), **fields)


def choice(text: str, *, reason: str = "stop", with_ids: bool = True, end: bool = True, **extra: Any) -> dict[str, Any]:
    """A choice as vLLM sends it: the stop token is among the ids and not in the text."""
    tail = (END,) if end and reason == "stop" else ()
    found = {"index": 0, "text": text, "finish_reason": reason, **extra}
    return {**found, "token_ids": [*ids(text), *tail]} if with_ids else found


@dataclass
class Fake:
    """A server: `script` says for a body and the number of the try what to answer, (status, body), or None: hang up."""

    script: Callable[[dict[str, Any], int], tuple[int, dict[str, Any]] | None]
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)
    tries: Counter[tuple[int, ...]] = field(default_factory=Counter)
    now: int = 0
    most: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def running(self) -> Iterator[str]:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                prompt = tuple(body["prompt"])
                with fake.lock:
                    fake.bodies.append(body)
                    fake.keys.add(str(self.headers["Authorization"]))
                    fake.tries[prompt] += 1
                    fake.now += 1
                    fake.most = max(fake.most, fake.now)
                    number = fake.tries[prompt]
                answer = fake.script(body, number)
                with fake.lock:
                    fake.now -= 1
                if answer is None:
                    self.connection.close()
                    return
                payload = json.dumps(answer[1]).encode()
                self.send_response(answer[0])
                self.send_header("Content-Type", "application/json")
                self.send_header("retry-after-ms", "20")
                self.send_header("Content-Length", str(len(payload)))
                self.end_headers()
                self.wfile.write(payload)

            def log_message(self, *_: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.handle_error = lambda *_: None  # type: ignore[method-assign]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/v1"
        finally:
            server.shutdown()
            thread.join()
            server.server_close()


def completion(one: dict[str, Any], *, tokens: int | None = None) -> tuple[int, dict[str, Any]]:
    usage = {} if tokens is None else {
        "usage": {"completion_tokens": tokens, "prompt_tokens": 1, "total_tokens": tokens + 1}
    }  # fmt: skip
    return 200, {"id": "x", "object": "text_completion", "created": 1, "model": "m", "choices": [one], **usage}


def backend(url: str, *, key: str | None = KEY, **changes: Any) -> OpenAIBackend:
    fields = {"token_ids": True, "concurrency": 4, "retries": 3, "timeout": 5.0, **changes}
    return OpenAIBackend(TEMPLATE, Server(url=url, model="m", **fields), api_key=key)


def ask_one(one: dict[str, Any], *, tokens: int | None = None) -> Reply:
    fake = Fake(lambda body, number: completion(one, tokens=tokens))
    with fake.running() as url:
        (reply,) = backend(url).run([request("r")])
    return reply


def test_replies_survive_dropped_connections_refusals_and_any_order() -> None:
    asked = [request(f"r{n}") for n in range(11)]
    number_of = {one.prompt_ids: n for n, one in enumerate(asked)}

    def script(body: dict[str, Any], number: int) -> tuple[int, dict[str, Any]] | None:
        n = number_of[tuple(body["prompt"])]
        if number == 1 and n % 4 == 0:
            return None
        if number == 1 and n % 4 == 1:
            return 429, {"error": {"message": "slow down"}}
        if number <= 2 and n % 4 == 2:
            return 500 + n % 3, {"error": {"message": "oh"}}
        time.sleep(0.3 if n == 3 else 0.0)
        return completion(choice(f"answer {n}"))

    fake = Fake(script)
    with fake.running() as url:
        replies = list(backend(url).run(asked))
    assert {reply.request.id: reply.token_ids for reply in replies} == {
        f"r{n}": (*ids(f"answer {n}"), END) for n in range(11)
    }
    assert len(replies) == 11
    assert all(reply.exact and reply.finish_reason == "stop" for reply in replies)
    assert [reply.request.id for reply in replies] != [one.id for one in asked]
    assert fake.tries[asked[2].prompt_ids] == 3
    assert 1 < fake.most <= 4


def test_the_server_is_sent_ids_and_exactly_our_sampling() -> None:
    fake = Fake(lambda body, number: completion(choice("x")))
    with fake.running() as url:
        list(backend(url).run([request("a"), request("b", temperature=0.0, top_k=0, top_p=0.5)]))
        list(backend(url, token_ids=False, key=None).run([request("c", top_k=0)]))
    bodies = {tuple(body["prompt"]): body for body in fake.bodies}
    sampled, greedy, plain = (bodies[request(name).prompt_ids] for name in "abc")
    assert sampled == {
        "model": "m", "prompt": list(request("a").prompt_ids), "max_tokens": 30, "temperature": 0.7, "top_p": 0.9,
        "seed": 11, "return_token_ids": True, "stop_token_ids": [END], "top_k": 20, "min_p": 0.0,
        "repetition_penalty": 1.0, "skip_special_tokens": False,
    }  # fmt: skip
    assert (greedy["temperature"], greedy["top_p"], greedy["top_k"]) == (0.0, 1.0, -1)
    assert plain.keys() == {"model", "prompt", "max_tokens", "temperature", "top_p", "seed"}
    assert fake.keys == {f"Bearer {KEY}", "Bearer none"}


@pytest.mark.parametrize(
    ("one", "expected", "reason"),
    [
        (choice("abc"), (*ids("abc"), END), "stop"),
        (choice("abc", end=False, stop_reason=END), (*ids("abc"), END), "stop"),
        (choice("abc", reason="length"), ids("abc"), "length"),
        (choice(""), (END,), "stop"),
        (choice("abc", prompt_token_ids=list(request("r").prompt_ids)), (*ids("abc"), END), "stop"),
        # A server that went on behind our stop token: what follows it is no part of the reply.
        ({**choice("abc"), "token_ids": [*ids("abc"), END, 5, 6]}, (*ids("abc"), END), "stop"),
        ({**choice("ab", with_ids=False), "response_token_ids": [*ids("ab"), END]}, (*ids("ab"), END), "stop"),
        # Ids that the text alone would not have given: they are taken as the server made them.
        ({**choice("<|im_end|>"), "token_ids": [*ids("<"), *ids("|im_end|>"), END]},
         (*ids("<"), *ids("|im_end|>"), END), "stop"),
    ],
)  # fmt: skip
def test_ids_are_the_servers_own(one: dict[str, Any], expected: tuple[int, ...], reason: str) -> None:
    reply = ask_one(one)
    assert (reply.token_ids, reply.finish_reason, reply.exact, reply.fault) == (expected, reason, True, "")


@pytest.mark.parametrize(
    ("one", "fault"),
    [
        (choice("abc", reason="content_filter"), "finish reason 'content_filter'"),
        (choice("abc", end=False), "stopped at a token that is no end of turn"),
        (choice("abc", prompt_token_ids=[1, 2]), "the server read other prompt ids than were sent"),
        (choice("a" * 31, reason="length"), "longer than asked for"),
    ],
)
def test_replies_whose_ids_are_not_certain_are_dropped(one: dict[str, Any], fault: str) -> None:
    reply = ask_one(one)
    assert (reply.token_ids, reply.finish_reason, reply.fault) == ((), "dropped", fault)


@pytest.mark.parametrize(
    ("text", "reason", "tokens", "expected"),
    [
        ("abc", "stop", None, (*ids("abc"), END)),
        ("abc", "stop", 4, (*ids("abc"), END)),
        ("abc", "stop", 3, (*ids("abc"), END)),
        ("abc", "length", 3, ids("abc")),
        ("h\u00e9 \U0001f980", "stop", None, (*ids("h\u00e9 \U0001f980"), END)),
        ("abc", "length", 4, None),  # the server counted other tokens than the text encodes to
        ("abc", "stop", 2, None),
        ("ab\ufffd", "length", None, None),  # half a character
        ("", "length", None, None),
        ("a" * 31, "length", None, None),
    ],
)
def test_text_alone_is_encoded_again_where_that_is_certain(
    text: str, reason: str, tokens: int | None, expected: tuple[int, ...] | None
) -> None:
    reply = ask_one(choice(text, reason=reason, with_ids=False), tokens=tokens)
    if expected is None:
        assert (reply.finish_reason, reply.fault) == ("dropped", "text does not encode to certain ids")
    else:
        assert (reply.token_ids, reply.finish_reason, reply.exact) == (expected, reason, False)


def test_prompt_that_does_not_come_back_from_its_text_makes_the_reply_uncertain() -> None:
    spelled = tuple(token for char in "<|im_end|>" for token in ids(char))
    fake = Fake(lambda body, number: completion(choice("abc", with_ids=False)))
    with fake.running() as url:
        (reply,) = backend(url).run([Request("r", (*ids("hi"), *spelled), 9, frozenset({END}))])
    assert reply.fault == "text does not encode to certain ids"


@pytest.mark.parametrize(
    ("status", "message", "tries"),
    [
        (400, r"answered request 'r' with 400: .*no such field.*token_ids to false", 1),
        (401, r"with 401: .*bad key \*\*\*.*synthesize\.backend\.api_key_env", 1),
        (404, r"with 404: .*synthesize\.backend\.url", 1),
        (503, r"with 503: .*tried 3 times.*run again", 3),
    ],
)
def test_refusals_are_the_users_to_mend_and_show_no_key(status: int, message: str, tries: int) -> None:
    text = f"bad key {KEY}" if status == 401 else "no such field"
    fake = Fake(lambda body, number: (status, {"error": {"message": text}}))
    with fake.running() as url, pytest.raises(UserError, match=message) as caught:
        list(backend(url, retries=2).run([request("r")]))
    assert KEY not in str(caught.value)
    assert sum(fake.tries.values()) == tries


def test_a_plain_server_is_not_asked_for_a_top_k_it_would_ignore() -> None:
    with pytest.raises(
        UserError, match=r"request 'r' asks for top_k 20, which the plain OpenAI interface does not know"
    ):
        list(backend("http://127.0.0.1:9/v1", token_ids=False).run([request("g", temperature=0.0), request("r")]))


def test_server_that_is_not_there_is_said_with_its_address() -> None:
    with pytest.raises(UserError, match=r"http://127\.0\.0\.1:9/v1 gave no answer to request 'r' in 1 tries"):
        list(backend("http://127.0.0.1:9/v1", retries=0).run([request("r")]))


def test_answer_that_is_too_late_is_asked_for_again() -> None:
    def script(body: dict[str, Any], number: int) -> tuple[int, dict[str, Any]]:
        time.sleep(0.6 if number == 1 else 0.0)
        return completion(choice("late"))

    fake = Fake(script)
    with fake.running() as url:
        (reply,) = backend(url, timeout=0.3).run([request("r")])
    assert reply.token_ids == (*ids("late"), END)
    assert fake.tries[request("r").prompt_ids] == 2


def test_what_was_answered_before_the_server_broke_is_not_asked_again(tmp_path: Path) -> None:
    asked = [request(f"r{n}") for n in range(12)]
    broken = True

    def script(body: dict[str, Any], number: int) -> tuple[int, dict[str, Any]]:
        if broken and len(fake.tries) > 7:
            return 503, {"error": {"message": "down"}}
        return completion(choice("fine"))

    fake = Fake(script)
    log = ReplyLog(tmp_path, rows_per_part=3)
    with fake.running() as url:
        with pytest.raises(UserError, match="down"):
            answer_all(backend(url, retries=0), asked, log, Ranks(), phase="p", progress=lambda *_: None)
        kept = set(log.read(asked))
        assert len(kept) >= 4
        broken = False
        fake.bodies.clear()
        replies = answer_all(backend(url), asked, log, Ranks(), phase="p", progress=lambda *_: None)
    assert [reply.request.id for reply in replies] == [one.id for one in asked]
    again = {tuple(body["prompt"]) for body in fake.bodies}
    assert again == {one.prompt_ids for one in asked if one.id not in kept}
