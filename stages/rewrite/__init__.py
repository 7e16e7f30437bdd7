"""Perturbing text: back-translation, LLM rewriting, your own pairs."""
