from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from holdfast.processes.workers import command_workers
from holdfast.processes.workers.command_workers import (
    SubprocessHandler,
    get_subprocess_handler,
    replace_subprocess_handler,
)
from real_jobs import News, Watched

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import Any


@pytest.fixture
def news(tmp_path: Path) -> Iterator[News]:
    made = News(tmp_path)
    yield made
    made.close()


def handler(script: str, news: News, **how: Any) -> SubprocessHandler:
    how = {"stdout": None, "stderr": None, "local_rank_id": 0, **how}
    return SubprocessHandler("sh", ("-c", script), {"NEWS": str(news.path)}, **how)


def test_it_starts_the_program_with_our_environment_and_its_own(
    news: News, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OURS", "ours")
    monkeypatch.setenv("NEWS", "replaced")
    one = handler("echo $OURS $$ > $NEWS; exit 4", news, local_rank_id=3)
    assert news.next() == ["ours", str(one.proc.pid)]
    assert one.proc.wait() == 4
    assert one.local_rank_id == 3
    one.close()


def test_arguments_become_text(tmp_path: Path) -> None:
    said = tmp_path / "said"
    args = ("-c", 'echo "$@"', "sh", 1, 2.5, tmp_path, None)
    one = SubprocessHandler("sh", args, {}, str(said), None, 0)
    one.proc.wait()
    one.close()
    assert said.read_text() == f"1 2.5 {tmp_path} None\n"


def test_each_stream_has_its_file_which_begins_empty(tmp_path: Path, news: News) -> None:
    out, err = tmp_path / "out", tmp_path / "err"
    out.write_text("of an earlier start\n")
    one = handler("echo to out; echo to err >&2", news, stdout=str(out), stderr=str(err))
    one.proc.wait()
    one.close()
    assert (out.read_text(), err.read_text()) == ("to out\n", "to err\n")


@pytest.mark.parametrize("death_sig", [None, signal.SIGINT, signal.SIGKILL])
def test_closing_signals_the_whole_group(news: News, death_sig: signal.Signals | None) -> None:
    script = "sleep 1000 & echo child $! > $NEWS; echo leader $$ > $NEWS; exec sleep 1000"
    one = handler(script, news)
    everyone = Watched(*news.take(2).values())
    one.close(death_sig)
    # A child in the background of a shell ignores SIGINT.
    if death_sig == signal.SIGINT:
        assert one.proc.wait() == -signal.SIGINT
        one.close(signal.SIGKILL)
        os.killpg(one.proc.pid, signal.SIGKILL)
    else:
        assert one.proc.wait() == -(death_sig or signal.SIGTERM)
    everyone.all_gone()


def test_closing_what_has_ended_and_closing_twice(tmp_path: Path, news: News) -> None:
    one = handler("true", news, stdout=str(tmp_path / "out"))
    one.proc.wait()
    one.close()
    one.close()


def test_a_program_that_is_missing_leaves_no_open_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        SubprocessHandler("no-such-program", (), {}, str(tmp_path / "out"), None, 0)


def test_the_factory_can_be_replaced(news: News) -> None:
    asked: list[dict[str, Any]] = []

    class Own(SubprocessHandler):
        pass

    def make(**how: Any) -> SubprocessHandler:
        asked.append(how)
        return Own(**how)

    assert command_workers.custom_handler_factory() is None
    assert replace_subprocess_handler(make) is None
    try:
        assert command_workers.custom_handler_factory() is make
        one = get_subprocess_handler("true", (1,), {"A": "b"}, None, None, 5, None)
        assert type(one) is Own
        assert one.proc.wait() == 0
        one.close()
    finally:
        assert replace_subprocess_handler(None) is make
    assert asked == [
        {
            "entrypoint": "true",
            "args": (1,),
            "env": {"A": "b"},
            "stdout": None,
            "stderr": None,
            "local_rank_id": 5,
            "numa_options": None,
        }
    ]
    one = get_subprocess_handler("true", (), {}, None, None, 0)
    assert type(one) is SubprocessHandler
    assert one.proc.wait() == 0
    one.close()
