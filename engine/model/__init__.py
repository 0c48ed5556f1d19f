"""The model: finding and loading weights, the transformer, attention over paged K and V, sampling, and the runner."""
