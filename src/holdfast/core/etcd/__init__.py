"""A job without a coordinator: the pure machines of a node on etcd, and of the node that leads."""
