from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite-scenarios",
        action="store_true",
        help="write what the machines do now into the transcripts, instead of comparing",
    )


@pytest.fixture
def rewriting(pytestconfig: pytest.Config) -> bool:
    # Without a default this fails when the folder is only found by collection, and the option
    # was therefore never read.
    return bool(pytestconfig.getoption("rewrite_scenarios", default=False))
