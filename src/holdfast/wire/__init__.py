"""The protocol of agents and coordinator, sans-IO: bytes in, checked messages out."""
