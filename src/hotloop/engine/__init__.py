"""The engine: plan, loop, feed, precision, checkpoints, records. It knows no family."""
