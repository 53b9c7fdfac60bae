"""What travels between agents and coordinator: bytes in, typed structs out. No sockets here."""
