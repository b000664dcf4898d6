"""How checkpoints of other architectures become those of this package: one short file a source."""
