"""Text to training rows: sources, tokenizers, packing, lanes."""
