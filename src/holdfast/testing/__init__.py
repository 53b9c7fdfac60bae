"""What proves Holdfast, for use on your own parts too: the simulator is `holdfast.testing.sim`."""
