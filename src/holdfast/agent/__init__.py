"""The agent of a node: it drives `holdfast.core.supervision` and performs its effects."""
