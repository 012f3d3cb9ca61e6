"""Seconds: of operators, of communication, and of a step that is made of them."""
