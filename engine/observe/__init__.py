"""What the lab knows of a run: the log of steps and requests, latencies, hardware ceilings, files of traces."""
