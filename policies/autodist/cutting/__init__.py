"""The model cut into pipeline stages, and the time a step of these takes."""
