"""The protocol of agents and coordinator, sans-IO: it turns bytes into valid messages and back."""
