"""The small key-value stores that agents share."""
