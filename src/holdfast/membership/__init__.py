"""A node's membership in a job: its connection to the coordinator, etcd or backend that runs `core.rounds`."""
