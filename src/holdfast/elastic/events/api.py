"""What an event is, under TorchElastic's module path; re-exports only."""

from __future__ import annotations

from holdfast.events.values import (
    Event,
    EventMetadataValue,
    EventSource,
    NodeState,
    RdzvEvent,
)

__all__ = ["Event", "EventMetadataValue", "EventSource", "NodeState", "RdzvEvent"]
