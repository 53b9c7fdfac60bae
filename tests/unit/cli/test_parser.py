from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.cli.flags import FLAGS, build_parser, parse_plain

if TYPE_CHECKING:
    from argparse import Namespace


def parse(*words: str) -> Namespace:
    return build_parser().parse_args(words)


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as caught:
        parse(*words)
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    return err.rstrip("\n")


@pytest.mark.parametrize(
    ("words", "script", "script_args"),
    [
        ("train.py", "train.py", []),
        ("train.py --nnodes 2 -m x", "train.py", ["--nnodes", "2", "-m", "x"]),
        ("train.py -- a -- b", "train.py", ["a", "--", "b"]),
        ("-- train.py -- a", "train.py", ["--", "a"]),
        ("--tee 3 -- train.py", "train.py", []),
        ("train.py --help", "train.py", ["--help"]),
        ("- a", "-", ["a"]),
        ("-- -c pass", "-c", ["pass"]),
        ("-1 a", "-1", ["a"]),
        ("--role -1 train.py", "train.py", []),
        ("-r3 train.py -t", "train.py", ["-t"]),
        ("-r 3 train.py", "train.py", []),
        ("-mr 3 pkg.mod", "pkg.mod", []),
        ("-mr3 pkg.mod", "pkg.mod", []),
        ("-m pkg.mod -m", "pkg.mod", ["-m"]),
    ],
)
def test_where_the_script_begins(words: str, script: str, script_args: list[str]) -> None:
    parsed = parse(*words.split())
    assert (parsed.training_script, parsed.training_script_args) == (script, script_args)


@pytest.mark.parametrize("word", ["--n", "--m", "--rdzv", "--no", "--nproc", "-z", "--r=1"])
def test_arguments_of_the_script_are_never_taken_for_abbreviations(word: str) -> None:
    assert parse("train.py", word, "3").training_script_args == [word, "3"]


def test_a_script_may_be_empty_or_hold_spaces() -> None:
    assert parse("", "a").training_script == ""
    assert parse("-my script.py", "a").training_script == "-my script.py"
    assert parse("--role", "-a b", "train.py").role == "-a b"


@pytest.mark.parametrize(
    ("words", "dest", "expected"),
    [
        ("--nproc 2", "nproc_per_node", "2"),
        ("--nproc=2", "nproc_per_node", "2"),
        ("--nproc_p 2", "nproc_per_node", "2"),
        ("--nproc-p=2", "nproc_per_node", "2"),
        ("--max-r 3", "max_restarts", 3),
        ("--stand", "standalone", True),
        ("--no-p", "no_python", True),
        ("--te=3", "tee", "3"),
    ],
)
def test_a_prefix_that_fits_one_flag_is_that_flag(words: str, dest: str, expected: object) -> None:
    assert getattr(parse(*words.split(), "train.py"), dest) == expected


def test_a_full_name_is_itself_though_others_begin_with_it() -> None:
    parser = build_parser()
    parser.add_argument("--role-of-node")
    assert parser.parse_args(["--role", "a", "train.py"]).role == "a"


def test_an_ambiguous_prefix_lists_what_it_could_be(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (("--master", "x"), ("--master=x",)):
        assert refusal(capsys, *words, "train.py") == (
            "holdfast run: error: --master: could be any of --master-addr, --master-port"
        )


def test_an_unknown_flag_is_named_with_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys, "--max-restart-count", "3", "train.py") == (
        "holdfast run: error: --max-restart-count: no such flag; did you mean --max-restarts?"
    )
    assert refusal(capsys, "--zzzzzz=1", "train.py") == (
        "holdfast run: error: --zzzzzz=1: no such flag; see holdfast run --help"
    )
    assert refusal(capsys, "-z", "train.py").startswith("holdfast run: error: -z: no such flag")


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("--nprocs", "did you mean --nproc-per-node?"),
        ("--no-pythn", "did you mean --no-python?"),
        ("--rdzv_timeout", "settings of the rendezvous are given by --rdzv-conf KEY=VALUE"),
        ("--rdzv-endpont", "did you mean --rdzv-endpoint?"),
    ],
)
def test_what_is_suggested(word: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys, word, "2", "train.py").endswith(f"{word}: no such flag; {said}")


def test_a_script_that_was_taken_for_a_value_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (("--nproc", "train.py"), ("--tee", "3", "--nproc_per_node", "train.py")):
        assert refusal(capsys, *words).startswith(
            "holdfast run: error: no script given: train.py was taken as the value of "
            "--nproc-per-node; usage: "
        )


