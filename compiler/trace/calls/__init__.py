"""From one call of a function to one canonical operator."""
