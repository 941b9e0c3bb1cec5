from __future__ import annotations

import http.server
import threading
import time
from collections.abc import Iterator

import pytest

from scripts import torch_index
from tests.support.worker import free_port


class _Index(http.server.BaseHTTPRequestHandler):
    """Knows one page."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/whl/cpu/torch/" else 404)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        del args


@pytest.fixture
def server() -> Iterator[str]:
    with http.server.HTTPServer(("127.0.0.1", 0), _Index) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()
        thread.join()


def test_an_index_that_answers_is_used(server: str) -> None:
    assert torch_index.main(f"{server}/whl/cpu") == f"--extra-index-url {server}/whl/cpu"


def test_an_index_without_torch_is_not_used(server: str) -> None:
    assert torch_index.main(f"{server}/elsewhere") == ""


def test_an_index_that_does_not_answer_is_skipped_at_once() -> None:
    begin = time.monotonic()
    assert torch_index.main(f"http://127.0.0.1:{free_port()}") == ""
    assert time.monotonic() - begin < 10.0


@pytest.mark.parametrize("index", ["", "no url"])
def test_no_index_is_no_option(index: str) -> None:
    assert torch_index.main(index) == ""