@pytest.mark.parametrize("words", [(), ("--nproc-per-node", "2"), ("-m",), ("--",)])
def test_a_missing_script_is_one_line(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert refusal(capsys, *words) == (
        "holdfast run: error: no script given; "
        "usage: holdfast run [flags] SCRIPT [arguments of the script]"
    )


@pytest.mark.parametrize("words", [("--nproc_per_node",), ("--nproc-per-node", "--tee", "3", "x")])
def test_a_missing_value_names_the_flag(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    line = refusal(capsys, *words)
    assert line == "holdfast run: error: --nproc-per-node: expected one argument"


def test_a_value_for_a_switch_names_the_flag(capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal(capsys, "--standalone=1", "train.py")
    assert line == "holdfast run: error: --standalone: takes no value"


def test_the_command_line_of_the_process_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["holdfast", "--nproc", "2", "train.py"])
    assert build_parser().parse_args().nproc_per_node == "2"


def test_a_program_can_add_flags_of_its_own() -> None:
    parser = build_parser()
    parser.add_argument("--use-env", "--use_env", action="store_true")
    parser.add_argument("--pair", nargs=2)
    parsed = parser.parse_args(["--use_env", "--pair", "a", "b", "train.py", "--pair", "c"])
    assert (parsed.use_env, parsed.pair, parsed.training_script) == (True, ["a", "b"], "train.py")
    assert parsed.training_script_args == ["--pair", "c"]


def test_known_args_hand_back_the_unknown() -> None:
    parsed, unknown = build_parser().parse_known_args(["--bogus", "train.py", "a"])
    assert unknown == ["--bogus"]
    assert (parsed.training_script, parsed.training_script_args) == ("train.py", ["a"])


@pytest.mark.torch
@pytest.mark.parametrize(
    "words",
    [
        "train.py --lr 1 --x=2 -v",
        "--nproc-p 2 --max_r 1 train.py --nnodes 9",
        "-- train.py -- a",
        "-r 1 -t3 -m mod",
        "-mr 3 mod",
        "--role -1 x",
        "--standalone --run-path x",
        "- a",
    ],
)
def test_the_same_namespace_as_torchrun(words: str) -> None:
    from torch.distributed.run import parse_args

    theirs = vars(parse_args(words.split()))
    ours = vars(parse(*words.split()))
    assert {name: ours[name] for name in theirs} == theirs


@pytest.mark.parametrize(("columns", "most"), [("60", 58), ("500", 98), ("nonsense", 78)])
def test_help_fits_the_width_of_the_terminal(
    columns: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr("os.get_terminal_size", no_terminal)
    flags = build_parser().format_help().partition("Examples:")[0].partition("Workers:")[2]
    widths = [len(line) for line in flags.splitlines() if line.startswith("  ")]
    assert most - 12 <= max(widths) <= most


def no_terminal(_descriptor: int) -> None:
    raise OSError("not a terminal")


WORDS = st.sampled_from(
    [spelling for flag in FLAGS for spelling in flag.spellings]
    + [f"{flag.name}=3" for flag in FLAGS]
    + ["-mr", "-r3", "-h", "--nproc", "--no", "--", "-", "-1", "train.py", "3", "fork", "node"]
    + ["", "a b", "SIGINT", "1:4", "0.5", "--unheard-of", "-x"]
)
VARIABLES = st.dictionaries(
    st.sampled_from([flag.variable for flag in FLAGS]),
    st.sampled_from(["", "1", "yes", "2", "spawn", "many", "0.5"]),
    max_size=2,
)


@given(words=st.lists(WORDS, max_size=8), variables=VARIABLES)
def test_a_plain_command_line_gives_what_argparse_gives(
    words: list[str], variables: dict[str, str]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, text in variables.items():
            patch.setenv(name, text)
        plain = parse_plain(words)
        if plain is not None:
            assert vars(plain) == vars(build_parser().parse_args(words))


def test_what_people_write_is_plain() -> None:
    words = [
        "--nproc-per-node",
        "2",
        "--max_restarts=3",
        "-m",
        "--tee",
        "3",
        "my.training",
        "--epochs",
        "3",
    ]
    plain = parse_plain(words)
    assert plain is not None
    assert (plain.max_restarts, plain.module, plain.training_script_args) == (
        3,
        True,
        ["--epochs", "3"],
    )
