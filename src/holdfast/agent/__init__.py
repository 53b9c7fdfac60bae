"""The agent of a node: it drives `holdfast.core.supervision` and does what it says."""
