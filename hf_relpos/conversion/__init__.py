"""Convert checkpoints of other architectures to those of this package: one short file a source."""
