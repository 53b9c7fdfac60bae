"""The handlers of a worker: registered once, found by name, answering what they are to answer."""

from __future__ import annotations

import subprocess
import sys

import pytest

from holdfast.control import handlers
from holdfast.control.handlers import Request, Response, find_handler, register_handler
from holdfast.errors import UsageError


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handlers, "_handlers", dict(handlers._handlers))


def nothing(request: Request, response: Response) -> None: ...


def asked(name: str) -> Response:
    response = Response()
    handler = find_handler(name)
    assert handler is not None
    handler(Request(), response)
    return response


def test_those_that_are_there_from_the_start() -> None:
    program = "from holdfast.control import handler_names; print(handler_names())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout == b"['dump_traceback', 'ping', 'pyspy_dump']\n"


def test_ping() -> None:
    response = asked("ping")
    assert (response.status, response.content_type, response.content) == (
        200,
        "text/plain",
        b"pong",
    )


def test_py_spy_looks_at_the_worker_itself() -> None:
    response = asked("pyspy_dump")
    assert response.status == 200, response.content
    assert b"test_py_spy_looks_at_the_worker_itself (" in response.content


def test_without_py_spy_there_is_a_line_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.setenv("PATH", "/nowhere")
    response = asked("pyspy_dump")
    assert response.status == 500
    assert response.content.count(b"\n") == 1
    assert b"pip install py-spy" in response.content


def test_own_ones_are_registered_once() -> None:
    register_handler("own", nothing)
    assert find_handler("own") is nothing
    assert "own" in handlers.handler_names()
    with pytest.raises(UsageError, match="'own' is registered already"):
        register_handler("own", nothing)
    with pytest.raises(ValueError, match="'ping' is registered already"):
        register_handler("ping", nothing)


@pytest.mark.parametrize("name", ["", "a/b", "a b", "a?", "é", "x" * 101])
def test_a_name_must_fit_into_a_path(name: str) -> None:
    with pytest.raises(UsageError, match="no name for a handler"):
        register_handler(name, nothing)


def test_there_is_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handlers, "HANDLERS_MAX", len(handlers._handlers))
    with pytest.raises(UsageError, match="handlers already"):
        register_handler("one-more", nothing)


def test_an_unknown_one_is_none() -> None:
    assert find_handler("unknown") is None


def test_a_request_has_text_and_parameters() -> None:
    request = Request(b"\xc3\xa9\xff", {"a": "1", "b": ""})
    assert request.body() == "é\ufffd"
    assert [request.get_param(name) for name in "abc"] == ["1", "", ""]
    assert [request.has_param(name) for name in "abc"] == [True, True, False]


def test_a_response_takes_no_nonsense() -> None:
    response = Response()
    response.set_content("é", "text/x-own")
    assert (response.content, response.content_type) == ("é".encode(), "text/x-own")
    with pytest.raises(ValueError, match="content type"):
        response.set_content("x", "text/plain\r\nSet-Cookie: a")
    for wrong in (0, 100, 600):
        with pytest.raises(ValueError, match="status"):
            response.set_status(wrong)
