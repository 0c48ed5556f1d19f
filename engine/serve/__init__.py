"""The engine in its own process: host, protocol, client, and the detokeniser."""
