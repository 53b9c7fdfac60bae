"""A client of etcd v3 over its HTTP gateway, and a server started for one job."""
