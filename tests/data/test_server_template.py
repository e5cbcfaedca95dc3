"""A server that renders as we do, one that does not, one that does not tell."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from eyas.data.encode import ChatTemplate
from eyas.data.openai_backend import Server
from eyas.data.server_template import compare_rendering
from eyas.models.errors import UserError
from eyas.tests.data.template_families import FAMILIES

pytest.importorskip("openai")
OFF = FAMILIES["thinking, off"].chat_template()
PROMPTS = [[{"role": "user", "content": text}] for text in ("2+2?", "who?")]


@contextmanager
def serving(answer: Callable[[dict[str, Any]], tuple[int, Any]]) -> Iterator[tuple[Server, list[dict[str, Any]]]]:
    asked: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append({"path": self.path, **json.loads(self.rfile.read(int(self.headers["Content-Length"])))})
            status, body = answer(asked[-1])
            payload = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, *_: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        url = f"http://127.0.0.1:{http.server_address[1]}/v1"
        yield Server(url, "m", token_ids=True, concurrency=1, retries=0, timeout=5.0), asked
    finally:
        http.shutdown()
        thread.join()
        http.server_close()


def rendered(arguments: dict[str, Any], body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    template = ChatTemplate(OFF.tokenizer, arguments)
    return 200, {"tokens": template.ids(body["messages"], add_generation_prompt=body["add_generation_prompt"])}


def test_a_server_that_reads_the_template_arguments_renders_our_ids() -> None:
    with serving(lambda body: rendered(body["chat_template_kwargs"], body)) as (server, asked):
        line = compare_rendering(OFF, server, PROMPTS, api_key=None)
    assert line == "the server renders 2 prompts to the ids that training uses"
    assert [body["path"] for body in asked] == ["/tokenize"] * 2
    assert asked[1]["messages"] == PROMPTS[1]
    assert asked[0]["chat_template_kwargs"] == {"enable_thinking": False}


def test_a_server_that_renders_otherwise_is_refused_with_both_texts() -> None:
    with (
        serving(lambda body: rendered({}, body)) as (server, asked),
        pytest.raises(UserError, match=r"renders prompt 1 otherwise .* from token \d+ on: .*<think>.* here, .*there"),
    ):
        compare_rendering(OFF, server, PROMPTS, api_key=None)
    assert len(asked) == 1


@pytest.mark.parametrize("answer", [(404, {"error": "no"}), (200, {"count": 3}), (200, ["?"])])
def test_a_server_that_does_not_tell_is_left_unchecked_and_that_is_said(answer: tuple[int, Any]) -> None:
    with serving(lambda body: answer) as (server, _):
        assert "unchecked" in compare_rendering(OFF, server, PROMPTS, api_key=None)


def test_a_server_that_is_away_is_left_to_the_first_request() -> None:
    away = Server("http://127.0.0.1:9/v1", "m", token_ids=True, concurrency=1, retries=0, timeout=1.0)
    assert "unchecked" in compare_rendering(OFF, away, PROMPTS, api_key="k")
