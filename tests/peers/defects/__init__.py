"""What goes wrong with many nodes under torchrun 2.13, each as a script that shows it.

`python tests/peers/defects/show.py` runs them; docs/track-record.md tells what Holdfast does.
A script is a module with a function `show`; it shortens waits by settings where the defect does
not depend on them, and says which. They are not part of the test suite: most take ten seconds.
"""
