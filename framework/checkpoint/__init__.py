"""Checkpoints: TensorFlow's own format, named by variable path, put in place by one rename."""
