"""A small server that speaks the Hub's HTTP API for one user: create, preupload, LFS, commit, and download."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_right_token_of_the_test"


class HubServer(ThreadingHTTPServer):
    """What it holds, what it was asked, and which requests it still drops without an answer."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.objects: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.drop: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that go away are part of the test."""

    def revision(self, repo: str) -> str:
        digest = hashlib.sha1(repr(sorted(self.repos[repo].items())).encode())
        return digest.hexdigest()


class _Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Keep quiet."""

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _answer(self, value: Any = None, *, status: int = 200, raw: bytes | None = None, **headers: str) -> None:
        content = raw if raw is not None else json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name.replace("_", "-"), text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _accepts(self) -> bool:
        """Note the request; drop it or refuse its token where told to."""
        path = self.path.partition("?")[0]
        self.server.requests.append(f"{self.command} {path}")
        for part in self.server.drop:
            if part in path:
                self.server.drop.remove(part)
                self.close_connection = True
                self.connection.close()
                return False
        signed = "/objects/" in path and self.command == "PUT"  # as on the Hub, the link itself is the permission
        if not signed and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._answer({"error": "Invalid username or password."}, status=401)
            return False
        return True

    def do_POST(self) -> None:
        body = self._body()
        if not self._accepts():
            return
        path, server = self.path.partition("?")[0], self.server
        if path == "/api/repos/create":
            asked = json.loads(body)
            repo = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
            exists = repo in server.repos
            server.repos.setdefault(repo, {})
            server.private.setdefault(repo, bool(asked.get("private")) or asked.get("visibility") == "private")
            self._answer({"url": f"{server.url}/{repo}", "name": repo}, status=409 if exists else 200)
        elif path == "/api/validate-yaml":
            self._answer({"errors": [], "warnings": []})
        elif "/preupload/" in path:
            modes = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for file in json.loads(body)["files"]
            ]
            self._answer({"files": modes})
        elif path.endswith("/info/lfs/objects/batch"):
            objects = [
                {"oid": o["oid"], "size": o["size"]}
                | ({} if o["oid"] in server.objects else {
                    "actions": {"upload": {"href": f"{server.url}/objects/{o['oid']}", "header": {}}}
                })
                for o in json.loads(body)["objects"]
            ]  # fmt: skip
            self._answer({"transfer": "basic", "objects": objects})
        elif "/commit/" in path:
            repo = path.removeprefix("/api/models/").partition("/commit/")[0]
            for line in body.splitlines():
                item = json.loads(line)
                value = item["value"]
                if item["key"] == "file":
                    server.repos[repo][value["path"]] = base64.b64decode(value["content"])
                elif item["key"] == "lfsFile":
                    server.repos[repo][value["path"]] = server.objects[value["oid"]]
            revision = server.revision(repo)
            self._answer({"commitUrl": f"{server.url}/{repo}/commit/{revision}", "commitOid": revision})
        else:
            self._answer({"error": f"unknown {path}"}, status=404)

    def do_PUT(self) -> None:
        body = self._body()
        if self._accepts():
            oid = self.path.rpartition("/")[2]
            assert hashlib.sha256(body).hexdigest() == oid
            self.server.objects[oid] = body
            self._answer({})

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        if not self._accepts():
            return
        path, server = self.path.partition("?")[0], self.server
        repo = "/".join(path.removeprefix("/api/models").lstrip("/").split("/")[:2])
        if repo not in server.repos:
            self._answer({"error": "Repository not found"}, status=404, X_Error_Code="RepoNotFound")
        elif path.startswith("/api/models/") and "/tree/" in path:
            self._answer([
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in server.repos[repo].items()
            ])  # fmt: skip
        elif path.startswith("/api/models/"):
            siblings = [{"rfilename": name} for name in server.repos[repo]]
            self._answer({"id": repo, "modelId": repo, "sha": server.revision(repo), "siblings": siblings, "tags": []})
        else:
            name = path.partition("/resolve/")[2].partition("/")[2]
            data = server.repos[repo].get(name)
            if data is None:
                self._answer({"error": "Entry not found"}, status=404, X_Error_Code="EntryNotFound")
            else:
                etag = f'"{hashlib.sha256(data).hexdigest()}"'
                self._answer(raw=data, ETag=etag, X_Repo_Commit=server.revision(repo))


@contextmanager
def hub() -> Iterator[HubServer]:
    """Run a server for the duration of a test."""
    server = HubServer()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
