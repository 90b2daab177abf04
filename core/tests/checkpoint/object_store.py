"""A small object store by HTTP, with what S3 promises, and the file system of fsspec that speaks to it: ``bucket://``.

An object appears whole when its request is complete, is replaced whole, is read by ranges and listed by prefix; nothing
is renamed. Other processes find the store by the variable ``BUCKET_ENDPOINT``. ``test_checkpoint_remote.py`` runs the
same jobs against S3 by s3fs and moto where those are installed.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import quote, unquote, urlsplit

import fsspec
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

ENDPOINT = "BUCKET_ENDPOINT"


class Store(ThreadingHTTPServer):
    """The server: objects by name, a log of requests, and functions that may refuse one, or do it and then say no."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, bytes] = {}
        self.requests: list[tuple[str, str, int]] = []
        self.refuses = self.loses = lambda method, name: False
        self.lock = threading.Lock()

    def handle_error(self, request, client_address):
        """Say nothing of clients that were killed in the middle of a request."""

    def names(self, prefix=""):
        with self.lock:
            return sorted(name for name in self.objects if name.startswith(prefix))

    def bytes_read(self):
        return sum(size for method, _, size in self.requests if method == "GET")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def _answer(self, status, body=b"", length=None):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
        self.server.requests.append((self.command, self.name, len(body)))

    def _serve(self):
        self.name = unquote(urlsplit(self.path).path).lstrip("/")
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if len(body) < int(self.headers.get("Content-Length", 0)):
            return  # The client died while it sent: no object.
        if self.server.refuses(self.command, self.name):
            self._answer(503)
            return
        with self.server.lock:
            objects = self.server.objects
            found = objects.get(self.name)
            if self.command == "PUT":
                objects[self.name] = body
                answer = 200, b""
            elif self.command == "DELETE":
                objects.pop(self.name, None)
                answer = 204, b""
            elif self.command == "POST":  # A listing by prefix.
                sizes = {name: len(data) for name, data in objects.items() if name.startswith(self.name)}
                answer = 200, json.dumps(sizes).encode()
            elif found is None:
                answer = 404, b""
            elif "Range" in self.headers and self.command == "GET":
                first, last = self.headers["Range"].removeprefix("bytes=").split("-")
                answer = 206, found[int(first) : int(last) + 1 if last else None]
            else:
                answer = 200, found
        if self.server.loses(self.command, self.name):
            answer = 503, b""
        self._answer(*answer)

    do_GET = do_HEAD = do_PUT = do_DELETE = do_POST = _serve  # noqa: N815 (names that http.server calls)


@contextlib.contextmanager
def serving(store=None):
    """A store in threads of this process, which children find."""
    store = store or Store()
    thread = threading.Thread(target=store.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    before = os.environ.get(ENDPOINT)
    os.environ[ENDPOINT] = f"127.0.0.1:{store.server_port}"
    try:
        yield store
    finally:
        os.environ.pop(ENDPOINT)
        if before is not None:
            os.environ[ENDPOINT] = before
        store.shutdown()
        store.server_close()
        thread.join()


class BucketFileSystem(AbstractFileSystem):
    """``bucket://name/key``: every name is a key, folders are what is before a slash."""

    protocol = "bucket"

    def _request(self, method, path, body=None, headers=None):
        with contextlib.closing(http.client.HTTPConnection(os.environ[ENDPOINT], timeout=30)) as connection:
            connection.request(method, f"/{quote(path)}", body, headers or {})
            answer = connection.getresponse()
            data = answer.read()
            if answer.status == 404:
                raise FileNotFoundError(path)
            if answer.status >= 400:
                raise OSError(f"{method} {path}: {answer.status} {answer.reason}")
            return data, answer.headers

    def _sizes(self, prefix):
        return json.loads(self._request("POST", prefix)[0])

    def info(self, path, **_):
        path = self._strip_protocol(path)
        try:
            size = int(self._request("HEAD", path)[1]["Content-Length"])
        except FileNotFoundError:
            if not self._sizes(f"{path}/"):
                raise
            return {"name": path, "size": 0, "type": "directory"}
        return {"name": path, "size": size, "type": "file"}

    def ls(self, path, detail=True, **_):
        path = self._strip_protocol(path)
        found = {}
        for name, size in self._sizes(f"{path}/").items():
            first, deeper, _ = name[len(path) + 1 :].partition("/")
            kind = {"size": 0, "type": "directory"} if deeper else {"size": size, "type": "file"}
            found[first] = {"name": f"{path}/{first}", **kind}
        if not found:
            raise FileNotFoundError(path)
        return list(found.values()) if detail else sorted(one["name"] for one in found.values())

    def cat_file(self, path, start=None, end=None, **_):
        path = self._strip_protocol(path)
        if start is None and end is None:
            return self._request("GET", path)[0]
        return self._request("GET", path, headers={"Range": f"bytes={start or 0}-{'' if end is None else end - 1}"})[0]

    def pipe_file(self, path, value, mode="overwrite", **_):
        self._request("PUT", self._strip_protocol(path), bytes(value))

    def _rm(self, path):
        self._request("DELETE", self._strip_protocol(path))

    def _open(self, path, mode="rb", block_size=None, **kwargs):
        return _BucketFile(self, path, mode, block_size or 1 << 16, **kwargs)


class _BucketFile(AbstractBufferedFile):
    """An open object; what is written is sent when it is closed."""

    def _fetch_range(self, start, end):
        return self.fs.cat_file(self.path, start, end)

    def _initiate_upload(self):
        self.whole = io.BytesIO()

    def _upload_chunk(self, final=False):
        self.whole.write(self.buffer.getvalue())
        if final:
            self.fs.pipe_file(self.path, self.whole.getvalue())
        return True


fsspec.register_implementation("bucket", BucketFileSystem, clobber=True)
