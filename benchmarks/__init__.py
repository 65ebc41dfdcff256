"""Measurements: speed and memory as ratios to a peer in one interleaved run."""
