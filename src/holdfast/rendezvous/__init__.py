"""The rendezvous handlers, through which the nodes of a job form rounds."""
