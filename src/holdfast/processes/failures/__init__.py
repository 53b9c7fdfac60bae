"""Failed workers: how they exited, what they recorded, and the failure reports."""
