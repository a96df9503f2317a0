"""W&B without W&B: its files read back, and a server on this machine that answers as it does, or never."""

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from wandb.proto.wandb_internal_pb2 import Record

BLOCK, HEADER = 1 << 15, 7


def records(file: Path) -> Iterator[Record]:
    """Of a .wandb file: a LevelDB log (blocks of pieces with checksum, length and type) after a header of 7 bytes."""
    content, at, whole = file.read_bytes(), HEADER, b""
    while at + HEADER <= len(content):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
            continue
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        piece = content[at + HEADER : at + HEADER + length]
        if kind not in (1, 2, 3, 4) or len(piece) < length:
            return  # the process ended while it wrote
        at += HEADER + length
        whole = piece if kind in (1, 2) else whole + piece
        if kind in (1, 4):
            yield Record.FromString(whole)


def history(file: Path) -> list[dict]:
    """The points of a .wandb file, in order, `_step` among their fields."""
    return [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        | {"_step": record.history.step.num}
        for record in records(file)
        if record.HasField("history")
    ]


def offline_history(run_directory: Path) -> list[dict]:
    """The points of all offline runs in the directory of one of our runs, which all have the same id."""
    files = sorted(run_directory.glob("wandb/offline-run-*/*.wandb"))
    assert len({file.name for file in files}) == 1
    return [point for file in files for point in history(file)]


class Server(ThreadingHTTPServer):
    """Keeps the history of one run. `hangs`: what is asked from now on is never answered."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.history: list[str] = []
        self.hangs = threading.Event()
        self.has_run = threading.Event()
        self.ended = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def points(self) -> list[dict]:
        return [json.loads(line) for line in self.history]

    def answer(self, query: str, variables: dict) -> dict:
        entity = {"id": "e", "name": "somebody"}
        project = {"id": "p", "name": "ds_dflash", "entity": entity}
        run = {"id": "r", "name": "abcd1234", "displayName": "run", "config": "{}", "sweepName": None, "tags": []}
        run |= {"project": project, "historyLineCount": len(self.history), "eventsLineCount": 0, "logLineCount": 0}
        run |= {"historyTail": json.dumps(self.history[-1:]), "eventsTail": "[]", "summaryMetrics": "{}"}
        run |= {"wandbConfig": '{"t": {}}', "notes": None, "description": None}
        if "RunResumeStatus" in query:
            return {"model": project | {"bucket": run if self.history else None}}
        if "UpsertBucket" in query:
            self.has_run.set()
            return {"upsertBucket": {"bucket": run, "inserted": not self.history}}
        if "CreateRunFiles" in query:
            files = [{"name": name, "uploadUrl": f"{self.url}/upload"} for name in variables["files"]]
            return {"createRunFiles": {"runID": "r", "uploadHeaders": [], "files": files}}
        if "Viewer" in query:
            fields = {"id": "u", "entity": "somebody", "username": "somebody", "email": "", "flags": "{}"}
            return {"viewer": fields | {"teams": {"edges": []}}}
        return {"serverInfo": {"features": []}}


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        if self.server.hangs.is_set():
            self.server.ended.wait()
            return
        if self.path.endswith("/file_stream"):
            lines = body.get("files", {}).get("wandb-history.jsonl")
            if lines:
                kept = self.server.history
                kept[lines["offset"] : lines["offset"] + len(lines["content"])] = lines["content"]
            content = b"{}"
        else:
            content = json.dumps(
                {"data": self.server.answer(body.get("query", ""), body.get("variables", {}))}
            ).encode()
        self.reply(content)

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.reply(b"")

    def reply(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_) -> None:
        pass


@contextlib.contextmanager
def serving() -> Iterator[Server]:
    with Server() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server
        finally:
            server.ended.set()
            server.shutdown()


@contextlib.contextmanager
def dead_url() -> Iterator[str]:
    """Where every connection is refused: the port is taken, and nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"
