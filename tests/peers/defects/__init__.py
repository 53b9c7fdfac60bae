"""Defects of torchrun 2.13 to 2.15 with many nodes, each with a script that shows it.

`python tests/peers/defects/show.py` runs them; docs/track-record.md says what Holdfast does instead.
A script is a module with a function `show`. If the defect does not depend on a wait, the script shortens the wait with
a setting, and its docstring says so. The scripts are not part of the test suite: most take ten seconds.
"""
