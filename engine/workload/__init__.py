"""Workloads: who arrives when with which prompt; scenes and experiments as data; statistics that judge differences."""
