from __future__ import annotations

import pytest

from holdfast.scripting.arguments import get_env_variable_or_raise, macros


def test_a_variable_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME", "value")
    monkeypatch.setenv("EMPTY", "")
    assert (get_env_variable_or_raise("SOME"), get_env_variable_or_raise("EMPTY")) == ("value", "")


def test_a_variable_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SOME", raising=False)
    with pytest.raises(ValueError, match=r"^SOME: the variable is not set in the environment$"):
        get_env_variable_or_raise("SOME")


ARGUMENTS = ["--rank=${local_rank}", "$local_rank", "$local_ranks", "${other}", "", 7, None]


def test_placeholders_are_replaced_in_text_alone() -> None:
    assert macros.substitute(ARGUMENTS, "3") == [
        "--rank=3", "3", "$local_ranks", "${other}", "", 7, None,
    ]  # fmt: skip
    assert macros.substitute([macros.local_rank], "3") == ["3"]


@pytest.mark.torch
def test_they_are_replaced_as_with_torch() -> None:
    from torch.distributed.elastic.utils import macros as torchs

    assert macros.substitute(ARGUMENTS, "3") == torchs.substitute(ARGUMENTS, "3")
