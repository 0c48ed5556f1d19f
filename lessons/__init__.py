"""Lessons: texts and the experiments they run on the engine."""
