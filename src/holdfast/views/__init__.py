"""Renders a job for people: tables, the terminal view, the dashboard and reports."""
