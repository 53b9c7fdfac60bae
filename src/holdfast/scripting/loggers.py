"""Loggers as TorchElastic's programs make them: the level is that of the variable `LOGLEVEL`."""

from __future__ import annotations

import logging
import os
import sys


def get_log_level() -> str:
    """Return the level where `LOGLEVEL` is not set."""
    return "WARNING"


def get_logger(name: str | None = None) -> logging.Logger:
    """Return the logger of this name, or else that of the module which calls this.

    Raises `ValueError` if `LOGLEVEL` is no level that `logging` knows.
    """
    if name is None:
        name = sys._getframe(1).f_globals.get("__name__")
    logger = logging.getLogger(name)
    logger.setLevel(os.environ.get("LOGLEVEL", get_log_level()))
    return logger
