"""Rendezvous under TorchElastic's module path; re-exports only."""

from __future__ import annotations

from holdfast.elastic._impl.submodules import bind_submodules
from holdfast.elastic.rendezvous.api import *  # noqa: F403
from holdfast.elastic.rendezvous.api import __all__  # noqa: F401

bind_submodules(__name__)
