"""Decisions, and nothing else: pure machines that turn facts and the time into what to do."""
