"""Turn one call of a function into one canonical operator."""
