"""PyTorch's TCPStore without torch: protocol, server and client."""
