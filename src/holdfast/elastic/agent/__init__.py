"""The agents under TorchElastic's module path; see `holdfast.elastic.agent.server`."""

from __future__ import annotations

from holdfast.elastic._impl.submodules import bind_submodules

bind_submodules(__name__)
