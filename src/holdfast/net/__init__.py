"""Network helpers that every room shares: addresses, listening, TLS, token, HTTP server."""
