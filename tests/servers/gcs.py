"""Google Cloud Storage on loopback: `python gcs.py PORT BUCKET`.

`gcp-storage-emulator` has the JSON API, by which gcsfs and TensorStore ask. Here is what obstore
asks beside that, of the XML API: ETag and generation, conditions, HEAD, DELETE, lists, and uploads
in parts. Facts: https://cloud.google.com/storage/docs/xml-api/reference-methods
"""

from __future__ import annotations

import base64
import itertools
import logging
import re
import sys
import threading
from functools import partial
from http import HTTPStatus
from http.server import ThreadingHTTPServer
from typing import Any
from xml.sax.saxutils import escape

from gcp_storage_emulator import server
from gcp_storage_emulator.exceptions import NotFound
from gcp_storage_emulator.handlers import buckets, objects
from gcp_storage_emulator.storage import Storage

PAGE = 1000
_uploads: dict[str, dict[int, bytes]] = {}
_upload_ids = itertools.count(1)


def get(request: Any, response: Any, storage: Storage) -> None:
    found = _object(request, storage)
    objects.download(request, response, storage)
    if found is None or not _allowed(request, response, found):
        return
    response["ETag"], response["x-goog-generation"] = _etag(found), found["generation"]
    response["Last-Modified"] = "Thu, 01 Jan 2026 00:00:00 GMT"
    response["Accept-Ranges"] = "bytes"


def put(request: Any, response: Any, storage: Storage) -> None:
    number = request.query.get("partNumber")
    if number:
        _uploads[request.query["uploadId"][0]][int(number[0])] = request.data or b""
        response["ETag"] = f'"part-{number[0]}"'
        return
    data = request.data or b""  # read also where it is not wanted: the connection goes on
    if _allowed(request, response, _object(request, storage)):
        _store(request, response, storage, data)


def post(request: Any, response: Any, storage: Storage) -> None:
    if "uploadId" in request.query:
        parts = _uploads.pop(request.query["uploadId"][0])
        asked = [int(n) for n in re.findall(rb"<PartNumber>(\d+)<", request.data)]
        _store(request, response, storage, b"".join(parts[n] for n in asked))
        etag = response["ETag"]
        result = f"<ETag>{escape(etag)}</ETag>"
        response.write_file(_xml("CompleteMultipartUploadResult", result), "application/xml")
        return
    upload = str(next(_upload_ids))
    _uploads[upload] = {}
    names = f"<Bucket>b</Bucket><Key>k</Key><UploadId>{upload}</UploadId>"
    response.write_file(_xml("InitiateMultipartUploadResult", names), "application/xml")


def delete(request: Any, response: Any, storage: Storage) -> None:
    response.status = HTTPStatus.NO_CONTENT
    if "uploadId" in request.query:
        _uploads.pop(request.query["uploadId"][0], None)
    else:
        objects.delete(request, response, storage)


def list_objects(request: Any, response: Any, storage: Storage) -> None:
    """ListObjectsV2, of at most a thousand names a page."""
    asked = {key: values[0] for key, values in request.query.items()}
    prefix, delimiter = asked.get("prefix", ""), asked.get("delimiter", "")
    after = asked.get("continuation-token", asked.get("start-after", ""))
    live = storage.objects.get(request.params["bucket_name"], {})
    rows: dict[str, str] = {}
    for name in sorted(live):
        if name.startswith(prefix) and name > after:
            head, cut, _ = name[len(prefix) :].partition(delimiter) if delimiter else (name, "", "")
            shown = prefix + head + cut if cut else name
            if shown > after:
                rows.setdefault(shown, _row(shown, None if cut else live[name]))
    page = sorted(rows)[:PAGE]
    body = "<IsTruncated>false</IsTruncated>"
    if len(rows) > PAGE:
        body = "<IsTruncated>true</IsTruncated>"
        body += f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>"
    body += "".join(rows[name] for name in page)
    response.write_file(_xml("ListBucketResult", body), "application/xml")


def _row(name: str, found: dict[str, Any] | None) -> str:
    if found is None:
        return f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
    return (
        f"<Contents><Key>{escape(name)}</Key><Size>{found['size']}</Size>"
        f"<LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>{_etag(found)}</ETag>"
        "</Contents>"
    )


def _xml(name: str, body: str) -> bytes:
    return f"<?xml version='1.0' encoding='UTF-8'?><{name}>{body}</{name}>".encode()


def _object(request: Any, storage: Storage) -> dict[str, Any] | None:
    try:
        return storage.get_file_obj(request.params["bucket_name"], request.params["object_id"])
    except NotFound:
        return None


def _etag(found: dict[str, Any]) -> str:
    return f'"{base64.b64decode(found["md5Hash"]).hex()}"'


def _allowed(request: Any, response: Any, found: dict[str, Any] | None) -> bool:
    """Whether the request's conditions hold; else the answer is 412."""
    generation = request.get_header("x-goog-if-generation-match")
    etag = request.get_header("If-Match")
    holds = generation is None or generation == (found["generation"] if found else "0")
    if found is not None and etag is not None:
        holds = holds and etag in ("*", _etag(found))
    if not holds:
        response.status = HTTPStatus.PRECONDITION_FAILED
        response.write_file(b"")
    return holds


def _store(request: Any, response: Any, storage: Storage, data: bytes) -> None:
    bucket, name = request.params["bucket_name"], request.params["object_id"]
    kind = request.get_header("Content-Type", "application/octet-stream")
    found = objects._make_object_resource(request.base_url, bucket, name, kind, str(len(data)))
    found = objects._checksums(data, found)
    storage.create_file(bucket, name, data, found)
    response["ETag"], response["x-goog-generation"] = _etag(found), found["generation"]


class _Response(server.Response):
    """An answer without a body where the question was HEAD."""

    def close(self) -> None:
        handler = self._handler
        content = self._content.encode() if isinstance(self._content, str) else self._content
        handler.send_response(self.status.value, self.status.phrase)
        for key, value in self._headers.items():
            handler.send_header(key, value)
        if self.status != HTTPStatus.NO_CONTENT:
            handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        if handler.command != "HEAD" and self.status != HTTPStatus.NO_CONTENT:
            handler.wfile.write(content)


class _Handler(server.RequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # an answer in few packets
    turn = threading.Lock()

    def _handle(self) -> None:
        with self.turn:
            server.Router(self).handle(self.command)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = _handle


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


_NAME = {"GET": get, "HEAD": get, "PUT": put, "POST": post, "DELETE": delete}


def main(port: int, bucket: str) -> None:
    logging.disable(logging.CRITICAL)
    storage = Storage(use_memory_fs=True)
    storage._write_config_to_file = lambda: None  # every object's description, at every write
    buckets.create_bucket(bucket, storage)
    *others, (pattern, _) = server.HANDLERS
    server.HANDLERS = (*others, (pattern, _NAME), (r"^/(?P<bucket_name>[-.\w]+)/?$", _LIST))
    server.Response = _Response
    _Server(("127.0.0.1", port), partial(_Handler, storage)).serve_forever()


_LIST = {"GET": list_objects}

if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
