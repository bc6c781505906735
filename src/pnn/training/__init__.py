"""From batches to checkpoints."""
