"""The network code that all packages share: addresses, listening, TLS, token, HTTP server."""
