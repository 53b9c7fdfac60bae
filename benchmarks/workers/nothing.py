"""A worker that does nothing at all."""
