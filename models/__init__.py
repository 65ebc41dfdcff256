"""Networks, one file each, and tasks, one file each (a ``Trainer`` subclass); ``registry`` knows the tasks by name."""
