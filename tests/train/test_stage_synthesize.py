"""The synthesize stage with the target behind a server: the corpus of the local backend, and no key left anywhere."""

import json
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from eyas.data.backends import Request
from eyas.data.batch_decode import BatchDecoder
from eyas.data.corpus import load_corpus
from eyas.models.errors import UserError
from eyas.tests.data.toys import writing_target
from eyas.tests.train.tiny_run import tiny_recipe
from eyas.train.pipeline import run_stages
from eyas.train.progress import Reporter
from eyas.train.recipe_io import parse_recipe

KEY = "sk-not-to-be-written-4711"
TARGET, TEMPLATE = writing_target()


class Served(NamedTuple):
    model: Path
    url: str
    asked: list[dict[str, Any]]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The writing target as a model folder and behind a server that answers as vLLM does; every third try fails."""
    folder = tmp_path_factory.mktemp("served")
    TARGET.model.save_pretrained(folder)
    TEMPLATE.tokenizer.save_pretrained(folder)
    asked: list[dict[str, Any]] = []
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, answer = 200, {}
            with lock:
                if self.path == "/tokenize":
                    answer = {"tokens": TEMPLATE.ids(body["messages"], add_generation_prompt=True)}
                else:
                    asked.append(body)
                if answer:
                    pass
                elif len(asked) % 3 == 0:
                    status, answer = 503, {"error": {"message": "busy"}}
                else:
                    stops = frozenset(body.get("stop_token_ids", [TEMPLATE.end_of_turn]))
                    request = Request(
                        "r", tuple(body["prompt"]), body["max_tokens"], stops, body["temperature"],
                        max(0, body.get("top_k", 0)), body["top_p"], body["seed"],
                    )  # fmt: skip
                    (reply,) = BatchDecoder(TARGET, batch=1, capacity=512).run([request])
                    text_ids = reply.token_ids[:-1] if reply.finish_reason == "stop" else reply.token_ids
                    choice = {
                        "index": 0, "text": TEMPLATE.tokenizer.decode(list(text_ids)),
                        "finish_reason": reply.finish_reason,
                    }  # fmt: skip
                    if body.get("return_token_ids"):
                        choice["token_ids"] = list(reply.token_ids)
                    usage = {"completion_tokens": len(reply.token_ids), "prompt_tokens": 1, "total_tokens": 2}
                    answer = {"id": "x", "object": "text_completion", "created": 1, "model": body["model"],
                              "choices": [choice], "usage": usage}  # fmt: skip
            payload = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("retry-after-ms", "5")
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield Served(folder, f"http://127.0.0.1:{server.server_address[1]}/v1", asked)
    server.shutdown()
    thread.join()
    server.server_close()


def synthesize(served: Served, folder: Path, *, top_k: int = 20, **backend: Any) -> dict[str, Any]:
    """Run the stage and return its result; the prompts are two files of the tiny run and one two-turn talk."""
    talk = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "?"},
        {"role": "user", "content": "two"},
    ]
    folder.mkdir()
    (folder / "talk.jsonl").write_text(json.dumps({"id": "talk", "messages": talk}) + "\n")
    changes: dict[str, dict[str, Any]] = {
        "synthesize": {
            "self_prompts": 6, "self_heldout": 1, "validation": 2, "self_prompt_tokens": 50, "max_reply_tokens": 30,
            "answers": [{"temperature": 0.0}, {"temperature": 0.7, "top_k": top_k, "top_p": 0.9}],
            "steering": [{"category": "sums", "system": "Sums."}, {"category": "any", "share": 2}],
            "prompt_top_k": top_k, "backend": backend,
        },
        "head": {"aux_layers": [0, 1, 2]},
    }  # fmt: skip
    fields = tiny_recipe(served.model, folder, **changes)
    fields["synthesize"]["prompts"].append(str(folder / "talk.jsonl"))
    recipe = parse_recipe(fields, where="here")
    summary = run_stages(recipe, folder / "run", last="synthesize", reporter=Reporter(quiet=True))
    return dict(summary["results"]["synthesize"])


def test_a_served_target_writes_the_corpus_of_a_local_one(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_KEY", KEY)
    local = synthesize(served, tmp_path / "local")
    remote = synthesize(served, tmp_path / "remote", kind="openai", url=served.url, model="m", api_key_env="SOME_KEY")
    corpora = [(tmp_path / name / "run" / "corpus" / "corpus.jsonl").read_bytes() for name in ("local", "remote")]
    assert corpora[0] == corpora[1]
    assert local == remote
    assert {body["model"] for body in served.asked} == {"m"}
    written = [path for path in (tmp_path / "remote").rglob("*") if path.is_file()]
    assert len(written) > 5
    assert not [path for path in written if KEY.encode() in path.read_bytes()]


def test_a_server_of_texts_alone_gives_the_same_ids_and_says_how_many_were_encoded(
    served: Served, tmp_path: Path
) -> None:
    remote = synthesize(served, tmp_path / "texts", top_k=0, kind="openai", url=served.url, token_ids=False)
    rows = load_corpus(tmp_path / "texts" / "run" / "corpus" / "corpus.jsonl")
    assert remote["reencoded_replies"] == remote["turns"] == sum(len(row.generated) for row in rows)
    assert remote["early_ends"].get("text does not encode to certain ids", 0) == 0
    greedy = [row for row in rows if row.temperature == 0]
    for row in greedy[:6]:
        (alone,) = BatchDecoder(TARGET, batch=1, capacity=512).run(
            [Request("r", row.prompt_ids, 30, frozenset({TEMPLATE.end_of_turn}))]
        )
        start, end = row.generated[0]
        assert row.input_ids[start:end] == alone.token_ids


def test_what_became_of_prompts_and_turns_is_in_the_result(served: Served, tmp_path: Path) -> None:
    result = synthesize(served, tmp_path / "counts")
    rows = load_corpus(tmp_path / "counts" / "run" / "corpus" / "corpus.jsonl")
    for category, counts in result["self_written"].items():
        assert counts["asked"] == counts["wanted"] + counts["wanted"] // 3
        assert counts["kept"] <= counts["asked"] - counts["dropped"] - counts["duplicates"], category
    kept = sum(counts["kept"] for counts in result["self_written"].values())
    assert len({row.prompt_ids for row in rows if row.source == "self"}) == kept
    splits = Counter(row.split for row in rows)
    assert (result["rows"], result["heldout_rows"], result["validation_rows"]) == (len(rows), 1, splits["validation"])
    assert max(len(row.generated) for row in rows if row.id.startswith("talk/")) == 2


def test_a_server_that_is_away_ends_the_stage_with_a_sentence(served: Served, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"gave no answer to request 'self-.*run again to go on"):
        synthesize(served, tmp_path / "away", kind="openai", url="http://127.0.0.1:9/v1", retries=0)
