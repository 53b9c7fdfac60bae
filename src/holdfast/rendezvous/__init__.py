"""How the nodes of a job meet."""
