"""The types of events under TorchElastic's module path; re-exports only."""

from __future__ import annotations

from holdfast.observe.events.event import (
    Event,
    EventMetadataValue,
    EventSource,
    NodeState,
    RdzvEvent,
)

__all__ = ["Event", "EventMetadataValue", "EventSource", "NodeState", "RdzvEvent"]
