"""Starts the workers of one machine, keeps them together and starts them again; loads no TensorFlow."""
