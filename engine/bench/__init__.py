"""Benchmarks: what this machine can do, and how close the engine comes to it."""
