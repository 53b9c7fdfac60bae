"""Rendezvous under TorchElastic's module path; re-exports only."""

from __future__ import annotations

from holdfast.elastic.rendezvous import (  # noqa: F401 (also reached as attributes)
    api,
    registry,
    utils,
)
from holdfast.elastic.rendezvous.api import *  # noqa: F403
from holdfast.elastic.rendezvous.api import __all__  # noqa: F401
