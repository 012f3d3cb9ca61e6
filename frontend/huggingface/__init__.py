"""Hugging Face models that stay what they are while a compiled program runs in them."""
