"""Prompts that a first visit sends: different lengths, so that prefill and decode are seen to share the engine."""

LONG_NOTE = (
    "Read this note and say what happens next. Every morning the baker in our street opens the shutters before the sun is "
    "up. First comes the postman, who never buys anything and always says that he will tomorrow. Then come the children on "
    "their way to school, who count their coins at the window and share one roll between three of them. At eight the old "
    "professor sits down at the only table, opens the same book at the same page, and orders a coffee that she forgets to "
    "drink. Today the shutters stayed closed. The postman knocked, the children pressed their noses against the glass, and "
    "the professor, for the first time in years, turned the page."
)
SAMPLE_PROMPTS = (
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "Explain in simple words why the sky is blue in the day and red in the evening.",
    "Give me five tips for learning a new language.",
    LONG_NOTE,
)
"""Four prompts, the last one long."""
