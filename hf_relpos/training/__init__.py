"""A training run: arguments, model, trainer, folder, card."""
