"""The serving logic, without torch: configuration, requests, KV bookkeeping, scheduler, engine, trace records."""
