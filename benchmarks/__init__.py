"""Measures how fast Holdfast is, next to `torchrun` and to bare processes, in the same run.

Run it as `python -m benchmarks` in an environment that has both launchers; `--help` has examples.

The one thing to know: the ratios are the result. The launchers take turns (torchrun, holdfast,
bare, torchrun, ...), so other load on the machine affects all of them equally; the absolute times
belong to that machine on that day.

It measures; it does not judge a change by itself. Only with `--check` does a missed target change the
exit code.
"""
