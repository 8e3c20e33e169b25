"""A server on localhost that speaks as much of the Hugging Face Hub's API as reading models takes."""

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

__all__ = ["COMMIT", "TOKEN", "Hub", "hub_of"]

COMMIT, TOKEN = "c0" * 20, "hf_secret"


@dataclass
class Hub:
    """The served models.

    Attributes:
        models: name -> directory.
        private, gated: names that are refused without TOKEN, and with it, too.
        broken: names of files whose download breaks off half-way.
        sizes: name of a file -> size that the listing claims.
        got: (repo, file) of each download, in order.
        ranges: (repo, file, (first, last)) of each download of a part.
        url: of the server.
    """

    models: dict[str, Path]
    private: set[str] = field(default_factory=set)
    gated: set[str] = field(default_factory=set)
    broken: set[str] = field(default_factory=set)
    sizes: dict[str, int] = field(default_factory=dict)
    got: list[tuple[str, str]] = field(default_factory=list)
    ranges: list[tuple[str, str, tuple[int, int]]] = field(default_factory=list)
    url: str = ""

    def files(self, repo: str) -> dict[str, Path]:
        root = self.models[repo]
        return {path.relative_to(root).as_posix(): path for path in sorted(root.rglob("*")) if path.is_file()}


@contextlib.contextmanager
def hub_of(models: dict[str, Path]) -> Iterator[Hub]:
    hub = Hub(models)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("_Bound", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        if len(parts) < 3:  # what huggingface_hub asks of its own
            self._refuse(404, "RepoNotFound")
            return
        if parts[:2] == ["api", "models"]:
            repo, verb, rest = "/".join(parts[2:4]), *(parts[4:5] or [""]), parts[5:]
        else:
            repo, verb, rest = "/".join(parts[:2]), parts[2], parts[3:]
        revision = rest[0] if rest else "main"
        is_named = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if repo not in self.hub.models or (repo in self.hub.private and not is_named):
            self._refuse(404, "RepoNotFound")
        elif revision not in ("main", "v1", COMMIT):
            self._refuse(404, "RevisionNotFound")
        elif verb == "resolve":
            self._file(repo, "/".join(rest[1:]))
        elif verb == "tree":
            self._json([{"type": "file", **entry} for entry in self._entries(repo, "path", "oid")])
        else:
            self._json({"id": repo, "sha": COMMIT, "siblings": self._entries(repo, "rfilename", "blobId")})

    def _entries(self, repo: str, path: str, blob: str) -> list[dict[str, object]]:
        return [
            {path: name, "size": self.hub.sizes.get(name, file.stat().st_size), blob: _etag(file)}
            for name, file in self.hub.files(repo).items()
        ]

    def _file(self, repo: str, name: str) -> None:
        if repo in self.hub.gated:
            self._refuse(403, "GatedRepo")
            return
        file = self.hub.files(repo).get(name)
        if file is None:
            self._refuse(404, "EntryNotFound")
            return
        content = file.read_bytes()
        given = self.headers.get("Range", "").removeprefix("bytes=")
        first, last = (int(end) if end else None for end in given.split("-")) if given else (0, None)
        part = content[first : None if last is None else last + 1]
        self.send_response(206 if given else 200)
        self.send_header("ETag", f'"{_etag(file)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(part)))
        if given:
            self.send_header("Content-Range", f"bytes {first}-{first + len(part) - 1}/{len(content)}")
        self.end_headers()
        if self.command == "HEAD":
            return
        self.hub.got.append((repo, name))
        if given:
            self.hub.ranges.append((repo, name, (first, first + len(part))))
        if name in self.hub.broken:
            self.wfile.write(part[: len(part) // 2])
            self.close_connection = True
        else:
            self.wfile.write(part)

    def _json(self, body: object) -> None:
        text = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _etag(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()
