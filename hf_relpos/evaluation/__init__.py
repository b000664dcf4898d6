"""Exact numbers of a language model on text."""
